"""Devices that die, freeze, dawdle, fail or come back, while a client asks for answers."""

import asyncio
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import pytest

import mdp
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.requests.prediction import Prediction
from mdp.requests.reason import NOT_NEEDED
from mdp.testing.agents import AgentProcess
from mdp.testing.bundles import DEVICES, colour_picture, subset_accuracy, write_bundle
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import Dealers
from tests.support.bundles import CASCADE_ACCURACY, with_cascade
from tests.support.fleet import PLENTY_MS, Fleet, answers_until

pytestmark = pytest.mark.usefixtures("no_leaks")

RED = colour_picture("red")
#: Reached by the tests in which somebody is late; long enough for the others to answer.
SHORT_MS = 1000.0


class Standing(Fleet):
    """A fleet whose plain agents go on from test to test, unless one has ended or frozen them."""

    def __init__(self, folder: Path, bundle: Path) -> None:
        super().__init__(folder, bundle)
        self.standing: dict[str, AgentProcess] = {}

    def mend(self) -> None:
        """Have a plain agent for each device again, and none of them in the next fleet file."""
        for agent in self.standing.values():
            if agent.process.poll() is not None or agent.kernel_state() == "T":
                agent.close()
        self.standing = {n: a for n, a in self.standing.items() if a.process.poll() is None}
        self.standing = dict(self.start_all(*DEVICES).agents)
        self.agents = {}

    def start_all(self, *names: str, odd: tuple[object, ...] = ()) -> Self:
        """Start those that do not stand already."""
        first = [self.start(str(odd[0]), *odd[1:], odd=True, wait_for=None)] if odd else []
        for name in names or DEVICES:
            self.agents[name] = self.standing.get(name) or self.start(name, wait_for=None)
        for agent in [*first, *self.agents.values()]:
            agent.wait_for("READY")
        return self

    def dismiss(self) -> None:
        """End what was started beside the plain agents."""
        for agent in [*self.agents.values(), *self._retired]:
            if agent not in self.standing.values():
                agent.close()
        self._retired.clear()


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    folder = tmp_path_factory.mktemp("fleet")
    with Standing(folder, write_bundle(folder / "bundle")) as fleet:
        yield fleet
        fleet.agents |= fleet.standing


@pytest.fixture
def fleet(standing: Standing) -> Fleet:
    standing.mend()
    return standing


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Fleet]:
    """For replicas, which share the requests as equals: none has served for longer."""
    with Fleet(tmp_path, write_bundle(tmp_path / "bundle")) as fleet:
        yield fleet


@pytest.fixture
def no_leaks(standing: Standing, fleet: Fleet, no_leaks: None) -> Iterator[None]:
    """Of what a test starts; the plain agents stay."""
    yield
    standing.dismiss()


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    path.mkdir()
    return path


def ask(client: mdp.Client, deadline_ms: float = PLENTY_MS) -> Prediction:
    answer = client.classify(RED, deadline_ms=deadline_ms)
    assert answer.label == "red"
    if "late" not in answer.missing.values():
        assert answer.latency_ms <= deadline_ms
    assert set(answer.used) | set(answer.missing) == set(DEVICES)
    return answer


def without(answer: Prediction, device: str, *reasons: str) -> None:
    """Assert that just `device` is missing, for a reason that begins like one of `reasons`."""
    assert list(answer.missing) == [device]
    assert answer.missing[device].startswith(reasons), answer.missing
    assert answer.partial
    members = tuple(k for k, name in enumerate(DEVICES) if name != device)
    assert answer.used == tuple(DEVICES[k] for k in members)
    assert answer.mode == "stacked"
    assert answer.expected_accuracy == subset_accuracy(members).stacked


def test_a_frozen_device_is_hedged_by_its_replica(fresh: Fleet) -> None:
    fresh.start_all(*DEVICES, "gamma/attic")
    with mdp.Client.connect(fresh.write(), timeout_s=PATIENCE_S, hedge_after_ms=30.0) as client:
        fresh.agents["gamma"].stop()
        # Not `disconnected` yet: nobody but the hedge can have asked the replica.
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert answer.used == ("alpha", "beta", "gamma/attic")
        assert answer.missing == {}
        assert answer.latency_ms >= 30.0


