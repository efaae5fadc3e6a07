"""Generated histories of a crew: whatever happens, every batch is in the result exactly once.

Trainers, their log and mailboxes are played; the machine is the real one. A trainer's parameters
are the batches that they were trained on, so that a mean is a union and can be checked.
"""

import math
import os
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.neighbours import Neighbours
from partitioner.crew.coordinator.partial import OnRequest, Shuffled, draw_by
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import (
    LocalSgdSchedule,
    RoundSchedule,
    SynchronousSchedule,
)
from partitioner.crew.messages import (
    Accepted,
    AnyAction,
    AnyEvent,
    Close,
    Commit,
    Done,
    Finished,
    Gone,
    GoOn,
    Joined,
    Meet,
    MeetingFailed,
    Ready,
    Receipt,
    Refused,
    Waiting,
)

#: `make invariants` plays the nightly number.
HISTORIES = 100_000 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 500
NETWORK, DIGEST = "member-0", "d"
#: After so many turns without new faults a history has to be at its end.
TURNS = 20_000
#: Epoch and number; where batches spread, the time that it was trained too.
Batch = tuple[int, ...]


@dataclass
class Played:
    """A trainer as `exchange.parameters` and `CoordinatorClient` have it behave."""

    rank: int
    name: str
    #: Reports that are not in the log yet; a killed trainer's never get there.
    sent: deque[AnyEvent] = field(default_factory=deque)
    mail: deque[AnyAction] = field(default_factory=deque)
    base: frozenset[Batch] | None = None
    delta: list[Batch] = field(default_factory=list)
    mean: tuple[int, frozenset[Batch]] | None = None
    meets: Meet | None = None
    since: int = 0
    epoch: int = 0
    given: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    hand: int | None = None
    training: bool = False
    killed: bool = False
    over: bool = False
    last_seq: int = 0
    generation: int = 0
    #: Whether its last meeting was of all.
    whole: bool = True
    #: Whether it was told that its last meeting ends the epoch.
    ends: bool = False


