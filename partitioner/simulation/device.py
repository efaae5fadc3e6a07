"""One simulated agent: a queue, a computation at a time, a link, and what may go wrong with it."""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from mdp.session import Session
from partitioner.simulation.agent import AgentQueue
from partitioner.simulation.models import (
    RETRANSMIT_S,
    DeviceModel,
    SlowSpells,
    generator,
    seconds,
    shares,
    ways,
)

#: At a moment in seconds, do something with an argument.
Push = Callable[[float, Callable[[float, Any], None], Any], None]


class Asker(Protocol):
    """The call that a job belongs to."""

    session: Session


class Job:
    """One request as its agent sees it."""

    __slots__ = ("arrived_s", "back_s", "budget_s", "call", "deadline_s", "device", "epoch",
                 "queue_s", "refusal", "took_s")  # fmt: skip

    def __init__(
        self, call: Any, device: "SimulatedDevice", budget_s: float, back_s: float, took_s: float
    ) -> None:
        self.call = call
        self.device = device
        self.budget_s = budget_s
        #: How long its reply will be under way.
        self.back_s = back_s
        self.took_s = took_s
        self.arrived_s = self.deadline_s = self.queue_s = 0.0
        self.refusal: str | None = None
        self.epoch = 0


class SimulatedDevice:
    """A `DeviceModel` in action; replies are handed to `reply` when they reach the client."""

    def __init__(
        self, model: DeviceModel, seed: int, push: Push, reply: Callable[[float, Job], None]
    ) -> None:
        self.model, self.name = model, model.name
        self.up = True
        #: Counts the lives of the device: what was begun in one is not finished in the next.
        self.epoch = 0
        self.busy_s = 0.0
        #: What became of its requests.
        self.counts: Counter[str] = Counter(asked=0, used=0, late=0, too_late=0, overloaded=0)
        self._push, self._reply = push, reply
        self._queue: AgentQueue[Job] = AgentQueue()
        self._compute = seconds(model.compute, seed, model.name, "compute")
        self._ways = ways(model.delay, seed, model.name)
        self._there_s = model.request_bytes * 8 / model.bandwidth_bps
        self._back_s = model.reply_bytes * 8 / model.bandwidth_bps
        self._link_free_s = -math.inf
        self._turnaround_s, self._free_s, self._turning = model.turnaround_s, 0.0, False
        self._loss = model.loss
        self._losses = shares(seed, model.name, "loss")
        self._spells = _spells(model.slow, seed, model.name) if model.slow else None

    def send(self, now_s: float, call: Any, budget_s: float) -> None:
        """A client's request sets out; the link carries one message at a time."""
        self.counts["asked"] += 1
        there_s, back_s = next(self._ways)
        begins_s = max(now_s, self._link_free_s)
        self._link_free_s = begins_s + self._there_s
        arrives_s = self._link_free_s + there_s
        back_s += self._back_s
        if self._loss:
            arrives_s += self._retransmission_s()
            back_s += self._retransmission_s()
        # Drawn already here, also if it is never computed: so the n-th request costs the same
        # whatever became of those before.
        job = Job(call, self, budget_s, back_s, next(self._compute))
        self._push(arrives_s, self._arrive, job)

    def fall(self) -> None:
        """The device is gone, with everything it has."""
        self.up, self._turning = False, False
        self.epoch += 1
        self._queue.clear()

    def _retransmission_s(self) -> float:
        late_s, wait_s = 0.0, RETRANSMIT_S
        while next(self._losses) < self._loss:
            late_s, wait_s = late_s + wait_s, 2 * wait_s
        return late_s

    def _arrive(self, now_s: float, job: Job) -> None:
        if not self.up:
            return
        queue = self._queue
        if self._turning and now_s >= self._free_s and not queue.waiting:
            queue.running = self._turning = False
        job.arrived_s, job.deadline_s, job.epoch = now_s, now_s + job.budget_s, self.epoch
        refusal = queue.offer(job, now_s)
        if refusal is not None:
            self._send_back(now_s, job, refusal)
        elif not queue.running:
            self._take(now_s)
        elif self._turning and len(queue.waiting) == 1:
            self._push(self._free_s, self._turned, self.epoch)

    def _take(self, now_s: float) -> None:
        dropped: list[Job] = []
        job = self._queue.take(now_s, dropped)
        for late in dropped:
            self._send_back(now_s, late, "too_late")
        if job is None:
            return
        if self._spells is not None:
            job.took_s *= self._spells.send(now_s)
        job.queue_s = now_s - job.arrived_s
        self._push(now_s + job.took_s, self._computed, job)

    def _computed(self, now_s: float, job: Job) -> None:
        if job.epoch != self.epoch:
            return
        self.busy_s += job.took_s
        self._push(now_s + job.back_s, self._reply, job)
        queue = self._queue
        queue.done(job.took_s)
        if not self._turnaround_s:
            self._take(now_s)
            return
        queue.running = self._turning = True
        self._free_s = now_s + self._turnaround_s
        if queue.waiting:
            self._push(self._free_s, self._turned, self.epoch)

    def _turned(self, now_s: float, epoch: int) -> None:
        if epoch == self.epoch:
            self._queue.running = self._turning = False
            self._take(now_s)

    def _send_back(self, now_s: float, job: Job, refusal: str) -> None:
        self.counts[refusal] += 1
        job.refusal = refusal
        self._push(now_s + job.back_s, self._reply, job)


class Lives:
    """When a device falls and rises again: an alternating renewal process in equilibrium."""

    def __init__(self, model: DeviceModel, seed: int) -> None:
        self._model = model
        self._random = generator(seed, model.name, "lives")
        up_s, down_s = model.mean_up_s, model.mean_down_s
        #: A device that never falls is up; one that never is up, down.
        self.constant = math.isinf(up_s) or down_s == 0 or up_s == 0
        share = 0.0 if up_s == 0 else 1.0 if self.constant else up_s / (up_s + down_s)
        self.starts_up = bool(self._random.random() < share)

    def periods(self) -> Iterator[float]:
        """Seconds that it stays as it starts, then the other way, and so on."""
        up = self.starts_up
        while True:
            yield self._random.exponential(self._model.mean_up_s if up else self._model.mean_down_s)
            up = not up


def _spells(slow: SlowSpells, seed: int, name: str) -> Generator[float, float, None]:
    """Sent a moment, not before the last one, tells by how much computing takes longer then."""
    factor_at = _factor_at(slow, seed, name)
    next(factor_at)
    return factor_at


def _factor_at(slow: SlowSpells, seed: int, name: str) -> Generator[float, float, None]:
    now_s = yield 1.0
    random = generator(seed, name, "slow")
    means_s = (slow.every_s, slow.lasts_s)
    is_slow = bool(random.random() < slow.lasts_s / sum(means_s))
    until_s = random.exponential(means_s[is_slow])
    while True:
        while now_s >= until_s:
            is_slow = not is_slow
            until_s += random.exponential(means_s[is_slow])
        now_s = yield slow.factor if is_slow else 1.0
