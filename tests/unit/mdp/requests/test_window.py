"""The window of requests out at each device: who waits, who goes, and whole calls that are late."""

import math
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from mdp.fusion.fuse import Contribution
from mdp.requests.health import TOLERATED_FAILURES
from mdp.requests.in_flight import InFlight
from mdp.requests.reason import NO_TURN, UNREACHABLE, Code, Reason
from mdp.requests.request import Request
from mdp.requests.session import Action, DeviceFailed, Finish, Replied, Session, TimePassed
from mdp.requests.window import FIRST_PAUSE_S, LONGEST_PAUSE_S, MOST_OUT, SendWindow, most_out

NOTHING = Contribution(np.zeros(0, np.float32), np.zeros(0, np.float32))
PAIR = {0: ["a"], 1: ["b"]}
FULL = Reason("overloaded", "200 requests wait already")


@dataclass
class Call:
    session: Session
    number: int = 0
    ends: list[tuple[float, Finish]] = field(default_factory=list)

    @property
    def missing(self) -> dict[str, Code]:
        ((_, finish),) = self.ends
        return {device: reason.code for device, reason in finish.missing.items()}


class Driver:
    """A client without sockets: calls, and devices whose requests a test ends."""

    def __init__(
        self, members: dict[int, list[str]] = PAIR, *, batch: int = 1, first: Sequence[int] = ()
    ) -> None:
        self.k_of = {device: k for k, devices in members.items() for device in devices}
        self.book: InFlight[Call] = InFlight(
            members, self.k_of, chance=random.Random(0).random, first=frozenset(first),
            batches=dict.fromkeys(members, batch),
        )  # fmt: skip
        self.now_s = 10.0
        self.calls: list[Call] = []
        #: Device -> what is out there, in the order of sending.
        self.out: dict[str, list[tuple[int, Request]]] = defaultdict(list)
        #: Device -> every number that was ever sent there.
        self.sent: dict[str, list[int]] = defaultdict(list)
        self.gone = dict[str, Reason]()

    def submit(self, deadline_s: float = 1.0) -> Call:
        decide_s = self.now_s + deadline_s
        choice = self.book.choose(self.now_s, dict(self.gone), decide_s)
        call = Call(Session(choice, decide_s=decide_s, hedge=self.book.hedge))
        self.calls.append(call)
        call.number = self.book.begin(call)
        self.act(call.number, call.session.start(self.now_s))
        self.give_turns()
        return call

    def act(self, number: int, actions: list[Action]) -> None:
        for action in actions:
            call = self.book.calls.get(number)
            if call is None:
                return
            if isinstance(action, Finish):
                call.ends.append((self.now_s, action))
                self.book.on_decision(number, self.now_s)
            elif not self.book.holds(number, action):
                self.send(number, action)

    def send(self, number: int, request: Request) -> None:
        device = request.device
        if device in self.gone:
            failed = DeviceFailed(device=device, reason=UNREACHABLE, now_s=self.now_s)
            self.act(number, self.book.calls[number].session.handle(failed))
            return
        assert request.sent_s == self.now_s, "the time of sending"
        left_s = self.book.calls[number].session.decide_s - self.now_s
        assert request.budget_ms == pytest.approx(left_s * 1e3), "the budget of that moment"
        assert left_s > 0, "with time left"
        self.out[device].append((number, request))
        self.sent[device].append(number)
        self.book.on_send(number, request)

    def give_turns(self) -> None:
        while turn := self.book.next_turn(self.now_s):
            session = self.book.calls[turn.number].session
            if not session.waits_for(turn.request.device):
                continue
            if turn.reason is None:
                self.send(turn.number, turn.request)
            else:
                failed = DeviceFailed(
                    device=turn.request.device, reason=turn.reason, now_s=self.now_s
                )
                self.act(turn.number, session.handle(failed))

    def answer(self, device: str, place: int = 0, compute_s: float = 0.01) -> None:
        number, _ = self.out[device].pop(place)
        replied = Replied(
            device=device, contribution=NOTHING, queue_ms=0.0, compute_ms=compute_s * 1e3,
            now_s=self.now_s,
        )  # fmt: skip
        self.act(number, self.book.handle(number, replied) or [])
        self.give_turns()

    def refuse(self, device: str, place: int = 0, reason: Reason = FULL) -> None:
        number, _ = self.out[device].pop(place)
        failed = DeviceFailed(device=device, reason=reason, now_s=self.now_s)
        self.act(number, self.book.handle(number, failed) or [])
        self.give_turns()

    def pass_s(self, seconds: float) -> None:
        """The clock goes on; the calls and the book are told whenever they want to know."""
        until_s = self.now_s + seconds
        while (wake_s := self.wake_s()) <= until_s:
            self.now_s = max(self.now_s, wake_s)
            for number, call in list(self.book.calls.items()):
                if call.session.wake_s <= self.now_s:
                    self.act(number, call.session.handle(TimePassed(now_s=self.now_s)))
            self.give_turns()
            # What has run out of time, the devices drop.
            for device, requests in self.out.items():
                self.out[device] = [
                    (n, r) for n, r in requests if r.sent_s + r.budget_ms / 1e3 > self.now_s
                ]
        self.now_s = until_s

    def wake_s(self) -> float:
        wakes_s = [call.session.wake_s for call in self.book.calls.values()]
        return min([self.book.wake_s(), *wakes_s])

    def lose(self, device: str) -> None:
        self.gone[device] = UNREACHABLE
        self.out[device].clear()
        for number, actions in self.book.on_loss(device, self.now_s):
            self.act(number, actions)
        self.give_turns()

    def connect(self, device: str) -> None:
        del self.gone[device]
        self.book.on_connect(device, self.now_s)

    def teach(self, each_s: float, *devices: str, rounds: int = 24) -> None:
        """Let the devices answer some calls, one after the other, each in so long."""
        for _ in range(rounds):
            self.submit(deadline_s=60.0)
            self.now_s += each_s
            for device in devices or self.k_of:
                self.answer(device, compute_s=each_s)