class World:
    """The coordinator, its machine, and the trainers of one history."""

    #: Whether a commit may leave an epoch complete and not ended.
    exact = False

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.epochs, self.batches = self.random.randint(1, 3), self.random.randint(1, 12)
        self.schedule = self.made()
        self.names = tuple(f"t{i}" for i in range(self.random.randint(1, 6)))
        self.machine = MembershipMachine(DIGEST, {NETWORK: self.names}, {NETWORK: self.schedule})
        self.trainers: list[Played] = []
        self.cursors: dict[int, int] = {}
        #: Members of each meeting that have reached its collective; how it ended for each.
        self.arrived: dict[int, set[int]] = {}
        self.means: dict[int, frozenset[Batch]] = {}
        self.broken: set[int] = set()
        self.generations: dict[int, tuple[int, ...]] = {}
        self.faults = self.random.choice((0.0, 0.02, 0.1, 0.3))
        self.log: list[AnyEvent] = []
        self.late: list[AnyEvent] = []
        self.seq = 0
        self.now_s = 0.0
        self.state: frozenset[Batch] | None = None

    def made(self) -> RoundSchedule:
        """The schedule that is tested."""
        return LocalSgdSchedule(
            NETWORK, RoundLengths(self.random.randint(1, 12), self.batches, self.epochs)
        )

    def join(self) -> None:
        taken = {trainer.name for trainer in self.trainers if not (trainer.killed or trainer.over)}
        free = [name for name in self.names if name not in taken]
        if free and len(self.trainers) < 12:
            trainer = Played(len(self.trainers), self.random.choice(free))
            self.trainers.append(trainer)
            trainer.sent.append(Joined(rank=trainer.rank, name=trainer.name, digest=DIGEST))

    def append(self, event: AnyEvent) -> None:
        """One event comes to the coordinator, which acts on it."""
        self.log.append(event)
        self.now_s += self.random.random()
        for action in self.machine.handle(event, self.now_s):
            trainer = self.trainers[action.rank]
            trainer.mail.append(action)
            if isinstance(action, Commit):
                self.commit(trainer, action)

    def report(self, trainer: Played, kind: type[Ready | Waiting | Finished]) -> None:
        trainer.sent.append(
            kind(
                rank=trainer.rank,
                network=NETWORK,
                pictures=len(trainer.delta),
                since=trainer.since,
                claims=tuple(trainer.done),
            )
        )
        trainer.done.clear()

    def train(self, trainer: Played) -> None:
        """Finish the step in hand, and take the next batch."""
        if trainer.hand is not None:
            trainer.delta.append((trainer.epoch, trainer.hand))
            trainer.done.append(trainer.hand)
            trainer.hand = None
            self.report(trainer, Ready)
            return
        if trainer.given:
            trainer.hand = trainer.given.pop(0)
            return
        claim = self.cursors.get(trainer.epoch, 0)
        self.cursors[trainer.epoch] = claim + 1
        if claim < self.batches:
            trainer.hand = claim
        else:
            trainer.training = False
            self.report(trainer, Finished)

    def read(self, trainer: Played) -> None:
        action = trainer.mail.popleft()
        match action:
            case Refused():
                trainer.over, trainer.training = True, False
            case Accepted():
                self.report(trainer, Waiting)
            case Close() if trainer.training:
                if trainer.hand is not None:
                    trainer.mail.appendleft(action)
                    self.train(trainer)
                else:
                    trainer.training = False
                    self.report(trainer, Waiting)
            case Meet():
                assert not trainer.training
                assert trainer.meets is None, "told to be in two meetings"
                assert action.seq > trainer.last_seq
                assert trainer.rank in action.members
                assert any(action.weights)
                trainer.meets, trainer.last_seq = action, action.seq
                trainer.ends = action.ends
                self.arrived.setdefault(action.seq, set()).add(trainer.rank)
            case Commit():
                assert trainer.mean
                trainer.base, trainer.delta = trainer.mean[1], []
                trainer.generation = action.seq
                self.go_on(trainer, action.seq, action.epoch)
            case GoOn():
                assert not trainer.training
                assert action.seq > trainer.last_seq
                trainer.given += action.claims
                trainer.last_seq = action.seq
                self.go_on(trainer, action.seq, action.epoch)

    def commit(self, trainer: Played, commit: Commit) -> None:
        """No batch may be lost or twice in what becomes the network's state."""
        assert trainer.mean, "a mean is committed that a member does not have"
        seq, state = trainer.mean
        assert seq == commit.seq
        if isinstance(self.schedule, LocalSgdSchedule) and trainer.base is not None:
            assert trainer.ends or commit.epoch == trainer.epoch, "the end comes as a surprise"
        assert seq > self.seq or state == self.state, "members have unlike means"
        assert self.state is None or self.state <= state, "a committed batch is lost"
        self.seq, self.state = seq, state
        in_epoch = len(state) - commit.epoch * self.batches
        assert 0 <= in_epoch < self.batches + self.exact

    def go_on(self, trainer: Played, seq: int, epoch: int) -> None:
        assert trainer.epoch == epoch or not trainer.given
        trainer.since, trainer.epoch = seq, epoch
        trainer.training = epoch < self.epochs
        trainer.over = not trainer.training

    def collective(self, trainer: Played) -> None:
        """One member's end of a meeting: with the mean, or without."""
        meet = trainer.meets
        assert meet
        members = [self.trainers[rank] for rank in meet.members]
        there = self.arrived[meet.seq]
        if meet.seq not in self.means and there == set(meet.members):
            self.means[meet.seq] = self.mean_of(meet)
        lost = meet.seq in self.broken or any(m.killed or m.over for m in members)
        if meet.seq not in self.means and not lost:
            return
        trainer.meets = None
        if meet.seq not in self.means or self.random.random() < self.faults:
            self.broken.add(meet.seq)
            there.discard(trainer.rank)
            blamed = self.random.choice(meet.members) if self.random.random() < 0.2 else None
            trainer.sent.append(
                MeetingFailed(rank=trainer.rank, network=NETWORK, seq=meet.seq, blamed=blamed)
            )
            return
        trainer.mean = meet.seq, self.means[meet.seq]
        trainer.sent.append(Done(rank=trainer.rank, network=NETWORK, seq=meet.seq))

    def mean_of(self, meet: Meet) -> frozenset[Batch]:
        """The union of what members with a weight have; all have begun alike."""
        parts = zip(meet.members, meet.weights, strict=True)
        givers = [self.trainers[rank] for rank, weight in parts if weight]
        assert len({giver.base for giver in givers}) == 1, "unlike parameters meet"
        done = [batch for giver in givers for batch in self.delta_of(giver, meet.seq)]
        state = (givers[0].base or frozenset()) | set(done)
        assert len(state) == len(givers[0].base or ()) + len(done), "a batch is done twice"
        return state

    def delta_of(self, trainer: Played, seq: int) -> list[Batch]:
        """Batches that a trainer gives to a meeting."""
        return trainer.delta

    def fault(self) -> None:
        """Something goes wrong, or somebody comes."""
        kind = self.random.randrange(5)
        trainer = self.random.choice(self.trainers)
        if kind == 0:
            self.join()
        elif kind == 1 and not trainer.over:
            trainer.killed = True
        elif kind == 2 and self.random.random() < 0.3:
            # Taken for lost while it lives: it goes on until it reads that it is not wanted.
            self.append(Gone(rank=trainer.rank))
        elif kind == 3 and self.log:
            self.late.append(self.random.choice(self.log[-20:]))
        elif self.late:
            event = self.late.pop(self.random.randrange(len(self.late)))
            if not isinstance(event, Gone):
                self.append(event)

    def turn(self, trainer: Played) -> bool:
        """One thing that a trainer does; whether there was one."""
        if trainer.killed:
            watched = trainer.rank in self.machine.living
            if watched and self.random.random() < 0.2:
                self.append(Gone(rank=trainer.rank))
            return watched
        choices = []
        if trainer.sent:
            choices.append(lambda: self.append(trainer.sent.popleft()))
        if trainer.meets:
            choices.append(lambda: self.collective(trainer))
        elif trainer.mail:
            choices.append(lambda: self.read(trainer))
        elif trainer.training and not trainer.sent:
            choices.append(lambda: self.train(trainer))
        if choices:
            self.random.choice(choices)()
        return bool(choices)

    def play(self) -> None:
        for _ in range(self.random.randint(1, len(self.names))):
            self.join()
        faulty = self.random.randrange(400)
        for turn in range(TURNS):
            if turn < faulty and self.random.random() < self.faults:
                self.fault()
            elif not self.turn(self.random.choice(self.trainers)) and turn >= faulty:
                # Nothing happens by chance any more: does anybody have something to do?
                self.faults = 0.0
                if not any(self.turn(trainer) for trainer in self.trainers):
                    return
        raise AssertionError("the history does not end")

    def check(self) -> None:
        """The end: trained, or given up for a reason that happened."""
        reason = self.schedule.ended
        if reason == f"{NETWORK} is trained":
            state = self.state or frozenset()
            assert len(state) == self.epochs * self.batches
        elif not reason:
            assert not self.machine.living, "trainers wait and nothing happens"
        else:
            assert "not finite" in reason or "no trainer" in reason or "each other" in reason
        for trainer in self.trainers:
            assert trainer.over or trainer.killed or not trainer.sent


