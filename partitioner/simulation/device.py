"""One simulated agent: a queue, a computation at a time, a link, and what may go wrong with it."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar, Protocol

import numpy as np
from msgspec import Struct
from numpy.random import Generator
from numpy.typing import NDArray

from mdp.queueing.queue import AgentQueue, Reason
from mdp.requests.session import Session
from partitioner.simulation.models import (
    RETRANSMIT_S,
    DeviceModel,
    Dice,
    Draws,
    Measured,
    SlowSpells,
    exponential,
    seconds,
)

#: What may become of a request.
FATES = ("asked", "used", "late", "too_late", "overloaded")

#: A moment that has passed. One object for all devices, and so one that is at hand.
_PAST = -math.inf

#: So many requests' costs are drawn at a time: with thousands of devices most are asked seldom.
_COSTS = 16

#: At a moment in seconds, do something with an argument.
Push = Callable[[float, Callable[[float, Any], None], Any], None]


class Asker(Protocol):
    """The call that a job belongs to."""

    session: Session


class Job(Struct, eq=False):
    """One request as its agent sees it."""

    #: All callers are one client to an agent, and there is one bundle.
    client: ClassVar[str] = ""
    digest: ClassVar[str] = ""

    call: Any
    device: "SimulatedDevice"
    budget_s: float
    #: How long its reply will be under way.
    back_s: float
    took_s: float
    arrived_s: float = 0.0
    deadline_s: float = 0.0
    queue_s: float = 0.0
    refusal: Reason | None = None
    #: Whether its device fell while computing it.
    is_lost: bool = False


class SimulatedDevice:
    """A `DeviceModel` in action; replies are handed to `reply` when they reach the client."""

    __slots__ = ("_ask_s", "_cost_s", "_done_s", "_free_s", "_link_free_s", "_push", "_queue",
                 "_reply", "_running", "_spells", "_there_s", "_turnaround_s", "asked", "busy_s",
                 "epoch", "late",
                 "model", "name", "overloaded", "too_late", "up", "used")  # fmt: skip

    def __init__(
        self,
        model: DeviceModel,
        dice: Dice,
        push: Push,
        reply: Callable[[float, Job], None],
        client_bps: float = math.inf,
    ) -> None:
        """Replies come no faster than `client_bps`, what a client's port carries."""
        self.model, self.name = model, model.name
        self.up = True
        #: Counts the lives of the device: what was begun in one is not finished in the next.
        self.epoch = 0
        self.busy_s = 0.0
        #: What became of its requests.
        self.asked = self.used = self.late = self.too_late = self.overloaded = 0
        self._push, self._reply = push, reply
        self._queue: AgentQueue[Job] = AgentQueue()
        self._there_s = model.request_bytes * 8 / model.bandwidth_bps
        delay = model.delay
        self._ask_s = (
            float(np.mean(delay.values_s))
            if isinstance(delay, Measured)
            else delay.round_trip_s + 2 * delay.jitter_s
        )
        #: Draws, of each request in turns, what `_costs` says.
        self._cost_s = chain.from_iterable(_costs(model, dice, client_bps)).__next__
        self._link_free_s = _PAST
        self._turnaround_s = model.turnaround_s
        #: What it computes, until when, and until when it sends that reply: -inf, it is idle.
        self._running: Job | None = None
        self._done_s = self._free_s = _PAST
        self._spells = Spells(model.slow, dice, model.name) if model.slow else None

    @property
    def counts(self) -> dict[str, int]:
        """What became of its requests."""
        return {name: getattr(self, name) for name in FATES}

    def send(self, now_s: float, call: Any, budget_s: float) -> None:
        """A client's request sets out; the link carries one message at a time."""
        self.asked += 1
        link_free_s = self._link_free_s
        if link_free_s < now_s:
            link_free_s = now_s
        self._link_free_s = link_free_s = link_free_s + self._there_s
        # Drawn already here, also if it is never computed: so the n-th request costs the same
        # whatever became of those before.
        cost_s = self._cost_s
        there_s = cost_s()
        job = Job(call, self, budget_s, cost_s(), cost_s())
        self._push(link_free_s + there_s, self._arrive, job)

    def ask(self, now_s: float, told: Callable[[float, Any], None], client: Any) -> None:
        """`client` asks how this device is; if it is there, `told` gets both with its answer."""
        if self.up:
            self._push(now_s + self._ask_s, told, (client, self.name))

    def fall(self, now_s: float) -> None:
        """The device is gone, with everything it has."""
        self.settle(now_s)
        if self._running is not None:
            self._running.is_lost, self._running = now_s < self._done_s, None
        self.up = False
        self.epoch += 1
        self._queue = AgentQueue()

    def settle(self, now_s: float) -> None:
        """Count a computation that has ended by now."""
        job = self._running
        if job is not None and now_s >= self._done_s:
            self.busy_s += job.took_s

    def _ready(self, now_s: float) -> None:
        """Take note of a computation whose reply has been sent by now."""
        job = self._running
        if job is not None and now_s >= self._free_s:
            self._running = None
            self.busy_s += job.took_s
            self._queue.done(job.took_s)

    def _arrive(self, now_s: float, job: Job) -> None:
        if not self.up:
            return
        if self._running is not None:
            self._ready(now_s)
        queue = self._queue
        job.arrived_s, job.deadline_s = now_s, now_s + job.budget_s
        if self._running is None and queue.takes_at_once(job, now_s):
            self._begin(now_s, job)
            return
        sent_back = queue.offer(job, now_s)
        if sent_back:
            self._send_back(now_s, *sent_back[0])
        elif self._running is None:
            self._take(now_s)
        elif queue.waiting == 1:
            self._push(self._free_s, self._freed, self.epoch)

    def _take(self, now_s: float) -> None:
        jobs, dropped = self._queue.take(now_s)
        for late in dropped:
            self._send_back(now_s, late, "too_late")
        for job in jobs:
            self._begin(now_s, job)

    def _begin(self, now_s: float, job: Job) -> None:
        if self._spells is not None:
            job.took_s *= self._spells.factor(now_s)
        job.queue_s = now_s - job.arrived_s
        self._running, self._done_s = job, now_s + job.took_s
        self._free_s = self._done_s + self._turnaround_s
        self._push(self._done_s + job.back_s, self._deliver, job)

    def _freed(self, now_s: float, epoch: int) -> None:
        """Nobody is computing or sending, and somebody waits."""
        if epoch != self.epoch:
            return
        self._ready(now_s)
        self._take(now_s)
        if self._queue.waiting:
            self._push(self._free_s, self._freed, epoch)

    def _deliver(self, now_s: float, job: Job) -> None:
        if job.is_lost:
            return
        if job is self._running:
            # What is known by now is put away while it is at hand: with thousands of devices the
            # next request comes when nothing of it is in a cache any more.
            self._ready(now_s)
            if now_s >= self._free_s:
                self._free_s = self._done_s = _PAST
                if now_s >= self._link_free_s:
                    self._link_free_s = _PAST
        self._reply(now_s, job)

    def _send_back(self, now_s: float, job: Job, refusal: Reason) -> None:
        if refusal == "too_late":
            self.too_late += 1
        else:
            self.overloaded += 1
        job.refusal = refusal
        self._push(now_s + job.back_s, self._reply, job)


