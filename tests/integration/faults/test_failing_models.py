"""Models that fail while they are served: what fails with them, and what comes back."""

import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from devices.agent import server as agent_module
from devices.agent.bundles import LoadableBundle
from devices.agent.jobs import PictureJob
from devices.agent.reload import Reloader
from devices.agent.server import Agent
from mdp.formats.bundle import Bundle
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import Failure
from mdp.testing.agents import ANY_PORT, AgentProcess
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import PATIENCE_S, until
from tests.support.bundles import change_assignment
from tests.support.fakes import StrangePeer
from tests.support.fleet import Fleet
from tests.support.serving import Held, replies, request, serving, told

pytestmark = pytest.mark.usefixtures("no_leaks")


class Shop:
    """An agent in this process, and what it finds when it looks at its bundle again."""

    def __init__(self, folder: Path) -> None:
        self.old = Bundle.open(write_bundle(folder / "old", name="old"))
        self.new = Bundle.open(write_bundle(folder / "new", name="new", bag_scale=9.0))
        self.there = self.old
        self.runtimes = {self.old.digest: Held(), self.new.digest: Held()}
        self.looked = 0

    def runtime(self, bundle: Bundle) -> Held:
        return self.runtimes[bundle.digest]

    def read(self) -> LoadableBundle:
        self.looked += 1
        there = self.there
        assignment = there.assignment("alpha")
        return LoadableBundle(bundle=there, assignment=assignment, load=lambda: self.runtime(there))

    def reloader(self) -> Reloader:
        return Reloader(self.read, clock=lambda: 0.0, available_bytes=lambda: None)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


@pytest.fixture
def open_shop(shop: Shop) -> Iterator[tuple[Agent, StrangePeer]]:
    with (
        serving(shop.old, shop.runtime(shop.old), reloader=shop.reloader()) as (agent, address),
        StrangePeer(address) as peer,
    ):
        yield agent, peer


def failed(peer: StrangePeer, bundle: Bundle, number: int) -> str:
    """Why a request failed."""
    peer.send(request(bundle, number))
    message = peer.receive().message
    assert isinstance(message, Failure)
    assert message.request_id == number
    return f"{message.code}: {message.text}"


def answered(peer: StrangePeer, bundle: Bundle, number: int) -> None:
    peer.send(request(bundle, number))
    assert replies(peer, 1) == {number: "answered"}


def test_a_new_model_that_fails_makes_way_for_the_old_one(
    shop: Shop, open_shop: tuple[Agent, StrangePeer]
) -> None:
    agent, peer = open_shop
    shop.there = shop.new
    agent.reload()
    until(lambda: told(peer).digest == shop.new.digest, "it has changed over")
    answered(peer, shop.new, 1)
    shop.runtime(shop.new).error = RuntimeError("on fire")
    for number in (2, 3, 4):
        assert failed(peer, shop.new, number) == "failed: RuntimeError: on fire"
    assert failed(peer, shop.new, 5).startswith("wrong_bundle: serves old ")
    answered(peer, shop.old, 6)
    status = told(peer)
    assert (status.state, status.digest) == ("READY", shop.old.digest)
    expected = f"the bundle is as before: new {shop.new.digest[:12]} failed: RuntimeError: on fire"
    assert status.reason == expected
    assert (status.counts["renewed"], status.counts["not_renewed"]) == (1, 1)


