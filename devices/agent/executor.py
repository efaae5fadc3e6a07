"""Answers admitted requests by the model that they ask for, one or several at a time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from devices.agent.bundles import Service, Shelf, wrong_bundle
from devices.agent.counters import Ledger
from devices.agent.jobs import Job
from devices.agent.replies import Replies
from mdp.errors import AgentError, PictureError
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels, decode_jpeg
from mdp.protocol.messages import Infer, Look, Result, Seen, as_line, logits_buffer, pixels_of

#: Inferences that may fail in a row before a bundle is given up.
TOLERATED_FAILURES = 3

#: A request and its crop.
Ready = tuple[Job, Pixels]


class Run(NamedTuple):
    """What running some jobs came to."""

    #: How many were computed at once, in how many seconds without decoding; None if that failed.
    pictures: int = 0
    took_s: float | None = None
    #: Of each job, also of those that were refused.
    decoding_s: Sequence[float] = ()
    #: As `took_s`, failed or not.
    elapsed_s: float = 0.0


class Computing:
    """Computes one batch at a time; whoever calls makes sure of that."""

    def __init__(
        self,
        shelf: Shelf,
        replies: Replies,
        ledger: Ledger,
        *,
        clock: Callable[[], float],
        give_up: Callable[[Service], None],
    ) -> None:
        """`give_up` is told of a service that has failed too often in a row."""
        #: Why the last inference failed; empty if it did not.
        self.reason = ""
        self._shelf = shelf
        self._replies = replies
        self._ledger = ledger
        self._clock = clock
        self._give_up = give_up

    def run(self, jobs: Sequence[Job]) -> Run:
        """Answer `jobs`, all for one bundle."""
        started_s = self._clock()
        ready, decoding_s = [], []
        for job in jobs:
            is_jpeg = isinstance(job.infer, Infer) and job.infer.encoding == "jpeg"
            begun_s = self._clock() if is_jpeg else 0.0
            pixels = self._pixels(job)
            decoding_s.append(self._clock() - begun_s if is_jpeg else 0.0)
            if pixels is not None:
                ready.append((job, pixels))
        if not ready:
            return Run(decoding_s=decoding_s)
        took_s = self._compute(ready, started_s)
        elapsed_s = took_s if took_s is not None else self._clock() - started_s
        elapsed_s = max(0.0, elapsed_s - sum(decoding_s))
        return Run(len(ready), None if took_s is None else elapsed_s, decoding_s, elapsed_s)

    def _pixels(self, job: Job) -> Pixels | None:
        """The crop of a request `[image_size, image_size, 3]`; None if that has been refused."""
        try:
            return pixels_for(job)
        except PictureError as error:
            self._replies.fail_job(job, "bad_message", str(error))
        except MemoryError:
            self._replies.fail_job(job, "failed", "no memory for the picture")
        return None

    def _compute(self, ready: Sequence[Ready], started_s: float) -> float | None:
        service = self._shelf.named(ready[0][0].infer.digest)
        if service is None:
            for job, _ in ready:
                self._replies.fail_job(job, *wrong_bundle(self._shelf, job.infer))
            return None
        try:
            contribution = service.runtime.run(together([pixels for _, pixels in ready]))
            took_s = self._clock() - started_s
            rows = apart(contribution, len(ready))
        except Exception as error:  # whatever a runtime raises is its requests' failure
            self._failed(service, ready, error)
            return None
        for (job, _), row in zip(ready, rows, strict=True):
            result = _result(
                job,
                num_classes=service.num_classes,
                queue_ms=(started_s - job.arrived_s) * 1e3,
                compute_ms=took_s * 1e3,
            )
            self._replies.send(job.peer, result, logits_buffer(row))
            self._ledger.count("answered")
        service.answered += len(ready)
        service.failures = 0
        self.reason = ""
        return took_s

    def _failed(self, service: Service, ready: Sequence[Ready], error: Exception) -> None:
        """One request has failed; of several, whichever it was is found by asking one by one."""
        if len(ready) > 1:
            for job, pixels in ready:
                now_s = self._clock()
                if now_s > job.deadline_s:
                    text = "computed with others, that failed, and no time was left"
                    self._replies.fail_job(job, "too_late", text)
                else:
                    self._compute([(job, pixels)], now_s)
            return
        self.reason = as_line(f"{type(error).__name__}: {error}")
        service.failures += 1
        # Before the reply: who has it may ask at once how this agent is, of another thread.
        if service.failures == TOLERATED_FAILURES:
            self._give_up(service)
        self._replies.fail_job(ready[0][0], "failed", self.reason)


def _result(job: Job, *, num_classes: int, queue_ms: float, compute_ms: float) -> Result | Seen:
    """What goes before the logits that answer `job`."""
    request_id, sighting = job.infer.request_id, job.sighting
    if sighting is None:
        return Result(
            request_id=request_id,
            num_classes=num_classes,
            queue_ms=queue_ms,
            compute_ms=compute_ms,
        )
    return Seen(
        request_id=request_id,
        num_classes=num_classes,
        queue_ms=queue_ms,
        compute_ms=compute_ms,
        frame=sighting.number,
        age_ms=sighting.age_ms,
    )


def pixels_for(job: Job) -> Pixels:
    """The crop of a request `[image_size, image_size, 3]`; raises PictureError."""
    if isinstance(job.infer, Look):
        assert job.sighting is not None  # chosen as the Look arrived
        return job.sighting.crop
    if job.infer.encoding == "jpeg":
        return decode_jpeg(bytes(job.pixels), job.infer.image_size)
    return pixels_of(job.infer, job.pixels)


def together(pictures: Sequence[Pixels]) -> Pixels:
    """Crops as one batch `[N, image_size, image_size, 3]`; a single one is not copied."""
    return pictures[0][None] if len(pictures) == 1 else np.stack(pictures)


def apart(contribution: Contribution, count: int) -> list[Contribution]:
    """What was computed for each of `count` pictures; raises AgentError for another number.

    Each `[num_classes]`, or `[1, num_classes]` if there is but one, which is not taken apart.
    """
    found = [len(head) for head in contribution.heads]
    if set(found) != {count}:
        raise AgentError(
            f"expected logits of {count} pictures, got {' and '.join(map(str, found))}"
        )
    if count == 1:
        return [contribution]
    return [Contribution.of(rows) for rows in zip(*contribution.heads, strict=True)]
