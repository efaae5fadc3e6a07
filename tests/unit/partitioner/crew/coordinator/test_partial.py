"""Meetings of some trainers at a time, event by event and in virtual time."""

import math
import os
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, TypeVar

import pytest

from partitioner.crew.coordinator.claims import SpreadClaims
from partitioner.crew.coordinator.partial import (
    OnRequest,
    PartialMeetings,
    Shuffled,
    draw_by,
    shuffled_groups,
)
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.simulate import (
    NETWORK,
    CrewScenario,
    CrewTrace,
    Paced,
    simulate,
    slow_periods,
    steady,
)
from partitioner.crew.messages import (
    AnyAction,
    AnyEvent,
    Close,
    Commit,
    Done,
    Finished,
    Gone,
    GoOn,
    Meet,
    MeetingFailed,
    Ready,
    Waiting,
)

NET = "member-0"
#: `make invariants` plays the nightly numbers.
NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
CREWS = 60 if NIGHTLY else 9
DRAWS = 2 if NIGHTLY else 1
S = TypeVar("S", bound=PartialMeetings)


def told(schedule: PartialMeetings, *events: AnyEvent) -> list[AnyAction]:
    """Actions that the last of some events brings about."""
    actions: list[AnyAction] = []
    for event in events:
        actions = schedule.handle(event)
    return actions


def ready(rank: int, pictures: int, since: int, *claims: int) -> Ready:
    return Ready(rank=rank, network=NET, pictures=pictures, since=since, claims=claims)


def waiting(rank: int, pictures: int = 0, since: int = 0) -> Waiting:
    return Waiting(rank=rank, network=NET, pictures=pictures, since=since)


def finished(rank: int, pictures: int, since: int) -> Finished:
    return Finished(rank=rank, network=NET, pictures=pictures, since=since)


def done(rank: int, seq: int) -> Done:
    return Done(rank=rank, network=NET, seq=seq)


def failed(rank: int, seq: int, blamed: int | None = None) -> MeetingFailed:
    return MeetingFailed(rank=rank, network=NET, seq=seq, blamed=blamed)


def meetings(actions: Sequence[AnyAction]) -> dict[int, tuple[tuple[int, ...], bool]]:
    """Members of each meeting that begins, and whether it is of all; by number."""
    return {a.seq: (a.members, a.whole) for a in actions if isinstance(a, Meet)}


def closed(actions: Sequence[AnyAction]) -> list[int]:
    return [action.rank for action in actions if isinstance(action, Close)]


def by_rank(number: int, rank: int) -> int:
    return rank


def started(schedule: S, trainers: int = 4) -> S:
    """All have the first one's parameters by meeting 1, which is of all."""
    actions = told(schedule, *(waiting(rank) for rank in range(trainers)))
    assert meetings(actions) == {1: (tuple(range(trainers)), True)}
    told(schedule, *(done(rank, 1) for rank in range(trainers)))
    return schedule


def pairs(every: int = 8, batches: int = 100) -> Shuffled:
    """Pairs (0 1) and (2 3) in every round."""
    return started(Shuffled(NET, RoundLengths(every, batches, 2), expected=range(4), draw=by_rank))


# --- DS-Sync ---


def test_the_draw_is_that_of_the_reference() -> None:
    assert draw_by(7)(0, 0) == 17469523255737126788


@pytest.mark.parametrize(
    ("sites", "expected"),
    [
        (
            ((0, 1), (2, 3)),
            {
                **{number: [(0, 1), (2, 3)] for number in (0, 1, 2, 4, 5, 6)},
                3: [(0, 3), (1,), (2,)],
                7: [(0, 2), (1,), (3,)],
            },
        ),
        (
            (range(4), range(4, 8)),
            {
                0: [(0, 2), (1, 3), (4, 7), (5, 6)],
                1: [(0, 3), (1, 2), (4, 5), (6, 7)],
                2: [(0, 3), (1, 2), (4, 5), (6, 7)],
                3: [(0, 4), (1, 2, 3), (5, 6, 7)],
                7: [(0, 6), (1, 2, 3), (4, 5, 7)],
            },
        ),
    ],
)
def test_shuffled_groups_are_those_of_the_reference(
    sites: Sequence[Sequence[int]], expected: dict[int, list[tuple[int, ...]]]
) -> None:
    draw = draw_by(7)
    assert expected == {
        number: sorted(shuffled_groups(draw, number, sites, 2, 4)) for number in expected
    }