def test_what_is_being_decoded_keeps_its_bundle_served(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change with no grace comes after a request was taken and before its model is looked up."""
    begun, may_go, said = threading.Event(), threading.Event(), list[str]()
    pixels = PictureJob.pixels

    def slowly(job: PictureJob) -> Pixels:
        begun.set()
        assert may_go.wait(PATIENCE_S)
        return pixels(job)

    monkeypatch.setattr(PictureJob, "pixels", slowly)
    old, gone = shop.runtime(shop.old), f"serves old {shop.old.digest[:12]} no more"
    with (
        serving(shop.old, old, reloader=shop.reloader(), grace_s=0.0, report=said.append) as (
            agent,
            address,
        ),
        StrangePeer(address) as peer,
    ):
        peer.send(request(shop.old, 1))
        until(begun.is_set, "the request is taken")
        shop.there = shop.new
        agent.reload()
        until(lambda: f"serves new {shop.new.digest[:12]}" in said, "it has changed over")
        # Whoever answers this has looked before whether the old one can go.
        assert told(peer).digest == shop.new.digest
        assert gone not in said
        may_go.set()
        assert replies(peer, 1) == {1: "answered"}
        until(lambda: gone in said, "the old one goes afterwards")


def out_of_memory(shop: Shop, agent: Agent, peer: StrangePeer) -> None:
    shop.runtime(shop.old).error = MemoryError()
    for number in (1, 2, 3):
        assert failed(peer, shop.old, number) == "failed: MemoryError:"
    until(lambda: agent.state == "FAILED", "it gives up")
    assert failed(peer, shop.old, 4) == "failed: MemoryError:"


def test_a_failed_agent_serves_again_once_its_bundle_works(
    shop: Shop, open_shop: tuple[Agent, StrangePeer]
) -> None:
    agent, peer = open_shop
    out_of_memory(shop, agent, peer)
    assert shop.looked == 0, "not yet"
    shop.runtime(shop.old).error = None
    agent.reload()
    until(lambda: agent.state == "READY", "it serves again")
    answered(peer, shop.old, 5)
    assert told(peer).reason == ""


def test_a_failed_agent_looks_by_itself(
    shop: Shop, open_shop: tuple[Agent, StrangePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, peer = open_shop
    monkeypatch.setattr(agent_module, "RETRY_S", 0.01)
    out_of_memory(shop, agent, peer)
    shop.runtime(shop.old).error = None
    until(lambda: agent.state == "READY", "it serves again")
    answered(peer, shop.old, 5)


def test_a_request_for_which_there_is_no_memory_is_lost_alone(
    shop: Shop, open_shop: tuple[Agent, StrangePeer], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, peer = open_shop
    decode: Any = vars(agent_module)["decode"]

    def scarce(frames: Any) -> Any:
        monkeypatch.setattr(agent_module, "decode", decode)
        raise MemoryError

    monkeypatch.setattr(agent_module, "decode", scarce)
    peer.send(request(shop.old, 1))
    answered(peer, shop.old, 2)
    assert told(peer).counts["failed"] == 1
    assert agent.state == "READY"


def test_what_cannot_be_written_to_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    (tmp_path / "alpha.log").symlink_to("/dev/full")
    with Fleet(tmp_path, bundle) as fleet:
        agent = fleet.start("alpha", "--insecure", bind="tcp://0.0.0.0:0")
        port = agent.address.rpartition(":")[2]
        with StrangePeer(f"tcp://127.0.0.1:{port}") as peer:
            answered(peer, Bundle.open(bundle), 1)
        assert agent.process.poll() is None
        agent.process.terminate()
        assert agent.process.wait(60) == 0


#: `mdp-agent`, but loading takes for ever, and is done by onnxruntime all the time. `{hold}` says
#: which load does: the first, or that of another bundle.
FOREVER = """
import sys
from devices.agent import options
from devices.cli.main import main
loads, whole = [], options.open_runtime
def open_runtime(*args, **how):
    loads.append(args)
    while len(loads) == {hold}:
        whole(*args, **how)
    return whole(*args, **how)
options.open_runtime = open_runtime
main()
"""


@pytest.mark.parametrize("hold", [1, 2], ids=["first bundle", "another bundle"])
def test_an_agent_that_is_stopped_while_a_model_loads_ends_in_order(
    tmp_path: Path, hold: int
) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    where = ["--bundle", str(bundle), "--device", "alpha", "--bind", ANY_PORT, "--json"]
    program = [sys.executable, "-c", FOREVER.format(hold=hold), "run", *where]
    agent = AgentProcess("alpha", program, tmp_path / "alpha.log")
    try:
        agent.wait_for("LISTENING" if hold == 1 else "READY")
        if hold == 2:
            change_assignment(bundle, why="for another reason")
            agent.signal(signal.SIGHUP)
            # It takes in signals in their order; the loading is under way by then or begins.
            with StrangePeer(agent.address) as peer:
                assert told(peer).state == "READY"
        assert agent.terminate() == 0
        assert agent.stderr == ""
    finally:
        agent.close()