def test_at_most_so_many_are_out_and_the_others_wait_in_order() -> None:
    driver = Driver()
    calls = [driver.submit() for _ in range(20)]
    assert driver.sent["a"] == driver.sent["b"] == [call.number for call in calls[:MOST_OUT]]
    assert driver.book.held == 2 * (20 - MOST_OUT)
    driver.now_s += 0.25
    driver.answer("a", place=3)
    # The next one goes out, with what it has left by now.
    assert driver.sent["a"][MOST_OUT:] == [calls[MOST_OUT].number]
    assert driver.out["a"][-1][1].budget_ms == pytest.approx(750.0)
    assert driver.out["a"][-1][1].held_s == pytest.approx(0.25)
    while driver.out["a"] or driver.out["b"]:
        driver.answer("a" if driver.out["a"] else "b")
    assert driver.sent["a"] == driver.sent["b"] == [call.number for call in calls]
    assert [call.missing for call in calls] == [{}] * 20
    assert driver.book.held == 0


@pytest.mark.parametrize(("batch", "most"), [(1, 8), (4, 8), (8, 16), (32, 64)])
def test_the_window_is_twice_the_batch(batch: int, most: int) -> None:
    driver = Driver(batch=batch)
    for _ in range(100):
        driver.submit()
    assert len(driver.out["a"]) == most == most_out(batch)