class ExactWorld(World):
    """Each step is a collective of the last meeting's members; a state is the steps in it."""

    exact = True

    def made(self) -> RoundSchedule:
        #: Who has come to a step of a generation, which is named by its meeting.
        self.steps: dict[tuple[int, int], set[int]] = {}
        self.stepped: set[tuple[int, int]] = set()
        return SynchronousSchedule(NETWORK, self.epochs)

    def report(self, trainer: Played, kind: type[Ready | Waiting | Finished]) -> None:
        trainer.sent.append(
            kind(
                rank=trainer.rank,
                network=NETWORK,
                pictures=len(trainer.base or ()),
                since=trainer.since,
            )
        )

    def train(self, trainer: Played) -> None:
        """Come to the next step, or leave it: done, or failed."""
        assert trainer.base is not None
        done = len(trainer.base)
        if trainer.hand is None and done == (trainer.epoch + 1) * self.batches:
            trainer.training = False
            self.report(trainer, Finished)
            return
        step = trainer.generation, done
        there = self.steps.setdefault(step, set())
        if trainer.hand is None:
            trainer.hand = done
            there.add(trainer.rank)
            return
        members = self.generations[trainer.generation]
        if there == set(members):
            self.stepped.add(step)
        others = [self.trainers[rank] for rank in members]
        now = trainer.generation
        # One that has not read its Commit yet is waited for.
        left = [m.killed or m.over or m.generation > now for m in others]
        left += [m.generation == now and not m.training for m in others]
        if step not in self.stepped and not any(left):
            return
        trainer.hand = None
        if step in self.stepped and self.random.random() >= self.faults:
            trainer.base |= {(trainer.epoch, done)}
            self.report(trainer, Ready)
        else:
            there.discard(trainer.rank)
            trainer.training = False
            self.report(trainer, Waiting)

    def mean_of(self, meet: Meet) -> frozenset[Batch]:
        self.generations[meet.seq] = meet.members
        parts = zip(meet.members, meet.weights, strict=True)
        states = {self.trainers[rank].base for rank, weight in parts if weight}
        assert len(states) == 1 or states == {None}, "unlike states are given"
        return states.pop() or frozenset()

    def commit(self, trainer: Played, commit: Commit) -> None:
        super().commit(trainer, commit)
        assert (trainer.base or frozenset()) <= (self.state or frozenset()), "a step is lost"

    def check(self) -> None:
        if self.schedule.ended == f"{NETWORK} is trained":
            done = [trainer for trainer in self.trainers if trainer.over and trainer.base]
            assert all(
                len(trainer.base or ()) == self.epochs * self.batches
                for trainer in done
                if trainer.epoch == self.epochs
            )
            return
        super().check()


