"""Whom a client asks: the order of replicas, and what it learns from what became of requests."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mdp.requests.health import TOLERATED_STRIKES
from mdp.requests.hedging import ENOUGH
from mdp.requests.ranked import Ranked
from mdp.requests.replicas import HEARTBEAT_S, LOOKED_AT, Roster
from mdp.requests.session import PROBATION, Send

PAIR = {0: ["a", "b"]}
UNTIL_S = 1.0


def roster(members: dict[int, list[str]], **options: Any) -> Roster:
    k_of = {device: k for k, devices in members.items() for device in devices}
    return Roster(members, k_of, chance=random.Random(0).random, **options)


class Play:
    """One call after the other at a roster, with devices that take their time."""

    def __init__(self, members: dict[int, list[str]], **options: Any) -> None:
        self.roster = roster(members, **options)
        self.now_s = 0.0
        self.call = 0

    def first(self, k: int = 0) -> str:
        """Who would be asked first for member `k`."""
        return self.roster.begin(self.now_s, {}).members[k][0]

    def send(self, device: str, k: int = 0) -> int:
        self.call += 1
        send = Send(k=k, device=device, budget_ms=0.0)
        self.roster.sent(self.call, send, self.now_s, self.now_s + UNTIL_S)
        return self.call

    def answer(self, call: int, device: str, took_s: float) -> None:
        self.now_s += took_s
        self.roster.answered(call, device, self.now_s)


def test_equal_replicas_share_the_requests() -> None:
    play, asked = Play(PAIR), Counter[str]()
    for _ in range(100):
        device = play.first()
        asked[device] += 1
        play.answer(play.send(device), device, 0.010)
    assert asked == {"a": 50, "b": 50}


def test_the_faster_one_is_preferred_and_the_slower_one_tried_now_and_then() -> None:
    play, asked = Play(PAIR), Counter[str]()
    for _ in range(400):
        device = play.first()
        asked[device] += 1
        play.answer(play.send(device), device, 0.010 if device == "a" else 0.050)
    assert 2 <= asked["b"] <= 12


def test_one_that_was_slow_for_a_while_is_found_to_be_fast_again() -> None:
    play = Play(PAIR)
    for device, took_s in (("a", 0.010), ("b", 0.100)):
        play.answer(play.send(device), device, took_s)
    asked = Counter[str]()
    for _ in range(300):
        device = play.first()
        asked[device] += 1
        play.answer(play.send(device), device, 0.010 if device == "a" else 0.002)
    assert asked["b"] > 150


def test_what_is_under_way_counts() -> None:
    play = Play(PAIR)
    for device in ("a", "b"):
        play.answer(play.send(device), device, 0.010)
    sent = Counter[str]()
    for _ in range(10):
        device = play.first()
        sent[device] += 1
        play.send(device)
    assert sent == {"a": 5, "b": 5}


def test_the_better_of_two_out_of_many() -> None:
    members = {0: [f"d{n}" for n in range(20)]}
    play, asked = Play(members), Counter[str]()
    for _ in range(2000):
        device = play.first()
        asked[device] += 1
        play.answer(play.send(device), device, 0.100 if device == "d7" else 0.010)
    assert set(asked) == set(members[0])
    # It is drawn as one of two in a tenth of all calls, and is the better one in few of them.
    assert asked["d7"] < 60 < min(count for device, count in asked.items() if device != "d7")


def test_those_that_are_not_there_are_not_drawn() -> None:
    play = Play({0: ["a", "b", "c"]})
    for _ in range(20):
        choice = play.roster.begin(0.0, {"a": "unreachable"})
        assert set(choice.members[0][:2]) == {"b", "c"}
        assert choice.unavailable == {"a": "unreachable"}


def test_a_member_alone_keeps_its_order_and_costs_nothing() -> None:
    members = {0: ["a"], 1: ["b"]}
    assert roster(members).begin(0.0, {}).members is members


def test_the_first_two_and_then_the_others() -> None:
    ranked: Sequence[str] = Ranked(["c", "a"], ["a", "b", "c", "d"])
    assert len(ranked) == 4
    assert list(ranked) == ["c", "a", "b", "d"]
    assert ranked[2:] == ["b", "d"]


def test_when_a_hedge_goes_out() -> None:
    play = Play(PAIR)
    assert play.roster.after_s("a") == float("inf")
    for number in range(ENOUGH):
        play.answer(play.send("a"), "a", 0.001 * (number + 1))
    assert round(play.roster.after_s("a"), 6) == 0.010
    # What is known of the other one is better than nothing.
    assert round(play.roster.after_s("b"), 6) == 0.010
    assert Play(PAIR, hedge_after_s=0.005).roster.after_s("a") == 0.005


def test_there_is_nothing_to_hedge_with_without_replicas_or_a_budget() -> None:
    assert roster(PAIR).hedges
    assert not roster({0: ["a"]}).hedges
    assert not roster(PAIR, hedge_share=0.0).hedges


def test_hedges_earn_no_hedges() -> None:
    play = Play(PAIR)
    while play.roster.allowed():
        pass
    for number in range(100):
        send = Send(k=0, device="a", budget_ms=0.0, hedged=True)
        play.roster.sent(1000 + number, send, 0.0, 1.0)
    assert not play.roster.allowed()


def test_an_answer_in_time_counts_also_if_its_call_was_decided_before() -> None:
    play = Play({0: ["a"], 1: ["b"]})
    for _ in range(TOLERATED_STRIKES):
        play.send("a")
    play.now_s = 1.5
    assert "a" in play.roster.begin(play.now_s, {}).unavailable
    play.roster.told(0, "a", "", play.now_s)
    assert play.roster.begin(play.now_s, {}).probing == {"a": 0}
    call = play.send("a")
    assert play.roster.begin(play.now_s, {}).unavailable == {"a": PROBATION}
    play.answer(call, "a", 0.9)
    choice = play.roster.begin(play.now_s, {})
    assert (choice.unavailable, choice.probing) == ({}, {})


def test_with_nobody_else_those_that_are_out_are_a_chance() -> None:
    play = Play({0: ["a"], 1: ["b"]})
    for device, k in (("a", 0), ("b", 1)):
        for _ in range(TOLERATED_STRIKES):
            play.send(device, k)
    choice = play.roster.begin(2.0, {})
    assert (choice.unavailable, choice.probing) == ({}, {"a": 0, "b": 1})
    choice = play.roster.begin(2.0, {"a": "unreachable"})
    assert (choice.unavailable, choice.probing) == ({"a": "unreachable"}, {"b": 1})
    # One that is back is waited for, as nobody else is there.
    play.roster.told(0, "b", "", 2.0)
    choice = play.roster.begin(2.0, {"a": "unreachable"})
    assert (choice.unavailable, choice.probing) == ({"a": "unreachable"}, {})


def test_nothing_is_kept_of_calls_that_were_answered() -> None:
    play = Play(PAIR)
    for _ in range(1000):
        device = play.first()
        play.answer(play.send(device), device, 0.001)
    assert not play.roster._pending
    assert not play.roster._health


def test_one_that_owes_an_answer_for_long_is_not_given_more() -> None:
    play = Play(PAIR)
    for device, took_s in (("a", 0.005), ("b", 0.040)):
        play.answer(play.send(device), device, took_s)
    assert play.first() == "a"
    play.send("a")
    assert play.first() == "a"
    # Time goes on, and nothing comes of it; an answer to something else shows that it lives.
    play.now_s += 0.030
    assert play.first() == "b"
    play.answer(play.send("a"), "a", 0.0)
    assert play.first() == "a"


def test_one_that_did_not_answer_is_not_given_the_next_one() -> None:
    play = Play(PAIR)
    for device in ("a", "b"):
        play.answer(play.send(device), device, 0.010)
    assert play.first() == "a"
    play.send("a")
    play.now_s += 2 * UNTIL_S
    asked = []
    for _ in range(50):
        asked.append(play.first())
        play.answer(play.send(asked[-1]), asked[-1], 0.010)
    assert set(asked) == {"b"}
    play.roster.told(0, "a", "", play.now_s)
    assert play.first() == "a"


def test_of_many_replicas_a_few_are_asked_how_they_are_at_a_time() -> None:
    names = [f"d{n}" for n in range(20)]
    play = Play({0: names})
    play.answer(play.send("d0"), "d0", 0.010)
    asked = Counter[str]()
    for _ in range(40):
        play.now_s += HEARTBEAT_S
        due = play.roster.due(play.now_s)
        assert len(due) <= LOOKED_AT
        for device in due:
            play.roster.asked(-1, device, play.now_s)
            play.roster.told(-1, device, "", play.now_s)
            asked[device] += 1
    # In turns: nobody is forgotten, and nobody is asked more often than others.
    assert set(asked) == set(names)
    assert max(asked.values()) - min(asked.values()) <= 1


def test_of_many_replicas_those_that_are_there_are_found() -> None:
    names = [f"d{n}" for n in range(40)]
    play = Play({0: names})
    for there in (set(names[::2]), {"d3"}, {"d3", "d7"}, set[str]()):
        gone = {name: "gone" for name in names if name not in there}
        for _ in range(50):
            first = play.roster.begin(play.now_s, gone).members[0][0]
            assert first in there or len(there) < 2


def test_what_a_device_takes_is_known_after_enough_round_trips_and_sooner_where_it_was_late() -> (
    None
):
    known = Roster({0: ["alpha"]}, {"alpha": 0}, chance=random.random, cascade=True)
    for call in range(ENOUGH):
        assert known.slow_s("alpha") == math.inf
        known.sent(call, Send(k=0, device="alpha", budget_ms=50.0), float(call), call + 0.050)
        known.answered(call, "alpha", call + 0.010)
    assert math.isclose(known.slow_s("alpha"), 0.010, rel_tol=1e-6)
    known.sent(99, Send(k=0, device="alpha", budget_ms=50.0), 99.0, 99.050)
    known.answered(99, "alpha", 99.080)
    assert math.isclose(known.slow_s("alpha"), 0.080, rel_tol=1e-6)
