"""A network's training in virtual time: the schedule of a real run, with played trainers.

Trainers differ in pace, slow down for a while, come late and are lost. Messages take no time; a
mean takes the seconds that are handed in, as does what a trainer publishes on to each neighbour.
"""

import hashlib
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Literal

from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import LocalSgdSchedule, RoundSchedule
from partitioner.crew.coordinator.watch import SILENT_S
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
    Rank,
    Ready,
    Receipt,
    Refused,
    TrainerReport,
    Waiting,
)

Kind = Literal["step", "wait", "mean"]
#: The name of the network that is trained.
NETWORK = "network"


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """A trainer: seconds of a step, when it comes, and when it is lost."""

    name: str
    step_s: float
    joins_s: float = 0.0
    lost_s: float = math.inf


def steady(rank: Rank, at_s: float) -> float:
    """No trainer slows down."""
    return 1.0


def slow_periods(
    seed: int = 3, share: float = 0.1, factor: float = 5.0, length_s: float = 20.0
) -> Callable[[Rank, float], float]:
    """Each trainer is `factor` times slower in a `share` of the periods, drawn by SHA-256."""

    def slowness(rank: Rank, at_s: float) -> float:
        drawn = hashlib.sha256(repr((seed, rank, int(at_s // length_s))).encode()).digest()
        return factor if int.from_bytes(drawn[:8]) / 2**64 < share else 1.0

    return slowness


@dataclass(frozen=True, slots=True, kw_only=True)
class CrewScenario:
    """One network; a batch is one step of one trainer. Ends with its epochs, or at `until_s`."""

    trainers: tuple[Paced, ...]
    every_pictures: int
    batch_pictures: int = 1
    #: Batches of an epoch.
    batches: int
    epochs: int = 1
    until_s: float = math.inf
    #: Seconds of a mean of these members.
    mean_s: Callable[[tuple[Rank, ...]], float] = lambda members: 0.0
    #: How many times slower a step is that a trainer begins then.
    slowed: Callable[[Rank, float], float] = steady
    #: From a loss until the coordinator knows it, and until the others' mean fails.
    silent_s: float = SILENT_S
    fails_s: float = 1.0


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """A stretch of one trainer's work, from when to when; a step that is lost with it is none."""

    rank: Rank
    kind: Kind
    start_s: float
    end_s: float


@dataclass(slots=True)
class CrewTrace:
    """The outcome of a simulation."""

    spans: list[SimulatedSpan] = field(default_factory=list)
    log: list[tuple[float, AnyEvent, list[AnyAction]]] = field(default_factory=list)
    #: Seconds until the end, and why nobody trains after that.
    seconds: float = 0.0
    ended: str = ""

    def steps(self, rank: Rank | None = None) -> int:
        """Steps of one trainer, or of all."""
        return sum(s.kind == "step" and rank in (None, s.rank) for s in self.spans)


@dataclass(slots=True)
class _Played:
    paced: Paced
    mail: deque[AnyAction] = field(default_factory=deque)
    lost: bool = False
    busy: bool = False
    trains: bool = False
    rested_s: float | None = None
    epoch: int = 0
    since: int = 0
    pictures: int = 0
    given: list[int] = field(default_factory=list)
    meets: Meet | None = None
    #: The number of a mean in the background that is not committed.
    late: int = 0
    #: Those to whom it publishes, since the mean of this number.
    neighbours: tuple[Rank, ...] = ()
    base: int = 0


def _meets(trainer: _Played, meet: Meet) -> bool:
    """Tell whether a trainer is in this meeting, as each is told of it by a message of its own."""
    return trainer.meets is not None and trainer.meets.seq == meet.seq


def simulate(scenario: CrewScenario, schedule: RoundSchedule | None = None) -> CrewTrace:
    """Play a scenario to its end, by default with means of everyone (`LocalSgdSchedule`).

    schedule: another one, of the network `NETWORK`; not yet used.
    """
    return _Simulation(scenario, schedule or _everyone(scenario)).run()


def _everyone(scenario: CrewScenario) -> LocalSgdSchedule:
    return LocalSgdSchedule(
        NETWORK, RoundLengths(scenario.every_pictures, scenario.batches, scenario.epochs)
    )


class _Simulation:
    def __init__(self, scenario: CrewScenario, schedule: RoundSchedule) -> None:
        self._scenario, self._schedule = scenario, schedule
        self._trainers = [_Played(paced) for paced in scenario.trainers]
        self._cursors: dict[int, int] = {}
        self._trace = CrewTrace()
        self._now_s = 0.0
        self._number = count().__next__
        self._queue: list[tuple[float, int, Callable[[], None]]] = []

    def run(self) -> CrewTrace:
        for rank, trainer in enumerate(self._trainers):
            self._at(trainer.paced.joins_s, lambda rank=rank: self._report(rank, Waiting))  # type: ignore[misc]
            if trainer.paced.lost_s < math.inf:
                self._at(trainer.paced.lost_s, lambda rank=rank: self._lose(rank))  # type: ignore[misc]
        while self._queue and not self._schedule.ended:
            at_s, _, act = heappop(self._queue)
            if at_s > self._scenario.until_s:
                break
            self._now_s = at_s
            act()
        self._trace.seconds, self._trace.ended = self._now_s, self._schedule.ended
        return self._trace

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heappush(self._queue, (at_s, self._number(), act))

    def _span(self, rank: Rank, kind: Kind, start_s: float) -> None:
        if self._now_s > start_s or kind == "step":
            self._trace.spans.append(SimulatedSpan(rank, kind, start_s, self._now_s))

    def _log(self, event: AnyEvent) -> None:
        actions = self._schedule.handle(event, self._now_s)
        self._trace.log.append((self._now_s, event, actions))
        for action in actions:
            self._trainers[action.rank].mail.append(action)
            self._at(self._now_s, lambda rank=action.rank: self._read(rank))  # type: ignore[misc]

    def _report(self, rank: Rank, kind: type[TrainerReport], claims: tuple[int, ...] = ()) -> None:
        trainer = self._trainers[rank]
        if trainer.lost:
            return
        if kind is not Ready:
            trainer.trains, trainer.rested_s = False, self._now_s
        event = kind(
            rank=rank,
            network=NETWORK,
            pictures=trainer.pictures,
            since=trainer.since,
            claims=claims,
        )
        assert isinstance(event, Ready | Waiting | Finished)
        self._log(event)
        for neighbour in trainer.neighbours if kind is Waiting else ():
            took_s = self._scenario.mean_s((rank, neighbour))
            came = self._receipt(neighbour, rank, trainer.since)
            self._at(self._now_s + took_s, came)

    def _receipt(
        self, rank: Rank, source: Rank, since: int, *, lost: bool = False
    ) -> Callable[[], None]:
        """Let a trainer have what a neighbour published, or lose it, unless it is lost itself."""
        event = Receipt(rank=rank, network=NETWORK, source=source, since=since, lost=lost)
        trainers = self._trainers
        return lambda: (
            None if trainers[rank].lost or trainers[source].lost != lost else self._log(event)
        )

    def _read(self, rank: Rank) -> None:
        """Take what has come, unless a step or a mean is under way."""
        trainer = self._trainers[rank]
        while trainer.mail and not trainer.busy and not trainer.lost:
            match trainer.mail.popleft():
                case Meet(background=True) as meet:
                    self._go_on_meanwhile(rank, meet)
                case Meet() as meet:
                    self._arrive(rank, meet)
                case Commit(seq=seq) if seq == trainer.late:
                    trainer.late = 0
                case Close() if trainer.trains:
                    self._report(rank, Waiting)
                case Commit() as told:
                    trainer.pictures = 0
                    trainer.neighbours, trainer.base = told.neighbours, told.seq
                    self._go_on(rank, told)
                case GoOn() as told:
                    trainer.given += told.claims
                    self._go_on(rank, told)
                case Refused():
                    trainer.trains = False

    def _go_on(self, rank: Rank, told: Commit | GoOn) -> None:
        trainer = self._trainers[rank]
        trainer.since, trainer.epoch = told.seq, told.epoch
        if trainer.rested_s is not None:
            self._span(rank, "wait", trainer.rested_s)
        trainer.trains, trainer.rested_s = True, None
        self._step(rank)

    def _step(self, rank: Rank) -> None:
        """Begin the next step; at its end read what has come, and begin the next."""
        trainer, scenario = self._trainers[rank], self._scenario
        if trainer.given:
            claim = trainer.given.pop(0)
        else:
            claim = self._cursors.get(trainer.epoch, 0)
            self._cursors[trainer.epoch] = claim + 1
        if claim >= scenario.batches:
            self._report(rank, Finished)
            return
        began_s = self._now_s

        def end() -> None:
            if trainer.lost:
                return
            trainer.busy = False
            self._span(rank, "step", began_s)
            trainer.pictures += scenario.batch_pictures
            self._report(rank, Ready, (claim,))
            # What the report brings about is read before the next step.
            self._at(self._now_s, next_step)

        def next_step() -> None:
            self._read(rank)
            if trainer.trains and not trainer.busy and not trainer.lost:
                self._step(rank)

        trainer.busy = True
        self._at(began_s + trainer.paced.step_s * scenario.slowed(rank, began_s), end)

    def _arrive(self, rank: Rank, meet: Meet) -> None:
        """Come to a meeting: it begins with the last member, or fails for all."""
        trainer = self._trainers[rank]
        if trainer.rested_s is not None:
            self._span(rank, "wait", trainer.rested_s)
        trainer.meets, trainer.busy, trainer.rested_s = meet, True, self._now_s
        members = [self._trainers[member] for member in meet.members]
        if any(member.lost for member in members):
            self._fail(rank, meet)
        elif all(_meets(member, meet) for member in members):
            self._at(self._now_s + self._scenario.mean_s(meet.members), lambda: self._finish(meet))

    def _go_on_meanwhile(self, rank: Rank, meet: Meet) -> None:
        """Come to a meeting, and go on with the next step."""
        trainer = self._trainers[rank]
        trainer.meets, trainer.late, trainer.pictures = meet, meet.seq, 0
        members = [self._trainers[member] for member in meet.members]
        if any(member.lost for member in members):
            self._fail(rank, meet)
        elif all(_meets(member, meet) for member in members):
            self._at(self._now_s + self._scenario.mean_s(meet.members), lambda: self._finish(meet))
        self._go_on(rank, GoOn(rank=rank, network=NETWORK, seq=meet.seq, epoch=trainer.epoch))

    def _finish(self, meet: Meet) -> None:
        if not all(_meets(self._trainers[rank], meet) for rank in meet.members):
            return
        for rank in meet.members:
            self._leave(rank)
            self._log(Done(rank=rank, network=NETWORK, seq=meet.seq))

    def _fail(self, rank: Rank, meet: Meet) -> None:
        def fail() -> None:
            if _meets(self._trainers[rank], meet) and not self._trainers[rank].lost:
                self._leave(rank)
                self._log(MeetingFailed(rank=rank, network=NETWORK, seq=meet.seq))

        self._at(self._now_s + self._scenario.fails_s, fail)

    def _leave(self, rank: Rank) -> None:
        trainer = self._trainers[rank]
        if trainer.meets is not None and trainer.meets.background:
            trainer.meets = None
            return
        assert trainer.rested_s is not None
        self._span(rank, "mean", trainer.rested_s)
        trainer.meets, trainer.busy, trainer.rested_s = None, False, self._now_s
        self._at(self._now_s, lambda: self._read(rank))

    def _lose(self, rank: Rank) -> None:
        trainer = self._trainers[rank]
        trainer.lost = True
        for neighbour in trainer.neighbours:
            lost = self._receipt(neighbour, rank, trainer.base, lost=True)
            self._at(self._now_s + self._scenario.fails_s, lost)
        if meet := trainer.meets:
            trainer.meets = None
            for member in meet.members:
                if _meets(self._trainers[member], meet):
                    self._fail(member, meet)
        self._at(self._now_s + self._scenario.silent_s, lambda: self._log(Gone(rank=rank)))
