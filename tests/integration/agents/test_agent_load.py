"""Many clients at one agent: shares, batches, draining, and cores of its own."""

import asyncio
import re
import signal
import threading
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

import mdp
from devices.agent.options import ServeOptions
from devices.build import build_agent
from devices.cores import cores_in
from devices.machine import Machine
from mdp.formats.bundle import Bundle
from mdp.protocol.messages import Failure, Result, contribution_of
from mdp.queueing.queue import CAPACITY_BYTES, LEAST_BYTES
from mdp.requests.prediction import Prediction
from mdp.requests.window import MOST_OUT
from mdp.testing.agents import ANY_PORT
from mdp.testing.bundles import colour_picture, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import AgentKeys, new_pair
from tests.support.bundles import change_assignment
from tests.support.fakes import StrangePeer
from tests.support.fleet import PLENTY_MS, Fleet
from tests.support.serving import Held, Paying, ask_status, count_queued, replies, request, serving

pytestmark = pytest.mark.usefixtures("no_leaks")


def test_a_client_that_floods_does_not_starve_another(fleet: Fleet) -> None:
    bundle, runtime = Bundle.open(fleet.bundle), Held()
    with (
        serving(bundle, runtime) as (_, address),
        StrangePeer(address) as greedy,
        StrangePeer(address) as modest,
    ):
        runtime.hold()
        greedy.send(request(bundle, 1))
        until(runtime.waiting.is_set, "the first is computed")
        most = CAPACITY_BYTES // LEAST_BYTES
        for sent in range(1, most + 1, 64):
            for number in range(sent + 1, sent + 65):
                greedy.send(request(bundle, number % 200, request_id=number))
            # Never more than the agent takes in at a time.
            assert count_queued(greedy) == sent + 63
        for number in range(most + 2, most + 25):
            greedy.send(request(bundle, 0, request_id=number))
        # One is computed; those that wait fill the memory; the others have been told.
        told_first = [greedy.receive().message for _ in range(23)]
        texts = {message.text for message in told_first if isinstance(message, Failure)}
        assert texts == {f"{most} requests wait already"}
        assert count_queued(greedy) == most
        for number in (201, 202):
            modest.send(request(bundle, number))
        assert count_queued(modest) == most
        runtime.free.set()
        assert replies(modest, 2) == {201: "answered", 202: "answered"}
        left = replies(greedy, most + 1)
        assert Counter(left.values()) == {"answered": most - 1, "overloaded": 2}
        # The flood's first took longer to compute than both of the modest one's.
        assert [batch[0] for batch in runtime.batches[:5]] == [1, 201, 202, 2, 3]


def test_many_calls_at_a_time_are_all_complete(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    fleet.start_all("alpha", "gamma", odd=("beta", "--hold", "run", "--gate", gate))

    async def ask_many() -> list[Prediction]:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            picture = colour_picture("red")
            calls = [
                asyncio.create_task(client.classify(picture, deadline_ms=PLENTY_MS))
                for _ in range(50)
            ]
            queued: int | None = None
            # As many are there as the client's window lets out: all of them wait until one is
            # computed.
            while queued != MOST_OUT - 1:
                await asyncio.sleep(0.005)
                statuses = await client.status(timeout_s=PATIENCE_S)
                (queued,) = [each.queued for each in statuses if each.device == "beta"]
                assert (queued or 0) <= MOST_OUT
            (gate / "run").touch()
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask_many())
    assert Counter(tuple(answer.missing.items()) for answer in answers) == {(): 50}


def test_a_client_is_its_key_however_many_connections_it_has(fleet: Fleet) -> None:
    bundle, runtime = Bundle.open(fleet.bundle), Held()
    (own, secret), greedy, modest = new_pair(), new_pair(), new_pair()
    keys = AgentKeys(secret=secret, allowed=frozenset([greedy[0], modest[0]]))
    with serving(bundle, runtime, keys=keys) as (_, address), ExitStack() as stack:
        crowd = [stack.enter_context(StrangePeer(address, (*greedy, own))) for _ in range(4)]
        alone = stack.enter_context(StrangePeer(address, (*modest, own)))
        assert count_queued(alone) == 0
        runtime.hold()
        crowd[0].send(request(bundle, 1))
        until(runtime.waiting.is_set, "the first is computed")
        for place, peer in enumerate(crowd):
            for number in range(4):
                peer.send(request(bundle, 10 * place + number))
            assert count_queued(peer) == 4 * (place + 1)
        alone.send(request(bundle, 201))
        count_queued(alone)
        runtime.free.set()
        assert replies(alone, 1) == {201: "answered"}
        # By connection, one of each of the four would have come before it.
        assert 201 in [batch[0] for batch in runtime.batches[1:3]]