def test_calls_that_end_while_they_wait_are_asked_of_nobody() -> None:
    driver = Driver()
    patient = [driver.submit(deadline_s=5.0) for _ in range(MOST_OUT)]
    hasty = driver.submit(deadline_s=0.1)
    last = driver.submit(deadline_s=5.0)
    driver.pass_s(0.2)
    assert hasty.missing == {"a": "not asked", "b": "not asked"}
    assert hasty.ends[0][1].missing["a"] is NO_TURN
    driver.answer("a")
    assert driver.sent["a"] == [call.number for call in (*patient, last)]
    # A caller that has gone.
    gone = driver.submit(deadline_s=5.0)
    driver.book.on_decision(gone.number, driver.now_s)
    for _ in range(MOST_OUT):
        driver.answer("a")
    assert gone.number not in driver.sent["a"]
    assert driver.book.held == 1, "the last one, at the other device"


def test_a_turn_that_comes_after_the_deadline_is_none() -> None:
    driver = Driver({0: ["a"]})
    for _ in range(MOST_OUT):
        driver.submit(deadline_s=5.0)
    hasty = driver.submit(deadline_s=0.1)
    last = driver.submit(deadline_s=5.0)
    # A reply is taken in before the call is told the time.
    driver.now_s += 0.1
    driver.answer("a")
    assert driver.sent["a"][-1] == last.number
    assert not hasty.ends
    driver.pass_s(0.0)
    assert hasty.missing == {"a": "not asked"}


def test_silence_makes_room_by_the_deadline_of_what_is_out() -> None:
    driver = Driver({0: ["a"]})
    for _ in range(MOST_OUT):
        call = driver.submit(deadline_s=0.5)
        # As a cascade whose first stage was sure: nobody waits, and the device still computes.
        driver.book.on_decision(call.number, driver.now_s)
    last = driver.submit(deadline_s=2.0)
    assert last.number not in driver.sent["a"]
    driver.book._breakers.clear()
    driver.pass_s(0.6)
    # Three silences exclude the device, before the last one has its turn.
    assert last.missing == {"a": "silent"}


def test_a_lost_connection_ends_what_waits_for_it_at_once() -> None:
    driver = Driver()
    calls = [driver.submit() for _ in range(12)]
    for _ in range(12):
        driver.answer("b")
    driver.lose("a")
    assert [call.missing for call in calls] == [{"a": "disconnected"}] * 12
    assert driver.book.held == 0
    driver.connect("a")
    driver.submit()
    assert len(driver.out["a"]) == 1


def test_what_waits_for_an_excluded_device_fails() -> None:
    driver = Driver()
    calls = [driver.submit(deadline_s=5.0) for _ in range(12)]
    for _ in range(12):
        driver.answer("b")
    for _ in range(TOLERATED_FAILURES):
        driver.refuse("a", reason=Reason("failed", "no"))
    assert [call.missing for call in calls[:3]] == [{"a": "failed"}] * 3
    assert not any(call.ends for call in calls[3:MOST_OUT]), "they are out"
    # Two had gone out as others failed; the rest fails without being asked.
    waiting = [call for call in calls[MOST_OUT:] if call.number not in driver.sent["a"]]
    assert len(waiting) == 2
    assert [call.missing for call in waiting] == [{"a": "failing"}] * 2


# Refusals for want of room.


def test_a_refused_request_goes_back_to_the_head_and_the_window_shrinks_and_grows() -> None:
    driver = Driver({0: ["a"]})
    calls = [driver.submit(deadline_s=60.0) for _ in range(12)]
    window = driver.book._windows["a"]
    for _ in range(4):
        driver.refuse("a", place=4)
    # All four had found the same queue.
    assert (window.limit, window.out) == (MOST_OUT / 2, 4)
    assert not any(call.ends for call in calls)
    driver.pass_s(FIRST_PAUSE_S)
    assert len(driver.out["a"]) == 4, "no more than fit"
    driver.answer("a")
    assert driver.sent["a"][-1] == calls[4].number, "the first of those refused"
    for _ in range(200):
        if not driver.out["a"]:
            break
        driver.answer("a")
    assert [call.missing for call in calls] == [{}] * 12
    assert window.limit > 6, "one more for a window of replies"