@pytest.mark.parametrize(
    ("trainers", "size", "expected"),
    [(4, 2, 1 / 3), (8, 2, 3 / 7), (8, 4, 1 / 7), (9, 3, 1 / 4), (6, 3, 1 / 5)],
)
def test_a_round_shrinks_the_variance_by_what_theory_says(
    trainers: int, size: int, expected: float
) -> None:
    """The mean over all stays; what trainers differ by shrinks by (n - g) / (g (n - 1))."""
    assert expected == (trainers - size) / (size * (trainers - 1))
    draw, left = draw_by(11), []
    for number in range(3000):
        groups = shuffled_groups(draw, number, [range(trainers)], size, 1)
        assert sorted(rank for group in groups for rank in group) == list(range(trainers))
        value = [draw(-1 - number, rank) / 2**64 for rank in range(trainers)]
        mean = sum(value) / trainers
        means = {rank: sum(value[r] for r in group) / size for group in groups for rank in group}
        assert sum(means.values()) / trainers == pytest.approx(mean)
        before = sum((x - mean) ** 2 for x in value)
        left.append(sum((x - mean) ** 2 for x in means.values()) / before)
    assert sum(left) / len(left) == pytest.approx(expected, abs=0.02)


def test_groups_of_a_round_meet_and_go_on_apart() -> None:
    crew = pairs()
    assert closed(told(crew, *(ready(rank, 2, 1, rank) for rank in range(4)))) == [0, 1, 2, 3]
    assert meetings(told(crew, waiting(0, 2, 1), waiting(1, 2, 1))) == {2: ((0, 1), False)}
    assert told(crew, done(0, 2)) == []
    committed = told(crew, done(1, 2))
    assert committed == [Commit(rank=rank, network=NET, seq=2, epoch=0) for rank in (0, 1)]
    # The other group has still to meet: this one trains on, and no round closes before.
    assert told(crew, ready(0, 9, 2, 4)) == []
    assert meetings(told(crew, waiting(3, 2, 1), waiting(2, 2, 1))) == {3: ((2, 3), False)}
    assert closed(told(crew, done(2, 3), done(3, 3))) == [0, 1, 2, 3]
    assert crew.claims.missing()[:2] == [5, 6]


def test_a_batch_is_lost_with_the_last_trainer_that_has_it() -> None:
    crew = pairs(batches=6)
    told(crew, *(ready(rank, 2, 1, rank) for rank in range(4)))
    told(crew, waiting(0, 2, 1), waiting(1, 2, 1), done(0, 2), done(1, 2))
    told(crew, Gone(rank=0))
    assert crew.claims.missing() == [4, 5]
    told(crew, Gone(rank=1))
    assert crew.claims.missing() == [0, 1, 4, 5]


def test_spread_claims_are_reported_once() -> None:
    claims = SpreadClaims(4)
    claims.report(0, [0, 4])
    claims.report(1, [1])
    claims.spread([0, 1], [0, 1])
    claims.report(0, [1])  # its own parameters have it
    assert claims.count == 2
    for rank in (0, 1):
        with pytest.raises(ValueError, match="trainer 2: batch 1 is done already"):
            claims.report(2, [1])
        claims.commit(rank)
    assert (claims.committed, claims.complete, claims.missing()) == ({0, 1}, False, [2, 3])


def test_who_is_left_of_a_group_goes_on_alone() -> None:
    crew = pairs()
    told(crew, *(ready(rank, 2, 1, rank) for rank in range(4)))
    told(crew, waiting(0, 2, 1))
    assert told(crew, Gone(rank=1)) == [GoOn(rank=0, network=NET, seq=2, epoch=0)]


def test_a_group_whose_mean_fails_meets_again_without_who_is_lost() -> None:
    crew = started(
        Shuffled(NET, RoundLengths(8, 100, 1), expected=range(6), size=3, draw=by_rank), 6
    )
    told(crew, *(ready(rank, 2, 1, rank) for rank in range(6)))
    told(crew, *(waiting(rank, 2, 1) for rank in range(3)))
    assert told(crew, failed(0, 2), failed(1, 2)) == []
    assert meetings(told(crew, Gone(rank=2))) == {3: ((0, 1), False)}


