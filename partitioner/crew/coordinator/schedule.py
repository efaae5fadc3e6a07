"""Rounds of the trainers of a network: local SGD, and gradients averaged in every step.

A round closes, all finish the step in hand and rest, and they meet: those of one group, or of
several at once. All living members of a meeting have the result before any takes it over (Commit);
otherwise they meet again, with their own parameters unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from partitioner.crew.coordinator.claims import Claims
from partitioner.crew.coordinator.rounds import RoundLengths, constant_period
from partitioner.crew.messages import (
    AnyAction,
    AnyEvent,
    AnyReport,
    Close,
    Commit,
    Done,
    Finished,
    Gone,
    GoOn,
    Meet,
    MeetingFailed,
    Rank,
    Ready,
    Receipt,
    Refused,
    Waiting,
)

#: Meetings in a row that fail without a trainer lost or blamed: some cannot reach each other.
ATTEMPTS = 5
#: A step that takes so many times longer than another's is waited for by training on, until a
#: round has so many times its pictures.
_LONGER, _LONGEST = 2, 1.5


@dataclass(slots=True)
class ScheduledTrainer:
    """A trainer as its schedule sees it."""

    #: Epochs that it had behind it as it entered, by its checkpoint.
    epoch: int = 0
    #: The number of the last Commit or GoOn that it was told.
    since: int = 0
    pictures: int = 0
    #: Those of a mean in the background that failed; they count as done since the last mean.
    carried: int = 0
    #: Whether it has the network's committed parameters; a newcomer gets them by its first mean.
    holds: bool = False
    #: Whether it has reported Waiting or Finished, and not been told to go on.
    rests: bool = True
    finished: bool = False
    #: Whether it has been told that the round closes.
    told: bool = False
    #: Reports of all when it last reported a step, and between its last two.
    reported: int = 0
    lap: int = 0
    #: Whether it sent a number that is not finite in this round, and ever.
    blamed: bool = False
    blamed_before: bool = False
    #: Meetings in a row that failed with it, without a trainer lost or blamed.
    failures: int = 0


@dataclass(slots=True)
class RunningMeeting:
    seq: int
    weights: dict[Rank, float]
    #: Whether its members go on meanwhile, and whether it is of all that take part.
    background: bool
    whole: bool
    #: Whether a member has the result; who failed may have named who sent the number.
    answers: dict[Rank, bool] = field(default_factory=dict)
    blamed: set[Rank] = field(default_factory=set)


class RoundSchedule(ABC):
    """The base of all rounds; a subclass decides when they close, who meets and whose part counts.

    Meetings are held by rank, so that several may be under way, each with members of its own. A
    round of all closes when none is. The first meeting waits for those that are `expected`: of them
    the one with most epochs behind it gives its parameters, of equals the lowest rank, and the
    training goes on with its epoch.
    """

    def __init__(self, network: str, epochs: int, expected: Iterable[Rank] = ()) -> None:
        self.network, self.epochs, self.epoch = network, epochs, 0
        self._expected = set(expected)
        #: Why nobody trains this network any more; empty: it is, or will be.
        self.ended = ""
        #: The same where beginning again would end alike.
        self.failed = ""
        self.members: dict[Rank, ScheduledTrainer] = {}
        self._seq = 0
        self._started = self._closing = False
        #: Meetings under way by rank, until each is resolved; of lost members too.
        self._meetings: dict[Rank, RunningMeeting] = {}
        #: Time of the event in hand.
        self._now_s = 0.0

    def handle(self, event: AnyEvent, now_s: float = 0.0) -> list[AnyAction]:
        """Take the log's next event; returns what trainers are told, in order.

        Reports of trainers that have not entered, or that belong to an earlier round or meeting,
        change nothing.
        """
        rank, self._now_s = event.rank, now_s
        if isinstance(event, Gone) and rank in self._expected:
            self._expected.discard(rank)
            if rank not in self.members and not self.ended:
                return self._advance()
        if self.ended:
            entering = isinstance(event, Waiting) and not event.since
            return [self._refusal(rank)] if entering else []
        member = self.members.get(rank)
        match event:
            case Gone() if member:
                del self.members[rank]
                if member.holds and rank not in self._meetings:
                    self._on_loss(rank)
            case Waiting(since=0) if member is None:
                self.members[rank] = ScheduledTrainer(epoch=event.epoch)
            case Ready() | Waiting() | Finished() if member:
                if event.since != member.since or member.rests:
                    return []
                self._on_report(member, event)
            case Done() | MeetingFailed():
                meeting = self._meetings.get(rank)
                if meeting is None or meeting.seq != event.seq:
                    return []
                meeting.answers[rank] = isinstance(event, Done)
                if isinstance(event, MeetingFailed) and event.blamed in meeting.weights:
                    meeting.blamed.add(event.blamed)
            case Receipt() if member:
                self._on_receipt(event)
            case _:
                return []
        return self._advance()

    def _on_report(self, member: ScheduledTrainer, event: AnyReport) -> None:
        member.pictures = event.pictures
        member.rests = not isinstance(event, Ready)
        member.finished = isinstance(event, Finished)

    def _on_receipt(self, event: Receipt) -> None:  # noqa: B027
        """A trainer has what a neighbour published, or has lost it; only `Neighbours` has such."""

    def _advance(self) -> list[AnyAction]:
        actions: list[AnyAction] = []
        for meeting in {one.seq: one for one in self._meetings.values()}.values():
            actions += self._resolve(meeting)
            if self.ended:
                return actions
        if not self._meetings and not self._givers() and (self._started or self.members):
            reason = f"no trainer that has the parameters of {self.network} is left"
            return actions + self._end(f"{reason}: start again from the last checkpoint")
        actions += self._close()
        awaits = not self._started and self._expected - self.members.keys()
        resting = [rank for rank in sorted(self.members) if self._is_free(rank)]
        if resting and not awaits:
            if claims := self._without_mean(resting):
                actions += self._go_on(claims) + self._has_ended()
            if not self.ended:
                for weights in self.groups([rank for rank in resting if rank not in claims]):
                    actions += self._meet(weights)
        return actions

    def _is_free(self, rank: Rank) -> bool:
        """Tell whether a trainer rests, and is in no meeting."""
        return self.members[rank].rests and rank not in self._meetings

    def _close(self) -> list[AnyAction]:
        """Tell those that may stop now, if the round closes."""
        if not self._meetings:
            self._closing = self._closing or self._due()
        if self._meetings or not self._closing:
            return []
        return self._tell_to_stop(self.members)

    def _tell_to_stop(self, ranks: Iterable[Rank]) -> list[AnyAction]:
        """Tell those of some that train and may stop now, each once."""
        training = {rank: self.members[rank] for rank in ranks if not self.members[rank].rests}
        told: list[AnyAction] = []
        for rank, member in training.items():
            if not member.told and self._may_stop(member, training.values()):
                member.told = True
                told.append(Close(rank=rank, network=self.network))
        return told

    def _may_stop(self, member: ScheduledTrainer, training: Iterable[ScheduledTrainer]) -> bool:
        """Tell whether one that trains, with these, is told now that the round closes."""
        return True

    def _resolve(self, meeting: RunningMeeting) -> list[AnyAction]:
        """Commit a meeting that all living members have finished, or end one that has failed."""
        living = [rank for rank in meeting.weights if rank in self.members]
        if any(rank not in meeting.answers for rank in living):
            return []
        for rank in meeting.weights:
            del self._meetings[rank]
        if living and all(meeting.answers[rank] for rank in living):
            return self._commit(meeting, living)
        for rank in meeting.weights.keys() - living:
            self._on_loss(rank)
        if meeting.background:
            self._on_failure({rank: meeting.weights[rank] for rank in living})
        blamed = [rank for rank in living if rank in meeting.blamed]
        for rank in blamed:
            member = self.members[rank]
            # In the background it has gone on with that number.
            ends = self._on_divergence(member) or meeting.background
            member.blamed = member.blamed_before = True
            if ends or not self._givers():
                return self._fail(f"trainer {rank} sent a number that is not finite")
            member.pictures = member.carried = 0
            self._on_loss(rank)
        lost = len(living) < len(meeting.weights)
        for rank in living:
            member = self.members[rank]
            member.failures = 0 if blamed or lost else member.failures + 1
        if any(self.members[rank].failures == ATTEMPTS for rank in living):
            names = ", ".join(map(str, living))
            return self._fail(
                f"{ATTEMPTS} means of {names} failed: they do not all reach each other"
            )
        return []

    def _commit(self, meeting: RunningMeeting, living: list[Rank]) -> list[AnyAction]:
        self._closing, self._started = False, True
        self._on_commit(meeting.weights, background=meeting.background, whole=meeting.whole)
        for rank in meeting.weights.keys() - living:
            self._on_loss(rank)  # what it has done meanwhile
        for rank in living:
            self.members[rank].failures = 0
        for rank in [] if meeting.background else living:
            member = self.members[rank]
            member.holds, member.blamed = True, False
            self._goes_on(rank, meeting.seq)
        seq, epoch = meeting.seq, self.epoch
        actions: list[AnyAction] = [
            Commit(rank=rank, network=self.network, seq=seq, epoch=epoch) for rank in living
        ]
        return actions + self._has_ended()

    def _has_ended(self) -> list[AnyAction]:
        """After the last epoch: who came too late to be told of it is refused."""
        if self.epoch < self.epochs:
            return []
        for rank in [rank for rank, member in self.members.items() if not member.rests]:
            del self.members[rank]
        return self._end(f"{self.network} is trained")

    def _goes_on(self, rank: Rank, seq: int) -> None:
        member = self.members[rank]
        member.since, member.rests, member.finished, member.told = seq, False, False, False

    def _meet(self, weights: dict[Rank, float]) -> list[AnyAction]:
        """A group meets; where nobody has a weight, the first that may gives its parameters."""
        if not any(weights.values()):
            giver = next(rank for rank in self._givers() if rank in weights)
            weights[giver] = 1.0
            if not self._started:
                self._begin_at(self.members[giver].epoch)
        self._seq += 1
        background, whole = self._begin_background(weights), self._is_whole()
        self._meetings |= dict.fromkeys(
            weights, RunningMeeting(self._seq, weights, background, whole)
        )
        if background:
            self._closing = False
            for rank in weights:
                self._goes_on(rank, self._seq)
        first = Meet(
            rank=0,
            network=self.network,
            seq=self._seq,
            members=tuple(weights),
            weights=tuple(weights.values()),
            background=background,
            whole=whole,
            ends=whole and not background and self._ends_epoch(),
        )
        return [replace(first, rank=rank) for rank in weights]

    def _begin_at(self, epoch: int) -> None:
        """Take in that the training goes on after so many epochs."""
        self.epoch = epoch

    def go_on_from(self, former: "RoundSchedule") -> None:
        """Use no number of a network that begins anew twice."""
        self._seq = former._seq

    def _go_on(self, claims: Mapping[Rank, tuple[int, ...]]) -> list[AnyAction]:
        """Go on without a mean."""
        self._seq += 1
        self._closing = False
        for rank in claims:
            self._goes_on(rank, self._seq)
        told = GoOn(rank=0, network=self.network, seq=self._seq, epoch=self.epoch)
        return [replace(told, rank=rank, claims=given) for rank, given in claims.items()]

    def end(self, reason: str) -> list[AnyAction]:
        """End a network for a reason, unless it has ended: who trains it or waits is refused."""
        return [] if self.ended else self._end(reason)

    def _end(self, reason: str) -> list[AnyAction]:
        self.ended = reason
        told: list[AnyAction] = [self._refusal(rank) for rank in self.members]
        self.members.clear()
        return told

    def _fail(self, reason: str) -> list[AnyAction]:
        self.failed = f"{self.network}: {reason}"
        return self._end(self.failed)

    def _refusal(self, rank: Rank) -> Refused:
        return Refused(rank=rank, network=self.network, reason=self.ended)

    def _givers(self) -> list[Rank]:
        """Trainers that may give their parameters to all: before the first mean, anybody may."""
        ranks = self._holders() if self._started else self._by_epoch()
        return [rank for rank in ranks if not self.members[rank].blamed]

    def _by_epoch(self) -> list[Rank]:
        return sorted(self.members, key=lambda rank: (-self.members[rank].epoch, rank))

    def _holders(self) -> list[Rank]:
        return sorted(rank for rank, member in self.members.items() if member.holds)

    @abstractmethod
    def _due(self) -> bool:
        """Tell whether the round closes."""

    @abstractmethod
    def groups(self, resting: Sequence[Rank]) -> list[dict[Rank, float]]:
        """The groups in which trainers that rest meet now, with everyone's weight; no rank twice.

        Each has a member that has the parameters, or, before the first mean, any.
        """

    def _without_mean(self, resting: Sequence[Rank]) -> dict[Rank, tuple[int, ...]]:
        """Those of `resting` that go on with their own parameters, and batches given to them."""
        return {}

    def _all_rest(self) -> bool:
        """Tell whether nobody trains or meets."""
        return all(self._is_free(rank) for rank in self.members)

    @abstractmethod
    def _on_divergence(self, member: ScheduledTrainer) -> bool:
        """Tell whether one more number that is not finite ends the training."""

    @abstractmethod
    def _on_loss(self, rank: Rank) -> None:
        """Take in that a trainer's work since the last mean is gone."""

    @abstractmethod
    def _on_commit(self, weights: Mapping[Rank, float], *, background: bool, whole: bool) -> None:
        """A mean with these weights is its members' state; they may have gone on."""

    def _is_whole(self) -> bool:
        """Tell whether meetings that begin now are of all that take part."""
        return True

    def _ends_epoch(self) -> bool:
        """Tell whether the epoch ends with a mean that begins now, unless work is lost."""
        return False

    def _begin_background(self, weights: Mapping[Rank, float]) -> bool:
        """Let these members go on while they meet, if they may; tells whether they do."""
        return False

    def _on_failure(self, weights: Mapping[Rank, float]) -> None:  # noqa: B027
        """A mean in the background has failed, and these members have what they gave to it."""