def test_with_a_replica_there_a_refusal_is_a_failure() -> None:
    driver = Driver({0: ["a", "b"]})
    call = driver.submit()
    (first,) = [device for device, out in driver.out.items() if out]
    driver.refuse(first)
    (other,) = [device for device, out in driver.out.items() if out]
    assert other != first
    driver.answer(other)
    assert call.missing == {}


def test_one_that_refuses_for_ever_costs_three_calls_their_deadline() -> None:
    driver = Driver()
    for _ in range(TOLERATED_FAILURES):
        call = driver.submit(deadline_s=1.0)
        driver.answer("b")
        tries = 0
        while not call.ends:
            assert driver.out["a"], "asked again"
            driver.refuse("a")
            tries += 1
            driver.pass_s(LONGEST_PAUSE_S)
        assert call.missing == {"a": "overloaded"}
        assert call.ends[0][0] == call.session.decide_s
        assert tries < 20, "ever more seldom"
    assert driver.book._windows["a"].limit == 1
    after = driver.submit()
    driver.answer("b")
    assert after.missing == {"a": "failing"}


def test_a_quota_is_no_full_queue() -> None:
    driver = Driver()
    call = driver.submit()
    driver.answer("b")
    driver.refuse("a", reason=Reason("quota", "this client's 5% of the computing time are used up"))
    assert call.missing == {"a": "quota"}
    assert driver.book._windows["a"].limit == MOST_OUT


def test_a_window_of_one_still_lets_everything_through() -> None:
    driver = Driver({0: ["a"]})
    calls = [driver.submit(deadline_s=60.0) for _ in range(10)]
    window = driver.book._windows["a"]
    window.limit = 1.0
    while driver.out["a"]:
        driver.answer("a")
        assert len(driver.out["a"]) <= MOST_OUT - 1
        window.limit = 1.0
    assert [call.missing for call in calls] == [{}] * 10
    assert driver.sent["a"] == [call.number for call in calls]


# Whole calls that would be late.


def test_a_call_that_would_be_late_at_one_device_is_refused_as_a_whole() -> None:
    driver = Driver()
    driver.teach(0.01)
    calls = [driver.submit(deadline_s=0.2) for _ in range(40)]
    refused = [call for call in calls if call.ends]
    # Ten milliseconds each: some twenty fit, and the others are refused at once.
    assert 18 <= 40 - len(refused) <= 20
    assert {frozenset(call.missing.items()) for call in refused} == {
        frozenset({("a", "too_late"), ("b", "too_late")})
    }
    ((_, finish),) = refused[0].ends
    assert not finish.timed_out
    assert not finish.arrived
    # The other device alone would have had the time.
    other = Driver()
    other.teach(0.001, "b", "a")
    for _ in range(30):
        other.submit(deadline_s=60.0)
        other.now_s += 0.02
        other.answer("a", compute_s=0.02)
        other.answer("b", compute_s=0.001)
    late = [other.submit(deadline_s=0.2) for _ in range(40)][-1]
    assert late.missing == {"a": "too_late", "b": "not asked"}
    ((_, finish),) = late.ends
    assert str(finish.missing["b"]) == "not asked: a would be late"


def test_a_deadline_shorter_than_any_prediction_is_for_the_device_to_refuse() -> None:
    driver = Driver()
    driver.teach(0.1)
    for _ in range(3):
        driver.submit(deadline_s=60.0)
    # No call before it makes it late; it would be so by itself.
    call = driver.submit(deadline_s=0.05)
    assert not call.ends
    assert call.number in driver.sent["a"]
    driver.refuse("a", place=-1, reason=Reason("too_late", "0.05 s do not suffice"))
    driver.refuse("b", place=-1, reason=Reason("too_late", "0.05 s do not suffice"))
    assert call.missing == {"a": "too_late", "b": "too_late"}
    # One that has time for itself alone.
    assert driver.submit(deadline_s=0.15).missing == {"a": "too_late", "b": "too_late"}


