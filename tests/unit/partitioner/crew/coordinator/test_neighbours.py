"""Trainers that go on with their neighbours' newest parameters, by event and in virtual time."""

from collections.abc import Sequence
from typing import Any

import pytest

from partitioner.crew.coordinator.neighbours import Neighbours, graph_of, neighbours_of, reached_in
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
    Receipt,
    Taken,
    Waiting,
)

NET = "member-0"


# --- who is whose neighbour ---


@pytest.mark.parametrize(
    ("members", "pairs", "expected"),
    [
        ("a", [], {"a": ""}),
        ("ab", [], {"a": "b", "b": "a"}),
        ("abcd", [], {"a": "bd", "b": "ac", "c": "bd", "d": "ac"}),
        ("abc", ["ab", "bc", "ab", "bb"], {"a": "b", "b": "ac", "c": "b"}),
        # Who is not there counts for nothing; where the others are not connected, a ring is.
        ("abe", ["ab", "bc", "be"], {"a": "b", "b": "ae", "e": "b"}),
        ("acd", ["ab", "bc", "cd"], {"a": "cd", "c": "ad", "d": "ac"}),
    ],
)
def test_neighbours_are_those_of_pairs_or_a_ring(
    members: str, pairs: list[str], expected: dict[str, str]
) -> None:
    found = neighbours_of(list(members), [(pair[0], pair[1]) for pair in pairs])
    assert found == {member: set(others) for member, others in expected.items()}
    assert reached_in(found) == set(members)


def test_what_is_not_connected_is_not_reached() -> None:
    assert reached_in(graph_of("abcd", [("a", "b"), ("c", "d")])) == {"a", "b"}
    assert reached_in(graph_of("", [])) == set()


# --- event by event ---


class Told:
    """A machine, the last action of each trainer, and what its reports need."""

    def __init__(self, trainers: int = 4, batches: int = 100, **more: Any) -> None:
        self.machine = Neighbours(
            NET, RoundLengths(trainers, batches, 2), expected=range(trainers), **more
        )
        self.actions: list[AnyAction] = []
        self.since = dict.fromkeys(range(trainers), 0)
        self.pictures = dict.fromkeys(range(trainers), 0)
        #: The number under which each has published last.
        self.published: dict[int, int] = {}
        self.claim = 0
        for rank in range(trainers):
            self.tell(Waiting(rank=rank, network=NET, pictures=0))
        self.commit(1, range(trainers))

    def tell(self, *events: AnyEvent) -> list[AnyAction]:
        """Actions that some events bring about."""
        self.actions = [action for event in events for action in self.machine.handle(event)]
        for action in self.actions:
            if isinstance(action, Commit | GoOn):
                self.since[action.rank] = action.seq
        return self.actions

    def commit(self, seq: int, ranks: Sequence[int]) -> list[AnyAction]:
        """All have the mean of a meeting."""
        self.pictures |= dict.fromkeys(ranks, 0)
        return self.tell(*(Done(rank=rank, network=NET, seq=seq) for rank in ranks))

    def step(self, rank: int) -> list[AnyAction]:
        """End an iteration: a step, and publishing."""
        self.pictures[rank] += 1
        report: dict[str, Any] = {
            "rank": rank, "network": NET, "pictures": self.pictures[rank], "since": self.since[rank]
        }  # fmt: skip
        self.claim += 1
        self.published[rank] = self.since[rank]
        return self.tell(Ready(**report, claims=(self.claim - 1,)), Waiting(**report))

    def receive(self, rank: int, source: int) -> list[AnyAction]:
        """Deliver the last published vector, or the next one where none was yet."""
        since = self.published.get(source, self.since[source])
        return self.tell(Receipt(rank=rank, network=NET, source=source, since=since))

    def lose(self, rank: int, source: int) -> list[AnyAction]:
        return self.tell(Receipt(rank=rank, network=NET, source=source, since=1, lost=True))

    @property
    def going(self) -> dict[int, tuple[Taken, ...]]:
        return {action.rank: action.takes for action in self.actions if isinstance(action, GoOn)}

    @property
    def closed(self) -> list[int]:
        return [action.rank for action in self.actions if isinstance(action, Close)]

    @property
    def meeting(self) -> tuple[int, ...]:
        return next((a.members for a in self.actions if isinstance(a, Meet) and a.whole), ())


