"""The agent: receive, admit, run, reply.

    STARTING ──> WARMING ──> READY ──> DRAINING
        └───────────┴──────────┴─────> FAILED

Two threads take turns at the socket, and one computation runs at a time. Whoever receives a
request while nothing runs computes it himself and leaves the socket to the other, so that a
request never waits for a thread to wake up, and the agent answers at any time, also while it
loads, computes or has failed.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

from devices.admission import Admission, Job
from devices.runtime import Runtime
from mdp.bundle import Bundle
from mdp.crop import Pixels, decode_jpeg
from mdp.errors import PictureError, WireError
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
    as_line,
    decode,
    encode,
    logits_buffer,
    pixels_of,
)

#: Inferences that may fail in a row before the agent gives up and says FAILED.
TOLERATED_FAILURES = 3
#: How long a draining agent finishes what it has accepted.
DRAIN_S = 5.0
#: How long threads that are about to end are waited for.
LEAVE_S = 1.0
#: The longest that a signal goes unnoticed.
LOOK_UP_S = 0.2
#: Refused and dropped requests are reported at most this often.
REPORT_EVERY_S = 10.0
#: A computation as short as this is done without leaving the socket to the other thread: waking it
#: would cost more than the socket's being unattended for so long.
UNATTENDED_S = 0.001
#: What may become of a request, as counted in every status.
OUTCOMES = ("answered", "undeliverable", *get_args(FailureCode))

Report = Callable[[str], None]


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
        """`load` makes the runtime beside the answering socket; what it raises ends `serve`."""
        self._bundle = bundle
        self._assignment = assignment
        self._load = load
        self._router = router
        self._report = report
        self._clock = clock
        #: Held by the thread that waits at the socket.
        self._turn = threading.Lock()
        #: Guards everything below.
        self._lock = threading.Lock()
        self._state: State = "STARTING"
        self._reason = ""
        self._runtime: Runtime | None = None
        self._admission = Admission()
        # Every key from the start: a dictionary that grows cannot be copied by another thread.
        self._counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        #: Requests not answered since the last report, by outcome.
        self._unreported: Counter[str] = Counter()
        self._next_report_s = 0.0
        self._failures = 0
        self._fatal: BaseException | None = None
        self._stopping = False
        self._drain_until_s = float("inf")
        self._over = False
        self._ended = threading.Event()

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
        workers = [
            threading.Thread(target=self._until_over, args=(work,), name=name, daemon=True)
            for name, work in (("first", self._work), ("second", self._load_and_work))
        ]
        for worker in workers:
            worker.start()
        # This thread computes nothing, so that it can take signals and leave at any time. It looks
        # up now and then: a signal that comes just before it waits does not end the wait.
        while not self._ended.wait(LOOK_UP_S):
            pass
        if self._fatal is not None:
            raise self._fatal
        # A model that still loads, or a computation that outlasted the draining, is left behind.
        leave_s = self._clock() + LEAVE_S
        for worker in workers:
            worker.join(timeout=max(0.0, leave_s - self._clock()))

    def _until_over(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again in the thread that serves
            self._fatal, self._over = error, True
            self._router.wake()
        finally:
            self._ended.set()

    def _load_and_work(self) -> None:
        runtime = self._load()
        self._enter("WARMING")
        runtime.warm_up()
        with self._lock:
            self._runtime = runtime
        # The other thread warms up too: a runtime may keep state per thread.
        self._router.wake()
        self._work()

    def _work(self) -> None:
        """Take turns at the socket, and run what comes while nothing else runs."""
        while (job := self._await_job()) is not None:
            while job is not None:
                self._run(job)
                job = self._take()

    # At the socket.

    def _await_job(self) -> Job | None:
        """Answer at the socket until there is a job to run; None when the agent's life is over."""
        with self._turn:
            while True:
                # First: the thread that was here before may have left with a job and a wake-up.
                self._keep_house()
                if self._over:
                    return None
                for peer, frames in self._router.poll(self._poll_s()):
                    self._receive(peer, frames)
                    # At once: a burst of short ones shall not fill the queue.
                    while self._is_short() and (job := self._take()) is not None:
                        self._run(job)
                while (job := self._take()) is not None:
                    if not self._is_short():
                        return job
                    self._run(job)

    def _is_short(self) -> bool:
        """Whether the next computation is; nothing is known of the first one."""
        return 0 < self._admission.estimate_s <= UNATTENDED_S

    def _poll_s(self) -> float | None:
        if self._state == "DRAINING":
            return 0.05
        return REPORT_EVERY_S if self._unreported else None

    def _keep_house(self) -> None:
        if self._state == "WARMING" and self._runtime is not None:
            self._runtime.warm_up()
            self._enter("READY")
        if self._stopping and self._state != "DRAINING":
            self._drain_until_s = self._clock() + DRAIN_S
            self._enter("DRAINING")
        if self._state == "DRAINING" and not self._over:
            waiting: list[Job] = []
            with self._lock:
                if self._clock() > self._drain_until_s:
                    self._over, waiting = True, self._admission.clear()
                self._over = self._over or self._admission.idle
            for job in waiting:
                self._fail_job(job, "draining", "this agent had to stop before its turn")
        self._unreported.update(self._router.turned_away())
        self._report_refusals()

    def _enter(self, state: State) -> None:
        with self._lock:
            if self._state == "DRAINING":
                return
            self._state = state
        self._report(state)

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
            with self._lock:
                code = self._admission.offer(job, now_s=now_s)
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
        if infer.k != self._assignment.k:
            return "wrong_submodel", (
                f"{self._assignment.device} serves sub-model {self._assignment.k}, "
                f"asked for {infer.k}"
            )
        size = self._assignment.submodel.image_size
        if infer.image_size != size:
            return "bad_message", f"expected a crop of {size} pixels, got {infer.image_size}"
        return None

    def _status(self, request_id: int) -> Status:
        with self._lock:
            runtime = self._runtime
            return Status(
                request_id=request_id,
                device=self._assignment.device,
                state=self._state,
                bundle=as_line(self._bundle.manifest.name),
                digest=self._bundle.digest,
                k=self._assignment.k,
                provider=as_line(runtime.provider) if runtime else "",
                fallback=runtime.fallback if runtime else False,
                reason=self._reason,
                queued=len(self._admission),
                counts=dict(self._counts),
            )

    def _report_refusals(self) -> None:
        """Say what was dropped or refused since the last time, at most every REPORT_EVERY_S."""
        if not self._unreported or self._clock() < self._next_report_s:
            return
        with self._lock:
            new, self._unreported = self._unreported, Counter()
        self._next_report_s = self._clock() + REPORT_EVERY_S
        self._report("not answered: " + ", ".join(f"{n} {code}" for code, n in new.items()))

    # Away from the socket.

    def _take(self) -> Job | None:
        """The next job that can be on time, unless one is running; late ones are sent back."""
        with self._lock:
            job, dropped = self._admission.take(now_s=self._clock())
        for late in dropped:
            self._fail_job(late, "too_late", "waited too long in the queue")
        return job

    def _run(self, job: Job) -> None:
        assert self._runtime is not None  # nothing is admitted before READY
        started_s = self._clock()
        took_s: float | None = None
        try:
            contribution = self._runtime.run(self._pixels(job)[None])
            took_s = self._clock() - started_s
            result = Result(
                request_id=job.infer.request_id,
                num_classes=len(self._bundle.manifest.labels),
                queue_ms=(started_s - job.arrived_s) * 1e3,
                compute_ms=took_s * 1e3,
            )
            self._send(job.peer, result, logits_buffer(contribution))
            self._count("answered")
            self._failures = 0
            if self._reason and self._state != "FAILED":
                self._reason = ""
        except PictureError as error:
            self._fail_job(job, "bad_message", str(error))
        except Exception as error:  # whatever a runtime raises is this request's failure
            self._reason = as_line(f"{type(error).__name__}: {error}")
            self._fail_job(job, "failed", self._reason)
            self._failures += 1
        finally:
            with self._lock:
                self._admission.done(took_s=took_s)
        if self._failures >= TOLERATED_FAILURES:
            self._give_up()
        if self._state == "DRAINING":
            self._router.wake()

    def _pixels(self, job: Job) -> Pixels:
        if job.infer.encoding == "jpeg":
            return decode_jpeg(bytes(job.pixels), job.infer.image_size)
        return pixels_of(job.infer, job.pixels)

    def _give_up(self) -> None:
        self._enter("FAILED")
        with self._lock:
            waiting = self._admission.clear()
        for job in waiting:
            self._fail_job(job, "failed", self._reason)

    def _send(self, peer: bytes, message: Message, *buffers: Buffer) -> None:
        if not self._router.send(peer, encode(message, *buffers)):
            self._count("undeliverable")

    def _fail(self, peer: bytes, request_id: int, code: FailureCode, text: str) -> None:
        self._count(code)
        self._send(peer, Failure(request_id=request_id, code=code, text=as_line(text)))

    def _fail_job(self, job: Job, code: FailureCode, text: str) -> None:
        self._fail(job.peer, job.infer.request_id, code, text)

    def _count(self, outcome: str) -> None:
        with self._lock:
            self._counts[outcome] += 1
            if outcome != "answered":
                self._unreported[outcome] += 1