def test_nothing_is_refused_before_devices_are_known_or_while_nothing_is_out() -> None:
    driver = Driver()
    assert not any(driver.submit(deadline_s=0.01).ends for _ in range(100))
    known = Driver()
    known.teach(0.1)
    assert not known.submit(deadline_s=0.01).ends


def test_with_a_replica_that_has_time_nothing_is_refused() -> None:
    driver = Driver({0: ["a", "b"]})
    for _ in range(48):
        driver.submit(deadline_s=60.0)
        driver.now_s += 0.01
        for device in ("a", "b"):
            while driver.out[device]:
                driver.answer(device)
    calls = [driver.submit(deadline_s=0.2) for _ in range(60)]
    taken = [call for call in calls if not call.ends]
    assert 30 <= len(taken) <= 40, "twice as many as one has time for"
    assert {frozenset(call.missing) for call in calls if call.ends} == {frozenset(("a", "b"))}


def test_a_device_that_answers_in_bursts_is_known_by_its_mean() -> None:
    driver = Driver({0: ["a"]})
    for _ in range(12):
        for _ in range(16):
            driver.submit(deadline_s=60.0)
        while driver.out["a"]:
            driver.now_s += 0.08
            for _ in range(min(8, len(driver.out["a"]))):
                driver.answer("a", compute_s=0.08)
    # Eight in 80 ms.
    assert 0.005 < driver.book._windows["a"].mean_s < 0.03
    assert not any(driver.submit(deadline_s=3.0).ends for _ in range(50))


def test_clocks_may_jump() -> None:
    driver = Driver({0: ["a"]})
    driver.teach(0.01)
    window = driver.book._windows["a"]
    for _ in range(MOST_OUT + 4):
        driver.submit(deadline_s=1e6)
    before_s = window.mean_s
    # The machine slept for a day.
    driver.now_s += 86_400.0
    for _ in range(4):
        driver.answer("a")
    assert window.mean_s < 3 * before_s
    driver.now_s -= 3_600.0
    for _ in range(4):
        driver.answer("a")
    assert 0 <= window.mean_s < 3 * before_s


def test_a_mean_is_of_replies_while_others_wait_or_of_the_agent_s_own_time() -> None:
    window = SendWindow()

    def reply(at_s: float, agent_s: float, ahead: int) -> None:
        request = Request(k=0, device="a", sent_s=0.0, ahead=ahead)
        window.on_answer(request, 0.75 * agent_s, 0.25 * agent_s, at_s)

    for number in range(20):
        # A link of 100 ms is no load: the agent had each for 5 ms.
        reply(0.1 * number, 0.005, 0)
    assert window.mean_s == pytest.approx(0.005)
    for number in range(60):
        # Behind three of its own, in 40 ms.
        reply(2.0 + 0.1 * number, 0.040, 3)
    assert window.mean_s == pytest.approx(0.010, rel=0.05)
    window.hold(1, Request(k=0, device="a", sent_s=0.0))
    for number in range(100):
        reply(10.0 + 0.02 * number, 0.001, 7)
    assert window.mean_s == pytest.approx(0.020, rel=0.05)


def test_a_device_with_rungs_is_predicted_by_its_quickest_and_sees_what_waits() -> None:
    """It takes as much of the time as there is, which says nothing of what it could do."""
    assert most_out(1, has_rungs=True) == most_out(8, has_rungs=True) == 64
    window = SendWindow(64, [0.25, 0.5, 1.0])
    for rung, took_s in ((0, 0.08), (1, 0.04), (2, 0.02)) * 4:
        request = Request(k=0, device="a", sent_s=10.0)
        window.admits(request)
        window.on_send(request)
        window.on_answer(request, 0.5, took_s, 10.0 + 0.5 + took_s, rung)
        window.out -= 1
    assert window.mean_s == pytest.approx(0.02)
    for _ in range(3):
        window.on_send(Request(k=0, device="a", sent_s=20.0))
    assert not window.is_late(0.081)
    assert window.is_late(0.079)


