"""Clients push bundles to agents, which go on answering; fetch them, and have them go back."""

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mdp.cli.main import app
from mdp.client.base import Options
from mdp.client.bundles import DeviceBundles
from mdp.client.sync import Client
from mdp.errors import ConfigError, TransferError
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, model_path
from mdp.formats.device_part import part_of, version_of
from mdp.formats.fleet import new_fleet, read_fleet
from mdp.formats.signing import load_signing_key, new_bundle_key, sign
from mdp.protocol.transfer import BundleState
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentProcess
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S
from mdp.transport import Dealers
from tests.support.bundles import relist
from tests.support.fleet import BIN, PLENTY_MS, Fleet

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
#: Ten pieces and some more.
MORE_BYTES = 700_000
#: argv: a fleet file and a bundle; a client that is killed once half of it is there.
KILLED = """
import os, signal, sys
from pathlib import Path
from mdp.client.base import Options
from mdp.client.bundles import DeviceBundles
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import read_fleet

def progress(there, total):
    if 2 * there >= total:
        os.kill(os.getpid(), signal.SIGKILL)

path = Path(sys.argv[1])
fleet, _ = read_fleet(path)
DeviceBundles(fleet, fleet.devices[0], Options(fleet=path)).push(Bundle.open(sys.argv[2]), progress)
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Agents with keys serve `old`; the client's key may push `new`, which is larger."""
    write_bundle(tmp_path / "old", name="old")
    write_bundle(tmp_path / "new", name="new", bag_scale=9.0, comment_bytes=MORE_BYTES)
    with Fleet(tmp_path, tmp_path / "old", keys=True) as fleet:
        (tmp_path / "client.limits").write_text("push = true\n")
        yield fleet


def start(fleet: Fleet, *options: object, name: str = "alpha") -> AgentProcess:
    kept = fleet.folder / f"kept-{name}"
    log = fleet.folder / "audit.jsonl"
    return fleet.start(name, "--allow-push", kept, "--audit", log, *options)


def again(fleet: Fleet, *options: object) -> AgentProcess:
    """Start the agent again where it listened."""
    return fleet.restart("alpha", "--allow-push", fleet.folder / "kept-alpha", *options)


def name_of_served(state: BundleState) -> str | None:
    """The name of the bundle that an agent serves."""
    return None if state.serves is None else state.serves.name


def new(fleet: Fleet) -> Bundle:
    return Bundle.open(fleet.folder / "new")


@contextmanager
def device(fleet: Fleet, patience_s: float = PATIENCE_S) -> Iterator[DeviceBundles]:
    path = fleet.write()
    entries, _ = read_fleet(path)
    with DeviceBundles(
        entries, entries.devices[0], Options(fleet=path), patience_s=patience_s
    ) as connected:
        yield connected


def client_of(fleet: Fleet, name: str) -> Client:
    """A client that holds the bundle `name`."""
    path = fleet.folder / f"fleet-{name}.toml"
    devices = [f"{device}={agent.address}" for device, agent in fleet.agents.items()]
    bundle = Bundle.open(fleet.folder / name)
    new_fleet(bundle, devices, path, public_key=fleet.public_keys.get, key=fleet.key)
    return Client.connect(path, timeout_s=PATIENCE_S)


def at_half(do: Callable[[], object]) -> Callable[[int, int], None]:
    """Progress that calls `do` once, after half of the bytes."""
    done = False

    def progress(there: int, total: int) -> None:
        nonlocal done
        if there * 2 >= total and not done:
            done = True
            do()

    return progress


def audit_lines(fleet: Fleet, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (fleet.folder / "audit.jsonl").read_text().splitlines())
    told = [line for line in lines if line["event"] == event]
    assert all(re.fullmatch(r"127\.0\.0\.1:\d+", line["address"]) for line in told)
    return told


def audit_reasons(fleet: Fleet, event: str) -> list[str]:
    return [line["reason"] for line in audit_lines(fleet, event)]


def test_a_push_goes_on_while_pictures_are_classified(fleet: Fleet) -> None:
    agent = start(fleet, "--grace-s", 300)
    before = Bundle.open(fleet.folder / "old")
    with client_of(fleet, "old") as old, device(fleet) as connected:
        over = threading.Event()
        answers: list[Prediction] = []

        def classify() -> None:
            while not over.is_set():
                answers.append(old.classify(RED, deadline_ms=PLENTY_MS))

        asking = threading.Thread(target=classify)
        asking.start()
        try:
            pushed = connected.push(new(fleet))
        finally:
            over.set()
            asking.join()
        assert answers
        assert {(answer.label, answer.used) for answer in answers} == {("red", ("alpha",))}
        part = part_of(new(fleet), 0)
        assert pushed.sent_bytes == pushed.total_bytes == sum(map(len, part.values()))
        state = connected.state()
        assert state.serves == state.current == version_of(new(fleet))
        assert state.previous == version_of(before)
        # Once more there is nothing to do.
        assert connected.push(new(fleet)).sent_bytes == 0
        with client_of(fleet, "new") as later:
            answer = later.classify(RED, deadline_ms=PLENTY_MS)
            assert (answer.label, answer.bundle) == ("red", new(fleet).digest)
            assert answer.probability > answers[-1].probability
        # `--bundle` is as it was; the agent comes back with the pushed one.
        assert agent.terminate() == 0
        assert Bundle.open(fleet.folder / "old").digest == before.digest
        again(fleet)
        assert connected.state().serves == version_of(new(fleet))
        assert connected.rollback() == version_of(before)
        assert connected.state().previous == version_of(new(fleet))
        with client_of(fleet, "old") as back:
            assert back.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)
    begun, switch, switched = audit_reasons(fleet, "push")
    assert begun.startswith(f"begin {version_of(new(fleet)).manifest[:12]}, ")
    assert (switch.split()[0], switched) == ("switch", "switched")