class BackgroundWorld(World):
    """Trainers go on while they meet; what they gave is theirs until the mean is committed."""

    exact = True

    def made(self) -> RoundSchedule:
        #: What a trainer has given to the mean under way, by its rank and the meeting.
        self.given: dict[int, tuple[int, list[Batch]]] = {}
        self.in_background = 0
        every = self.random.randint(1, 12)
        return LocalSgdSchedule(
            NETWORK, RoundLengths(every, self.batches, self.epochs), background=True
        )

    def read(self, trainer: Played) -> None:
        action = trainer.mail[0]
        late = self.given.get(trainer.rank)
        if isinstance(action, Meet) and late is not None:  # without a Commit: it was in vain
            trainer.delta = late[1] + trainer.delta
            del self.given[trainer.rank]
        if isinstance(action, Meet) and action.background:
            super().read(trainer)
            self.given[trainer.rank] = action.seq, trainer.delta
            self.in_background += 1
            trainer.delta, trainer.since, trainer.training = [], action.seq, True
        elif isinstance(action, Commit) and late is not None and late[0] == action.seq:
            trainer.mail.popleft()
            assert trainer.mean
            trainer.base = trainer.mean[1]
            del self.given[trainer.rank]
        else:
            super().read(trainer)

    def turn(self, trainer: Played) -> bool:
        """Train on or read while a mean is under way, as well as end it."""
        meets = trainer.meets
        if meets and meets.background and not trainer.killed and self.random.random() < 0.7:
            trainer.meets = None
            moved = super().turn(trainer)
            if trainer.meets is None:
                trainer.meets = meets
            if moved:
                return True
        return super().turn(trainer)

    def delta_of(self, trainer: Played, seq: int) -> list[Batch]:
        late = self.given.get(trainer.rank)
        return late[1] if late and late[0] == seq else trainer.delta