class LocalSgdSchedule(RoundSchedule):
    """Means of parameters, each when all together have done a round's pictures, or somebody comes.

    An epoch ends with a mean. Weights are pictures since the last mean, 0 for
    newcomers. Who sends a number that is not finite is left out of the mean once; a second time
    ends the training.

    In the `background` all train on meanwhile, where nobody enters and the epoch does not end; one
    mean is under way at most, and a number that is not finite ends the training at once.
    """

    def __init__(
        self,
        network: str,
        lengths: RoundLengths,
        expected: Iterable[Rank] = (),
        *,
        background: bool = False,
    ) -> None:
        super().__init__(network, lengths.epochs, expected)
        self.batches = lengths.batches
        self._period = lengths.period or constant_period(lengths.every_pictures)
        self._background = background
        self._reports = 0
        self.claims = Claims(lengths.batches)

    def _on_report(self, member: ScheduledTrainer, event: AnyReport) -> None:
        super()._on_report(member, event)
        self.claims.report(event.rank, event.claims)
        if isinstance(event, Ready):
            self._reports += 1
            member.lap, member.reported = self._reports - member.reported, self._reports

    def _may_stop(self, member: ScheduledTrainer, training: Iterable[ScheduledTrainer]) -> bool:
        """Tell whether nobody's step takes much longer: the quick go on meanwhile."""
        longest = max(self._length(one) for one in training)
        long = self._pictures() >= _LONGEST * self._round_pictures()
        return long or longest <= _LONGER * self._length(member)

    def _length(self, member: ScheduledTrainer) -> int:
        """Length of a step, the one in hand or the last, in reports of all."""
        return max(member.lap, self._reports - member.reported)

    def _due(self) -> bool:
        comes = len(self._holders()) < len(self.members)
        return comes or self._pictures() >= self._round_pictures()

    def _round_pictures(self) -> int:
        """Pictures of the round, as far as the training is."""
        return self._period(self.epoch * self.batches + self.claims.count)

    def _pictures(self) -> int:
        return sum(member.pictures + member.carried for member in self.members.values())

    def _without_mean(self, resting: Sequence[Rank]) -> dict[Rank, tuple[int, ...]]:
        holders = self._holders()
        blamed = any(member.blamed for member in self.members.values())
        ends = holders and not blamed and all(self.members[rank].finished for rank in holders)
        if not (ends and self._all_rest()):
            return {}
        # The counter has run out and nobody has a batch in hand: what is missing was lost.
        missing = self.claims.missing()
        parts = {rank: tuple(missing[i :: len(holders)]) for i, rank in enumerate(holders)}
        return {rank: part for rank, part in parts.items() if part}

    def groups(self, resting: Sequence[Rank]) -> list[dict[Rank, float]]:
        """Put all in one group, by their pictures since the last mean."""
        if not self._all_rest():
            return []
        members = {rank: self.members[rank] for rank in resting}
        return [{rank: float(m.pictures + m.carried) for rank, m in members.items()}]

    def _ends_epoch(self) -> bool:
        return self.claims.count == self.batches

    def _begin_background(self, weights: Mapping[Rank, float]) -> bool:
        members = [self.members[rank] for rank in weights]
        able = all(member.holds and not member.blamed for member in members)
        if not (self._background and able) or all(member.finished for member in members):
            return False
        for rank, member in zip(weights, members, strict=True):
            self.claims.meet(rank)
            member.pictures = member.carried = 0
        return True

    def _on_failure(self, weights: Mapping[Rank, float]) -> None:
        for rank, pictures in weights.items():
            self.claims.fail(rank)
            self.members[rank].carried += int(pictures)

    def _on_divergence(self, member: ScheduledTrainer) -> bool:
        return member.blamed_before

    def _on_loss(self, rank: Rank) -> None:
        self.claims.lose(rank)

    def _on_commit(self, weights: Mapping[Rank, float], *, background: bool, whole: bool) -> None:
        for rank in weights:
            self.claims.commit(rank)
            if rank in self.members and not background:
                self.members[rank].pictures = self.members[rank].carried = 0
        if self.claims.complete and not background:
            self.epoch += 1
            self.claims = type(self.claims)(self.batches)