def test_replicas_share_the_requests_and_one_steps_in_for_the_other(fresh: Fleet) -> None:
    fresh.start_all(*DEVICES, "gamma/attic")
    with fresh.client() as client:
        used = [ask_any(client).used[2] for _ in range(12)]
        assert set(used) == {"gamma", "gamma/attic"}
        fresh.agents["gamma"].kill()
        until(lambda: client.status()[2].state == "UNREACHABLE", "gamma is gone")
        assert {ask_any(client).used[2] for _ in range(5)} == {"gamma/attic"}


def ask_any(client: mdp.Client) -> Prediction:
    answer = client.classify(RED, deadline_ms=PLENTY_MS)
    assert answer.missing == {}
    return answer


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hedge_after_ms": -1.0}, "hedge_after_ms: expected 0 or more, got -1"),
        ({"hedge_share": 1.5}, "hedge_share: expected 0 to 1, got 1.5"),
        ({"hedge_share": float("nan")}, "hedge_share: expected 0 to 1, got nan"),
    ],
)
def test_a_hedge_that_cannot_be(fleet: Fleet, options: dict[str, Any], message: str) -> None:
    # Refused before anybody is asked for anything: there need be no agents.
    nobody = fleet.write(**{d: f"tcp://127.0.0.1:{k + 1}" for k, d in enumerate(DEVICES)})
    with pytest.raises(mdp.InputError, match=f"^{re.escape(message)}$"):
        mdp.Client.connect(nobody, **options)


def test_a_killed_device_is_named_and_used_again_after_its_restart(fleet: Fleet) -> None:
    fleet.start_all()
    with fleet.client() as client:
        assert ask(client).missing == {}
        fleet.agents["beta"].kill()
        for _ in range(5):
            without(ask(client), "beta", "unreachable", "disconnected")
        assert [s.state for s in client.status()] == ["READY", "UNREACHABLE", "READY"]
        address = fleet.agents["beta"].address
        assert fleet.restart("beta").address == address
        again = answers_until(client, RED, lambda a: "beta" in a.used, PLENTY_MS)
        assert again[-1].missing == {}
        assert ask(client).missing == {}


def test_a_device_killed_while_it_computes_is_settled_at_once(fleet: Fleet, gate: Path) -> None:
    fleet.start_all("alpha", "gamma", odd=("beta", "--hold", "run", "--gate", gate))

    def kill() -> None:
        until(lambda: (gate / "run-1").exists(), "beta computes")
        fleet.agents["beta"].kill()

    killer = threading.Thread(target=kill)
    with fleet.client() as client:
        killer.start()
        answer = ask(client)
        killer.join(PATIENCE_S)
    without(answer, "beta", "disconnected")


def test_many_calls_under_way_survive_a_kill(fleet: Fleet, gate: Path) -> None:
    fleet.start_all("alpha", "gamma", odd=("beta", "--hold", "run", "--gate", gate))

    async def ask_many() -> list[Prediction]:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            calls = [
                asyncio.create_task(client.classify(RED, deadline_ms=PLENTY_MS)) for _ in range(10)
            ]
            while not (gate / "run-1").exists():
                await asyncio.sleep(0.005)
            fleet.agents["beta"].kill()
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask_many())
    for answer in answers:
        # Whoever was still cutting its picture never asked beta.
        without(answer, "beta", "disconnected", "unreachable")
    assert "disconnected" in [answer.missing["beta"] for answer in answers]


def test_a_frozen_device_is_late_then_rested_and_back_when_it_thaws(fleet: Fleet) -> None:
    fleet.start_all()
    with fleet.client() as client:
        assert ask(client).missing == {}
        fleet.agents["gamma"].stop()
        # Three times the deadline is waited for; then the device is left alone.
        for _ in range(3):
            without(ask(client, 400.0), "gamma", "late")
        without(ask(client), "gamma", "silent: 3 requests unanswered")
        assert fleet.agents["gamma"].process.poll() is None
        assert client.status(timeout_s=0.2)[2].state in ("SILENT", "UNREACHABLE")
        fleet.agents["gamma"].signal(signal.SIGCONT)
        again = answers_until(client, RED, lambda a: "gamma" in a.used, PLENTY_MS)
        assert again[-1].missing == {}
        until(lambda: client.status()[2].usable, "gamma is well")


