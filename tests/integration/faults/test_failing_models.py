"""Models that fail while they are served: what fails with them, and what comes back."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from devices.agent import server as agent_module
from devices.agent.bundles import LoadableBundle
from devices.agent.jobs import PictureJob
from devices.agent.reload import Reloader
from devices.agent.server import Agent
from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import Failure
from mdp.testing.agents import ANY_PORT, AgentProcess
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import Router
from tests.support.bundles import change_assignment
from tests.support.fakes import StrangePeer
from tests.support.fleet import Fleet
from tests.support.serving import Held, ask_status, count_queued, replies, request, serving

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


def failure_of(peer: StrangePeer, bundle: Bundle, number: int) -> str:
    """Reason why a request failed."""
    peer.send(request(bundle, number))
    message = peer.receive().message
    assert isinstance(message, Failure)
    assert message.request_id == number
    return f"{message.code}: {message.text}"


def assert_answer(peer: StrangePeer, bundle: Bundle, number: int) -> None:
    peer.send(request(bundle, number))
    assert replies(peer, 1) == {number: "answered"}


def test_a_model_that_cannot_be_loaded_leaves_no_thread_at_the_socket(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = threading.Event()

    def load() -> Held:
        failed.set()
        raise InputError("no such model")

    source = LoadableBundle(bundle=shop.old, assignment=shop.old.assignment("alpha"), load=load)
    with Router(ANY_PORT) as router:
        poll = router.poll

        def come_late(timeout_s: float | None) -> object:
            # The other thread is at the socket only after this one has failed.
            assert failed.wait(PATIENCE_S)
            time.sleep(0.2)
            return poll(timeout_s)

        monkeypatch.setattr(router, "poll", come_late)
        with pytest.raises(InputError, match="no such model"):
            Agent(source, router).serve()
        assert not {"first", "second"} & {thread.name for thread in threading.enumerate()}


def test_a_failing_model_is_rolled_back(shop: Shop, open_shop: tuple[Agent, StrangePeer]) -> None:
    agent, peer = open_shop
    shop.there = shop.new
    agent.reload()
    until(lambda: ask_status(peer).digest == shop.new.digest, "it has changed over")
    assert_answer(peer, shop.new, 1)
    shop.runtime(shop.new).error = RuntimeError("on fire")
    for number in (2, 3, 4):
        assert failure_of(peer, shop.new, number) == "failed: RuntimeError: on fire"
    assert failure_of(peer, shop.new, 5).startswith("wrong_bundle: serves old ")
    assert_answer(peer, shop.old, 6)
    status = ask_status(peer)
    assert (status.state, status.digest) == ("READY", shop.old.digest)
    expected = f"the bundle is as before: new {shop.new.digest[:12]} failed: RuntimeError: on fire"
    assert status.reason == expected
    assert (status.counts["renewed"], status.counts["not_renewed"]) == (1, 1)


def test_decoding_keeps_its_bundle(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert ask_status(peer).digest == shop.new.digest
        assert gone not in said
        may_go.set()
        assert replies(peer, 1) == {1: "answered"}
        until(lambda: gone in said, "the old one goes afterwards")


def test_a_client_cannot_keep_a_third_bundle_out(shop: Shop, tmp_path: Path) -> None:
    """It goes on asking for the first; what was accepted of it is answered before it goes."""
    third = Bundle.open(write_bundle(tmp_path / "third", name="third", bag_scale=7.0))
    shop.runtimes[third.digest] = Held()
    old, now_s = shop.runtime(shop.old), [0.0]
    with (
        serving(shop.old, old, reloader=shop.reloader(), grace_s=30.0, clock=lambda: now_s[0]) as (
            agent,
            address,
        ),
        StrangePeer(address) as peer,
    ):
        shop.there = shop.new
        agent.reload()
        until(lambda: ask_status(peer).digest == shop.new.digest, "it has changed over")
        shop.there = third
        now_s[0] = 29.0
        assert_answer(peer, shop.old, 1)
        agent.reload()
        until(lambda: bool(ask_status(peer).reason), "a third is refused")
        assert ask_status(peer).reason == (
            "the bundle is as before: two bundles are served, and old "
            f"{shop.old.digest[:12]} for 1 s more: reload its clients, and try again then"
        )
        now_s[0] = 30.0
        old.hold()
        peer.send(request(shop.old, 2))
        until(old.waiting.is_set, "one of the first is computed")
        peer.send(request(shop.old, 3))
        assert count_queued(peer) == 1
        agent.reload()
        until(lambda: len(agent.lifecycle.sources) == 1, "the first takes no more requests")
        assert failure_of(peer, shop.old, 4).startswith("wrong_bundle: serves new ")
        assert shop.runtime(third).batches == [], "two are in memory"
        old.free.set()
        assert replies(peer, 2) == {2: "answered", 3: "answered"}
        began_s = time.monotonic()

        def is_served() -> bool:
            # Behind a computation the agent looks again after some of its own seconds, which begin
            # whenever it has looked.
            now_s[0] = 31.0 + time.monotonic() - began_s
            return ask_status(peer).digest == third.digest

        until(is_served, "the third is served")
        assert_answer(peer, shop.new, 5)
        assert_answer(peer, third, 6)
        assert failure_of(peer, shop.old, 7).startswith("wrong_bundle: serves third ")
        assert ask_status(peer).reason == ""


@pytest.mark.parametrize("how", ["told to reload", "by itself"])
def test_an_agent_fails_after_three_errors_and_serves_once_its_bundle_works(
    shop: Shop, open_shop: tuple[Agent, StrangePeer], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    agent, peer = open_shop
    runtime = shop.runtime(shop.old)
    if how == "by itself":
        monkeypatch.setattr(agent_module, "RETRY_S", 0.01)
    for errors in (2, 3):
        runtime.error = MemoryError() if errors == 3 else RuntimeError("on\nfire")
        said = "failed: MemoryError:" if errors == 3 else "failed: RuntimeError: on fire"
        for number in range(errors):
            assert failure_of(peer, shop.old, number) == said
        if errors == 2:
            assert ask_status(peer).reason == "RuntimeError: on fire"
            runtime.error = None
            assert_answer(peer, shop.old, 3)
            assert (ask_status(peer).state, ask_status(peer).reason) == ("READY", "")
    until(lambda: agent.state == "FAILED", "it gives up")
    assert failure_of(peer, shop.old, 4) == "failed: MemoryError:"
    runtime.error = None
    if how == "told to reload":
        assert shop.looked == 0
        agent.reload()
    until(lambda: agent.state == "READY", "it serves again")
    assert_answer(peer, shop.old, 5)
    assert ask_status(peer).reason == ""


def test_an_agent_serves_on_while_its_log_s_disk_is_full(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    (tmp_path / "alpha.log").symlink_to("/dev/full")
    with Fleet(tmp_path, bundle) as fleet:
        agent = fleet.start("alpha", "--insecure", bind="tcp://0.0.0.0:0")
        port = agent.address.rpartition(":")[2]
        with StrangePeer(f"tcp://127.0.0.1:{port}") as peer:
            assert_answer(peer, Bundle.open(bundle), 1)
        assert agent.process.poll() is None
        assert agent.terminate() == 0


#: `mdp-agent`, but the second model that it loads takes for ever, inside onnxruntime.
FOREVER = """
from devices.agent import options
from devices.cli.main import main
loads, whole = [], options.open_runtime
def open_runtime(*args, **how):
    loads.append(args)
    while len(loads) == 2:
        whole(*args, **how)
    return whole(*args, **how)
options.open_runtime = open_runtime
main()
"""


def test_an_agent_stopped_while_it_loads_another_model_ends_in_order(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle")
    where = ["--bundle", str(bundle), "--device", "alpha", "--bind", ANY_PORT, "--json"]
    program = [sys.executable, "-c", FOREVER, "run", *where]
    with AgentProcess("alpha", program, tmp_path / "alpha.log").wait_for("READY") as agent:
        change_assignment(bundle, why="for another reason")
        agent.signal(signal.SIGHUP)
        # Signals are handled in their order: the loading is under way by then, or begins.
        with StrangePeer(agent.address) as peer:
            assert ask_status(peer).state == "READY"
        assert agent.terminate() == 0
        assert agent.stderr == ""
