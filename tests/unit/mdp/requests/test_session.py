"""One request's life in simulated time: events in, actions out."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from mdp.fusion.fuse import Contribution
from mdp.requests.choice import Choice
from mdp.requests.hedging import Hedging
from mdp.requests.reason import LATE, NO_TIME, NOT_NEEDED, PROBATION, Reason
from mdp.requests.request import Request
from mdp.requests.session import (
    Action,
    DeviceFailed,
    Event,
    Finish,
    Replied,
    Session,
    Stage,
    Stages,
    TimePassed,
)

THREE = {0: ["alpha"], 1: ["beta"], 2: ["gamma"]}
REPLICAS = {0: ["alpha", "alpha/attic"], 1: ["beta"]}
SOME = Contribution(np.zeros(2, np.float32), np.ones(2, np.float32))
DEADLINE_S, RESERVE_S = 0.100, 0.002
DECIDE_S = DEADLINE_S - RESERVE_S


class Asking(Session):
    """A session that is told at its beginning which devices it may ask."""

    def __init__(
        self,
        members: Mapping[int, Sequence[str]],
        *,
        deadline_s: float,
        reserve_s: float = 0.0,
        **options: Any,
    ) -> None:
        self._options = options | {"decide_s": deadline_s - reserve_s}
        self._members = members

    def begin(
        self,
        *,
        now_s: float,
        unavailable: Mapping[str, str],
        probing: Mapping[str, int] | None = None,
    ) -> list[Action]:
        reasons = {device: Reason("failed", text) for device, text in unavailable.items()}
        super().__init__(Choice(self._members, reasons, probing or {}), **self._options)
        return self.start(now_s)


class HedgeAfter(Hedging):
    """Every device is given `seconds`; as many hedges are allowed as there are `tokens`."""

    def __init__(self, seconds: float, tokens: float = math.inf) -> None:
        super().__init__({}, {}, seconds, share=1.0)
        self.tokens = tokens

    def try_spend(self) -> bool:
        self.tokens -= 1
        return self.tokens >= 0


def reply(device: str, now_s: float, contribution: Contribution = SOME) -> Replied:
    return Replied(
        device=device, contribution=contribution, queue_ms=1.0, compute_ms=5.0, now_s=now_s
    )


def failure(device: str, now_s: float, reason: str = "broken") -> DeviceFailed:
    return DeviceFailed(device=device, reason=Reason("failed", reason), now_s=now_s)


def tick(now_s: float) -> TimePassed:
    return TimePassed(now_s=now_s)


def in_short(actions: Sequence[Action]) -> list[object]:
    """Actions in short: the device of a Request, and (used, missing, timed_out) of a Finish."""
    return [
        action.device
        if isinstance(action, Request)
        else (
            {k: arrival.device for k, arrival in action.arrived.items()},
            {d: r.text if r.code == "failed" else r for d, r in action.missing.items()},
            action.timed_out,
        )
        for action in actions
    ]


def play(
    members: Mapping[int, Sequence[str]],
    events: Sequence[Event],
    unavailable: Mapping[str, str] | None = None,
    start_s: float = 0.0,
) -> list[list[object]]:
    """Actions of a session at its start and at every event."""
    session = Asking(members, deadline_s=DEADLINE_S, reserve_s=RESERVE_S)
    told = [in_short(session.begin(now_s=start_s, unavailable=unavailable or {}))]
    return told + [in_short(session.handle(event)) for event in events]


ALL: tuple[dict[int, str], dict[str, object], bool] = (
    {0: "alpha", 1: "beta", 2: "gamma"},
    {},
    False,
)


@pytest.mark.parametrize(
    ("events", "told"),
    [
        pytest.param(
            [reply("alpha", 0.01), failure("beta", 0.02, "b"), tick(0.5)],
            [[], [], [({0: "alpha"}, {"beta": "b", "gamma": LATE}, True)]],
            id="one answers, one fails, one is late, and the clock jumps",
        ),
        pytest.param(
            [reply("alpha", 0.01), reply("beta", 0.15)],
            [[], [({0: "alpha", 1: "beta"}, {"gamma": LATE}, True)]],
            id="a reply that was in hand before the decision counts, and brings it about",
        ),
        pytest.param(
            [reply("alpha", 0.2), reply("beta", 0.2), reply("gamma", 0.2)],
            [[({0: "alpha"}, {"beta": LATE, "gamma": LATE}, True)], [], []],
            id="the first event after the time to decide decides",
        ),
    ],
)
def test_histories(events: list[Event], told: list[list[object]]) -> None:
    assert play(THREE, events) == [["alpha", "beta", "gamma"], *told]


@pytest.mark.parametrize(
    ("unavailable", "events", "told"),
    [
        pytest.param(
            {},
            [failure("alpha", 0.01, "a"), failure("alpha/attic", 0.02, "b"), reply("beta", 0.03)],
            [
                ["alpha", "beta"],
                ["alpha/attic"],
                [],
                [({1: "beta"}, {"alpha": "a", "alpha/attic": "b"}, False)],
            ],
            id="both fail",
        ),
        pytest.param(
            {},
            [failure("alpha", 0.01, "a"), reply("alpha", 0.02), reply("alpha/attic", 0.03)],
            [["alpha", "beta"], ["alpha/attic"], [], []],
            id="the first comes back too late for its member",
        ),
        pytest.param(
            {},
            [reply("beta", 0.02), failure("alpha", DECIDE_S + 0.001, "a")],
            [["alpha", "beta"], [], [({1: "beta"}, {"alpha": "a", "alpha/attic": NO_TIME}, True)]],
            id="nobody is asked once the time to decide has come",
        ),
    ],
)
def test_replicas(
    unavailable: dict[str, str], events: list[Event], told: list[list[object]]
) -> None:
    assert play(REPLICAS, events, unavailable) == told


def test_a_network_that_took_less_than_nothing_took_nothing() -> None:
    session = Asking({0: ["alpha"]}, deadline_s=1.0)
    session.begin(now_s=0.0, unavailable={})
    (finish,) = session.handle(reply("alpha", 0.001))
    assert isinstance(finish, Finish)
    assert finish.arrived[0].network_ms == 0.0


def hedging(
    members: Mapping[int, Sequence[str]], events: Sequence[Event], unavailable: Sequence[str] = ()
) -> list[list[object]]:
    """Actions of a session that asks the next replica beside one after 20 ms."""
    session = Asking(members, deadline_s=DEADLINE_S, reserve_s=RESERVE_S, hedge=HedgeAfter(0.020))
    told = [in_short(session.begin(now_s=0.0, unavailable=dict.fromkeys(unavailable, "gone")))]
    return told + [in_short(session.handle(event)) for event in events]


TRIPLE = {0: ["a", "b", "c"]}


@pytest.mark.parametrize(
    ("events", "told"),
    [
        pytest.param(
            [tick(0.019), tick(0.020), tick(0.050), reply("b", 0.06), reply("a", 0.07)],
            [[], ["b"], [], [({0: "b"}, {}, False)], []],
            id="the second answers first, and no third is asked",
        ),
        pytest.param(
            [tick(0.020), failure("a", 0.030), tick(0.045), reply("b", 0.05)],
            [["b"], [], [], [({0: "b"}, {}, False)]],
            id="one of two fails: the other is waited for",
        ),
        pytest.param(
            [tick(0.020), failure("b", 0.030), failure("a", 0.040), tick(0.060), tick(DECIDE_S)],
            [["b"], [], ["c"], [], [({}, {"a": "broken", "b": "broken", "c": LATE}, True)]],
            id="both fail: the third is asked",
        ),
        pytest.param(
            [failure("a", 0.010), tick(0.020), tick(0.030), reply("c", 0.04)],
            [["b"], [], ["c"], [({0: "c"}, {}, False)]],
            id="who steps in gets as much time",
        ),
    ],
)
def test_hedging(events: list[Event], told: list[list[object]]) -> None:
    assert hedging(TRIPLE, events) == [["a"], *told]


def test_without_a_token_there_is_no_hedge_and_the_replica_may_still_step_in() -> None:
    session = Asking(TRIPLE, deadline_s=DEADLINE_S, hedge=HedgeAfter(0.020, 0))
    told = [in_short(session.begin(now_s=0.0, unavailable={}))]
    events: list[Event] = [tick(0.020), tick(0.030), failure("a", 0.040), reply("b", 0.05)]
    told += [in_short(session.handle(event)) for event in events]
    assert told == [["a"], [], [], ["b"], [({0: "b"}, {}, False)]]
    spent = Asking(TRIPLE, deadline_s=DEADLINE_S, hedge=HedgeAfter(0.020, 1))
    spent.begin(now_s=0.0, unavailable={})
    (send,) = spent.handle(tick(0.020))
    assert isinstance(send, Request)
    assert send.hedged


def proving(
    members: Mapping[int, Sequence[str]],
    probing: Mapping[str, int],
    events: Sequence[Event],
    unavailable: Mapping[str, str] | None = None,
) -> list[list[object]]:
    """Actions of a session that asks `probing` devices beside the others."""
    session = Asking(members, deadline_s=DEADLINE_S, reserve_s=RESERVE_S)
    start = session.begin(now_s=0.0, unavailable=unavailable or {}, probing=probing)
    return [in_short(start)] + [in_short(session.handle(event)) for event in events]


@pytest.mark.parametrize(
    ("events", "told"),
    [
        pytest.param(
            [failure("alpha", 0.01, "a"), failure("beta", 0.02, "b"), reply("gamma", 0.03)],
            [[], [], [({2: "gamma"}, {"alpha": "a", "beta": "b"}, False)]],
            id="it is waited for where nobody else answers",
        ),
        pytest.param(
            [failure("gamma", 0.01, "g"), reply("alpha", 0.02), tick(DECIDE_S)],
            [[], [], [({0: "alpha"}, {"beta": LATE, "gamma": "g"}, True)]],
            id="its failure is its reason",
        ),
    ],
)
def test_a_device_on_probation(events: list[Event], told: list[list[object]]) -> None:
    assert proving(THREE, {"gamma": 2}, events) == [["gamma", "alpha", "beta"], *told]


def cascade(first: Sequence[int], sure: bool, others_by_s: float = 0.05) -> Stages:
    """Asking `first`, which are sure or not, before the others."""
    return Stages(frozenset(first), others_by_s, lambda arrived: sure)


FIRST_AND_REST: list[tuple[str, list[Event], dict[str, str], list[list[object]], Stage]] = [
    (
        "sure",
        [reply("alpha", 0.01)],
        {},
        [["alpha"], [({0: "alpha"}, {"beta": NOT_NEEDED, "gamma": NOT_NEEDED}, False)]],
        "first",
    ),
    (
        "unsure",
        [reply("alpha", 0.01), reply("beta", 0.02), reply("gamma", 0.03)],
        {},
        [["alpha"], ["beta", "gamma"], [], [ALL]],
        "escalated",
    ),
    (
        "the first fails",
        [failure("alpha", 0.01, "x"), reply("beta", 0.02), reply("gamma", 0.03)],
        {},
        [["alpha"], ["beta", "gamma"], [], [({1: "beta", 2: "gamma"}, {"alpha": "x"}, False)]],
        "escalated",
    ),
    (
        "the first is late",
        [tick(0.04), tick(0.05), reply("beta", 0.06), reply("gamma", 0.07), tick(0.1)],
        {},
        [
            ["alpha"], [], ["beta", "gamma"], [], [],
            [({1: "beta", 2: "gamma"}, {"alpha": LATE}, True)],
        ],
        "escalated",
    ),
    (
        "the first is gone",
        [reply("gamma", 0.02), reply("beta", 0.03)],
        {"alpha": "gone"},
        [["beta", "gamma"], [], [({1: "beta", 2: "gamma"}, {"alpha": "gone"}, False)]],
        "escalated",
    ),
    (
        "sure while another is gone",
        [reply("alpha", 0.01)],
        {"gamma": "gone"},
        [["alpha"], [({0: "alpha"}, {"beta": NOT_NEEDED, "gamma": "gone"}, False)]],
        "first",
    ),
    (
        "unsure, and nobody else is there",
        [reply("alpha", 0.01)],
        {"beta": "x", "gamma": "y"},
        [["alpha"], [({0: "alpha"}, {"beta": "x", "gamma": "y"}, False)]],
        "escalated",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("events", "gone", "told", "stage"),
    [case[1:] for case in FIRST_AND_REST],
    ids=[case[0] for case in FIRST_AND_REST],
)
def test_a_cascade_asks_the_others_where_the_first_is_not_sure(
    events: Sequence[Event], gone: Mapping[str, str], told: list[list[object]], stage: Stage
) -> None:
    stages = cascade([0], sure=stage == "first")
    session = Asking(THREE, deadline_s=DEADLINE_S, reserve_s=RESERVE_S, stages=stages)
    steps = [session.begin(now_s=0.0, unavailable=gone)]
    steps += [session.handle(event) for event in events]
    assert [in_short(actions) for actions in steps] == told
    finish = steps[-1][-1]
    assert isinstance(finish, Finish)
    assert finish.stage == stage


def test_a_cascade_is_woken_to_ask_the_others_and_not_before() -> None:
    stages = cascade([0], sure=True, others_by_s=0.03)
    session = Asking(THREE, deadline_s=DEADLINE_S, reserve_s=RESERVE_S, stages=stages)
    session.begin(now_s=0.0, unavailable={})
    assert session.wake_s == 0.03
    sends = session.handle(tick(0.03))
    assert [action.budget_ms for action in sends if isinstance(action, Request)] == [
        pytest.approx((DECIDE_S - 0.03) * 1e3)
    ] * 2
    assert session.wake_s == DECIDE_S
    # A late first stage that is sure still ends it.
    (finish,) = session.handle(reply("alpha", 0.04))
    assert isinstance(finish, Finish)
    assert (finish.stage, finish.missing) == ("first", {"beta": NOT_NEEDED, "gamma": NOT_NEEDED})
    assert session.handle(reply("beta", 0.05)) == []


def test_only_the_first_stage_alone_is_asked_whether_it_is_sure_and_once() -> None:
    asked: list[tuple[int, ...]] = []

    def sure(arrived: Mapping[int, Contribution]) -> bool:
        asked.append(tuple(arrived))
        return True

    stages = Stages(frozenset([0, 1]), -math.inf, sure)
    session = Asking(THREE, deadline_s=DEADLINE_S, stages=stages)
    session.begin(now_s=0.0, unavailable={})
    # Somebody else's part is in the answer now, for which nothing was measured.
    assert session.handle(reply("gamma", 0.01)) == []
    assert session.handle(reply("alpha", 0.01)) == []
    (finish,) = session.handle(reply("beta", 0.01))
    assert isinstance(finish, Finish)
    assert (finish.stage, asked) == ("all", [])


def test_a_first_stage_of_two_waits_for_both_unless_one_fails() -> None:
    for second, asked in ((reply("beta", 0.02), ["gamma"]), (failure("beta", 0.02), ["gamma"])):
        stages = cascade([0, 1], sure=False)
        session = Asking(THREE, deadline_s=DEADLINE_S, stages=stages)
        assert in_short(session.begin(now_s=0.0, unavailable={})) == ["alpha", "beta"]
        assert session.handle(reply("alpha", 0.01)) == []
        assert in_short(session.handle(second)) == asked
    session = Asking(THREE, deadline_s=DEADLINE_S, stages=cascade([0, 1], sure=True))
    session.begin(now_s=0.0, unavailable={})
    assert in_short(session.handle(failure("alpha", 0.01))) == ["gamma"]


def test_a_first_stage_on_probation_is_not_waited_for() -> None:
    session = Asking(THREE, deadline_s=DEADLINE_S, stages=cascade([0], sure=True))
    told = in_short(session.begin(now_s=0.0, unavailable={}, probing={"alpha": 0, "gamma": 2}))
    assert told == ["alpha", "gamma", "beta"]
    (finish,) = session.handle(reply("beta", 0.01))
    assert isinstance(finish, Finish)
    assert finish.stage == "escalated"
    assert finish.missing == {"alpha": PROBATION, "gamma": PROBATION}


def test_a_device_on_probation_that_was_never_asked_is_said_to_be_not_needed() -> None:
    session = Asking(THREE, deadline_s=DEADLINE_S, stages=cascade([0], sure=True))
    assert in_short(session.begin(now_s=0.0, unavailable={}, probing={"gamma": 2})) == ["alpha"]
    (finish,) = session.handle(reply("alpha", 0.01))
    assert isinstance(finish, Finish)
    assert finish.missing == {"beta": NOT_NEEDED, "gamma": NOT_NEEDED}


def test_when_a_session_wants_to_be_woken() -> None:
    plain = Asking(REPLICAS, deadline_s=DEADLINE_S, reserve_s=RESERVE_S)
    plain.begin(now_s=0.0, unavailable={})
    assert plain.wake_s == DECIDE_S
    session = Asking(REPLICAS, deadline_s=DEADLINE_S, reserve_s=RESERVE_S, hedge=HedgeAfter(0.020))
    session.begin(now_s=0.0, unavailable={})
    assert session.wake_s == pytest.approx(0.020)
    session.handle(tick(0.020))
    assert session.wake_s == DECIDE_S


def test_a_hedge_gets_what_is_left_and_its_time_counts_from_its_own_asking() -> None:
    session = Asking({0: ["a", "b"]}, deadline_s=0.1, hedge=HedgeAfter(0.02))
    session.begin(now_s=0.0, unavailable={})
    (send,) = session.handle(tick(0.030))
    assert isinstance(send, Request)
    assert send.device == "b"
    assert send.budget_ms == pytest.approx(70.0)
    (finish,) = session.handle(reply("b", 0.040))
    assert isinstance(finish, Finish)
    assert finish.arrived[0].network_ms == pytest.approx(4.0)


def test_a_device_of_which_nothing_is_known_is_hedged_after_half_of_the_time() -> None:
    session = Asking({0: ["a", "b"]}, deadline_s=0.110, reserve_s=0.010, hedge=HedgeAfter(math.inf))
    session.begin(now_s=0.0, unavailable={})
    assert session.wake_s == pytest.approx(0.050)
    assert session.handle(tick(0.049)) == []
    (send,) = session.handle(tick(0.050))
    assert isinstance(send, Request)
    assert (send.device, send.hedged) == ("b", True)
    assert send.budget_ms == pytest.approx(50.0)