def test_a_device_frozen_for_long_is_unreachable_and_comes_back(fleet: Fleet) -> None:
    fleet.start_all("alpha", "gamma")
    with fleet.client() as client:
        fleet.agents["gamma"].stop()
        # ZeroMQ's heartbeats find out.
        until(lambda: client.status(timeout_s=0.1)[1].state == "UNREACHABLE", "it is noticed")
        answer = ask(client)
        assert answer.missing["gamma"] == "unreachable"
        assert answer.used == ("alpha",)
        fleet.agents["gamma"].signal(signal.SIGCONT)
        answers_until(client, RED, lambda a: "gamma" in a.used, PLENTY_MS)


def test_a_straggler_is_late_and_its_reply_is_counted(fleet: Fleet, gate: Path) -> None:
    fleet.start_all("beta", "gamma", odd=("alpha", "--hold", "run", "--gate", gate))
    with fleet.client() as client:
        without(ask(client, SHORT_MS), "alpha", "late")
        assert client.counters["late"] == 0
        (gate / "run").touch()
        until(lambda: client.status()[0].counts["answered"] == 1, "alpha is done")
        assert client.counters == {"late": 1, "duplicate": 0, "malformed": 0}
        # A late answer is a sign of life: it is not rested.
        assert ask(client).missing == {}


def test_a_full_queue_says_overloaded(fleet: Fleet, gate: Path) -> None:
    fleet.start_all(
        "beta", "gamma", odd=("alpha", "--hold", "run", "--gate", gate, "--run-s", 0.02)
    )

    async def answered(client: mdp.AsyncClient) -> Counter[str]:
        statuses = await client.status(timeout_s=PATIENCE_S)
        return Counter({s.device: s.counts["answered"] for s in statuses if s.device != "alpha"})

    async def ask_many() -> list[Prediction]:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            (gate / "run").touch()
            assert (await client.classify(RED, deadline_ms=PLENTY_MS)).missing == {}
            (gate / "run").unlink()
            before = await answered(client)
            calls = [asyncio.create_task(client.classify(RED, deadline_ms=PLENTY_MS))]
            # All at once, a burst would have to wait for the first to be taken out of the queue.
            while not (gate / "run-2").exists():
                await asyncio.wait(calls, timeout=0.005)
            for _ in range(3):
                calls += [
                    asyncio.create_task(client.classify(RED, deadline_ms=PLENTY_MS))
                    for _ in range(8)
                ]
                # Nor shall those fill the queues of the others, on a busy machine.
                while min(((await answered(client)) - before).values(), default=0) < len(calls):
                    await asyncio.sleep(0.005)
            # One runs, sixteen wait, and eight are turned away, which lets those calls end.
            done: set[asyncio.Task[Prediction]] = set()
            while len(done) < 8:
                done, _ = await asyncio.wait(calls, timeout=0.01)
            (gate / "run").touch()
            return await asyncio.gather(*calls)

    answers = asyncio.run(ask_many())
    refused = [answer for answer in answers if answer.missing]
    assert len(refused) == 8
    for answer in refused:
        without(answer, "alpha", "overloaded: 16 requests wait already")
    assert len([answer for answer in answers if answer.used == DEVICES]) == 17


def test_a_budget_that_cannot_suffice_says_too_late(fleet: Fleet) -> None:
    fleet.start_all("beta", "gamma", odd=("alpha", "--run-s", 1.5))
    with fleet.client() as client:
        # A reply leaves before its duration counts: the second one is computed after that.
        for _ in range(2):
            assert ask(client).missing == {}
        # It now knows that it takes longer than that, and says so at once.
        answer = ask(client, SHORT_MS)
        without(answer, "alpha", "too_late: ")
        assert answer.missing["alpha"].endswith("ms left do not suffice")


