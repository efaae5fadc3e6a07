"""Computes admitted requests, one or several at a time, and sends their replies."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from devices.agent.bundles import ServedBundle
from devices.agent.counters import Counters
from devices.agent.jobs import Job
from devices.agent.lifecycle import Lifecycle
from devices.agent.replies import Replies
from mdp.errors import AgentError, PictureError
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import as_line, logits_buffer
from mdp.tracing import record

#: Consecutive failures after which a bundle is withdrawn.
TOLERATED_FAILURES = 3

#: A job and its crop.
Decoded = tuple[Job, Pixels]


class Batch(NamedTuple):
    """Durations of one run, the arguments of `AgentQueue.done`."""

    #: How many were computed at once, in how many seconds without decoding; None if that failed.
    pictures: int = 0
    took_s: float | None = None
    #: Of each job, also of rejected ones.
    decoding_s: Sequence[float] = ()
    #: As `took_s`, failed or not.
    elapsed_s: float = 0.0


class Executor:
    """Computes one batch at a time; the caller's queue ensures that."""

    def __init__(
        self, lifecycle: Lifecycle, replies: Replies, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self._lifecycle = lifecycle
        self._replies = replies
        self._counters = counters
        self._clock = clock

    def run(self, jobs: Sequence[Job], rung: int = 0) -> Batch:
        """Answer `jobs`, all for one bundle, at its `rung`, the top one first, or its lowest."""
        started_s = self._clock()
        decoded: list[Decoded] = []
        decoding_s = []
        for job in jobs:
            begun_s = self._clock() if job.is_encoded else 0.0
            try:
                decoded.append((job, job.pixels()))
            except PictureError as error:
                self._replies.fail_jobs([job], "bad_message", str(error))
            except MemoryError:
                self._replies.fail_jobs([job], "failed", "no memory for the picture")
            decoding_s.append(self._clock() - begun_s if job.is_encoded else 0.0)
        if not decoded:
            return Batch(decoding_s=decoding_s)
        took_s = self._compute(jobs[0].served, decoded, started_s, rung)
        elapsed_s = took_s if took_s is not None else self._clock() - started_s
        elapsed_s = max(0.0, elapsed_s - sum(decoding_s))
        return Batch(len(decoded), None if took_s is None else elapsed_s, decoding_s, elapsed_s)

    def _compute(
        self, served: ServedBundle, decoded: Sequence[Decoded], started_s: float, rung: int
    ) -> float | None:
        """Seconds of computing the batch and sending its results; None if it failed."""
        if served.failures >= TOLERATED_FAILURES:
            jobs = [job for job, _ in decoded]
            self._replies.fail_jobs(jobs, *self._lifecycle.not_served(served.digest))
            return None
        # The bundle before may have fewer rungs than the one that the queue's choice is for.
        rungs = served.rungs
        ran = rungs[min(rung, len(rungs) - 1)]
        try:
            contribution = ran.runtime.run(stack_batch([pixels for _, pixels in decoded]))
            took_s = self._clock() - started_s
            rows = split_batch(contribution, len(decoded))
        except Exception as error:  # runtimes raise types of their own, without a common base
            self._fail(served, decoded, rung, error)
            return None
        # Before the replies: a client may request the agent's status at once.
        served.answered += len(decoded)
        served.failures, self._lifecycle.failure = 0, ""
        for (job, _), row in zip(decoded, rows, strict=True):
            queue_ms = (started_s - job.arrived_s) * 1e3
            header = job.reply(row, queue_ms=queue_ms, compute_ms=took_s * 1e3, rung=ran.number)
            self._counters.count("answered")
            if ran.number:
                self._counters.count_rung(ran.number)
            self._replies.send(job.route, header, logits_buffer(row))
        ended_s = started_s + took_s
        for job, _ in decoded:
            if job.traceparent:
                spans = ("mdp queue", job.arrived_s, started_s), ("mdp compute", started_s, ended_s)
                record(job.traceparent, spans, self._clock())
        return took_s

    def _fail(
        self, served: ServedBundle, decoded: Sequence[Decoded], rung: int, error: Exception
    ) -> None:
        """Fail a single job; of a batch, find the failing ones by computing each alone."""
        if len(decoded) > 1:
            for job, pixels in decoded:
                now_s = self._clock()
                if now_s > job.deadline_s:
                    text = "computed in a batch that failed, and no time was left"
                    self._replies.fail_jobs([job], "too_late", text)
                else:
                    self._compute(served, [(job, pixels)], now_s, rung)
            return
        text = as_line(f"{type(error).__name__}: {error}")
        self._lifecycle.failure = text
        served.failures += 1
        # Before the reply: its client may request the agent's status at once.
        if served.failures == TOLERATED_FAILURES:
            self._lifecycle.withdraw(served)
        self._replies.fail_jobs([decoded[0][0]], "failed", text)


def stack_batch(pictures: Sequence[Pixels]) -> Pixels:
    """Crops as one batch `[N, image_size, image_size, 3]`; a single one is not copied."""
    return pictures[0][None] if len(pictures) == 1 else np.stack(pictures)


def split_batch(contribution: Contribution, count: int) -> list[Contribution]:
    """The contribution of each of `count` pictures; raises AgentError for another number.

    Each is `[num_classes]`, a single one stays `[1, num_classes]`.
    """
    found = [len(head) for head in contribution.heads]
    if set(found) != {count}:
        raise AgentError(
            f"expected logits of {count} pictures, got {' and '.join(map(str, found))}"
        )
    if count == 1:
        return [contribution]
    parts = [Contribution.of(rows) for rows in zip(*contribution.heads, strict=True)]
    scores, maps = contribution.anomaly, contribution.anomaly_map
    if scores is None or maps is None:
        return parts
    beside = zip(parts, np.asarray(scores).tolist(), maps, strict=True)
    return [replace(part, anomaly=score, anomaly_map=cells) for part, score, cells in beside]
