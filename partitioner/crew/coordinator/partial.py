"""Rounds in which only some of a network's trainers meet at a time. Pure.

Members of such a meeting count alike, whatever they have done, so that the mean over all trainers
stays what it was. All meet to begin with, where somebody comes, where a number was not finite, and
at the end of an epoch. `Shuffled` is after DS-Sync (arXiv 2007.03298), `OnRequest` after Prague
(DOI 10.1145/3373376.3378499).
"""

import hashlib
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from partitioner.crew.coordinator.claims import SpreadClaims
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import LocalSgdSchedule, ScheduledTrainer
from partitioner.crew.messages import AnyAction, AnyReport, Rank, Waiting

#: Order of trainers in the draw of this number: the least is first.
RankDraw = Callable[[int, Rank], int]
#: Weight of a trainer's last steps in the running estimate of them.
_LAST = 0.2
#: Who has not met another for so many times as many requests as there are others waits longer for
#: it, and after twice as many prefers it.
_LONG = 4


def draw_by(seed: int) -> RankDraw:
    """The draw of a seed, the same in every run: the first 8 bytes of a SHA-256."""

    def draw(number: int, rank: Rank) -> int:
        digest = hashlib.sha256(f"{seed}:{number}:{rank}".encode()).digest()
        return int.from_bytes(digest[:8], "big")

    return draw


def shuffled_groups(
    draw: RankDraw, number: int, sites: Iterable[Sequence[Rank]], size: int, cross_every: int
) -> list[tuple[Rank, ...]]:
    """Groups of round `number`, from 0: a partition of the ranks of all sites.

    Within a site ranks are cut, in the order of the draw, into groups of `size`; one left over
    joins the last group. In each `cross_every`-th round the first of every site form a group
    across the sites, the only one that is.
    """
    drawn = [sorted(site, key=lambda rank: draw(number, rank)) for site in sites]
    found: list[tuple[Rank, ...]] = []
    if len(drawn) > 1 and (number + 1) % cross_every == 0:
        found.append(tuple(sorted(site[0] for site in drawn)))
        drawn = [site[1:] for site in drawn]
    for site in drawn:
        parts = [site[start : start + size] for start in range(0, len(site), size)]
        if len(parts) > 1 and len(parts[-1]) == 1:
            parts[-2:] = [parts[-2] + parts[-1]]
        found += [tuple(sorted(part)) for part in parts]
    return found


class PartialMeetings(LocalSgdSchedule):
    """The base of rounds of some: a subclass decides who stops, and who meets with whom.

    Batches are given out, lost and committed as of `LocalSgdSchedule`; an epoch ends with a mean of
    all.
    """

    claims: SpreadClaims

    def __init__(
        self,
        network: str,
        lengths: RoundLengths,
        expected: Iterable[Rank] = (),
        *,
        draw: RankDraw | None = None,
    ) -> None:
        super().__init__(network, lengths, expected)
        self.claims = SpreadClaims(lengths.batches)
        self._draw = draw or draw_by(0)
        #: Whether the next meeting is of all.
        self._whole = True

    @abstractmethod
    def _stop(self) -> list[AnyAction]:
        """Tell those that are to meet, or to ask for a meeting, to stop."""

    @abstractmethod
    def _dissolve(self) -> None:
        """Forget groups that have not met: all meet instead."""

    def _close(self) -> list[AnyAction]:
        holders = [self.members[rank] for rank in self._holders()]
        strange = len(holders) < len(self.members) or any(m.blamed for m in holders)
        self._whole = self._whole or strange or all(member.finished for member in holders)
        if not self._whole:
            return self._stop()
        self._dissolve()
        return self._tell_to_stop(self.members)

    def _is_whole(self) -> bool:
        return self._whole

    def _without_mean(self, resting: Sequence[Rank]) -> dict[Rank, tuple[int, ...]]:
        found = super()._without_mean(resting)
        self._whole = self._whole and not found
        return found

    def groups(self, resting: Sequence[Rank]) -> list[dict[Rank, float]]:
        """Put all in one group where they are due to meet, else those of each group that rests."""
        if not self._whole:
            return [dict.fromkeys(group, 1.0) for group in self._resting_groups()]
        if not self._all_rest():
            return []
        members = {rank: self.members[rank] for rank in resting}
        return [{rank: float(m.holds and not m.blamed) for rank, m in members.items()}]

    @abstractmethod
    def _resting_groups(self) -> list[tuple[Rank, ...]]:
        """Groups, of which all members rest and are in no meeting."""

    def _on_commit(self, weights: Mapping[Rank, float], *, background: bool, whole: bool) -> None:
        if whole:
            super()._on_commit(weights, background=False, whole=True)
            self._whole = False
            return
        living = [rank for rank in weights if rank in self.members]
        self.claims.spread(weights, living)
        for rank in living:
            self.members[rank].pictures = 0