def test_what_waited_too_long_in_the_queue_is_sent_back(fleet: Fleet, gate: Path) -> None:
    fleet.start_all("beta", "gamma", odd=("alpha", "--hold", "run", "--gate", gate))
    with fleet.client() as client:
        without(ask(client, 300.0), "alpha", "late")
        without(ask(client, 300.0), "alpha", "late")
        assert client.status()[0].counts["too_late"] == 0
        (gate / "run").touch()
        until(lambda: client.status()[0].counts["too_late"] == 1, "the second is sent back")
        assert client.counters["late"] == 2
        assert client.status()[0].counts["answered"] == 1


def test_three_failures_in_a_row_and_the_agent_says_failed(fleet: Fleet) -> None:
    fleet.start_all("beta", "gamma", odd=("alpha", "--raise-first", 99))
    reason = "RuntimeError: the model is on fire [really]"
    with fleet.client() as client:
        for _ in range(3):
            without(ask(client), "alpha", f"failed: {reason}")
        status = client.status()[0]
        assert (status.state, status.reason, status.usable) == ("FAILED", reason, False)
        # By then the client has stopped asking it for answers.
        without(ask(client), "alpha", f"failing: failed: {reason}", f"not_ready: FAILED: {reason}")
        assert client.status()[0].counts["failed"] == 3
    assert fleet.agents["alpha"].wait_for("FAILED").process.poll() is None
    assert fleet.agents["alpha"].terminate() == 0


def test_two_failures_are_overcome(fleet: Fleet) -> None:
    fleet.start_all("beta", "gamma", odd=("alpha", "--raise-first", 2))
    with fleet.client() as client:
        for _ in range(2):
            without(ask(client), "alpha", "failed: RuntimeError")
        assert client.status()[0].reason.startswith("RuntimeError")
        for _ in range(3):
            assert ask(client).missing == {}
        status = client.status()[0]
        assert (status.state, status.reason) == ("READY", "")


def test_nan_logits_are_a_bad_output(fleet: Fleet) -> None:
    fleet.start_all("beta", "gamma", odd=("alpha", "--nan"))
    with fleet.client() as client:
        answer = ask(client)
        without(answer, "alpha", "bad_output: logits that are not finite")
        assert np.isfinite(answer.probability)


def test_an_agent_with_another_bundle_is_named(fleet: Fleet, tmp_path: Path) -> None:
    other = write_bundle(tmp_path / "other", name="others", bag_scale=9.0)
    fleet.start("alpha", bundle=other)
    fleet.start_all("beta", "gamma")
    with fleet.client() as client:
        answer = ask(client)
        without(answer, "alpha", "wrong_bundle: serves others ")
        digest = client.bundle.digest[:12]
        assert answer.missing["alpha"].endswith(f"asked for {digest}")
        status = client.status()[0]
        assert (status.state, status.usable) == ("READY", False)
        assert status.reason.startswith("wrong_bundle: serves others ")
        assert status.reason.endswith(f"expected colours {digest}")


def test_addresses_mixed_up_are_noticed_even_at_the_same_image_size(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "bundle", sizes=(8, 8, 8))
    with Fleet(tmp_path, bundle) as fleet:
        fleet.start_all()
        alpha, beta = (fleet.agents[name].address for name in ("alpha", "beta"))
        with fleet.client(alpha=beta, beta=alpha) as client:
            answer = ask(client)
            assert answer.used == ("gamma",)
            assert answer.missing == {
                "alpha": "wrong_submodel: beta serves sub-model 1, asked for 0",
                "beta": "wrong_submodel: alpha serves sub-model 0, asked for 1",
            }
            status = client.status()[0]
            assert status.reason == "wrong_submodel: serves 1 (beta), expected 0"
            assert not status.usable