def test_means_of_a_group_that_fail_again_and_again_end() -> None:
    crew = pairs()
    told(crew, *(ready(rank, 2, 1, rank) for rank in range(4)))
    told(crew, waiting(0, 2, 1), waiting(1, 2, 1))
    for seq in range(2, 7):
        told(crew, failed(0, seq), failed(1, seq))
    assert crew.failed == f"{NET}: 5 means of 0, 1 failed: they do not all reach each other"


def test_all_meet_where_somebody_comes() -> None:
    crew = pairs()
    told(crew, *(ready(rank, 1, 1, rank) for rank in range(4)))
    assert closed(told(crew, waiting(4))) == [0, 1, 2, 3]
    actions = told(crew, *(waiting(rank, 1, 1) for rank in range(4)))
    assert meetings(actions) == {2: ((0, 1, 2, 3, 4), True)}
    meet = next(action for action in actions if isinstance(action, Meet))
    assert meet.weights == (1.0, 1.0, 1.0, 1.0, 0.0)
    told(crew, *(done(rank, 2) for rank in range(5)))
    assert crew.claims.committed == {0, 1, 2, 3}


def test_all_meet_after_a_number_that_is_not_finite() -> None:
    crew = pairs()
    told(crew, *(ready(rank, 2, 1, rank) for rank in range(4)))
    told(crew, waiting(0, 2, 1), waiting(1, 2, 1), failed(0, 2, blamed=1), failed(1, 2, blamed=1))
    actions = told(crew, waiting(2, 2, 1), waiting(3, 2, 1))
    assert meetings(actions) == {3: ((0, 1, 2, 3), True)}
    meet = next(action for action in actions if isinstance(action, Meet))
    assert meet.weights == (1.0, 0.0, 1.0, 1.0)
    assert crew.claims.missing()[0] == 1


def test_an_epoch_ends_with_a_mean_of_all_and_every_batch() -> None:
    crew = pairs(every=100, batches=3)
    told(crew, *(ready(rank, 2, 1, rank) for rank in range(2)))
    told(crew, *(finished(rank, 2, 1) for rank in range(3)))
    again = told(crew, finished(3, 0, 1))
    assert again == [GoOn(rank=0, network=NET, seq=2, epoch=0, claims=(2,))]
    actions = told(crew, ready(0, 4, 2, 2), finished(0, 4, 2))
    assert meetings(actions) == {3: ((0, 1, 2, 3), True)}
    assert told(crew, *(done(rank, 3) for rank in range(4)))[0] == Commit(
        rank=0, network=NET, seq=3, epoch=1
    )


# --- Prague ---


def crew_of(*paces: float) -> tuple[Paced, ...]:
    return tuple(Paced(name=f"t{rank}", step_s=step_s) for rank, step_s in enumerate(paces))


def requests(
    paces: Sequence[float], slowed: object = steady, until_s: float = 3000.0, **more: Any
) -> CrewTrace:
    """Trainers that ask after every step of their own."""
    n = len(paces)
    scenario = CrewScenario(
        trainers=crew_of(*paces),
        every_pictures=n,
        batches=10**6,
        until_s=until_s,
        slowed=slowed,  # type: ignore[arg-type]
    )
    schedule = OnRequest(NETWORK, RoundLengths(n, 10**6, 1), expected=range(n), **more)
    return simulate(scenario, schedule)