def test_a_push_goes_on_after_the_agent_was_killed(fleet: Fleet) -> None:
    agent = start(fleet)

    def kill() -> None:
        agent.kill()
        again(fleet)

    with device(fleet) as connected:
        pushed = connected.push(new(fleet), at_half(kill))
        # The piece under way may be lost: the other half was sent once.
        assert pushed.total_bytes <= pushed.sent_bytes <= pushed.total_bytes + 2**16
        assert connected.state().serves == version_of(new(fleet))


def test_a_push_goes_on_after_its_client_was_killed(fleet: Fleet) -> None:
    start(fleet)
    command = [sys.executable, "-c", KILLED, str(fleet.write()), str(fleet.folder / "new")]
    assert subprocess.run(command, timeout=PATIENCE_S).returncode == -9
    with device(fleet) as connected:
        assert name_of_served(connected.state()) == "old"
        pushed = connected.push(new(fleet))
        assert 0 < pushed.sent_bytes <= pushed.total_bytes / 2
        assert name_of_served(connected.state()) == "new"


def test_a_key_without_the_right_is_refused(fleet: Fleet) -> None:
    (fleet.folder / "client.limits").unlink()
    start(fleet)
    with device(fleet) as connected:
        for ask in (connected.state, lambda: connected.push(new(fleet)), connected.rollback):
            with pytest.raises(TransferError, match="may not push or fetch bundles"):
                ask()
        with pytest.raises(TransferError, match="may not push or fetch bundles"):
            connected.pull(fleet.folder / "pulled")
    assert not (fleet.folder / "pulled").exists()
    assert list((fleet.folder / "kept-alpha").iterdir()) == []
    assert fleet.agents["alpha"].terminate() == 0
    first, others = audit_lines(fleet, "refuse")
    assert (first["client"], others["count"]) == ("client", 3)


def test_an_agent_that_takes_no_bundles_says_so(fleet: Fleet) -> None:
    fleet.start("alpha")
    with device(fleet) as connected, pytest.raises(TransferError, match="--allow-push"):
        connected.state()


def test_a_bundle_that_does_not_load_is_not_served(fleet: Fleet) -> None:
    agent, model = start(fleet), fleet.folder / "new" / model_path(0)
    # The model of another picture size.
    model.write_bytes((fleet.folder / "new" / model_path(1)).read_bytes())
    relist(fleet.folder / "new", model_path(0))
    with device(fleet) as connected, client_of(fleet, "old") as old:
        with pytest.raises(TransferError, match=r"alpha: serves what it did before: .*model.onnx"):
            connected.push(new(fleet))
        assert old.classify(RED, deadline_ms=PLENTY_MS).used == ("alpha",)
        assert name_of_served(connected.state()) == "old"
        agent.kill()
        again(fleet)
        state = connected.state()
        assert (name_of_served(state), state.previous) == ("old", None)
    assert audit_reasons(fleet, "push")[-1].startswith("failed: ")


