"""The book of requests in flight: what a client learns of devices, and which replica is first."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from mdp.fusion.fuse import Contribution
from mdp.requests.choice import Choice
from mdp.requests.health import TOLERATED_FAILURES
from mdp.requests.hedging import ENOUGH
from mdp.requests.in_flight import OVERDUE, InFlight
from mdp.requests.reason import PROBATION, UNREACHABLE, Code, Reason
from mdp.requests.replicas import CHECKED, HEARTBEAT_S
from mdp.requests.request import Request
from mdp.requests.session import DeviceFailed, Replied, Session

PAIR = {0: ["a", "b"]}
BUDGET_S = 1.0
NOTHING = Contribution(np.zeros(0, np.float32), np.zeros(0, np.float32))


@dataclass
class Asked:
    session: Session


class Play:
    """Calls of one device each, one after the other or at once."""

    def __init__(self, members: dict[int, list[str]], **options: Any) -> None:
        k_of = {device: k for k, devices in members.items() for device in devices}
        self.book: InFlight[Asked] = InFlight(
            members, k_of, chance=random.Random(0).random, **options
        )
        self.k_of, self.now_s = k_of, 0.0

    def choose(self, *gone: str) -> Choice:
        reasons = dict.fromkeys(gone, UNREACHABLE)
        return self.book.choose(self.now_s, reasons, self.now_s + BUDGET_S)

    def first(self, k: int = 0) -> str:
        """The device that would be asked first for member `k`."""
        return next(iter(self.choose().members[k]))

    def send(self, device: str, *, hedged: bool = False) -> int:
        session = Session(Choice({}, {}, {}), decide_s=self.now_s + BUDGET_S)
        number = self.book.begin(Asked(session))
        k = self.k_of[device]
        self.book.on_send(number, Request(k=k, device=device, sent_s=self.now_s, hedged=hedged))
        self.book.on_decision(number, self.now_s)
        return number

    def answer(self, number: int, device: str, took_s: float) -> None:
        self.now_s += took_s
        replied = Replied(
            device=device, contribution=NOTHING, queue_ms=0.0, compute_ms=0.0, now_s=self.now_s
        )
        assert self.book.handle(number, replied) is None

    def fail(self, number: int, device: str, code: Code) -> None:
        failed = DeviceFailed(device=device, reason=Reason(code), now_s=self.now_s)
        assert self.book.handle(number, failed) is None

    def tell(self, device: str) -> None:
        self.book.on_status(0, device, None, self.now_s)


def count_asked(play: Play, calls: int, took_s: dict[str, float]) -> Counter[str]:
    asked = Counter[str]()
    for _ in range(calls):
        device = play.first()
        asked[device] += 1
        play.answer(play.send(device), device, took_s[device])
    return asked


def test_equal_replicas_share_the_requests_and_a_slow_one_gets_few() -> None:
    assert count_asked(Play(PAIR), 100, {"a": 0.010, "b": 0.010}) == {"a": 50, "b": 50}
    assert 2 <= count_asked(Play(PAIR), 400, {"a": 0.010, "b": 0.050})["b"] <= 12


def test_one_that_was_slow_for_a_while_is_found_to_be_fast_again() -> None:
    play = Play(PAIR)
    for device, took_s in (("a", 0.010), ("b", 0.100)):
        play.answer(play.send(device), device, took_s)
    assert count_asked(play, 300, {"a": 0.010, "b": 0.002})["b"] > 150


def test_what_is_in_flight_counts() -> None:
    play, sent = Play(PAIR), Counter[str]()
    for device in ("a", "b"):
        play.answer(play.send(device), device, 0.010)
    for _ in range(10):
        device = play.first()
        sent[device] += 1
        play.send(device)
    assert sent == {"a": 5, "b": 5}


def test_the_better_of_two_out_of_many() -> None:
    names = [f"d{n}" for n in range(20)]
    asked = count_asked(Play({0: names}), 2000, dict.fromkeys(names, 0.010) | {"d7": 0.100})
    assert set(asked) == set(names)
    # It is drawn as one of two in a tenth of all calls, and is the better one in few of them.
    assert asked["d7"] < 60 < min(count for device, count in asked.items() if device != "d7")


@pytest.mark.parametrize("there", [range(0, 40, 2), [3], [3, 7], []])
def test_of_many_replicas_those_that_are_there_are_found(there: list[int]) -> None:
    names = [f"d{n}" for n in range(40)]
    play = Play({0: names})
    gone = [name for n, name in enumerate(names) if n not in there]
    for _ in range(50):
        ranked = list(play.choose(*gone).members[0])
        assert sorted(ranked) == sorted(names)
        assert ranked[0] not in gone or len(there) < 2


def test_when_a_hedge_goes_out_and_that_hedges_earn_none() -> None:
    play = Play(PAIR)
    hedge = play.book.hedge
    assert hedge is not None
    assert hedge.after_s("a") == math.inf
    for number in range(ENOUGH):
        play.answer(play.send("a"), "a", 0.001 * (number + 1))
    # What is known of the other one is better than nothing.
    assert [round(hedge.after_s(device), 6) for device in PAIR[0]] == [0.010, 0.010]
    while hedge.try_spend():
        pass
    for _ in range(100):
        play.send("a", hedged=True)
    assert not hedge.try_spend()
    fixed = Play(PAIR, hedge_after_s=0.005).book.hedge
    assert fixed is not None
    assert fixed.after_s("a") == 0.005
    assert Play({0: ["a"]}).book.hedge is Play(PAIR, hedge_share=0.0).book.hedge is None


def test_an_answer_in_time_counts_also_if_its_call_was_decided_before() -> None:
    play = Play({0: ["a"], 1: ["b"]})
    for _ in range(TOLERATED_FAILURES):
        play.send("a")
    play.now_s = 1.5
    assert "a" in play.choose().unavailable
    play.tell("a")
    assert play.choose().probing == {"a": 0}
    number = play.send("a")
    assert play.choose().unavailable == {"a": PROBATION}
    play.answer(number, "a", 0.9)
    assert (play.choose().unavailable, play.choose().probing) == ({}, {})


def test_with_no_other_device_excluded_ones_are_asked() -> None:
    play = Play({0: ["a"], 1: ["b"]})
    for device in ("a", "b") * TOLERATED_FAILURES:
        play.send(device)
    play.now_s = 2.0
    assert (play.choose().unavailable, play.choose().probing) == ({}, {"a": 0, "b": 1})
    gone = {"a": UNREACHABLE}
    assert (play.choose("a").unavailable, play.choose("a").probing) == (gone, {"b": 1})
    # One that is back is waited for, as no other is there.
    play.tell("b")
    assert (play.choose("a").unavailable, play.choose("a").probing) == (gone, {})


def test_nothing_is_kept_of_what_was_answered_and_little_of_silence() -> None:
    play = Play(PAIR)
    for _ in range(1000):
        device = play.first()
        play.answer(play.send(device), device, 0.001)
    assert not play.book._entries
    assert not play.book._breakers
    numbers = [play.send("a") for _ in range(OVERDUE + 1)]
    play.now_s += 2 * BUDGET_S
    play.choose()
    # Nothing is known of the oldest any more, so an answer to it is no sign of life.
    for number, silent in ((numbers[0], True), (numbers[1], False)):
        play.answer(number, "a", 0.0)
        assert bool(play.book._breakers["a"].silences) == silent


@pytest.mark.parametrize("took_s", [0.030, 2 * BUDGET_S])
def test_one_that_owes_an_answer_for_long_is_not_given_more(took_s: float) -> None:
    play = Play(PAIR)
    for device, usual_s in (("a", 0.005), ("b", 0.040)):
        play.answer(play.send(device), device, usual_s)
    assert play.first() == "a"
    play.send("a")
    assert play.first() == "a"
    play.now_s += took_s
    assert play.first() == "b"
    play.tell("a")
    assert play.first() == "a"


def test_a_refusal_counts_as_all_the_time_that_there_was() -> None:
    play = Play(PAIR)
    play.answer(play.send("b"), "b", 0.500)
    play.fail(play.send("a"), "a", "overloaded")
    assert play.first() == "b"
    assert not play.choose().unavailable


def test_of_many_replicas_a_few_are_asked_for_their_status_at_a_time() -> None:
    names = [f"d{n}" for n in range(20)]
    play, asked = Play({0: names}), Counter[str]()
    play.answer(play.send("d0"), "d0", 0.010)
    for _ in range(40):
        play.now_s += HEARTBEAT_S
        due = play.book.due(play.now_s)
        assert len(due) <= CHECKED
        for device in due:
            number = play.book.number()
            play.book.on_status_request(number, device, play.now_s)
            play.book.on_status(number, device, None, play.now_s)
            asked[device] += 1
    assert set(asked) == set(names)
    assert max(asked.values()) - min(asked.values()) <= 1


def test_a_cascade_gives_the_others_what_they_need() -> None:
    play = Play({0: ["a"], 1: ["b"]}, first=frozenset([0]))
    for device in ("a", "b") * ENOUGH:
        assert play.book.others_by_s(play.choose(), 0.0, 0.1) <= 0.05
        play.answer(play.send(device), device, 0.010)
    assert play.book.others_by_s(play.choose(), 0.0, 0.1) == pytest.approx(0.09)
    # Where it was late lately, its longest round trip is what it needs.
    play.answer(play.send("b"), "b", BUDGET_S + 0.5)
    assert play.book.others_by_s(play.choose(), 0.0, 3.0) == pytest.approx(1.5)
