"""Another bundle takes the place of the one that is served, while clients go on asking."""

import shutil
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mdp.client.status import DeviceStatus
from mdp.client.sync import Client
from mdp.files import replacing_folder
from mdp.formats.bundle import MANIFEST, Bundle, model_path
from mdp.formats.fleet import new_fleet
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentProcess
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.bundles import change_assignment
from tests.support.fleet import BIN, PLENTY_MS, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Agents serve `live`, a link to `old`."""
    write_bundle(tmp_path / "old", name="old")
    write_bundle(tmp_path / "new", name="new", bag_scale=9.0)
    (tmp_path / "live").symlink_to("old")
    with Fleet(tmp_path, tmp_path / "live") as fleet:
        yield fleet


def point(fleet: Fleet, name: str) -> None:
    """Let the link lead to another bundle, at once."""
    link = fleet.folder / "link"
    link.symlink_to(name)
    link.replace(fleet.folder / "live")


def label(fleet: Fleet, name: str) -> str:
    """A bundle as agents call it."""
    return f"{name} {Bundle.open(fleet.folder / name).digest[:12]}"


def client_of(fleet: Fleet, name: str) -> Client:
    """A client that holds the bundle `name`."""
    path = fleet.folder / f"fleet-{name}.toml"
    devices = [f"{device}={agent.address}" for device, agent in fleet.agents.items()]
    new_fleet(Bundle.open(fleet.folder / name), devices, path)
    return Client.connect(path, timeout_s=PATIENCE_S)


def not_renewed(client: Client, times: int) -> bool:
    return status(client).counts["not_renewed"] == times


def ask(client: Client) -> Prediction:
    return client.classify(RED, deadline_ms=PLENTY_MS)


def status(client: Client) -> DeviceStatus:
    return client.status(timeout_s=PATIENCE_S)[0]


def look_again(agent: AgentProcess, event: str) -> None:
    """Tell the agent to look at its bundle again, and wait until it says `event`."""
    agent.signal(signal.SIGHUP)
    agent.wait_for(event)


def test_both_bundles_are_served_until_the_old_one_is_unused(fleet: Fleet) -> None:
    agent = fleet.start("alpha", "--grace-s", 0.5)
    with client_of(fleet, "old") as old:
        before = ask(old)
        assert before.used == ("alpha",)
        point(fleet, "new")
        look_again(agent, f"serves {label(fleet, 'new')}")
        with client_of(fleet, "new") as new:
            answers = [ask(client) for client in (old, new, old, new)]
            assert [answer.missing.get("alpha") for answer in answers] == [None] * 4
            # The new one is surer: its logits are larger.
            assert answers[0].probability == answers[2].probability == before.probability
            assert answers[1].probability == answers[3].probability > before.probability
            told = status(new)
            assert told.counts["renewed"] == 1
            assert told.counts[f"answered {new.bundle.digest[:12]}"] == 2
            assert told.counts[f"answered {old.bundle.digest[:12]}"] == 3
            assert (told.usable, told.reason) == (True, "")
            told = status(old)
            assert (told.usable, told.reason) == (
                True,
                f"serves {label(fleet, 'new')} by now, and this client's bundle until nobody asks "
                "for it: reload this client",
            )
            # Nobody asks for the old one from here on.
            agent.wait_for(f"serves {label(fleet, 'old')} no more")
            assert ask(new).used == ("alpha",)
        assert not status(old).usable
        assert status(old).reason.startswith("wrong_bundle: serves new ")
    assert agent.terminate() == 0
    assert agent.stderr == ""


def truncate(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_bytes(path.read_bytes()[:200])


def alter(folder: Path) -> None:
    path = folder / model_path(0)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


def not_finite(folder: Path) -> None:
    other = folder.with_name("other")
    write_bundle(other, name="nan", bag_scale=float("nan"))
    with replacing_folder(folder) as place:
        for path in other.iterdir():
            path.rename(place / path.name)


def hungry(folder: Path) -> None:
    change_assignment(folder, memory_bytes=2**47)


def elsewhere(folder: Path) -> None:
    change_assignment(folder, provider="CUDAExecutionProvider")


def larger(folder: Path) -> None:
    with replacing_folder(folder) as place:
        write_bundle(place, name="large", sizes=(400, 12, 8))


def gone(folder: Path) -> None:
    folder.rename(folder.with_name("away"))


SPOILT = [
    (truncate, "manifest.json: Input data was truncated"),
    (alter, "model.onnx: expected sha256 "),
    (not_finite, "the model gives logits that are not finite on a black picture"),
    (hungry, "needs 140,737,488 MB beside what is served, "),
    (elsewhere, "the plan asks for CUDAExecutionProvider, this device has "),
    (larger, "crops of 480,000 bytes are larger than the 196,608 that this agent accepts"),
    (gone, "new: expected a bundle folder with a manifest.json"),
]


def test_a_bundle_that_cannot_be_served_changes_nothing(fleet: Fleet) -> None:
    agent = fleet.start("alpha")
    with client_of(fleet, "old") as old:
        before = ask(old)
        for refused, (spoil, why) in enumerate(SPOILT, start=1):
            shutil.rmtree(fleet.folder / "new")
            write_bundle(fleet.folder / "new", name="new", bag_scale=9.0)
            spoil(fleet.folder / "new")
            point(fleet, "new")
            agent.signal(signal.SIGHUP)
            until(partial(not_renewed, old, refused), "it is refused")
            told = status(old)
            assert (told.usable, told.state) == (True, "READY")
            assert told.reason.startswith("the bundle is as before: ")
            assert why in told.reason
            assert ask(old).probability == before.probability
        # With the served one back in its place, the reason is forgotten.
        point(fleet, "old")
        agent.signal(signal.SIGHUP)
        until(lambda: not status(old).reason, "the reason to be forgotten")
        # A bundle that can be served is then taken.
        point(fleet, "new")
        write_bundle(fleet.folder / "new", name="new", bag_scale=9.0)
        look_again(agent, f"serves {label(fleet, 'new')}")
        assert ask(old).probability == before.probability
        assert status(old).counts["renewed"] == 1
    with client_of(fleet, "new") as new:
        assert status(new).reason == ""
        assert ask(new).used == ("alpha",)
    assert agent.terminate() == 0
    assert agent.stderr == ""


def test_there_and_back_needs_no_loading_and_a_third_has_to_wait(fleet: Fleet) -> None:
    agent = fleet.start("alpha")
    write_bundle(fleet.folder / "third", name="third", bag_scale=7.0)
    with client_of(fleet, "old") as old, client_of(fleet, "new") as new:
        ask(old)
        point(fleet, "new")
        look_again(agent, f"serves {label(fleet, 'new')}")
        assert (ask(old).used, ask(new).used) == (("alpha",), ("alpha",))
        point(fleet, "third")
        agent.signal(signal.SIGHUP)
        until(lambda: status(new).counts["not_renewed"] == 1, "there are two already")
        assert "two bundles are served, and old" in status(new).reason
        # Its model is gone from the disk, but not from memory.
        (fleet.folder / "old" / model_path(0)).unlink()
        point(fleet, "old")
        look_again(agent, f"serves {label(fleet, 'old')}")
        assert (ask(old).used, ask(new).used) == (("alpha",), ("alpha",))
        assert status(old).reason == ""


def bundle_command(*args: object) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "mdp"), "bundle", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_an_agent_with_a_bundle_key_serves_signed_bundles_only(fleet: Fleet) -> None:
    keys = fleet.folder / "keys"
    assert bundle_command("key", "--out", keys, "--name", "release").returncode == 0
    given = ["--bundle-key", keys / "release.public"]
    with pytest.raises(AssertionError, match=r"old: not signed: expected signature\.json"):
        fleet.start("alpha", *given)
    signing = ["sign", "--key", keys / "release.secret", "--bundle"]
    assert bundle_command(*signing, fleet.folder / "old").returncode == 0
    agent = fleet.start("alpha", *given)
    with client_of(fleet, "old") as old:
        assert ask(old).used == ("alpha",)
        point(fleet, "new")
        agent.signal(signal.SIGHUP)
        until(lambda: status(old).counts["not_renewed"] == 1, "it is refused")
        assert "new: not signed: expected signature.json" in status(old).reason
        assert ask(old).used == ("alpha",)
    assert bundle_command(*signing, fleet.folder / "new").returncode == 0
    look_again(agent, f"serves {label(fleet, 'new')}")
    verifying = ["verify", "--key", keys / "release.public", "--bundle"]
    verified = bundle_command(*verifying, fleet.folder / "new")
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "signed with key release (" in verified.stdout
    alter(fleet.folder / "new")
    verified = bundle_command(*verifying, fleet.folder / "new")
    assert verified.returncode == 2
    assert "model.onnx: expected sha256 " in verified.stderr