class Shuffled(PartialMeetings):
    """Groups that are drawn anew in every round, which ends by the pictures of all together.

    A group meets as soon as its members rest; nobody waits for another group. Sites, of trainers
    with quick lines between them, are as `site_of` says: each `cross_every`-th round one group
    crosses them.
    """

    def __init__(
        self,
        network: str,
        lengths: RoundLengths,
        expected: Iterable[Rank] = (),
        *,
        size: int = 2,
        cross_every: int = 4,
        site_of: Callable[[Rank], str] = lambda rank: "",
        draw: RankDraw | None = None,
    ) -> None:
        super().__init__(network, lengths, expected, draw=draw)
        self._size, self._cross_every, self._site_of = size, cross_every, site_of
        self._number = 0
        #: Groups of the round that have not met.
        self._groups: list[tuple[Rank, ...]] = []
        #: Pictures of all since the round before was closed, and those at which this one was.
        self._done = self._closed = 0

    def _on_report(self, member: ScheduledTrainer, event: AnyReport) -> None:
        self._done += max(0, event.pictures - member.pictures)
        super()._on_report(member, event)

    def _stop(self) -> list[AnyAction]:
        self._groups = [group for group in map(self._left_of, self._groups) if len(group) > 1]
        if not self._groups:
            self._done, self._closed = self._done - self._closed, 0
        if not self._groups and self._done >= self._round_pictures():
            self._closed = self._done
            drawn = shuffled_groups(
                self._draw, self._number, self._sites(), self._size, self._cross_every
            )
            self._number += 1
            self._groups = [group for group in drawn if len(group) > 1]
        return [action for group in self._groups for action in self._tell_to_stop(group)]

    def _pictures(self) -> int:
        return self._done

    def _left_of(self, group: tuple[Rank, ...]) -> tuple[Rank, ...]:
        """Those of a group that are still there."""
        return tuple(rank for rank in group if rank in self.members)

    def _sites(self) -> list[list[Rank]]:
        sites: dict[str, list[Rank]] = {}
        for rank in sorted(self.members):
            sites.setdefault(self._site_of(rank), []).append(rank)
        return list(sites.values())

    def _dissolve(self) -> None:
        self._groups, self._done, self._closed = [], 0, 0

    def _without_mean(self, resting: Sequence[Rank]) -> dict[Rank, tuple[int, ...]]:
        if found := super()._without_mean(resting):
            return found
        # One whose group is lost.
        grouped = {rank for group in self._groups for rank in group}
        alone = [r for r in resting if not (self.members[r].finished or r in grouped)]
        return {} if self._whole else dict.fromkeys(alone, ())

    def _resting_groups(self) -> list[tuple[Rank, ...]]:
        return [group for group in self._groups if all(map(self._is_free, group))]

    def _on_commit(self, weights: Mapping[Rank, float], *, background: bool, whole: bool) -> None:
        super()._on_commit(weights, background=background, whole=whole)
        self._groups = [group for group in self._groups if not weights.keys() & set(group)]


class OwnParts(PartialMeetings):
    """The base of rounds in which each stops after its own part of `every_pictures`."""

    def __init__(
        self,
        network: str,
        lengths: RoundLengths,
        expected: Iterable[Rank] = (),
        *,
        draw: RankDraw | None = None,
    ) -> None:
        super().__init__(network, lengths, expected, draw=draw)
        #: Pictures since its last mean with which each went on.
        self._began_pictures: dict[Rank, int] = {}

    def _goes_on(self, rank: Rank, seq: int) -> None:
        super()._goes_on(rank, seq)
        self._began_pictures[rank] = self.members[rank].pictures

    def _may_stop(self, member: ScheduledTrainer, training: Iterable[ScheduledTrainer]) -> bool:
        return not self._whole or super()._may_stop(member, training)

    def _stop(self) -> list[AnyAction]:
        part = self._round_pictures() / len(self.members)
        due = [
            rank
            for rank, member in self.members.items()
            if member.pictures - self._began_pictures.get(rank, 0) >= part
        ]
        return self._tell_to_stop(due)


@dataclass(slots=True)
class _Asking:
    """A trainer as one that asks for meetings."""

    #: How often it has asked since the last mean of all.
    count: int = 0
    #: When it went on, and how long it takes to ask.
    began_s: float = 0.0
    lap_s: float | None = None
    #: Whether the lap in hand tells that. After a mean of all it may hold validation, or the first
    #: step.
    is_usual: bool = False
    #: How often it had asked when it last met another.
    met: dict[Rank, int] = field(default_factory=dict)


