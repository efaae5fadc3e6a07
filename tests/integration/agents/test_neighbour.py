"""A camera on a device that computes nothing, whose pictures another device's agent computes."""

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest
from PIL import Image

from devices.camera.fetched import FetchedCamera, owner_keys
from devices.cli.main import main as agent_main
from mdp.cameras import SourceError, parse_source
from mdp.client.sync import Client
from mdp.errors import InferenceError
from mdp.formats.keys import load_public, new_keys
from mdp.testing.agents import ANY_PORT, AgentProcess
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import until
from mdp.transport import new_pair
from tests.support.command_lines import run_here
from tests.support.fleet import BIN, PLENTY_MS, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    write_bundle(tmp_path / "bundle")
    with Fleet(tmp_path, tmp_path / "bundle", keys=True) as fleet:
        yield fleet


@pytest.fixture
def doorbell(tmp_path: Path) -> Iterator[AgentProcess]:
    """A camera that sees green; only alpha is among its clients."""
    (tmp_path / "camera").mkdir()
    Image.fromarray(colour_picture("green", 480, 640)).save(tmp_path / "camera" / "1.png")
    (tmp_path / "allowed").mkdir()
    for name in ("alpha", "doorbell"):
        new_keys(tmp_path, name, new_pair)
    (tmp_path / "alpha.public").rename(tmp_path / "allowed" / "alpha.public")
    (tmp_path / "allowed" / "alpha.limits").write_text("record = false\n")
    command = [
        BIN / "mdp-agent", "camera", "--json", "--device", "doorbell", "--bind", ANY_PORT,
        "--source", f"folder:{tmp_path / 'camera'}", "--key", tmp_path / "doorbell.secret",
        "--clients", tmp_path / "allowed", "--audit", tmp_path / "audit.jsonl",
    ]  # fmt: skip
    with AgentProcess("doorbell", command, tmp_path / "doorbell.log") as agent:
        yield agent.wait_for("READY")


def start(fleet: Fleet, doorbell: AgentProcess) -> AgentProcess:
    """Alpha, which computes what the doorbell's camera sees."""
    fleet.public_keys["alpha"] = load_public(fleet.folder / "allowed" / "alpha.public")
    source = doorbell.address.replace("tcp:", "mdp:")
    owner = fleet.folder / "doorbell.public"
    return fleet.start("alpha", "--source", source, "--source-key", owner)


def why_not_answered(client: Client) -> str:
    """Reason why a look has no answer; empty where it has one."""
    try:
        client.look(deadline_ms=PLENTY_MS, within_ms=1000)
    except InferenceError as error:
        return str(error)
    return ""


def test_a_neighbour_computes_once_it_may_and_until_the_camera_is_gone(
    fleet: Fleet, doorbell: AgentProcess
) -> None:
    alpha = start(fleet, doorbell)
    with fleet.client() as client:
        refusal = "no_frame: this client's key may not record"
        until(lambda: refusal in why_not_answered(client), "a refusal")
        (fleet.folder / "allowed" / "alpha.limits").write_text("record = true\n")
        until(lambda: not why_not_answered(client), "an answer")
        answer = client.look(deadline_ms=PLENTY_MS, within_ms=1000)
        assert answer.label == "green"
        doorbell.wait_for("alpha begins to record")
        doorbell.kill()
        until(lambda: "the connection was lost" in why_not_answered(client), "the camera is gone")
    source = doorbell.address.replace("tcp:", "mdp:")
    alpha.wait_for(f"no pictures: {source}: the connection was lost")
    told = (fleet.folder / "audit.jsonl").read_text().splitlines()
    assert any('"refuse"' in line and "alpha" in line for line in told)
    assert any('"begins to record"' in line and "alpha" in line for line in told)


def test_no_more_is_sent_than_is_needed(tmp_path: Path, doorbell: AgentProcess) -> None:
    (tmp_path / "allowed" / "alpha.limits").write_text("record = true\n")
    keys = owner_keys(tmp_path / "alpha.secret", tmp_path / "doorbell.public")
    source = parse_source(doorbell.address.replace("tcp:", "mdp:"))
    shapes: list[tuple[int, int]] = []

    def fetched() -> bool:
        # Before the leave has been read, and before the first frame.
        with suppress(SourceError), closing(FetchedCamera(source, keys)) as camera:
            for _ in range(2):
                picture = camera.picture(smallest_side=48)
                assert isinstance(picture, Image.Image)
                shapes.append(picture.size)
        return bool(shapes)

    until(fetched, "pictures")
    # As wide as most cameras see, then as this one does.
    assert shapes == [(86, 64), (65, 49)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            ["--source", "mdp://127.0.0.1:7500"],
            "--source mdp://HOST:PORT: expected --key, and --so",
        ),
        (
            [
                *("--source", "mdp://127.0.0.1:7500", "--allow-record"),
                *("--key", "alpha.secret", "--clients", "alpha.public"),
            ],
            "--allow-record: expected a camera of this device's own",
        ),
        (["--source-key", "a.public"], "--source-key: expected --source mdp://HOST:PORT beside it"),
    ],
)
def test_bad_input(tmp_path: Path, options: list[str], expected: str) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    new_keys(tmp_path, "alpha", new_pair)
    options = [str(tmp_path / word) if word.startswith("alpha.") else word for word in options]
    done = run_here(
        agent_main, "mdp-agent", "run", "--bundle", bundle, "--device", "alpha", *options
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"mdp-agent: {expected}")
    assert done.stderr.count("\n") == 1