def test_batches_that_are_seen_widen_the_window() -> None:
    driver = Driver({0: ["a"]})
    for _ in range(200):
        driver.submit(deadline_s=1e6)
    window = driver.book._windows["a"]
    most = []
    for number in range(6):
        driver.now_s += 0.1
        # The agent takes all that is there, up to 24, and answers them together.
        for _ in range(min(24, len(driver.out["a"]))):
            driver.answer("a", compute_s=0.05 + number / 1e4)
        most.append(window.most)
    assert most == [16, 32, 48, 48, 48, 48]
    # As long, and one after the other.
    one = SendWindow()
    for number in range(100):
        request = Request(k=0, device="a", sent_s=0.0, ahead=7)
        one.on_answer(request, 0.0, 0.05, 0.05 * number)
    assert one.most == MOST_OUT


# Any history.

#: `make invariants` plays the nightly number.
HISTORIES = 25_000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 300
FLEETS = ({0: ["a"], 1: ["b"]}, {0: ["a"]}, {0: ["a", "c"], 1: ["b"]})
STEPS_S = (0.0, 0.001, 0.005, 0.02, 0.1, 0.7)
CODES: tuple[Code, ...] = ("overloaded", "overloaded", "too_late", "failed", "quota")


@settings(max_examples=HISTORIES, deadline=None)
@given(
    fleet=st.sampled_from(FLEETS),
    batch=st.sampled_from((1, 6)),
    script=st.lists(st.tuples(st.integers(0, 15), st.integers(0, 255)), max_size=120),
)
def test_whatever_happens_order_is_kept_nothing_is_lost_and_no_more_is_out(
    fleet: dict[int, list[str]], batch: int, script: list[tuple[int, int]]
) -> None:
    driver = Driver(fleet, batch=batch)
    most, devices = most_out(batch), list(driver.k_of)
    bounced = set[tuple[str, int]]()
    for what, number in script:
        device = devices[number % len(devices)]
        place = number >> 2
        if what < 5:
            for _ in range(1 + number % 4):
                driver.submit(deadline_s=(0.05, 0.3, 3.0)[number % 3])
        elif what < 10 and driver.out[device]:
            driver.now_s += 0.001
            driver.answer(device, place % len(driver.out[device]))
        elif what < 12 and driver.out[device]:
            place %= len(driver.out[device])
            bounced.add((device, driver.out[device][place][0]))
            driver.refuse(device, place, Reason(CODES[number % len(CODES)], "no"))
        elif what < 15:
            driver.pass_s(STEPS_S[number % len(STEPS_S)])
        elif what == 15:
            driver.connect(device) if device in driver.gone else driver.lose(device)
        for each in devices:
            window = driver.book._windows.get(each)
            assert len(driver.out[each]) <= max(most, window.most if window else 0)
            assert window is None or window.out == sum(
                each in entry.requests for entry in driver.book._entries.values()
            )
        waiting = sum(len(entry.held) for entry in driver.book._entries.values())
        assert driver.book.held == waiting
    if driver.book.held:
        event("some wait at the end")
    driver.pass_s(4.0)
    for call in driver.calls:
        ((ended_s, _),) = call.ends
        assert ended_s <= call.session.decide_s
    assert driver.book.held == 0
    assert driver.book.wake_s() == math.inf
    assert all(not window.line and window.out == 0 for window in driver.book._windows.values())
    if len(devices) == len(fleet):
        # Without replicas, each device got its requests in the order of the calls.
        for each, numbers in driver.sent.items():
            first_time = [n for n in numbers if (each, n) not in bounced]
            assert first_time == sorted(first_time)