class OnRequest(OwnParts):
    """Groups that are drawn as trainers ask for one, each after its part of `every_pictures`.

    Who asks and is in no group gets one of `size`, drawn among those that are in none, have asked
    at most `gap` times less often since the last mean of all, and are expected to ask within
    `reach` times its own lap from one request to the next, longer for who has not been met for
    long. With `divide` all others of these are put in groups too, one left over in a group of its
    own. A group meets once all its members have asked; who is alone, or was in a meeting that
    failed, goes on. With an infinite `reach` and `divide` these are Prague's groups.
    """

    def __init__(
        self,
        network: str,
        lengths: RoundLengths,
        expected: Iterable[Rank] = (),
        *,
        size: int = 2,
        gap: int = 8,
        reach: float = 0.25,
        divide: bool = False,
        draw: RankDraw | None = None,
    ) -> None:
        super().__init__(network, lengths, expected, draw=draw)
        self._size, self._gap, self._reach, self._divide = size, gap, reach, divide
        self._asking: dict[Rank, _Asking] = {}
        self._number = 0
        #: Groups that have not met, by rank, and those who ask for one.
        self._groups: dict[Rank, tuple[Rank, ...]] = {}
        self._requests: list[Rank] = []

    def _on_report(self, member: ScheduledTrainer, event: AnyReport) -> None:
        super()._on_report(member, event)
        if isinstance(event, Waiting) and not self._whole:
            asking = self._asking[event.rank]
            asking.count += 1
            if asking.is_usual:
                took_s = self._now_s - asking.began_s
                before_s = took_s if asking.lap_s is None else asking.lap_s
                asking.lap_s = before_s + _LAST * (took_s - before_s)
            asking.is_usual = True
            self._requests.append(event.rank)

    def _goes_on(self, rank: Rank, seq: int) -> None:
        super()._goes_on(rank, seq)
        self._asking[rank].began_s = self._now_s

    def _stop(self) -> list[AnyAction]:
        self._groups = {
            rank: tuple(other for other in group if other in self.members)
            for rank, group in self._groups.items()
            if rank in self.members
        }
        requests, self._requests = self._requests, []
        for rank in requests:
            if rank in self.members and rank not in self._groups:
                self._form(rank)
        return super()._stop()

    def _form(self, rank: Rank) -> None:
        """Put a trainer that asks in a group; with `divide` all others that are free, too."""
        asking, self._number = self._asking[rank], self._number + 1
        free = [
            other
            for other, member in self.members.items()
            if other not in self._groups
            and other != rank
            and not member.finished
            and asking.count - self._asking[other].count <= self._gap
            and self._due_s(other) <= self._now_s + self._reach_s(rank, other)
        ]
        free.sort(
            key=lambda other: (-int(self._patience(rank, other)), self._draw(self._number, other))
        )
        drawn = [rank, *free]
        parts = [
            tuple(sorted(drawn[start : start + self._size]))
            for start in range(0, len(drawn) if self._divide else 1, self._size)
        ]
        if len(parts[0]) == 1:  # it goes on at once
            del parts[0]
        self._groups |= {one: group for group in parts for one in group}

    def _reach_s(self, rank: Rank, other: Rank) -> float:
        """Seconds for which a trainer that asks waits for another."""
        if self._reach == math.inf:
            return math.inf  # of a lap of no time too
        return self._reach * (self._asking[rank].lap_s or 0.0) * self._patience(rank, other) ** 2

    def _patience(self, rank: Rank, other: Rank) -> float:
        """Times as long as usual that it has not met another, squared what it waits for it.

        Equal trainers that are out of step would never meet otherwise.
        """
        since = self._asking[rank].count - self._asking[rank].met.get(other, 0)
        return max(1.0, since / (_LONG * max(1, len(self.members) - 1)))

    def _due_s(self, rank: Rank) -> float:
        """The time at which a trainer is expected to ask: now, where nothing is known."""
        asking = self._asking[rank]
        if asking.lap_s is None:
            return self._now_s
        return (self._now_s if rank in self._meetings else asking.began_s) + asking.lap_s

    def _dissolve(self) -> None:
        self._groups, self._requests = {}, []

    def _without_mean(self, resting: Sequence[Rank]) -> dict[Rank, tuple[int, ...]]:
        if (found := super()._without_mean(resting)) or self._whole:
            return found
        alone = [
            rank
            for rank in resting
            if len(self._groups.get(rank, ())) < 2 and not self.members[rank].finished
        ]
        for rank in alone:
            self._groups.pop(rank, None)
        return dict.fromkeys(alone, ())

    def _resting_groups(self) -> list[tuple[Rank, ...]]:
        groups = dict.fromkeys(self._groups.values())
        return [g for g in groups if len(g) > 1 and all(map(self._is_free, g))]

    def _meet(self, weights: dict[Rank, float]) -> list[AnyAction]:
        # While they meet they may be put in the next group.
        self._groups = {rank: g for rank, g in self._groups.items() if rank not in weights}
        for rank in weights if not self._whole else ():
            asking = self._asking[rank]
            asking.met |= dict.fromkeys(weights.keys() - {rank}, asking.count)
        return super()._meet(weights)

    def _on_commit(self, weights: Mapping[Rank, float], *, background: bool, whole: bool) -> None:
        super()._on_commit(weights, background=background, whole=whole)
        if whole:
            # Nobody is behind or strange to another any more, who comes now neither.
            laps = {rank: asking.lap_s for rank, asking in self._asking.items()}
            self._asking = {rank: _Asking(lap_s=laps.get(rank)) for rank in weights}