def test_a_boosting_prefix_stays_boosted_and_anything_else_is_bagged(fleet: Fleet) -> None:
    fleet.start_all()
    with fleet.client("boosted") as client:
        assert ask(client).mode == "boosted"
        fleet.agents["gamma"].kill()
        answer = ask(client)
        assert (answer.mode, answer.used) == ("boosted", ("alpha", "beta"))
        assert answer.expected_accuracy == subset_accuracy((0, 1)).boosted
        fleet.restart("gamma")
        answers_until(client, RED, lambda a: "gamma" in a.used, PLENTY_MS)
        fleet.agents["alpha"].kill()
        answer = ask(client)
        assert (answer.mode, answer.used) == ("bagged", ("beta", "gamma"))
        assert answer.expected_accuracy == subset_accuracy((1, 2)).bagged


def test_one_is_left_then_none(fleet: Fleet) -> None:
    fleet.start_all()
    with fleet.client() as client:
        fleet.agents["alpha"].kill()
        fleet.agents["gamma"].kill()
        answer = ask(client)
        assert (answer.mode, answer.used) == ("single", ("beta",))
        assert answer.expected_accuracy == subset_accuracy((1,)).stacked
        fleet.agents["beta"].kill()
        until(lambda: client.status()[1].state == "UNREACHABLE", "beta is gone")
        with pytest.raises(mdp.QuorumNotMet, match=r"no device can answer \(.*beta: unr") as info:
            client.classify(RED, deadline_ms=PLENTY_MS)
        assert info.value.outcomes == dict.fromkeys(DEVICES, "unreachable")
        gone = list(client.stream([RED] * 3, deadline_ms=PLENTY_MS, errors="yield"))
        assert [type(answer) for answer in gone] == [mdp.QuorumNotMet] * 3
        with pytest.raises(mdp.QuorumNotMet):
            next(iter(client.stream([RED], deadline_ms=PLENTY_MS)))


def test_nobody_answers_in_time(fleet: Fleet, gate: Path) -> None:
    for device in DEVICES:
        fleet.start(device, "--hold", "run", "--gate", gate, odd=True)
    with fleet.client() as client:
        with pytest.raises(mdp.DeadlineExceeded, match="no answer within 300 ms") as info:
            client.classify(RED, deadline_ms=300.0)
        assert info.value.outcomes == dict.fromkeys(DEVICES, "late")
        (gate / "run").touch()
        answers_until(client, RED, lambda a: not a.missing, PLENTY_MS)


def test_a_replica_answers_for_a_killed_device_and_nothing_is_missing(fresh: Fleet) -> None:
    fresh.start_all("alpha", "alpha/attic", "beta", "gamma")
    with fresh.client() as client:
        assert client.classify(RED, deadline_ms=PLENTY_MS).used == DEVICES
        fresh.agents["alpha"].kill()
        for _ in range(3):
            answer = client.classify(RED, deadline_ms=PLENTY_MS)
            assert answer.used == ("alpha/attic", "beta", "gamma")
            assert answer.missing == {}
            assert answer.expected_accuracy == subset_accuracy((0, 1, 2)).stacked


def test_a_replica_takes_over_a_call_under_way(fresh: Fleet, gate: Path) -> None:
    fresh.start_all("alpha/attic", "beta", "gamma", odd=("alpha", "--hold", "run", "--gate", gate))

    def kill() -> None:
        until(lambda: (gate / "run-1").exists(), "alpha computes")
        fresh.agents["alpha"].kill()

    killer = threading.Thread(target=kill)
    with fresh.client() as client:
        killer.start()
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        killer.join(PATIENCE_S)
        assert answer.used == ("alpha/attic", "beta", "gamma")
        assert answer.missing == {}


def test_a_device_that_was_never_there_may_come_later(fleet: Fleet) -> None:
    fleet.start_all("alpha", "beta")
    fleet.start("gamma").kill()
    with mdp.Client.connect(fleet.write(), timeout_s=0.5) as client:
        without(ask(client), "gamma", "unreachable")
        fleet.restart("gamma")
        answers_until(client, RED, lambda a: not a.missing, PLENTY_MS)