class SynchronousSchedule(RoundSchedule):
    """Gradients averaged in every step, within a group of the last meeting: its generation.

    `pictures` of a report is the position in the run. A trainer whose step fails reports Waiting.
    When one is lost, or waits, all stop; those furthest on have weight 1 and give their state, and
    the living are the next generation. Newcomers enter with it, or at the end of an epoch.
    """

    def __init__(self, network: str, epochs: int, expected: Iterable[Rank] = ()) -> None:
        super().__init__(network, epochs, expected)
        self._reduced = False

    def _begin_at(self, epoch: int) -> None:
        """Count generations that ended, whatever epochs their checkpoints have."""

    def _due(self) -> bool:
        waits = (m.rests and not m.finished for m in self.members.values() if m.holds)
        return self._reduced or any(waits)

    def _without_mean(self, resting: Sequence[Rank]) -> dict[Rank, tuple[int, ...]]:
        holders = self._holders()
        ends = holders and all(self.members[rank].finished for rank in holders)
        if not (ends and self._all_rest()):
            return {}
        self.epoch += 1
        if self.epoch == self.epochs or not (self._reduced or len(holders) < len(self.members)):
            return dict.fromkeys(holders, ())
        for rank in holders:
            # A meeting that is tried again ends no further epoch.
            self.members[rank].finished = False
        return {}

    def groups(self, resting: Sequence[Rank]) -> list[dict[Rank, float]]:
        """Put all in one group, to which those furthest on give their state."""
        if not self._all_rest():
            return []
        holders = self._holders()
        furthest = max((self.members[rank].pictures for rank in holders), default=0)
        members = {rank: self.members[rank] for rank in resting}
        return [
            {
                rank: float(member.holds and member.pictures == furthest)
                for rank, member in members.items()
            }
        ]

    def _on_divergence(self, member: ScheduledTrainer) -> bool:
        return True

    def _on_loss(self, rank: Rank) -> None:
        self._reduced = True

    def _on_commit(self, weights: Mapping[Rank, float], *, background: bool, whole: bool) -> None:
        # One that was lost in the meeting itself is in its group: the next needs another.
        self._reduced = not all(rank in self.members for rank in weights)
