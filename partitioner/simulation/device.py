"""One simulated agent: its queue, its computation, its link and their failures."""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct
from numpy.random import Generator
from numpy.typing import NDArray

from mdp.queueing.queue import AgentQueue
from mdp.queueing.queue import Reason as Refusal
from partitioner.simulation import models

#: Outcomes that are counted for each device.
FATES = ("asked", "used", "late", "too_late", "overloaded")

#: Before every moment.
_PAST = -math.inf

#: Requests whose costs are drawn at once.
_COSTS = 16

#: Schedules a callback: virtual seconds, callback, argument.
Push = Callable[[float, Callable[[float, Any], None], Any], None]


class QueuedRequest(Struct, eq=False):
    """One request in its agent's queue."""

    #: For the queue: one client and one bundle.
    client: ClassVar[str] = ""
    digest: ClassVar[str] = ""

    call: Any
    device: "SimulatedDevice"
    budget_s: float
    #: Network seconds of its reply.
    back_s: float
    took_s: float
    arrived_s: float = 0.0
    deadline_s: float = 0.0
    queue_s: float = 0.0
    refusal: Refusal | None = None
    #: The rung that it was computed at, counted from the top.
    rung: int = 0
    #: Whether its device failed while computing it.
    is_lost: bool = False

    @property
    def size_bytes(self) -> int:
        """Memory that it holds while it waits."""
        return self.device.model.waiting_bytes


class SimulatedDevice:
    """A `DeviceModel` in action; replies are handed to `reply` when they reach the client."""

    __slots__ = ("_ask_s", "_cost_s", "_done_s", "_free_s", "_link_free_s", "_push", "_queue",
                 "_reply", "_rungs", "_running", "_there_s", "_turnaround_s", "asked", "busy_s",
                 "epoch", "late",
                 "model", "name", "overloaded", "too_late", "up", "used")  # fmt: skip

    def __init__(
        self,
        model: models.DeviceModel,
        streams: models.RandomStreams,
        push: Push,
        reply: Callable[[float, QueuedRequest], None],
        client_bps: float = math.inf,
    ) -> None:
        """Replies arrive at most at `client_bps`, the rate of a client's port."""
        self.model, self.name = model, model.name
        self.up = True
        #: Number of failures so far: what was begun before one is not finished after it.
        self.epoch = 0
        self.busy_s = 0.0
        #: Its requests, by outcome.
        self.asked = self.used = self.late = self.too_late = self.overloaded = 0
        self._push, self._reply = push, reply
        #: Number and share of the top's time of each rung that it runs at.
        self._rungs = list(enumerate((1.0, *model.rungs)))
        if model.rung is not None:
            self._rungs = [self._rungs[model.rung]]
        self._queue = self._new_queue()
        self._there_s = model.request_bytes * 8 / model.bandwidth_bps
        delay = model.delay
        self._ask_s = (
            float(np.mean(delay.values_s))
            if isinstance(delay, models.MeasuredSeconds)
            else delay.round_trip_s + 2 * delay.jitter_s
        )
        #: SampleStream, of each request in turns, what `_costs` says.
        self._cost_s = chain.from_iterable(_costs(model, streams, client_bps)).__next__
        self._link_free_s = _PAST
        self._turnaround_s = model.turnaround_s
        #: The job being computed, the end of computing, and of sending the reply; -inf: idle.
        self._running: QueuedRequest | None = None
        self._done_s = self._free_s = _PAST

    @property
    def counts(self) -> dict[str, int]:
        """Its requests, by outcome."""
        return {name: getattr(self, name) for name in FATES}

    def send(self, now_s: float, call: Any, budget_s: float) -> None:
        """Send a client's request; the link carries one message at a time."""
        self.asked += 1
        link_free_s = self._link_free_s
        if link_free_s < now_s:
            link_free_s = now_s
        self._link_free_s = link_free_s = link_free_s + self._there_s
        # Drawn even if never computed, so that the n-th request always costs the same.
        cost_s = self._cost_s
        there_s = cost_s()
        job = QueuedRequest(call, self, budget_s, cost_s(), cost_s())
        self._push(link_free_s + there_s, self._arrive, job)

    def ask(self, now_s: float, replied: Callable[[float, Any], None], client: Any) -> None:
        """Send a status request; `replied` gets the client and the device's name, if it is up."""
        if self.up:
            self._push(now_s + self._ask_s, replied, (client, self.name))

    def fall(self, now_s: float) -> None:
        """Fail, losing every job."""
        self.settle(now_s)
        if self._running is not None:
            self._running.is_lost, self._running = now_s < self._done_s, None
        self.up = False
        self.epoch += 1
        self._queue = self._new_queue()

    def _new_queue(self) -> AgentQueue[QueuedRequest]:
        """An empty queue; where there are rungs, it knows their times as agents measure them."""
        queue: AgentQueue[QueuedRequest] = AgentQueue()
        if len(self._rungs) > 1:
            one_s = models.median_s(self.model.compute)
            queue.renew(1, [{1: share * one_s} for _, share in self._rungs])
        return queue

    def settle(self, now_s: float) -> None:
        """Count the computing time of a job that has ended by now."""
        job = self._running
        if job is not None and now_s >= self._done_s:
            self.busy_s += job.took_s

    def _ready(self, now_s: float) -> None:
        """Become idle if the reply has been sent by now."""
        job = self._running
        if job is not None and now_s >= self._free_s:
            self._running = None
            self.busy_s += job.took_s
            self._queue.done(job.took_s)

    def _arrive(self, now_s: float, job: QueuedRequest) -> None:
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
            self._push(self._free_s, self._on_free, self.epoch)

    def _take(self, now_s: float) -> None:
        jobs, dropped = self._queue.take(now_s)
        for late in dropped:
            self._send_back(now_s, late, "too_late")
        for job in jobs:
            self._begin(now_s, job)

    def _begin(self, now_s: float, job: QueuedRequest) -> None:
        job.queue_s = now_s - job.arrived_s
        job.rung, share = self._rungs[self._queue.rung]
        job.took_s *= share
        self._running, self._done_s = job, now_s + job.took_s
        self._free_s = self._done_s + self._turnaround_s
        self._push(self._done_s + job.back_s, self._deliver, job)

    def _on_free(self, now_s: float, epoch: int) -> None:
        """Take the next job: the agent is idle and jobs wait."""
        if epoch != self.epoch:
            return
        self._ready(now_s)
        self._take(now_s)
        if self._queue.waiting:
            self._push(self._free_s, self._on_free, epoch)

    def _deliver(self, now_s: float, job: QueuedRequest) -> None:
        if job.is_lost:
            return
        if job is self._running:
            self._ready(now_s)
            if now_s >= self._free_s:
                self._free_s = self._done_s = _PAST
                if now_s >= self._link_free_s:
                    self._link_free_s = _PAST
        self._reply(now_s, job)

    def _send_back(self, now_s: float, job: QueuedRequest, refusal: Refusal) -> None:
        if refusal == "too_late":
            self.too_late += 1
        else:
            self.overloaded += 1
        job.refusal = refusal
        self._push(now_s + job.back_s, self._reply, job)