def test_connecting_that_is_interrupted_leaves_nothing_behind(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.start_all()
    made: list[Dealers] = []

    def interrupted(self: Dealers, timeout_s: float | None) -> NoReturn:
        made.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Dealers, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mdp.Client.connect(fleet.write())
    assert [dealers._context.closed for dealers in made] == [True]


def test_a_stream_goes_on_through_a_death(fleet: Fleet) -> None:
    fleet.start_all()
    with fleet.client() as client:
        missing = []
        for number, answer in enumerate(client.stream([RED] * 12, deadline_ms=PLENTY_MS)):
            assert isinstance(answer, Prediction)
            assert answer.label == "red"
            missing.append(answer.missing)
            if number == 3:
                fleet.agents["beta"].kill()
        assert missing[:4] == [{}] * 4
        assert set(missing[-1]) == {"beta"}


def test_an_async_client_sees_a_death_and_a_return(fleet: Fleet) -> None:
    fleet.start_all()

    async def live() -> None:
        async with mdp.AsyncClient.connect(fleet.write(), timeout_s=PATIENCE_S) as client:
            assert (await client.classify(RED, deadline_ms=PLENTY_MS)).missing == {}
            fleet.agents["beta"].kill()
            answer = await client.classify(RED, deadline_ms=PLENTY_MS)
            without(answer, "beta", "unreachable", "disconnected")
            fleet.restart("beta")
            until_s = time.monotonic() + PATIENCE_S
            while (await client.classify(RED, deadline_ms=PLENTY_MS)).missing:
                assert time.monotonic() < until_s
                await asyncio.sleep(0.01)

    asyncio.run(live())


def test_a_cascade_asks_the_others_only_where_the_first_is_not_sure(
    fleet: Fleet, tmp_path: Path
) -> None:
    fleet.start_all()

    def written(threshold: float) -> Path:
        """A fleet file by whose bundle alpha, asked first, is sure above `threshold`."""
        bundle = with_cascade(shutil.copytree(fleet.bundle, tmp_path / f"{threshold}"), threshold)
        entries = [f"{name}={agent.address}" for name, agent in fleet.agents.items()]
        path = tmp_path / f"{threshold}.toml"
        new_fleet(Bundle.open(bundle), entries, path)
        return path

    async def asked_without_waiting(path: Path) -> Prediction:
        async with mdp.AsyncClient.connect(path, timeout_s=PATIENCE_S, cascade=True) as client:
            return await client.classify(RED, deadline_ms=PLENTY_MS)

    def answered(asking: mdp.Client) -> dict[str, int]:
        return {status.device: status.counts["answered"] for status in asking.status()}

    sure, unsure = written(0.5), written(1.0)
    with (
        mdp.Client.connect(sure, timeout_s=PATIENCE_S, cascade=True) as trusting,
        mdp.Client.connect(unsure, timeout_s=PATIENCE_S, cascade=True) as doubting,
    ):
        before = answered(trusting)
        answer = ask(trusting)
        assert (answer.stage, answer.used) == ("first", ("alpha",))
        assert answer.missing == dict.fromkeys(("beta", "gamma"), str(NOT_NEEDED))
        assert answer.expected_accuracy == CASCADE_ACCURACY.stacked
        after = answered(trusting)
        assert {name: after[name] - before[name] for name in DEVICES} == {
            "alpha": 1, "beta": 0, "gamma": 0,
        }  # fmt: skip
        answer = ask(doubting)
        assert (answer.stage, answer.missing) == ("escalated", {})
        assert answer.expected_accuracy == subset_accuracy((0, 1, 2)).stacked
        for path, stage in ((sure, "first"), (unsure, "escalated")):
            assert asyncio.run(asked_without_waiting(path)).stage == stage
        # Connected, and silent: the others are asked while they still have time.
        fleet.agents["alpha"].stop()
        answer = ask(trusting, 2 * SHORT_MS)
        assert answer.stage == "escalated"
        without(answer, "alpha", "late")
        fleet.agents["alpha"].kill()
        answer = ask(trusting)
        assert answer.stage == "escalated"
        without(answer, "alpha", "unreachable", "disconnected")


def test_a_bundle_without_a_cascade_is_refused(fleet: Fleet) -> None:
    fleet.start_all()
    said = "key `cascade`: expected members to ask first and how sure they have to be, found none"
    with pytest.raises(mdp.ConfigError, match=said):
        mdp.Client.connect(fleet.write(), timeout_s=PATIENCE_S, cascade=True)
