"""Trainers that go on with their neighbours' newest parameters, and meet nobody meanwhile. Pure.

After Hop (DOI 10.1145/3297858.3304009). A trainer stops after its part of a round, an *iteration*,
and publishes its parameters. It waits until its neighbours have come as far, and goes on with a
mean of its own and theirs, which need not be there: they sent them before.
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec.structs import replace

from partitioner.crew.coordinator.partial import OwnParts
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import RunningMeeting, ScheduledTrainer
from partitioner.crew.messages import (
    AnyAction,
    AnyReport,
    Commit,
    Finished,
    GoOn,
    Rank,
    Receipt,
    Taken,
    Waiting,
)

T = TypeVar("T", bound=Hashable)
#: Neighbours of each trainer; of two, each is the other's.
Graph = Mapping[T, set[T]]


def graph_of(members: Sequence[T], pairs: Collection[tuple[T, T]]) -> Graph[T]:
    """The graph of `pairs` of neighbours; those with one that is no member count for nothing."""
    found: dict[T, set[T]] = {member: set() for member in members}
    for one, other in pairs:
        if one in found and other in found and one != other:
            found[one].add(other)
            found[other].add(one)
    return found


def reached_in(graph: Graph[T]) -> set[T]:
    """All that the first member reaches from neighbour to neighbour, itself included."""
    found: set[T] = set()
    ahead = list(graph)[:1]
    while ahead:
        member = ahead.pop()
        found.add(member)
        ahead += graph[member] - found
    return found


def neighbours_of(members: Sequence[T], pairs: Collection[tuple[T, T]] = ()) -> Graph[T]:
    """The graph of `pairs`, or a ring in the order of `members` where they do not connect all."""
    given = graph_of(members, pairs)
    if len(reached_in(given)) == len(members):
        return given
    return graph_of(members, list(zip(members, [*members[1:], *members[:1]], strict=True)))


@dataclass(slots=True)
class _Place:
    """A trainer since the last mean of all."""

    #: Those whom it waits for, and who wait for it.
    neighbours: set[Rank]
    #: The one that it is in.
    iteration: int = 0
    #: Iterations whose end it has published, with the batches that were in it, by its Commit or
    #: GoOn before; and of each neighbour the last of these that has come.
    published: dict[int, tuple[int, int]] = field(default_factory=dict)
    received: dict[Rank, int] = field(default_factory=dict)


class Neighbours(OwnParts):
    """Each goes on once enough of its neighbours have published what is new enough.

    All but `backup` of them have to have published the end of its own iteration, or of one at most
    `stale` earlier, and nobody may be more than `gap` iterations ahead of a neighbour. Who is at
    least 2 behind all its neighbours goes on to theirs, by `skip` iterations at most. The newer
    what is taken, the more it counts.

    All meet where a trainer's own parameters are not finite. A finished one is nobody's neighbour
    any more, nor is one that is lost: where those that are left are not connected, all meet.
    `graph_of` gives the neighbours of those that have met.
    """

    def __init__(
        self,
        network: str,
        lengths: RoundLengths,
        expected: Iterable[Rank] = (),
        *,
        gap: int = 4,
        backup: int = 1,
        stale: int = 0,
        skip: int = 8,
        graph_of: Callable[[Sequence[Rank]], Graph[Rank]] = neighbours_of,
    ) -> None:
        super().__init__(network, lengths, expected)
        self._gap, self._backup, self._stale, self._skip = gap, backup, stale, skip
        self._graph_of = graph_of
        self._places: dict[Rank, _Place] = {}
        #: The number of the last mean of all.
        self._base = 0
        #: What those that go on take.
        self._takes: dict[Rank, tuple[Taken, ...]] = {}

    @property
    def tokens(self) -> dict[tuple[Rank, Rank], int]:
        """Iterations that the second may go on, by each neighbour, the first: never below 0."""
        return {
            (other, rank): self._places[other].iteration - place.iteration + self._gap
            for rank, place in self._places.items()
            for other in place.neighbours
        }

    def iteration(self, rank: Rank) -> int:
        """Iterations that a trainer has ended or skipped since the last mean of all."""
        return self._places[rank].iteration

    def _on_report(self, member: ScheduledTrainer, event: AnyReport) -> None:
        super()._on_report(member, event)
        place = self._places[event.rank]
        if isinstance(event, Finished):
            self._part(event.rank, set(place.neighbours))
        elif isinstance(event, Waiting):
            # No neighbour is further behind than the gap: to none what is older is new enough.
            least = place.iteration - self._gap - self._stale
            kept = {since: one for since, one in place.published.items() if one[0] >= least}
            place.published = {**kept, event.since: (place.iteration, self.claims.of(event.rank))}

    def _on_receipt(self, event: Receipt) -> None:
        rank, source, since = event.rank, event.source, event.since
        if rank not in self._places or since < self._base:
            return
        place = self._places[rank]
        if source == rank:
            self._whole = self._whole or since == self._base
        elif source in place.neighbours and not event.lost:
            # It may be here before the coordinator has read that it was published.
            place.received[source] = max(since, place.received.get(source, 0))
        elif source in place.neighbours and since == self._base:
            self._part(rank, {source})

    def _part(self, rank: Rank, others: set[Rank]) -> None:
        """Wait for each other no longer."""
        for other in others:
            self._places[rank].neighbours.discard(other)
            self._places[other].neighbours.discard(rank)

    def _on_loss(self, rank: Rank) -> None:
        super()._on_loss(rank)
        if rank in self._places:
            self._part(rank, set(self._places[rank].neighbours))
            del self._places[rank]
            training = {r: p.neighbours for r, p in self._places.items() if not self._is_over(r)}
            self._whole = self._whole or len(reached_in(training)) < len(training)

    def _is_over(self, rank: Rank) -> bool:
        member = self.members.get(rank)
        return member is None or member.finished

    def _dissolve(self) -> None:
        """Nobody is bound."""

    def _without_mean(self, resting: Sequence[Rank]) -> dict[Rank, tuple[int, ...]]:
        if (found := super()._without_mean(resting)) or self._whole:
            return found
        waiting = [rank for rank in resting if not self.members[rank].finished]
        going: list[Rank] = []
        # Who goes on may let a neighbour go on.
        while able := [rank for rank in waiting if rank not in going and self._is_able(rank)]:
            self._advance_one(able[0])
            going.append(able[0])
        return dict.fromkeys(going, ())

    def _is_able(self, rank: Rank) -> bool:
        """Tell whether a trainer that waits may go on."""
        place = self._places[rank]
        ahead = all(
            self._places[other].iteration - place.iteration + self._gap >= 1
            for other in place.neighbours
        )
        return ahead and len(self._fresh(place)) >= len(place.neighbours) - self._backup

    def _fresh(self, place: _Place) -> dict[Rank, int]:
        """Iterations of what has come and is new enough, by neighbour."""
        found: dict[Rank, int] = {}
        for other in sorted(place.neighbours & place.received.keys()):
            published = self._places[other].published.get(place.received[other])
            if published is not None and published[0] >= place.iteration - self._stale:
                found[other] = published[0]
        return found

    def _advance_one(self, rank: Rank) -> None:
        """Begin a trainer's next iteration."""
        place = self._places[rank]
        fresh = self._fresh(place)
        weights = {
            other: max(1, self._stale + 1 + iteration - place.iteration)
            for other, iteration in fresh.items()
        }
        total = self._stale + 1 + sum(weights.values())
        self._takes[rank] = tuple(
            Taken(other, place.received[other], weights.get(other, 0) / total)
            for other in sorted(place.neighbours & place.received.keys())
        )
        for other in fresh:
            _, batches = self._places[other].published[place.received[other]]
            self.claims.take(rank, batches)
        behind = min(
            (self._places[other].iteration - place.iteration for other in place.neighbours),
            default=0,
        )
        place.iteration += max(1, min(behind, self._skip))

    def _go_on(self, claims: Mapping[Rank, tuple[int, ...]]) -> list[AnyAction]:
        takes, self._takes = self._takes, {}
        return [
            replace(action, takes=takes.get(action.rank, ()))
            if isinstance(action, GoOn)
            else action
            for action in super()._go_on(claims)
        ]

    def _resting_groups(self) -> list[tuple[Rank, ...]]:
        return []

    def _commit(self, meeting: RunningMeeting, living: list[Rank]) -> list[AnyAction]:
        self._base = meeting.seq
        graph = self._graph_of(living)
        self._places = {rank: _Place(set(graph[rank])) for rank in living}
        actions = super()._commit(meeting, living)
        if self.ended:
            return actions
        return [
            replace(action, neighbours=tuple(sorted(graph[action.rank])))
            if isinstance(action, Commit)
            else action
            for action in actions
        ]
