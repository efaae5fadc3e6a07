"""Local steps and rounds: every trainer takes its own steps, and all meet now and then.

Local SGD (Stich, 2019) with rounds that end by the pictures of all together, so that nobody waits
for a number of steps of the slowest. When a round ends is the schedule's to say
(`partitioner.crew.coordinator`); here a trainer reports, meets and takes over what is committed.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, nn

from mdp.errors import MDPError
from partitioner.crew.averaging.codecs import CODECS, Codec
from partitioner.crew.averaging.flat import CodecOf, Flat, join, moments_of, write
from partitioner.crew.averaging.mean import (
    EVERY_NUMBER,
    Mask,
    Mean,
    Means,
    Meeting,
    NotFinite,
    Segment,
)
from partitioner.crew.averaging.neighbours import NewestVectors
from partitioner.crew.averaging.owners import OuterStep
from partitioner.crew.coordinator.rounds import averages_moments, step_factor
from partitioner.crew.coordinator.sizes import CodecName
from partitioner.crew.messages import (
    AnyAction,
    Close,
    Commit,
    Done,
    Finished,
    GoOn,
    Meet,
    MeetingFailed,
    Ready,
    Receipt,
    Refused,
    Taken,
    TrainerControl,
    Waiting,
    cursor,
)
from partitioner.training.distributed import PATIENCE, Crew
from partitioner.training.synchroniser import Index, Share, step_clipped

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch._C._distributed_c10d import ProcessGroupGloo
    from torch.distributed import ProcessGroup

#: Wait of one poll for an action.
_POLL_S = 1.0
#: Numbers told at the end of an epoch: claims, and losses of at most so many names less one.
_TOLD = 16


class CrewEnded(MDPError):
    """The coordinator tells this trainer to take no further part."""


class ProcessGroups(Protocol):
    """Makes process groups of trainers that meet."""

    def of(
        self, network: str, seq: int, members: Sequence[int]
    ) -> "ProcessGroupGloo | ProcessGroup":
        """The group of a meeting, in the order of `members`; RuntimeError where one is lost."""

    def drop(self, network: str, members: Sequence[int]) -> None:
        """Let go of a group, so that members that still wait in it fail at once."""


@dataclass(slots=True)
class _Result:
    """The mean of a meeting, not yet taken over."""

    seq: int
    meeting: Meeting
    #: Whether all met that take part.
    whole: bool
    #: Places of the members that had the network before.
    entered: list[int]
    #: The network that all have now, and what a codec left out of the own one.
    vector: Tensor
    left: Tensor | None
    #: Whether the network's codecs were used.
    coded: bool
    #: Moments, where they were averaged too.
    moments: Tensor | None


@dataclass(slots=True)
class _Late:
    """A meeting in the background: the parameters that were given to it, and its mean."""

    meet: Meet
    given: Tensor
    mean: "Future[_Result]"


class Rounds:
    """A `Synchroniser` by means of parameters. One object for one training of one network.

    trainers: how many share the batches, which are cut into as many steps. first: whether this one
    keeps checkpoints and the outcome. scales: multiply the step size by `step_factor`. moments:
    AdamW's are averaged too, in each so many meetings; 0 for none. outer: the owner's step from the
    last mean to the next. stride: of parameters each so many-th travels in a mean, by the number of
    the meeting, which all members know. codecs: those of names. A trainer enters by a meeting,
    where it receives parameters and moments, so that it may come at any time; its epoch begins
    where the others are. From then on moments are each trainer's own. Where only some meet,
    differences that are sent are those from the last mean of all. What was not sent stays with the
    parameters: x += C(mean) - C(own). Where that may be most of it, members count alike, and an
    epoch's last mean is of every number. Raises CrewEnded where the schedule refuses this trainer.
    """

    def __init__(
        self,
        network: str,
        trainer: TrainerControl,
        groups: ProcessGroups,
        trainers: int,
        *,
        first: bool,
        means: Means,
        codec_of: CodecOf,
        scales: bool = False,
        moments: int = 0,
        outer: OuterStep | None = None,
        stride: int = 1,
        codecs: Mapping[CodecName, Codec] = CODECS,
    ) -> None:
        self._network, self._trainer, self._groups = network, trainer, groups
        self._trainers, self._first = trainers, first
        self._means, self._codec_of = means, codec_of
        self._stride, self._codecs = stride, codecs
        self._scales, self._every_moments, self._outer = scales, moments, outer
        self._factor = 1.0
        self._mean = Mean([], means)
        self._pictures = self._seq = self._epoch = 0
        self._entered = False
        self._result: _Result | None = None
        self._settled: _Result | None = None
        #: Of the last meeting, if that was in the background; one thread takes such means.
        self._late: _Late | None = None
        self._thread = ThreadPoolExecutor(1, "crew-mean")
        #: What a codec left out of the epoch's last mean: it stays with this trainer's parameters.
        self._left: Tensor | None = None
        self._claims = self._batches = 0
        #: Bytes sent beside the means: to newcomers.
        self.settling_bytes = 0
        #: The lines to neighbours, if there are any, until all meet; and bytes of all so far.
        self._newest: NewestVectors | None = None
        self._published_bytes: list[Mapping[int, int]] = []

    @property
    def crew(self) -> Crew:
        """This trainer alone: no step waits for another."""
        return Crew(rank=0 if self._first else 1)

    @property
    def parts(self) -> int:
        """A batch is cut into a step for each trainer."""
        return self._trainers

    @property
    def bytes_sent(self) -> int:
        """Bytes of parameters that this trainer has sent, in means and to neighbours."""
        return self._mean.sent_bytes + sum(sum(line.values()) for line in self._published_bytes)

    def wrap(
        self, module: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
    ) -> nn.Module:
        """The module itself."""
        self._module, self.optimiser = module, optimiser
        self._flat = Flat(module, self._codec_of, self._codecs)
        self._mean = Mean(self._flat.segments, self._means)
        codecs = [s.codec for s in self._flat.segments]
        #: Whether differences from the last mean are sent, instead of parameters, and whether most
        #: of a difference may stay with the parameters.
        lossy = any(codec.lossy for codec in codecs)
        self._differs = self._outer is not None or self._stride > 1 or lossy
        self._postpones = self._stride > 1 or any(codec.sparse for codec in codecs)
        return module

    def begin(self, epoch: int) -> int:
        """Enter: receive the network from those that have it."""
        self._epoch = epoch
        self._trainer.report(
            Waiting(rank=self._trainer.rank, network=self._network, pictures=0, epoch=epoch)
        )
        self._rest()
        # Others may have begun again from an earlier one: what this trainer knows is not theirs.
        self._entered, self._behind = True, self._epoch != epoch
        return self._epoch

    def shares(self, batches: Sequence[Index], epoch: int) -> Iterator[Share]:
        """Batches that nobody else has taken, until all of the epoch are in a committed mean."""
        self._claims, self._batches = 0, len(batches)
        self._settled = None
        if self._left is not None:
            self._flat.write(self._flat.read() + self._left)
            self._left = None
        counter = cursor(self._network, epoch)
        while self._epoch == epoch:
            number = self._trainer.claim(counter)
            if number < len(batches):
                self._claims += 1
                yield number, batches[number], 1.0
                continue
            self._part()
            self._report(Finished)
            self._rest()

    def step_losses(self, losses: Tensor) -> Tensor:
        """The own ones."""
        return losses

    def update(self, optimiser: torch.optim.Optimizer) -> float:
        """Take a step with the own gradients, of the size that a part of a batch needs."""
        for group in optimiser.param_groups:
            group["lr"] *= self._factor
        return step_clipped(self._module, optimiser)

    def after_step(self, pictures: int) -> None:
        """Report the step, and meet where the round is closed."""
        self._pictures += pictures
        self._attend()
        self._report(Ready)
        while (action := self._trainer.poll()) is not None:
            self._check_refused(action)
            if isinstance(action, Close) and action.network == self._network:
                self._stop()
                self._rest()
            elif isinstance(action, Commit) and action.network == self._network:
                self._take_over(action)

    def settle(self, sums: Tensor) -> Tensor:
        """The epoch's last mean has been taken over.

        The first trainer returns the losses of all claims, the others an estimate from their own.
        """
        told = torch.zeros(_TOLD, dtype=torch.float64)
        told[0], told[1 : 1 + len(sums)] = self._claims, sums
        if (settled := self._settled) is not None:
            first, *others = settled.entered
            if settled.meeting.place != first:
                self._send(settled, told, first)
            else:
                for place in others:
                    received = torch.zeros_like(told)
                    if self._receive(settled, received, place):
                        told += received
        claims = max(1.0, float(told[0]))
        return told[1 : 1 + len(sums)] * (self._batches / claims)

    def from_first(self, value_of: "Callable[[], float]") -> float:
        """A number that the first trainer computes; the others wait for it as long as it takes."""
        settled = self._settled
        if settled is None:
            return value_of()
        first, *others = settled.entered
        message = torch.zeros(1, dtype=torch.float64)
        if settled.meeting.place != first:
            # To validate takes as long as it takes.
            if not self._receive(settled, message, first, PATIENCE):
                raise CrewEnded(f"{self._network}: the trainer that validates is lost")
            return float(message[0])
        message[0] = value_of()
        for place in others:
            self._send(settled, message, place)
        return float(message[0])

    def all_stop(self, stop: bool) -> bool:
        """Decide as the first trainer does; a newcomer goes on with the others."""
        if self._settled is None:
            return stop and not self._behind
        return bool(self.from_first(lambda: float(stop)))

    @staticmethod
    def _send(settled: _Result, message: Tensor, place: int) -> None:
        """Send to a member that may be lost, and then needs nothing."""
        with suppress(RuntimeError):
            settled.meeting.group.send([message], place, 0).wait()

    @staticmethod
    def _receive(
        settled: _Result, message: Tensor, place: int, patience: timedelta | None = None
    ) -> bool:
        """Fill `message`, within the group's timeout or `patience`; False: the sender is lost."""
        try:
            # Where the sender is gone already, this raises at once.
            received = settled.meeting.group.recv([message], place, 0)
            received.wait() if patience is None else received.wait(patience)
        except RuntimeError:
            return False
        return True

    def _report(self, kind: type[Ready | Waiting | Finished]) -> None:
        self._trainer.report(
            kind(
                rank=self._trainer.rank,
                network=self._network,
                pictures=self._pictures,
                since=self._seq,
            )
        )

    def _stop(self) -> None:
        """Report that the own part is done, and publish the parameters to the neighbours."""
        newest = self._newest
        if newest is None:
            self._report(Waiting)
            return
        vector = self._flat.read()
        if bool(vector.isfinite().all()):
            self._report(Waiting)
            sent = vector - self.common if self._differs else vector
            newest.publish(self._seq, self._mean.encode(sent))
        else:
            self._report_receipt(newest.number, self._trainer.rank, None)
            self._report(Waiting)

    def _report_receipt(self, number: int, source: int, since: int | None) -> None:
        """Report what has come since mean `number`; None: `source` is lost."""
        self._trainer.report(
            Receipt(
                rank=self._trainer.rank,
                network=self._network,
                source=source,
                since=number if since is None else since,
                lost=since is None,
            )
        )

    def _take(self, takes: Sequence[Taken]) -> None:
        """Take the mean of the own parameters and what neighbours have published."""
        if self._newest is None or not takes:
            return
        found = self._flat.read() * (1 - sum(taken.share for taken in takes))
        for source, since, share in takes:
            data = self._newest.take(source, since)
            if share:
                theirs = self._mean.decode(data)
                found += share * (theirs + self.common if self._differs else theirs)
        self._flat.write(found)

    def _follow(self, neighbours: Sequence[int], result: _Result) -> None:
        """Publish to these from now on, over the group of a mean of all."""
        self._newest = NewestVectors(
            result.meeting,
            result.seq,
            neighbours,
            self._mean.whole_bytes,
            partial(self._report_receipt, result.seq),
        )
        self._published_bytes.append(self._newest.sent_bytes)

    def _part(self) -> None:
        """Publish to nobody, and take nothing, any more."""
        if self._newest is not None:
            self._newest.end()
            self._newest = None

    def _check_refused(self, action: AnyAction | None) -> None:
        if isinstance(action, Refused) and action.network in ("", self._network):
            self._thread.shutdown()  # its groups are of one thread at a time
            self._part()
            raise CrewEnded(action.reason)

    def _rest(self) -> None:
        """Meet as often as told, until told to go on."""
        while True:
            self._attend(waits=True)
            action = self._trainer.poll(_POLL_S)
            self._check_refused(action)
            if action is None or action.network != self._network:
                continue
            if isinstance(action, Meet):
                self._part()
                self._meet(action)
                if action.background:
                    return
            elif isinstance(action, Commit):
                late = self._late
                self._take_over(action)
                if late is None:
                    return
            elif isinstance(action, GoOn):
                self._take(action.takes)
                self._seq, self._epoch = action.seq, action.epoch
                return

    def _meet(self, meet: Meet) -> None:
        """Take the mean, and report how that went; parameters stay as they are."""
        self._result = self._late = None
        vector = self._flat.read()
        if meet.background:
            mean = self._thread.submit(self._average, meet, vector)
            self._late = _Late(meet, vector, mean)
            self._seq, self._pictures = meet.seq, 0
        else:
            self._answer(meet, lambda: self._average(meet, vector))

    def _attend(self, *, waits: bool = False) -> None:
        """Report how a meeting in the background went, once it has ended."""
        late = self._late
        if late is not None and self._result is None and (waits or late.mean.done()):
            self._answer(late.meet, late.mean.result)
            if self._result is None:
                self._late = None

    def _answer(self, meet: Meet, mean: "Callable[[], _Result]") -> None:
        rank, blamed = self._trainer.rank, None
        try:
            self._result = mean()
        except NotFinite as error:
            blamed = error.blamed
        except RuntimeError:
            self._groups.drop(self._network, meet.members)  # of gloo: a member is lost
        if self._result is not None:
            self._trainer.report(Done(rank=rank, network=self._network, seq=meet.seq))
        else:
            failed = MeetingFailed(rank=rank, network=self._network, seq=meet.seq, blamed=blamed)
            self._trainer.report(failed)

    def _average(self, meet: Meet, vector: Tensor) -> _Result:
        """The mean of a meeting, of the own `vector`; parameters, moments and errors fed back stay.

        Where a newcomer is among the members, parameters and moments are averaged in fp32.
        """
        made = self._groups.of(self._network, meet.seq, meet.members)
        # Of the collectives torch's types know only that a ProcessGroup has them.
        group = cast("ProcessGroup", made)
        meeting = Meeting(
            group=group, members=meet.members, weights=meet.weights, rank=self._trainer.rank
        )
        finite = bool(vector.isfinite().all())
        mine = torch.tensor([self._entered, finite], dtype=torch.uint8)
        told = [torch.zeros_like(mine) for _ in meet.members]
        group.allgather([told], [mine]).wait()
        entered = [place for place, has in enumerate(told) if bool(has[0])]
        if coded := len(entered) == len(told):
            counted = meeting
            if self._postpones:
                # What stayed with parameters in earlier means is of those too that took no step
                # since; who was blamed for a number counts for nothing as before.
                able = [w > 0 or bool(has[1]) for w, has in zip(meet.weights, told, strict=True)]
                counted = replace(meeting, weights=tuple(map(float, able)))
            vector, left = self._encode(vector, counted, meet)
        else:
            vector, left = self._exactly(vector, meeting), None
        moments = None
        if not coded or averages_moments(meet.seq, self._every_moments, whole=meet.whole):
            moments = self._exactly(join(self._moments()), meeting)
        return _Result(meet.seq, meeting, meet.whole, entered, vector, left, coded, moments)

    def _encode(self, vector: Tensor, meeting: Meeting, meet: Meet) -> tuple[Tensor, Tensor | None]:
        """The mean by the network's codecs, and what they leave out of the own part of it."""
        sent = vector - self.common if self._differs else vector
        mask = EVERY_NUMBER if meet.ends else Mask(self._stride, meet.seq)
        shards = self._mean.collect(sent, meeting, mask, whole=meet.ends)
        if self._outer is not None:
            owner = self._outer.of(meeting.members, self._flat.learned)
            shards.own = owner(shards.own, shards.segments)
        mean = self._mean.spread(shards)
        self._mean.check(mean, sent, meeting)
        if not self._differs:
            return mean, None
        counts = meeting.shares[meeting.place] > 0
        return self.common + mean, sent - shards.sent if counts else None

    def _exactly(self, vector: Tensor, meeting: Meeting) -> Tensor:
        """The mean in fp32; nothing is sent where all have the same numbers, as at a start."""
        digest = hashlib.sha256(vector.numpy().tobytes()).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        told = [torch.zeros_like(mine) for _ in meeting.members]
        meeting.group.allgather([told], [mine]).wait()
        if all(torch.equal(one, mine) for one in told) and bool(vector.isfinite().all()):
            return vector
        mean = Mean([Segment(0, vector.numel(), CODECS["fp32"])], self._means)
        found = mean.of(vector, meeting)
        self.settling_bytes += mean.sent_bytes
        return found

    def _moments(self) -> list[Tensor]:
        return moments_of(self.optimiser, self._flat.parameters)

    def _take_over(self, commit: Commit) -> None:
        result = self._result
        if result is None or result.seq != commit.seq:
            raise CrewEnded(f"{self._network}: told to take over a mean that this trainer lacks")
        if result.moments is not None:
            write(self._moments(), result.moments)
        if result.coded:
            self._mean.commit()
        if self._outer is not None:
            self._outer.commit(result.meeting.members if result.coded else ())
        if self._scales and result.whole:
            # Who comes has taken no step yet; in the next round all take as many. Where some meet,
            # the others' steps count for them later.
            weights = result.meeting.weights
            steps = weights if result.coded and any(weights) else [1.0] * len(weights)
            self._factor = step_factor(steps, self._trainers)
        if self._differs and result.whole:
            self.common = result.vector
        if (late := self._late) is not None:
            # All that was done since it was given stays.
            moved = result.vector - late.given + (0.0 if result.left is None else result.left)
            self._flat.write(self._flat.read() + moved)
            self._result = self._late = None
            return
        ends = self._entered and commit.epoch > self._epoch
        # An epoch ends with the same network on all.
        self._left, left = (result.left, None) if ends else (None, result.left)
        self._flat.write(result.vector if left is None else result.vector + left)
        self._settled, self._result = result if ends else None, None
        if commit.neighbours:
            self._follow(commit.neighbours, result)
        self._seq, self._epoch, self._pictures = commit.seq, commit.epoch, 0