def test_a_commit_says_who_is_whose_neighbour() -> None:
    crew = Told()
    assert crew.actions == [
        Commit(rank=rank, network=NET, seq=1, epoch=0, neighbours=neighbours)
        for rank, neighbours in enumerate([(1, 3), (0, 2), (1, 3), (0, 2)])
    ]


def test_who_has_what_all_neighbours_published_goes_on_with_their_mean() -> None:
    crew = Told(backup=0)
    for rank in range(4):
        assert crew.step(rank) == [Close(rank=rank, network=NET)]
    assert crew.receive(0, 1) == []
    assert crew.receive(0, 3) == [
        GoOn(rank=0, network=NET, seq=2, takes=(Taken(1, 1, 1 / 3), Taken(3, 1, 1 / 3)))
    ]
    assert crew.machine.iteration(0) == 1
    # Its batch and theirs are in its parameters now.
    assert crew.machine.claims.of(0) == 0b1011
    assert crew.machine.claims.of(1) == 0b0010


def test_what_comes_before_the_coordinator_knows_of_it_counts_once_it_does() -> None:
    crew = Told(2, backup=0)
    crew.step(0)
    assert crew.receive(0, 1) == []
    crew.step(1)
    assert crew.going == {0: (Taken(1, 1, 1 / 2),)}


def test_a_backup_worker_need_not_have_published() -> None:
    crew = Told(backup=1)
    for rank in (0, 1):
        crew.step(rank)
    crew.receive(0, 1)
    assert crew.going == {0: (Taken(1, 1, 1 / 2),)}


def test_what_is_too_old_is_not_taken_and_what_is_newer_counts_more() -> None:
    crew = Told(backup=1, skip=1)
    crew.step(3)
    crew.receive(0, 3)
    for number in range(3):
        crew.step(1)
        crew.step(2)
        crew.receive(1, 2)
        crew.receive(2, 1)
        assert crew.machine.iteration(1) == number + 1
    crew.step(1)
    crew.receive(0, 1)
    crew.step(0)
    # The neighbour 1 has published the end of iteration 3, and 3 that of iteration 0.
    assert crew.going == {0: (Taken(1, crew.published[1], 4 / 6), Taken(3, 1, 1 / 6))}
    crew.step(0)
    assert crew.going == {0: (Taken(1, crew.published[1], 3 / 4), Taken(3, 1, 0.0))}


def test_staleness_lets_older_ones_count() -> None:
    crew = Told(2, backup=0, stale=2, gap=4)
    crew.step(1)
    crew.receive(0, 1)
    for share in (3 / 6, 2 / 5, 1 / 4):
        crew.step(0)
        assert crew.going == {0: (Taken(1, 1, share),)}
    crew.step(0)
    assert crew.going == {}


def test_nobody_is_further_ahead_of_a_neighbour_than_the_gap() -> None:
    crew = Told(2, backup=1, gap=2)
    for iteration in (1, 2):
        crew.step(0)
        assert crew.going == {0: ()}
        assert crew.machine.tokens == {(1, 0): 2 - iteration, (0, 1): 2 + iteration}
    crew.step(0)
    assert crew.going == {}
    # The neighbour goes on, which gives a token.
    crew.step(1)
    assert crew.going == {1: (), 0: ()}


@pytest.mark.parametrize(("skip", "iteration"), [(1, 1), (2, 2), (8, 3)])
def test_who_is_behind_all_skips_iterations(skip: int, iteration: int) -> None:
    crew = Told(2, backup=1, gap=3, skip=skip)
    for _ in range(3):
        crew.step(0)
    crew.step(1)
    assert crew.machine.iteration(1) == iteration