def alone_or_met(trace: CrewTrace) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Meetings that begin, and trainers that go on alone."""
    for at_s, _, actions in trace.log:
        for action in actions:
            if isinstance(action, Meet) and action.rank == action.members[0]:
                yield at_s, action.members
            elif isinstance(action, GoOn):
                yield at_s, (action.rank,)


def test_requests_are_answered_as_in_the_reference() -> None:
    trace = requests((1, 1, 1, 3), until_s=5, gap=1, reach=math.inf, divide=True, draw=by_rank)
    assert list(alone_or_met(trace)) == [
        (0, (0, 1, 2, 3)),
        (1, (0, 1)),
        (2, (0, 1)),
        (3, (2, 3)),
        (3, (0, 1)),
        (4, (0, 2)),
        (5, (0,)),
    ]


def best(paces: Sequence[float], slowed: object) -> int:
    """Steps of trainers that never wait."""
    steps = 0
    for rank, pace in enumerate(paces):
        at_s = 0.0
        while (at_s := at_s + pace * slowed(rank, at_s)) <= 3000:  # type: ignore[operator]
            steps += 1
    return steps


@pytest.mark.parametrize(
    ("paces", "slowed", "more", "least", "most"),
    [
        ((1,) * 8, slow_periods(), {"reach": math.inf, "divide": True}, 0.77, 0.845),
        ((1,) * 8, slow_periods(), {}, 0.95, 0.97),
        # The shares of the published rule depend on the draw.
        ((1, 1, 1, 3), steady, {"reach": math.inf, "divide": True}, 0.89, 1.0),
        ((1, 1, 1, 3), steady, {}, 0.99, 1.0),
    ],
    ids=[
        "published, slow periods",
        "reach, slow periods",
        "published, constant",
        "reach, constant",
    ],
)
def test_trainers_keep_their_pace(
    paces: tuple[float, ...], slowed: object, more: dict[str, Any], least: float, most: float
) -> None:
    for seed in range(DRAWS):
        trace = requests(paces, slowed, draw=draw_by(seed), **more)
        assert least <= trace.steps() / best(paces, slowed) <= most


@pytest.mark.parametrize("seed", range(CREWS))
def test_every_pair_meets_again_and_again(seed: int) -> None:
    """Equal paces, or from 1 to 4, and slow periods: no pair waits for more than 50 n meetings."""
    draw, n = draw_by(seed), 2 + seed % 7
    paces = [1 + 3 * draw(-1, rank) / 2**64 if seed % 3 else 1.0 for rank in range(n)]
    slowed = slow_periods(seed, factor=2.5 if seed % 2 else 5.0)
    trace = requests(paces, slowed, until_s=1000 if n < 6 else 600, draw=draw)
    recent: dict[tuple[int, ...], int] = dict.fromkeys(combinations(range(n), 2), 0)
    number = 0
    for _, members in alone_or_met(trace):
        number += len(members) > 1
        recent |= dict.fromkeys(combinations(members, 2), number)
        assert number - min(recent.values()) <= 50 * n, "a pair does not meet"
    assert number > 25 * n


def ask(
    crew: OnRequest, rank: int, pictures: int, since: int, claim: int, at_s: float
) -> list[AnyAction]:
    """Report a step at this time, and ask for a group."""
    crew.handle(ready(rank, pictures, since, claim), at_s)
    return crew.handle(waiting(rank, pictures, since), at_s)


def finish(crew: OnRequest, seq: int, at_s: float, ranks: Sequence[int] = (0, 1)) -> None:
    """All have the mean of a meeting at this time."""
    for rank in ranks:
        crew.handle(done(rank, seq), at_s)


def test_a_request_far_from_its_partners_goes_on_alone() -> None:
    crew = started(OnRequest(NET, RoundLengths(4, 100, 1), expected=range(2), reach=0.25), 2)
    # Nothing is known of the other: it might come now. Laps count from the second on.
    for number, at_s in ((0, 0.0), (1, 4.0)):
        since, claim = 1 + number, 2 * number
        assert ask(crew, 0, 2, since, claim, at_s + 1.0) == []
        met = ask(crew, 1, 2, since, claim + 1, at_s + 4.0)
        assert meetings(met) == {since + 1: ((0, 1), False)}
        finish(crew, since + 1, at_s + 4.0)
    # In 1 s it asks again; the other is expected after 4 s.
    assert ask(crew, 0, 2, 3, 4, 9.0) == [GoOn(rank=0, network=NET, seq=4, epoch=0)]
    assert ask(crew, 0, 4, 4, 5, 10.0) == [GoOn(rank=0, network=NET, seq=5, epoch=0)]
    assert ask(crew, 0, 6, 5, 6, 11.9) == []
    assert meetings(ask(crew, 1, 2, 3, 7, 12.0)) == {6: ((0, 1), False)}


def test_validation_between_epochs_makes_no_laps_long() -> None:
    """An hour passes before the first step of the second epoch: the trainers still meet."""
    crew = started(OnRequest(NET, RoundLengths(4, 6, 2), expected=range(2), reach=0.25), 2)
    seq, at_s = 1, 0.0
    for step in range(3):
        at_s += 1.0
        assert ask(crew, 0, 2, seq, 2 * step, at_s) == []
        assert meetings(ask(crew, 1, 2, seq, 2 * step + 1, at_s + 0.1)) == {
            seq + 1: ((0, 1), False)
        }
        seq += 1
        finish(crew, seq, at_s + 0.1)
    crew.handle(finished(0, 0, seq), at_s)
    assert meetings(crew.handle(finished(1, 0, seq), at_s)) == {seq + 1: ((0, 1), True)}
    seq += 1
    finish(crew, seq, at_s)
    assert crew.epoch == 1
    at_s += 3600.0
    for step in range(3):
        at_s += 1.0
        assert ask(crew, 0, 2, seq, 2 * step, at_s) == [], "it goes on alone"
        assert meetings(ask(crew, 1, 2, seq, 2 * step + 1, at_s + 0.1)) == {
            seq + 1: ((0, 1), False)
        }
        seq += 1
        finish(crew, seq, at_s + 0.1)


def test_one_that_comes_late_is_behind_nobody() -> None:
    crew = started(OnRequest(NET, RoundLengths(4, 100, 1), expected=range(1), gap=1), 1)
    for seq in range(1, 6):
        told_on = ask(crew, 0, 4 * seq, seq, seq - 1, float(seq))
        assert told_on == [GoOn(rank=0, network=NET, seq=seq + 1, epoch=0)]
    assert closed(crew.handle(waiting(1), 6.0)) == [0]
    assert meetings(ask(crew, 0, 24, 6, 5, 6.0)) == {7: ((0, 1), True)}
    finish(crew, 7, 6.0)
    assert ask(crew, 0, 4, 7, 6, 7.0) == [], "it takes the other for too far behind"
    assert meetings(ask(crew, 1, 4, 7, 7, 7.0)) == {8: ((0, 1), False)}


def test_an_infinite_reach_is_one_of_laps_without_time_too() -> None:
    crew = started(OnRequest(NET, RoundLengths(4, 100, 1), expected=range(2), reach=math.inf), 2)
    for seq, claim in ((1, 0), (2, 2), (3, 4)):
        assert ask(crew, 0, 2, seq, claim, 0.0) == []
        assert meetings(ask(crew, 1, 2, seq, claim + 1, 0.0)) == {seq + 1: ((0, 1), False)}
        finish(crew, seq + 1, 0.0)


def test_a_meeting_on_request_that_fails_is_gone_on_without() -> None:
    crew = started(OnRequest(NET, RoundLengths(4, 100, 1), expected=range(2)), 2)
    told(crew, ready(0, 2, 1, 0), waiting(0, 2, 1), ready(1, 2, 1, 1))
    assert meetings(told(crew, waiting(1, 2, 1))) == {2: ((0, 1), False)}
    told(crew, failed(0, 2))
    assert told(crew, failed(1, 2)) == [
        GoOn(rank=rank, network=NET, seq=3, epoch=0) for rank in (0, 1)
    ]
    assert crew.claims.missing()[0] == 2


# --- both ---


SCHEDULES = {"shuffled": Shuffled, "on_request": OnRequest}


@pytest.mark.parametrize("kind", SCHEDULES)
def test_losses_and_joins_lose_no_batch(kind: str) -> None:
    late = Paced(name="late", step_s=1.0, joins_s=50.0)
    lost = Paced(name="lost", step_s=1.5, lost_s=100.5)
    scenario = CrewScenario(
        trainers=(*crew_of(1.0, 1.0, 3.0), lost, late),
        every_pictures=12,
        batches=500,
        epochs=2,
        mean_s=lambda members: 0.3,
    )
    schedule = SCHEDULES[kind](NETWORK, RoundLengths(12, 500, 2), expected=range(4))
    trace = simulate(scenario, schedule)
    assert trace.ended == "network is trained"
    whole = deque(
        a for _, _, actions in trace.log for a in actions if isinstance(a, Meet) and a.whole
    )
    some = [
        a for _, _, actions in trace.log for a in actions if isinstance(a, Meet) and not a.whole
    ]
    assert len({meet.seq for meet in whole}) <= 6 < 100 < len({meet.seq for meet in some})
    assert trace.steps() >= 1000
    assert any(4 in meet.members for meet in some)
    # The same log gives the same actions.
    again = SCHEDULES[kind](NETWORK, RoundLengths(12, 500, 2), expected=range(4))
    for at_s, event, actions in trace.log:
        assert again.handle(event, at_s) == actions