def test_waiting_requests_are_batched(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mdp.agent")
    bundle, runtime = Bundle.open(fleet.bundle), Held()
    with (
        serving(bundle, runtime, batch=3, clock=Paying(runtime)) as (_, address),
        StrangePeer(address) as peer,
    ):
        assert [len(batch) for batch in runtime.batches] == [1, 1, 2, 2, 3, 3], "measured"
        runtime.hold()
        peer.send(request(bundle, 1))
        until(runtime.waiting.is_set, "the first is computed, and did not wait for others")
        for number in range(2, 7):
            peer.send(request(bundle, number))
        assert count_queued(peer) == 5
        runtime.free.set()
        for number in range(1, 7):
            envelope = peer.receive()
            assert isinstance(envelope.message, Result)
            assert envelope.message.request_id == number
            assert contribution_of(envelope.buffers[0], 3).bag.tolist() == [number] * 3
        assert runtime.batches == [[1], [2, 3, 4], [5, 6]]
        # By this clock, computing takes a second.
        peer.send(request(bundle, 7, budget_ms=500.0))
        failure = peer.receive().message
        assert isinstance(failure, Failure)
        assert (failure.request_id, failure.code) == (7, "too_late")
        assert failure.text.endswith("500.0 ms left do not suffice")
    # Where nobody else is told what an agent in this process reports, its logger is.
    states = [r.getMessage() for r in caplog.records if r.getMessage().isupper()]
    assert states == ["WARMING", "READY", "DRAINING"]


def test_an_agent_measures_the_batches_that_the_plan_or_the_operator_asks_for(fleet: Fleet) -> None:
    change_assignment(fleet.bundle, batch=3)
    for options, sizes in (((), "1, 2, 3"), (("--batch", 1), None)):
        agent = fleet.start("alpha", *options)
        told = [event["event"] for event in agent.events]
        expected = rf"{sizes} pictures at once take [\d., ]+ ms"
        assert sum(bool(re.fullmatch(expected, event)) for event in told) == (sizes is not None)
        assert len(told) == 3 + (sizes is not None)


def test_accepted_requests_are_answered_before_the_end(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    agent = fleet.start("alpha", "--hold", "run", "--gate", gate, odd=True)
    bundle = Bundle.open(fleet.bundle)
    with ExitStack() as stack:
        peers = [stack.enter_context(StrangePeer(agent.address)) for _ in range(8)]
        for peer in peers:
            for number in (1, 2):
                peer.send(request(bundle, number))
            count_queued(peer)
        agent.signal(signal.SIGTERM)
        agent.wait_for("DRAINING")
        for peer in peers:
            peer.send(request(bundle, 3))
            assert replies(peer, 1) == {3: "draining"}
        (gate / "run").touch()
        for peer in peers:
            assert replies(peer, 2) == {1: "answered", 2: "answered"}
        assert agent.process.wait(PATIENCE_S) == 0
    assert agent.stderr == ""


def test_an_agent_stays_on_the_cores_that_it_is_given(fleet: Fleet) -> None:
    change_assignment(fleet.bundle, threads=4)
    core = max(own_cores())
    agent = fleet.start("alpha", "--cpus", core, "--threads", 4)
    with fleet.client() as client:
        client.status(timeout_s=PATIENCE_S)
    tasks = list(Path(f"/proc/{agent.process.pid}/task").iterdir())
    # Two that serve, the one that waits, ZeroMQ's two, and those that compute.
    assert len(tasks) >= 8
    assert {cores_allowed(task / "status") for task in tasks} == {frozenset([core])}


def own_cores() -> frozenset[int]:
    return cores_allowed(Path("/proc/self/status"))


def cores_allowed(status: Path) -> frozenset[int]:
    found = re.search(r"^Cpus_allowed_list:\s*(\S+)$", status.read_text(), flags=re.MULTILINE)
    assert found is not None
    return cores_in(found[1])


def test_an_agent_is_built_from_options_alone(tmp_path: Path) -> None:
    options = ServeOptions(bundle=write_bundle(tmp_path / "bundle"), device="alpha", bind=ANY_PORT)
    events: list[str] = []
    sensor = tmp_path / "sys/class/thermal/thermal_zone0/temp"
    sensor.parent.mkdir(parents=True)
    sensor.write_text("61500\n")
    with build_agent(options, report=events.append, machine=Machine(tmp_path)) as built:
        thread = threading.Thread(target=built.serve)
        thread.start()
        until(lambda: built.agent.state == "READY", "the agent is ready")
        with StrangePeer(built.address) as peer:
            peer.send(request(options.loadable().bundle, 1))
            assert replies(peer, 1) == {1: "answered"}
            assert ask_status(peer).temperature_c == 61.5
            sensor.unlink()
            built.agent.main_loop.wake()
            until(lambda: ask_status(peer).temperature_c is None, "the sensor is gone")
        built.agent.stop()
        thread.join(PATIENCE_S)
    assert (built.public_key, built.agent.left_behind) == (None, False)
    assert events[-3:] == ["WARMING", "READY", "DRAINING"]