def test_who_is_lost_is_waited_for_no_more() -> None:
    crew = Told(backup=0)
    for rank in (0, 1, 2):
        crew.step(rank)
    crew.receive(0, 1)
    crew.receive(2, 1)
    # Its neighbours lose the line at once, and the coordinator takes it for lost later.
    assert crew.lose(0, 3)[0].rank == 0
    assert crew.going == {0: (Taken(1, 1, 1 / 2),)}
    crew.tell(Gone(rank=3))
    assert crew.going == {2: (Taken(1, 1, 1 / 2),)}
    assert crew.closed == []
    # In the ring 3 stood between 0 and 2: without 1 nothing connects them.
    crew.step(0)
    crew.tell(Gone(rank=1))
    assert crew.closed == [2]
    crew.step(2)
    assert crew.meeting == (0, 2)
    crew.commit(crew.actions[0].seq, (0, 2))  # type: ignore[union-attr]
    assert [a.neighbours for a in crew.actions if isinstance(a, Commit)] == [(2,), (0,)]


def test_a_line_of_before_is_none_of_now() -> None:
    crew = Told(2, backup=0)
    crew.step(0)
    crew.tell(Receipt(rank=0, network=NET, source=1, since=0, lost=True))
    assert crew.machine.tokens == {(1, 0): 4, (0, 1): 4}
    assert crew.lose(0, 1)
    assert crew.machine.tokens == {}


def test_all_meet_where_numbers_are_not_finite() -> None:
    crew = Told(3)
    crew.step(0)
    assert crew.lose(1, 1) == [Close(rank=rank, network=NET) for rank in (1, 2)]
    crew.step(1)
    crew.step(2)
    assert crew.meeting == (0, 1, 2)
    crew.tell(*(MeetingFailed(rank=rank, network=NET, seq=2, blamed=1) for rank in range(3)))
    meet = crew.actions[0]
    assert isinstance(meet, Meet)
    assert meet.weights == (1.0, 0.0, 1.0)
    crew.commit(3, range(3))
    assert crew.machine.claims.committed == {0, 2}


def test_all_meet_where_somebody_comes() -> None:
    crew = Told(2, backup=0)
    crew.step(0)
    crew.tell(Waiting(rank=2, network=NET, pictures=0))
    assert crew.closed == [1]
    crew.step(1)
    assert crew.meeting == (0, 1, 2)
    crew.commit(crew.actions[0].seq, range(3))  # type: ignore[union-attr]
    assert [a.neighbours for a in crew.actions if isinstance(a, Commit)] == [(1, 2), (0, 2), (0, 1)]


def test_a_finished_trainer_is_waited_for_no_more_and_the_epoch_ends_with_all() -> None:
    crew = Told(2, batches=2, backup=0)
    crew.step(0)
    assert crew.tell(Finished(rank=1, network=NET, pictures=0, since=1)) == [
        GoOn(rank=0, network=NET, seq=2)
    ]
    # Batch 1 was lost: of those that rest, the first gets it.
    crew.tell(Finished(rank=0, network=NET, pictures=1, since=2))
    assert crew.actions == [GoOn(rank=0, network=NET, seq=3, claims=(1,))]
    crew.step(0)
    assert crew.going == {0: ()}
    crew.tell(Finished(rank=0, network=NET, pictures=2, since=4))
    assert crew.meeting == (0, 1)
    assert crew.commit(5, (0, 1))[0] == Commit(rank=0, network=NET, seq=5, epoch=1, neighbours=(1,))


# --- in virtual time ---


