"""The agent: receive, admit, run, reply. One thread for the socket, one for computing.

    STARTING ──> WARMING ──> READY ──> DRAINING
        └───────────┴──────────┴─────> FAILED

The socket thread answers at any time, also while the model loads, computes or has failed; the
compute thread owns the runtime. They share the queue and the finished replies, under one lock.
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from devices.admission import Admission, Job
from devices.runtime import Runtime
from mdp.bundle import Bundle
from mdp.crop import Pixels, decode_jpeg
from mdp.errors import MDPError, PictureError, WireError
from mdp.plan import Assignment
from mdp.transport import Router
from mdp.wire import (
    Ask,
    Buffer,
    Failure,
    FailureCode,
    Infer,
    Message,
    Result,
    State,
    Status,
    decode,
    encode,
    logits_buffers,
    pixels_of,
)

#: Inferences that may fail in a row before the agent gives up and says FAILED.
TOLERATED_FAILURES = 3
#: How long a draining agent finishes what it has accepted.
DRAIN_S = 5.0
#: Refused and dropped requests are reported at most this often.
REPORT_EVERY_S = 10.0

#: What may become of a request, as counted in every status.
OUTCOMES = ("answered", "undeliverable", *get_args(FailureCode))

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Reply:
    peer: bytes
    frames: list[Buffer]


class Agent:
    """Serves one assignment of a bundle on a router until `stop`."""

    def __init__(
        self,
        bundle: Bundle,
        assignment: Assignment,
        load: Callable[[], Runtime],
        router: Router,
        *,
        report: Report = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` makes the runtime in the compute thread; what it raises ends `serve`."""
        self._bundle = bundle
        self._assignment = assignment
        self._load = load
        self._router = router
        self._report = report
        self._clock = clock
        self._changed = threading.Condition()
        self._state: State = "STARTING"
        self._reason = ""
        self._provider, self._fallback = "", False
        self._admission = Admission()
        self._finished: deque[_Reply] = deque()
        # Every key from the start: both threads count, and neither may resize what the other reads.
        self._counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._reported = Counter(self._counts)
        self._next_report_s = 0.0
        self._fatal: BaseException | None = None
        self._stopping = False

    @property
    def state(self) -> State:
        """Where in its life the agent is."""
        return self._state

    def stop(self) -> None:
        """Finish what was accepted, refuse the rest, and let `serve` return. Any thread."""
        self._stopping = True
        self._router.wake()

    def serve(self) -> None:
        """Serve until `stop`; raises what loading or warming up the runtime raised."""
        compute = threading.Thread(target=self._compute, name="compute", daemon=True)
        compute.start()
        drain_until_s = float("inf")
        while True:
            for peer, frames in self._router.poll(self._poll_s()):
                self._receive(peer, frames)
            self._send_finished()
            self._report_refusals()
            if self._fatal is not None:
                raise self._fatal
            if self._stopping and self._state != "DRAINING":
                drain_until_s = self._clock() + DRAIN_S
                self._enter("DRAINING")
            if self._drained() or self._clock() > drain_until_s:
                break
        self._send_finished()
        compute.join(timeout=1.0)

    def _poll_s(self) -> float | None:
        if self._state == "DRAINING":
            return 0.05
        return None if self._counts == self._reported else REPORT_EVERY_S

    def _drained(self) -> bool:
        with self._changed:
            return self._state == "DRAINING" and self._admission.idle and not self._finished

    # The socket thread.

    def _receive(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        try:
            envelope = decode(frames)
        except WireError as error:
            self._fail(peer, 0, "bad_message", str(error))
            return
        match envelope.message:
            case Ask(request_id=request_id):
                self._send(peer, self._status(request_id))
            case Infer() as infer:
                self._admit(peer, infer, envelope.buffers[0])
            case message:
                self._fail(peer, 0, "bad_message", f"{type(message).__name__} is for clients")

    def _admit(self, peer: bytes, infer: Infer, pixels: Buffer) -> None:
        refusal = self._refusal(infer)
        if refusal is None:
            now_s = self._clock()
            job = Job(
                peer=peer,
                infer=infer,
                pixels=pixels,
                arrived_s=now_s,
                deadline_s=now_s + infer.budget_ms / 1e3,
            )
            with self._changed:
                code = self._admission.offer(job, now_s=now_s)
                self._changed.notify()
            if code is None:
                return
            texts = {
                "overloaded": f"{self._admission.capacity} requests wait already",
                "too_late": f"{infer.budget_ms:.1f} ms left do not suffice",
            }
            refusal = (code, texts[code])
        self._fail(peer, infer.request_id, *refusal)

    def _refusal(self, infer: Infer) -> tuple[FailureCode, str] | None:
        """Why this request is not even queued, whatever its budget."""
        if self._state == "FAILED":
            return "failed", self._reason
        if self._state == "DRAINING":
            return "draining", "this agent is about to stop"
        if self._state != "READY":
            return "not_ready", self._state
        if infer.digest != self._bundle.digest:
            return "wrong_bundle", (
                f"serves {self._bundle.manifest.name} {self._bundle.digest[:12]}, "
                f"asked for {infer.digest[:12]}"
            )
        size = self._assignment.submodel.image_size
        if infer.image_size != size:
            return "bad_message", f"expected a crop of {size} pixels, got {infer.image_size}"
        return None

    def _status(self, request_id: int) -> Status:
        with self._changed:
            return Status(
                request_id=request_id,
                device=self._assignment.device,
                state=self._state,
                bundle=self._bundle.manifest.name,
                digest=self._bundle.digest,
                k=self._assignment.k,
                provider=self._provider,
                fallback=self._fallback,
                reason=self._reason,
                queued=len(self._admission),
                counts=dict(self._counts),
            )

    def _send(self, peer: bytes, message: Message) -> None:
        if not self._router.send(peer, encode(message)):
            self._counts["undeliverable"] += 1

    def _fail(self, peer: bytes, request_id: int, code: FailureCode, text: str) -> None:
        self._counts[code] += 1
        self._send(peer, Failure(request_id=request_id, code=code, text=text[:1024]))

    def _send_finished(self) -> None:
        while True:
            with self._changed:
                if not self._finished:
                    return
                reply = self._finished.popleft()
            if not self._router.send(reply.peer, reply.frames):
                self._counts["undeliverable"] += 1

    def _report_refusals(self) -> None:
        """Say what was dropped or refused since the last time, at most every REPORT_EVERY_S."""
        if self._counts == self._reported or self._clock() < self._next_report_s:
            return
        new = self._counts - self._reported
        self._reported = Counter(self._counts)
        new.pop("answered", None)
        if new:
            self._next_report_s = self._clock() + REPORT_EVERY_S
            self._report("not answered: " + ", ".join(f"{n} {code}" for code, n in new.items()))

    # The compute thread.

    def _compute(self) -> None:
        try:
            runtime = self._load()
            with self._changed:
                self._provider, self._fallback = runtime.provider, runtime.fallback
            self._enter("WARMING")
            runtime.warm_up()
            self._enter("READY")
        except BaseException as error:  # raised again in the thread that serves
            self._fatal = error
            self._router.wake()
            return
        failures = 0
        while (job := self._next_job()) is not None:
            failures = 0 if self._run(runtime, job) else failures + 1
            if failures >= TOLERATED_FAILURES:
                self._give_up()
                return

    def _enter(self, state: State) -> None:
        with self._changed:
            if self._state == "DRAINING":
                return
            self._state = state
            self._changed.notify_all()
        self._report(state)

    def _next_job(self) -> Job | None:
        """The next job that can be on time; None when nothing will come any more."""
        while True:
            with self._changed:
                job, dropped = self._admission.take(now_s=self._clock())
                if job is None and not dropped:
                    if self._state == "DRAINING":
                        self._router.wake()
                        return None
                    self._changed.wait()
            for late in dropped:
                self._finish_failed(late, "too_late", "waited too long in the queue")
            if job is not None:
                return job

    def _run(self, runtime: Runtime, job: Job) -> bool:
        """Run and answer one job; False if the runtime failed."""
        started_s = self._clock()
        took_s: float | None = None
        try:
            contribution = runtime.run(self._pixels(job)[None])
            took_s = self._clock() - started_s
            result = Result(
                request_id=job.infer.request_id,
                num_classes=len(self._bundle.manifest.labels),
                queue_ms=(started_s - job.arrived_s) * 1e3,
                compute_ms=took_s * 1e3,
            )
            self._finish(job, "answered", encode(result, *logits_buffers(contribution)))
        except PictureError as error:
            self._finish_failed(job, "bad_message", str(error))
        except MDPError as error:
            self._finish_failed(job, "failed", str(error))
        except Exception as error:  # whatever a runtime raises is this request's failure
            self._finish_failed(job, "failed", f"{type(error).__name__}: {error}")
            self._reason = f"{type(error).__name__}: {error}"
            return False
        finally:
            with self._changed:
                self._admission.done(took_s=took_s)
        return True

    def _pixels(self, job: Job) -> Pixels:
        if job.infer.encoding == "jpeg":
            return decode_jpeg(bytes(job.pixels), job.infer.image_size)
        return pixels_of(job.infer, job.pixels)

    def _finish(self, job: Job, outcome: str, frames: list[Buffer]) -> None:
        with self._changed:
            self._counts[outcome] += 1
            self._finished.append(_Reply(job.peer, frames))
        self._router.wake()

    def _finish_failed(self, job: Job, code: FailureCode, text: str) -> None:
        failure = Failure(request_id=job.infer.request_id, code=code, text=text[:1024])
        self._finish(job, code, encode(failure))

    def _give_up(self) -> None:
        with self._changed:
            waiting = self._admission.clear()
            self._state = "FAILED"
        for job in waiting:
            self._finish_failed(job, "failed", self._reason)
        self._report(f"FAILED: {self._reason}")