def _costs(model: DeviceModel, dice: Dice, client_bps: float) -> Iterator["array[float]"]:
    """Of each request: seconds under way, its reply's, and those of computing; side by side.

    What a request touches of one of thousands of devices has to be fetched from memory: numbers of
    three kinds that lie apart are ten places more.
    """
    way_s = _ways(model, dice)
    late_s = chain.from_iterable(_delays(model.loss, dice, model.name)).__next__
    compute_s = seconds(model.compute, dice, model.name, "compute").next
    reply_s = model.reply_bytes * 8 / min(model.bandwidth_bps, client_bps)
    while True:
        costs = array("d")
        for _ in range(_COSTS):
            there_s = way_s() + late_s()
            back_s = way_s() + reply_s + late_s()
            costs.extend((there_s, back_s, compute_s()))
        yield costs


def _ways(model: DeviceModel, dice: Dice) -> Callable[[], float]:
    """Seconds that each message is under way, there and back in turns, beyond what bytes take."""
    delay = model.delay
    if isinstance(delay, Measured):
        return _halves(seconds(delay, dice, model.name, "ways").next).__next__
    half_s, jitter_s = delay.round_trip_s / 2, delay.jitter_s
    if not jitter_s:
        return repeat(half_s).__next__

    def drawn_s(random: Generator, size: int) -> NDArray[np.float64]:
        return half_s + jitter_s * exponential(random, size)

    return Draws(dice, model.name, "ways", drawn_s).next