def played(
    paces: Sequence[float], slowed: object = steady, until_s: float = 3000.0, **more: Any
) -> tuple[Neighbours, CrewTrace]:
    """Trainers that publish after every step of their own."""
    n = len(paces)
    scenario = CrewScenario(
        trainers=tuple(Paced(name=f"t{i}", step_s=pace) for i, pace in enumerate(paces)),
        every_pictures=n,
        batches=10**6,
        until_s=until_s,
        slowed=slowed,  # type: ignore[arg-type]
    )
    schedule = Neighbours(NETWORK, RoundLengths(n, 10**6, 1), expected=range(n), **more)
    return schedule, simulate(scenario, schedule)


FOUR, SIX = (1, 1, 1, 3), (1, 1, 1, 1, 1, 4)


@pytest.mark.parametrize(
    ("paces", "more", "least", "most"),
    [
        (FOUR, {"backup": 0, "skip": 1}, 1000, 1000),
        # Backup workers alone do not help against one that is always slow.
        (FOUR, {"backup": 1, "skip": 1}, 1004, 1004),
        (FOUR, {"backup": 0, "stale": 4, "skip": 1}, 1004, 1008),
        (FOUR, {"backup": 1}, 3000, 3000),
        (SIX, {"backup": 0, "skip": 1}, 750, 751),
        (SIX, {"backup": 1, "skip": 1}, 754, 758),
        (SIX, {"backup": 1}, 3000, 3000),
    ],
)
def test_iterations_are_those_of_the_reference(
    paces: tuple[int, ...], more: dict[str, int], least: int, most: int
) -> None:
    schedule, trace = played(paces, **more)
    slow = len(paces) - 1
    assert all(least <= schedule.iteration(rank) <= most for rank in range(slow))
    assert trace.steps(slow) == 3000 / paces[slow]
    skipped = schedule.iteration(slow) - trace.steps(slow)
    assert skipped == (2999 - 3000 / paces[slow] if least == 3000 else 0)


@pytest.mark.parametrize("more", [{"gap": 8}, {"gap": 8, "backup": 0, "stale": 8, "skip": 1}])
def test_nobody_is_ahead_of_its_tokens_under_spells(more: dict[str, Any]) -> None:
    n = 8
    schedule, seen = Neighbours(NETWORK, RoundLengths(n, 10**6, 1), expected=range(n), **more), 0
    _, trace = played((1,) * n, slow_periods(), until_s=300, **more)
    for at_s, event, actions in trace.log:
        # The same log gives the same actions, too.
        assert schedule.handle(event, at_s) == actions
        tokens = schedule.tokens
        assert all(0 <= left <= 2 * more["gap"] for left in tokens.values())
        seen += sum(not left for left in tokens.values())
    assert seen > 0, "nobody had to wait"


def test_losses_and_joins_lose_no_batch() -> None:
    late = Paced(name="late", step_s=1.0, joins_s=50.0)
    lost = Paced(name="lost", step_s=1.5, lost_s=100.5)
    paced = [Paced(name=f"t{i}", step_s=pace) for i, pace in enumerate((1.0, 1.0, 3.0))]
    scenario = CrewScenario(
        trainers=(*paced, lost, late),
        every_pictures=12,
        batches=500,
        epochs=2,
        mean_s=lambda members: 0.3,
    )
    trace = simulate(scenario, Neighbours(NETWORK, RoundLengths(12, 500, 2), expected=range(4)))
    assert trace.ended == "network is trained"
    told = [action for _, _, actions in trace.log for action in actions]
    whole = {action.seq for action in told if isinstance(action, Meet)}
    takes = {
        taken.source
        for action in told
        if isinstance(action, GoOn)
        for taken in action.takes
        if taken.share
    }
    assert len(whole) <= 6
    # What the slow one publishes is too old for its neighbours.
    assert takes == {0, 1, 3, 4}
    assert trace.steps() >= 1000
    # Nobody waits until the coordinator knows of the loss.
    waited = [span for span in trace.spans if span.kind == "wait" and span.end_s - span.start_s > 5]
    assert not [span for span in waited if 100.5 < span.end_s < 110.5]