def _costs(
    model: models.DeviceModel, streams: models.RandomStreams, client_bps: float
) -> Iterator["array[float]"]:
    """Per request: network seconds, those of its reply, and computing seconds.

    Interleaved in one array, which is faster with thousands of devices.
    """
    way_s = _ways(model, streams)
    late_s = chain.from_iterable(_delays(model.loss, streams, model.name)).__next__
    compute_s = models.seconds(model.compute, streams, model.name, "compute").next
    reply_s = model.reply_bytes * 8 / min(model.bandwidth_bps, client_bps)
    while True:
        costs = array("d")
        for _ in range(_COSTS):
            there_s = way_s() + late_s()
            back_s = way_s() + reply_s + late_s()
            costs.extend((there_s, back_s, compute_s()))
        yield costs


def _ways(model: models.DeviceModel, streams: models.RandomStreams) -> Callable[[], float]:
    """Network delay of each message, requests and replies in turns, without the bytes."""
    delay = model.delay
    if isinstance(delay, models.MeasuredSeconds):
        return _halves(models.seconds(delay, streams, model.name, "ways").next).__next__
    half_s, jitter_s = delay.round_trip_s / 2, delay.jitter_s
    if not jitter_s:
        return repeat(half_s).__next__

    def draw_s(random: Generator, size: int) -> NDArray[np.float64]:
        return half_s + jitter_s * models.exponential(random, size)

    return models.SampleStream(streams, model.name, "ways", draw_s).next


def _halves(trip_s: Callable[[], float]) -> Iterator[float]:
    """Split measured round trips evenly."""
    while True:
        half_s = trip_s() / 2
        yield half_s
        yield half_s


def _delays(loss: float, streams: models.RandomStreams, name: str) -> Iterator[Iterable[float]]:
    """Delay of each message by lost packets, in runs; doubled for each further loss."""
    if not loss:
        yield repeat(0.0)
    gaps = models.SampleStream(streams, name, "loss", partial(_gaps, loss), 4)
    #: Messages up to and including the next lost one.
    until = gaps.next()
    while True:
        yield repeat(0.0, int(until) - 1)
        late_s, wait_s, until = 0.0, models.RETRANSMIT_S, 0.0
        while until <= 0:
            late_s, wait_s = late_s + wait_s, 2 * wait_s
            # A resent packet counts as a message.
            until = gaps.next() - 1
        yield (late_s,)


def _gaps(loss: float, random: Generator, size: int) -> NDArray[np.float64]:
    """Messages up to and including the next lost one."""
    return random.geometric(loss, size).astype(np.float64)


class UpDownTimes:
    """Failures of a device: an alternating renewal process in equilibrium."""

    __slots__ = ("_lengths", "_means_s", "constant", "starts_up")

    def __init__(self, model: models.DeviceModel, streams: models.RandomStreams) -> None:
        up_s, down_s = model.mean_up_s, model.mean_down_s
        #: Whether the device is always up, or always down.
        self.constant = math.isinf(up_s) or down_s == 0 or up_s == 0
        share = 0.0 if up_s == 0 else 1.0 if self.constant else up_s / (up_s + down_s)
        self._means_s = (down_s, up_s)
        self._lengths = models.SampleStream(streams, model.name, "lives", models.exponential, 2)
        # exp(-x) of an exponential x of mean 1 is uniform.
        self.starts_up = math.exp(-self._lengths.next()) < share

    def length_s(self, up: bool) -> float:
        """Seconds until the next change, while `up` or down."""
        return self._means_s[up] * self._lengths.next()