def _halves(trip_s: Callable[[], float]) -> Iterator[float]:
    """What was measured is split evenly."""
    while True:
        half_s = trip_s() / 2
        yield half_s
        yield half_s


def _delays(loss: float, dice: Dice, name: str) -> Iterator[Iterable[float]]:
    """By how much each message is late, run by run; each time it is lost again twice as much."""
    if not loss:
        yield repeat(0.0)
    gaps = Draws(dice, name, "loss", partial(_gaps, loss), 4)
    #: How many more there are up to the next that does not get through.
    until = gaps.next()
    while True:
        yield repeat(0.0, int(until) - 1)
        late_s, wait_s, until = 0.0, RETRANSMIT_S, 0.0
        while until <= 0:
            late_s, wait_s = late_s + wait_s, 2 * wait_s
            # What is sent again counts as a message.
            until = gaps.next() - 1
        yield (late_s,)


def _gaps(loss: float, random: Generator, size: int) -> NDArray[np.float64]:
    """Messages up to and including the next lost one."""
    return random.geometric(loss, size).astype(np.float64)


class Lives:
    """When a device falls and rises again: an alternating renewal process in equilibrium."""

    __slots__ = ("_lengths", "_means_s", "constant", "starts_up")

    def __init__(self, model: DeviceModel, dice: Dice) -> None:
        up_s, down_s = model.mean_up_s, model.mean_down_s
        #: A device that never falls is up; one that never is up, down.
        self.constant = math.isinf(up_s) or down_s == 0 or up_s == 0
        share = 0.0 if up_s == 0 else 1.0 if self.constant else up_s / (up_s + down_s)
        self._means_s = (down_s, up_s)
        self._lengths = Draws(dice, model.name, "lives", exponential, 2)
        # Of an exponential variable of mean 1 this is from 0 to 1, all equally likely.
        self.starts_up = math.exp(-self._lengths.next()) < share

    def length_s(self, up: bool) -> float:
        """Seconds that it stays as it now is."""
        return self._means_s[up] * self._lengths.next()


class Spells:
    """By how much computing takes longer at each moment; moments are asked for in order."""

    __slots__ = ("_factor", "_is_slow", "_lengths", "_means_s", "_until_s")

    def __init__(self, slow: SlowSpells, dice: Dice, name: str) -> None:
        self._means_s, self._factor = (slow.every_s, slow.lasts_s), slow.factor
        self._lengths = Draws(dice, name, "slow", exponential, 4)
        self._is_slow = math.exp(-self._lengths.next()) < slow.lasts_s / sum(self._means_s)
        self._until_s = self._length_s()

    def factor(self, now_s: float) -> float:
        """How many times as long it takes now."""
        while now_s >= self._until_s:
            self._is_slow = not self._is_slow
            self._until_s += self._length_s()
        return self._factor if self._is_slow else 1.0

    def _length_s(self) -> float:
        return self._means_s[self._is_slow] * self._lengths.next()
