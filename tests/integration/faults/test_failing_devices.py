"""Devices that end, freeze, are late and return, while a client calls; more in the fault matrix."""

import asyncio
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, Self

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


def test_replicas_share_requests_and_replace_each_other(fresh: Fleet) -> None:
    fresh.start_all(*DEVICES, "gamma/attic")
    with mdp.Client.connect(fresh.write(), timeout_s=PATIENCE_S, hedge_after_ms=30.0) as client:
        fresh.agents["gamma"].stop()
        # The connection is still up: only hedging can have asked the replica.
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        assert (answer.used, answer.missing) == (("alpha", "beta", "gamma/attic"), {})
        assert answer.latency_ms >= 30.0
        fresh.agents["gamma"].signal(signal.SIGCONT)
    with fresh.client() as client:
        answers = [client.classify(RED, deadline_ms=PLENTY_MS) for _ in range(12)]
        assert {answer.used[2] for answer in answers} == {"gamma", "gamma/attic"}
        fresh.agents["gamma"].kill()
        answers += [client.classify(RED, deadline_ms=PLENTY_MS) for _ in range(3)]
        assert {answer.used[2] for answer in answers[12:]} == {"gamma/attic"}
        assert [answer.missing for answer in answers] == [{}] * 15
        assert answers[-1].expected_accuracy == subset_accuracy((0, 1, 2)).stacked


def test_a_replica_takes_over_a_call_in_flight(fresh: Fleet, gate: Path) -> None:
    fresh.start_all("alpha/attic", "beta", "gamma", odd=("alpha", "--hold", "run", "--gate", gate))

    def kill() -> None:
        until(lambda: (gate / "run-1").exists(), "alpha computes")
        fresh.agents["alpha"].kill()

    killer = threading.Thread(target=kill)
    with fresh.client() as client:
        killer.start()
        answer = client.classify(RED, deadline_ms=PLENTY_MS)
        killer.join(PATIENCE_S)
        assert (answer.used, answer.missing) == (("alpha/attic", "beta", "gamma"), {})


def test_calls_in_flight_end_at_once_when_a_device_is_killed(fleet: Fleet, gate: Path) -> None:
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
        # Calls whose picture was still being cut never asked beta.
        without(answer, "beta", "disconnected", "unreachable")
    assert "disconnected" in [answer.missing["beta"] for answer in answers]


def test_a_device_that_was_never_there_or_was_killed_is_used_once_it_runs(fleet: Fleet) -> None:
    fleet.start_all("alpha", "gamma")
    fleet.start("beta").kill()
    address = fleet.agents["beta"].address
    with mdp.Client.connect(fleet.write(), timeout_s=0.5) as client:
        for _ in range(2):
            for _ in range(4):
                without(ask(client), "beta", "unreachable", "disconnected")
            assert {s.device: s.state for s in client.status()}["beta"] == "UNREACHABLE"
            assert fleet.restart("beta").address == address
            answers_until(client, RED, lambda a: not a.missing, PLENTY_MS)
            fleet.agents["beta"].kill()


def test_a_frozen_device_is_late_then_excluded_and_used_once_it_thaws(fleet: Fleet) -> None:
    fleet.start_all()
    with fleet.client() as client:
        assert ask(client).missing == {}
        for until_unreachable in (False, True):
            fleet.agents["gamma"].stop()
            if until_unreachable:
                # ZeroMQ's heartbeats find out.
                until(lambda: client.status(timeout_s=0.1)[2].state == "UNREACHABLE", "noticed")
                without(ask(client), "gamma", "unreachable")
            else:
                for _ in range(3):
                    without(ask(client, 400.0), "gamma", "late")
                without(ask(client), "gamma", "silent: 3 requests unanswered")
                assert client.status(timeout_s=0.2)[2].state in ("SILENT", "UNREACHABLE")
            assert fleet.agents["gamma"].process.poll() is None
            fleet.agents["gamma"].signal(signal.SIGCONT)
            answers_until(client, RED, lambda a: not a.missing, PLENTY_MS)
            until(lambda: client.status()[2].usable, "gamma is ready")


def test_late_replies_count_and_late_requests_are_skipped(fleet: Fleet, gate: Path) -> None:
    fleet.start_all("beta", "gamma", odd=("alpha", "--hold", "run", "--gate", gate))
    with fleet.client() as client:
        for _ in range(2):
            without(ask(client, SHORT_MS), "alpha", "late")
        assert client.counters["late"] == client.status()[0].counts["too_late"] == 0
        (gate / "run").touch()
        until(lambda: client.status()[0].counts["too_late"] == 1, "the second is refused")
        assert client.status()[0].counts["answered"] == 1
        assert client.counters == {"late": 2, "duplicate": 0, "malformed": 0}
        # A late reply shows that the device is alive: it is asked again.
        assert ask(client).missing == {}


def test_answers_come_from_the_last_device_and_errors_without_any(fleet: Fleet) -> None:
    fleet.start_all()
    with fleet.client() as client:
        fleet.agents["alpha"].kill()
        fleet.agents["gamma"].kill()
        answer = ask(client)
        assert (answer.mode, answer.used) == ("single", ("beta",))
        assert answer.expected_accuracy == subset_accuracy((1,)).stacked
        fleet.agents["beta"].kill()
        until(lambda: client.status()[1].state == "UNREACHABLE", "beta is gone")
        with pytest.raises(mdp.QuorumNotMet, match=r"no device can answer \(.*beta.*: unr") as info:
            client.classify(RED, deadline_ms=PLENTY_MS)
        assert info.value.outcomes == dict.fromkeys(DEVICES, "unreachable")
        gone = list(client.stream([RED] * 3, deadline_ms=PLENTY_MS, errors="yield"))
        assert [type(answer) for answer in gone] == [mdp.QuorumNotMet] * 3


def test_interrupted_connect_closes_sockets(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Dealers] = []

    def interrupted(self: Dealers, timeout_s: float | None) -> NoReturn:
        made.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Dealers, "poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mdp.Client.connect(fleet.write(alpha="tcp://127.0.0.1:1"))
    assert [dealers._context.closed for dealers in made] == [True]


def test_a_cascade_escalates_where_it_is_unsure(fleet: Fleet, tmp_path: Path) -> None:
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
    message = (
        "key `cascade`: expected members to ask first and how sure they have to be, found none"
    )
    with pytest.raises(mdp.ConfigError, match=message):
        mdp.Client.connect(fleet.write(), timeout_s=PATIENCE_S, cascade=True)