def test_a_changed_piece_is_sent_again(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    start(fleet)
    sent = Dealers.send

    def send_altered(self: Dealers, to: str, frames: list[bytes]) -> bool:
        if len(frames) == 2 and len(frames[1]) == 2**16:
            frames = [frames[0], bytes(frames[1][:-1]) + b"?"]
        return sent(self, to, frames)

    with device(fleet) as connected:
        with monkeypatch.context() as patch:
            patch.setattr(Dealers, "send", send_altered)
            with pytest.raises(TransferError, match=r"before: model.onnx: expected sha256"):
                connected.push(new(fleet))
        assert name_of_served(connected.state()) == "old"
        pushed = connected.push(new(fleet))
        # All but the model was right.
        assert pushed.sent_bytes == len(part_of(new(fleet), 0)["model.onnx"])
        assert name_of_served(connected.state()) == "new"


def test_a_bundle_that_is_too_large_is_refused_before_a_byte_is_sent(fleet: Fleet) -> None:
    start(fleet, "--max-push-mb", 0.5)
    seen: list[int] = []
    refused = pytest.raises(TransferError, match=r"takes 0.5 MB \(--max-push-mb\)")
    with device(fleet) as connected, refused:
        connected.push(new(fleet), lambda there, total: seen.append(there))
    assert not seen
    assert list((fleet.folder / "kept-alpha").iterdir()) == []


def test_of_an_unsigned_bundle_no_model_is_taken(fleet: Fleet) -> None:
    public = fleet.folder / "release.public"
    new_bundle_key(fleet.folder, "release")
    key = load_signing_key(public.with_suffix(".secret"))
    sign(fleet.bundle / MANIFEST, Bundle.open(fleet.bundle).manifest_content, key)
    start(fleet, "--bundle-key", public)
    seen: list[int] = []
    with device(fleet) as connected:
        with pytest.raises(TransferError, match="not signed"):
            connected.push(new(fleet), lambda there, total: seen.append(there))
        assert max(seen) <= len(new(fleet).manifest_content)
        assert list((fleet.folder / "kept-alpha").iterdir()) == []
        sign(fleet.folder / "new" / MANIFEST, new(fleet).manifest_content, key)
        connected.push(new(fleet))
        assert connected.state().serves == version_of(new(fleet))


def test_two_versions_are_kept_and_what_was_pulled_is_as_it_was_pushed(fleet: Fleet) -> None:
    write_bundle(fleet.folder / "third", name="third", bag_scale=5.0)
    agent = start(fleet, "--grace-s", 0)
    with device(fleet) as connected:
        connected.push(new(fleet))
        agent.wait_for(re.compile("serves old .* no more"))
        connected.push(Bundle.open(fleet.folder / "third"))
        state = connected.state()
        assert (name_of_served(state), state.previous and state.previous.name) == ("third", "new")
        kept = [path.name for path in (fleet.folder / "kept-alpha").iterdir()]
        assert len(kept) == 3
        assert connected.pull(fleet.folder / "pulled") == state.serves
        with pytest.raises(ConfigError, match="missing, but listed"):
            # Of another device's model there is nothing here.
            Bundle.open(fleet.folder / "pulled").content(model_path(1))


def mdp(fleet: Fleet, *arguments: object) -> Any:
    words = ["bundle", *map(str, arguments), "--fleet", str(fleet.write())]
    return CliRunner().invoke(app, words)


def test_the_commands(fleet: Fleet) -> None:
    start(fleet)
    start(fleet, name="beta")
    done = mdp(fleet, "push", fleet.folder / "new", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert [pushed["device"] for pushed in told["devices"]] == ["alpha", "beta"]
    assert told["left"] == []
    assert mdp(fleet, "pull", "beta", "--out", fleet.folder / "from").exit_code == 0
    for file in (MANIFEST, FUSION, model_path(1)):
        there = fleet.folder / "new" / file
        assert (fleet.folder / "from" / file).read_bytes() == there.read_bytes()
    done = mdp(fleet, "rollback", "beta")
    assert (done.exit_code, done.stdout.split()[:3]) == (0, ["beta:", "serves", "old"])
    rows = json.loads(mdp(fleet, "status", "--json").stdout)["devices"]
    versions = [(row["serves"]["name"], row["previous"]["name"]) for row in rows]
    assert versions == [("new", "old"), ("old", "new")]
    # Each goes to its own previous version.
    done = mdp(fleet, "rollback", "alpha", "beta", "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    gone_back = [(each["device"], each["version"]["name"]) for each in told["devices"]]
    assert (gone_back, told["left"]) == ([("alpha", "old"), ("beta", "new")], [])
    rows = json.loads(mdp(fleet, "status", "--json").stdout)["devices"]
    # Of a bundle that one device cannot serve, none is served anywhere.
    write_bundle(fleet.folder / "other", name="other", devices=("alpha", "zeta", "eta"))
    done = mdp(fleet, "push", fleet.folder / "other")
    assert (done.stdout, done.exit_code) == ("", 1)
    assert "no assignment for device 'beta'" in str(done.exception)
    assert json.loads(mdp(fleet, "status", "--json").stdout)["devices"] == rows
    done = mdp(fleet, "push", fleet.folder / "new", "gamma")
    assert (done.stdout, str(done.exception)) == ("", "gamma: expected one of alpha, beta")
    # The first that fails ends it.
    fleet.agents["alpha"].kill()
    fleet.restart("alpha", "--allow-push", fleet.folder / "none")
    done = mdp(fleet, "rollback", "beta", "alpha")
    assert done.stdout.split()[:3] == ["beta:", "serves", "old"]
    assert str(done.exception) == "alpha: keeps no previous version"
    done = mdp(fleet, "rollback", "alpha", "beta")
    expected = "alpha: keeps no previous version; not tried: beta (name these to go on)"
    assert (done.stdout, str(done.exception)) == ("", expected)


def test_pushing_needs_keys(fleet: Fleet) -> None:
    command = [str(BIN / "mdp-agent"), "run", "--bundle", str(fleet.bundle), "--device", "alpha"]
    done = subprocess.run(
        [*command, "--allow-push", str(fleet.folder / "kept")],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("mdp-agent: --allow-push: expected --key and --clients: ")
    assert not (fleet.folder / "kept").exists()