class SpreadWorld(World):
    """Some meet at a time: parameters are unlike, and batches spread from trainer to trainer."""

    def made(self) -> RoundSchedule:
        #: Meetings of some, and of all, that were committed.
        self.some, self.all = set[int](), set[int]()
        self.trained = 0
        self.batches = self.random.randint(1, 24)
        every, size, draw = self.random.randint(1, 6), self.random.randint(2, 4), draw_by(5)
        if self.random.random() < 0.5:
            return Shuffled(
                NETWORK,
                RoundLengths(every, self.batches, self.epochs),
                size=size,
                draw=draw,
                cross_every=self.random.randint(1, 3),
                site_of=lambda rank: "ab"[rank % 2],
            )
        return OnRequest(
            NETWORK,
            RoundLengths(every, self.batches, self.epochs),
            size=size,
            draw=draw,
            gap=self.random.randint(1, 9),
            divide=self.random.random() < 0.5,
            reach=self.random.choice((0.0, 0.25, math.inf)),
        )

    def train(self, trainer: Played) -> None:
        if trainer.hand is None:
            super().train(trainer)
            return
        batch = trainer.epoch, trainer.hand
        super().train(trainer)
        self.trained += 1
        trainer.delta[-1] = (*batch, self.trained)

    def mean_of(self, meet: Meet) -> frozenset[Batch]:
        """The union of what members with a weight have, none of it trained twice."""
        assert meet.whole or set(meet.weights) == {1.0}
        found: set[Batch] = set()
        for rank, weight in zip(meet.members, meet.weights, strict=True):
            if weight:
                found |= {*(self.trainers[rank].base or ()), *self.trainers[rank].delta}
        assert len(found) == len({batch[:2] for batch in found}), "a batch is done twice"
        return frozenset(found)

    def read(self, trainer: Played) -> None:
        action = trainer.mail[0]
        if isinstance(action, Meet):
            trainer.whole = action.whole
        super().read(trainer)

    def commit(self, trainer: Played, commit: Commit) -> None:
        if trainer.whole:
            self.all.add(commit.seq)
            super().commit(trainer, commit)
            return
        self.some.add(commit.seq)
        assert trainer.mean
        assert trainer.mean[0] == commit.seq
        assert commit.epoch == trainer.epoch, "some end an epoch"


class NeighboursWorld(SpreadWorld):
    """Trainers that publish, and go on with what has come; lines between the living break too."""

    schedule: Neighbours

    def made(self) -> RoundSchedule:
        #: Takes of what was published, and who receives of whom: its vectors by number.
        self.takes = 0
        self.lines: dict[int, dict[int, dict[int, frozenset[Batch]]]] = {}
        self.cut = set[tuple[int, int]]()
        #: What is on its way: to, from, number, vector.
        self.sent: deque[tuple[int, int, int, frozenset[Batch]]] = deque()
        self.base: dict[int, int] = {}
        super().made()
        return Neighbours(
            NETWORK,
            RoundLengths(self.random.randint(1, 6), self.batches, self.epochs),
            gap=self.random.randint(1, 5),
            backup=self.random.randint(0, 2),
            stale=self.random.choice((0, 0, 1, 4)),
            skip=self.random.choice((1, 2, 8)),
        )

    def append(self, event: AnyEvent) -> None:
        super().append(event)
        assert all(tokens >= 0 for tokens in self.schedule.tokens.values())

    def report(self, trainer: Played, kind: type[Ready | Waiting | Finished]) -> None:
        rank, is_finite = trainer.rank, self.random.random() >= self.faults / 10
        if kind is Finished:
            self.lines.pop(rank, None)
        if kind is Waiting and rank in self.lines and not is_finite:
            own = Receipt(rank=rank, network=NETWORK, source=rank, since=self.base[rank], lost=True)
            trainer.sent.append(own)
        super().report(trainer, kind)
        for other in self.lines.get(rank, ()) if kind is Waiting and is_finite else ():
            known = frozenset({*(trainer.base or ()), *trainer.delta})
            self.sent.append((other, rank, trainer.since, known))

    def receive(self) -> None:
        """Deliver to a neighbour, in order, the published that no newer one has replaced."""
        rank, source, number, known = self.sent.popleft()
        trainer, lines = self.trainers[rank], self.lines.get(rank, {})
        if self.base.get(rank, 0) < self.base[source] and not (trainer.killed or trainer.over):
            self.sent.append((rank, source, number, known))  # it has not read who is its neighbour
            return
        if source not in lines or (rank, source) in self.cut or trainer.killed or trainer.over:
            return
        if self.trainers[source].killed or self.random.random() < self.faults / 4:
            self.cut.add((rank, source))
            lost = Receipt(
                rank=rank, network=NETWORK, source=source, since=self.base[rank], lost=True
            )
            trainer.sent.append(lost)
        elif (
            not any(sent[:2] == (rank, source) for sent in self.sent) or self.random.random() < 0.9
        ):
            lines[source][number] = known
            trainer.sent.append(Receipt(rank=rank, network=NETWORK, source=source, since=number))

    def turn(self, trainer: Played) -> bool:
        if self.sent and self.random.random() < 0.5:
            self.receive()
            return True
        return super().turn(trainer) or bool(self.sent)

    def read(self, trainer: Played) -> None:
        action, lines = trainer.mail[0], self.lines.get(trainer.rank, {})
        training = trainer.training
        super().read(trainer)
        if isinstance(action, Meet):
            assert action.whole
            self.lines.pop(trainer.rank, None)
        elif isinstance(action, Commit):
            self.lines[trainer.rank] = {other: {} for other in action.neighbours}
            self.cut -= {(trainer.rank, other) for other in action.neighbours}
            self.base[trainer.rank] = action.seq
        elif isinstance(action, GoOn) and not training:
            assert 0 <= sum(taken.share for taken in action.takes) < 1
            for source, since, share in action.takes:
                for older in [one for one in lines[source] if one < since]:
                    del lines[source][older]
                if share:
                    self.takes += 1
                    self.take(trainer, lines[source][since])
            # Of whom it has lost nothing comes: gloo has one connection for both directions.
            place = self.schedule._places.get(trainer.rank)
            kept = [lines[other] for other in place.neighbours if other in lines] if place else []
            most = 2 * (self.schedule._gap + 1)
            assert all(len(one) <= most for one in kept), "what is kept is not bounded"

    @staticmethod
    def take(trainer: Played, known: frozenset[Batch]) -> None:
        """The union of the own batches and a neighbour's, none of it trained twice."""
        own = {*(trainer.base or ()), *trainer.delta}
        trainer.base = frozenset(own | known)
        assert len(trainer.base) == len({batch[:2] for batch in trainer.base})


@pytest.mark.timeout(0 if HISTORIES > 500 else 240)
@pytest.mark.parametrize("kind", [World, ExactWorld, BackgroundWorld, SpreadWorld, NeighboursWorld])
def test_every_batch_is_in_the_result_exactly_once(kind: type[World]) -> None:
    ends: dict[str, int] = {}
    some = 0
    for seed in range(HISTORIES):
        world = kind(seed)
        try:
            world.play()
            world.check()
        except AssertionError as error:
            raise AssertionError(f"history {seed}: {error}") from error
        end = world.schedule.ended.partition(":")[0] or "all gone"
        ends[end] = ends.get(end, 0) + 1
        if isinstance(world, NeighboursWorld):
            some += world.takes > 2
        elif isinstance(world, SpreadWorld):
            some += len(world.some) > 2
    # What is generated has to reach what it is to test.
    assert len(ends) == 4
    assert ends[f"{NETWORK} is trained"] > HISTORIES / 3
    assert not issubclass(kind, SpreadWorld) or some > HISTORIES / 5
