"""The agent: receive, admit, compute, reply.

Two threads take turns at the socket, and one computation runs at a time. The thread that receives a
request while nothing runs computes it itself and leaves the socket to the other one, so that no
request waits for a thread to wake up, and the agent replies at any time, also while it loads,
computes or has failed.
"""

import threading
import time
from collections.abc import Callable, Sequence

from devices.agent.bundles import GRACE_S, LoadableBundle, ServedBundle, warm_up
from devices.agent.counters import Counters
from devices.agent.executor import Batch, Executor
from devices.agent.jobs import FrameJob, Job, PictureJob
from devices.agent.lifecycle import Lifecycle, Report
from devices.agent.main_loop import MainLoop
from devices.agent.masking import NOT_HERE as NOT_MASKED
from devices.agent.masking import MaskAccess, Masking
from devices.agent.push import NOT_HERE, BundleMessage, BundlePush, PushAccess
from devices.agent.quotas import Quotas
from devices.agent.record import NOT_HERE as NOT_RECORDED
from devices.agent.record import RecordAccess, Recording
from devices.agent.reload import NewBundle, Rejected, Reload, Reloader, Unchanged
from devices.agent.replies import Replies
from devices.agent.rest import NO_SOURCE, answer_rest
from devices.camera.frames import FrameBuffer, NoFrameError, view_of
from devices.events import LOG
from mdp.errors import WireError
from mdp.protocol.masking import MaskRequest
from mdp.protocol.messages import Buffer, FrameRequest, Infer, State, StatusRequest, decode
from mdp.protocol.recording import PictureRequest
from mdp.protocol.rest import RestRequest
from mdp.protocol.transfer import BundlePiece, BundleRead, BundleRefusal, BundleRequest
from mdp.queueing.queue import AgentQueue
from mdp.transport import Peer, Router

#: Longest computing of accepted jobs while draining, and the pause between checks for its end.
DRAIN_S, DRAIN_CHECK_S = 5.0, 0.05
#: A failed agent reloads its bundle after so long: the cause, such as memory, may be gone.
RETRY_S = 30.0
#: How long `serve` waits for threads that are about to end.
LEAVE_S = 1.0
#: A computation this short runs without handing over the socket: waking the other thread would take
#: longer than the socket is left alone.
UNATTENDED_S = 0.001
#: A computation this long hangs: the slowest planned device needs a few seconds.
HUNG_S = 30.0


class Agent:
    """Serves one device's part of a bundle on a router until `stop`."""

    def __init__(
        self,
        source: LoadableBundle,
        router: Router,
        *,
        reloader: Reloader | None = None,
        frames: FrameBuffer | None = None,
        push: PushAccess | None = None,
        record: RecordAccess | None = None,
        mask: MaskAccess | None = None,
        grace_s: float = GRACE_S,
        report: Report = LOG.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`source` is loaded while the socket is answered; what loading raises ends `serve`.

        `reloader` prepares other bundles; the previous one is served for `grace_s` after its last
        request, or after it was replaced if a further one is to take its place. Frame requests are
        answered from `frames`, which clients may record as `record` says, and mask as `mask` does;
        they may push bundles as `push` says, which needs `reloader`.
        """
        self._first = source
        self._router = router
        self._reloader = reloader
        self._frames = frames
        self._report = report
        self._clock = clock
        self._counters = Counters()
        self._replies = Replies(router, self._counters, report)
        self.lifecycle = Lifecycle(
            source, self._counters, grace_s=grace_s, report=report, clock=clock
        )
        self._push = None
        if push is not None and reloader is not None:
            self._push = BundlePush(push, self.lifecycle, self._replies, self._switch)
        self.recording: Recording | None = None
        if record is not None and frames is not None:
            self.recording = Recording(record, frames, self._replies, report, clock)
        self._masking: Masking | None = None
        if mask is not None and frames is not None:
            self._masking = Masking(mask, frames, self._replies, report)
        self._executor = Executor(self.lifecycle, self._replies, self._counters, clock)
        self.quotas = Quotas()
        self.main_loop = MainLoop()
        #: Held by the thread at the socket.
        self._turn = threading.Lock()
        #: Guards the queue, and the digest of what is computed.
        self._lock = threading.Lock()
        self._queue: AgentQueue[Job] = AgentQueue(batch=source.batch)
        self._computing = ""
        #: When the computation that runs has started.
        self._started_s = float("inf")
        #: Whether a thread at the socket has run its tasks since `is_alive` was last asked.
        self._attended = True
        #: Degrees Celsius, for statuses; None where nobody sets it.
        self.temperature_c: float | None = None
        self._fatal: BaseException | None = None
        self._stopping = False
        self._over = False
        self._drain_until_s = float("inf")
        self._retry_s = float("inf")
        #: When periodic tasks are due though nothing has happened; used by the turn's holder.
        self._periodic_s = float("-inf")
        #: Whether a thread still computes or loads after `serve` has returned.
        self.left_behind = False
        if frames is not None:
            frames.follow(lambda: [view_of(each.assignment) for each in self.lifecycle.sources])

    @property
    def state(self) -> State:
        """State of the agent's life."""
        return self.lifecycle.state

    @property
    def is_reloading(self) -> bool:
        """Tell whether a reload is requested or runs."""
        return self._reloader is not None and self._reloader.busy

    def is_alive(self) -> bool:
        """Tell whether a thread was at the socket since the last call, and no computation hangs."""
        attended, self._attended = self._attended, False
        self._router.wake()
        return attended and self._clock() - self._started_s < HUNG_S

    def stop(self) -> None:
        """Compute what was accepted, refuse the rest, and let `serve` return. Any thread."""
        self._stopping = True
        self._router.wake()

    def reload(self) -> None:
        """Read the bundle again, and serve it if it is another one. Any thread."""
        if self._reloader is not None:
            self._reloader.request()
            self._router.wake()

    def _switch(self, reload: Reload) -> None:
        if self._reloader is not None:
            self._reloader.switch(reload)
            self._router.wake()

    def serve(self, periodic: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`; raises what loading or warming up the runtime raises.

        `periodic` is called in this thread by `main_loop`.
        """
        workers = [
            threading.Thread(target=self._until_over, args=(work,), name=name, daemon=True)
            for name, work in (("first", self._work), ("second", self._load_and_work))
        ]
        for worker in workers:
            worker.start()
        self.main_loop.run(periodic)
        # A model that still loads, or a computation that outlasted the draining, is left behind.
        # After a failure, too, the other thread has to leave the socket before it is closed.
        leave_s = self._clock() + LEAVE_S
        for worker in workers:
            worker.join(timeout=max(0.0, leave_s - self._clock()))
        self.left_behind = any(worker.is_alive() for worker in workers)
        if self._reloader is not None:
            self.left_behind |= not self._reloader.join(max(0.0, leave_s - self._clock()))
        if self._fatal is not None:
            raise self._fatal

    def _until_over(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again in the thread that serves
            self._fatal, self._over = error, True
            self._router.wake()
        finally:
            self.main_loop.end()

    def _load_and_work(self) -> None:
        runtime = self._first.load()
        self.lifecycle.enter("WARMING")
        served = warm_up(self._first, runtime, self._clock)
        if served.measured_s:
            self._report(served.speeds)
        self._install(served)
        # The other thread warms up too: a runtime may keep state per thread.
        self._router.wake()
        self._work()

    def _work(self) -> None:
        """Take turns at the socket, and run what comes while nothing else runs."""
        while jobs := self._await_jobs():
            while jobs:
                self._run(jobs)
                jobs = self._take()

    # At the socket.

    def _await_jobs(self) -> list[Job]:
        """Answer at the socket until there are jobs to run; none once the agent is over."""
        with self._turn:
            # The thread before may have left with a job and a wake-up.
            self._run_periodic_tasks()
            while not self._over:
                due_s = min(self._periodic_s, self._counters.due_s)
                left_s = None if due_s == float("inf") else max(0.0, due_s - self._clock())
                self._receive_all(left_s)
                if self._queue.waiting and (jobs := self._take()):
                    return jobs
                if self._router.was_woken() or self._clock() >= due_s:
                    self._run_periodic_tasks()
            # What has arrived by now is refused.
            self._receive_all(0.0)
            return []

    def _receive_all(self, timeout_s: float | None) -> None:
        for peer, frames in self._router.poll(timeout_s):
            try:
                self._receive(peer, frames)
            except MemoryError:
                # No reply for this request: out of memory. The others are served.
                self._counters.count("failed")

    def _run_periodic_tasks(self) -> None:
        self._attended = True
        current, state = self.lifecycle.served.current, self.state
        if state == "WARMING" and current is not None:
            for rung in current.rungs:
                rung.runtime.warm_up()
            self.lifecycle.enter("READY")
        if self._stopping and state != "DRAINING":
            self._drain_until_s = self._clock() + DRAIN_S
            self.lifecycle.enter("DRAINING")
        if self.state == "DRAINING" and not self._over:
            self._drain()
        if self._reloader is not None and self.state in ("READY", "FAILED"):
            self._reload(self._reloader)
        self._counters.count_rejected(self._router.take_rejections())
        if line := self._counters.report(self._clock()):
            self._report(line)
        self._periodic_s = min(self.lifecycle.served.retires_s(), self._retry_s)
        if self.state == "DRAINING" or self._periodic_s <= self._clock():
            # Also while a computation delays the retirement of a bundle.
            self._periodic_s = self._clock() + DRAIN_CHECK_S

    def _drain(self) -> None:
        waiting: list[Job] = []
        with self._lock:
            if self._clock() > self._drain_until_s:
                self._over, waiting = True, self._queue.clear()
            idle = self._queue.idle
        self._over = self._over or (idle and self._router.has_delivered())
        self._replies.fail_jobs(waiting, "draining", "this agent had to stop before its turn")

    def _reload(self, reloader: Reloader) -> None:
        """Start and end reloads, and retire the previous bundle."""
        failed = self.state == "FAILED"
        if failed and self._retry_s == float("inf"):
            self._retry_s = self._clock() + RETRY_S
        if failed and self._clock() >= self._retry_s:
            self._retry_s = self._clock() + RETRY_S
            reloader.request()
        match reloader.outcome():
            case NewBundle(served):
                self._install(served)
                self.lifecycle.failure = self.lifecycle.reload_error = ""
                self._counters.count("renewed")
                self._report(f"serves {served.source}")
                if failed:
                    self._retry_s = float("inf")
                    self.lifecycle.enter("READY")
                reloader.settle()
            case Unchanged():
                self.lifecycle.reload_error = ""
                reloader.settle()
            case Rejected(error):
                why = f"{error}" or type(error).__name__
                self.lifecycle.reject_reload(why)
                reloader.settle(why)
            case None:
                pass
        # After the outcome: a reload may have been requested while one was running.
        reloader.start(self.lifecycle.served, make_room=self._make_room, done=self._router.wake)
        previous = self.lifecycle.served.previous
        if previous is not None:
            with self._lock:
                in_use = previous.digest == self._computing or self._queue.holds(previous.digest)
            # Accepted requests are answered first, however long that takes.
            if not in_use:
                self.lifecycle.retire()

    def _make_room(self) -> None:
        self.lifecycle.make_room(self._router.wake)

    def _install(self, served: ServedBundle) -> None:
        self.lifecycle.install(served)
        with self._lock:
            self._queue.renew(served.source.batch, [rung.measured_s for rung in served.rungs])

    def _receive(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        try:
            envelope = decode(frames)
        except WireError as error:
            self._replies.fail(peer.route, 0, "bad_message", str(error))
            return
        match envelope.message:
            case Infer() as infer:
                self._admit(peer, infer, envelope.buffers[0])
            case FrameRequest() as look:
                self._admit(peer, look, b"")
            case StatusRequest(request_id=request_id):
                status = self.lifecycle.status(
                    request_id,
                    queued=self._queue.waiting,
                    camera=self._camera(),
                    suspect=None if self._frames is None else self._frames.suspicion(),
                    temperature_c=self.temperature_c,
                )
                self._replies.send(peer.route, status)
            case BundleRequest() | BundlePiece() | BundleRead() as message:
                self._receive_bundle(peer, message, envelope.buffers)
            case RestRequest() as asked:
                answer_rest(self._replies, peer, asked, self._frames)
            case PictureRequest() as wanted if self.recording is not None:
                self.recording.receive(peer, wanted)
            case PictureRequest(request_id=request_id):
                self._replies.fail(peer.route, request_id, "no_frame", NOT_RECORDED)
            case MaskRequest() as wanted if self._masking is not None:
                self._masking.receive(peer, wanted)
            case MaskRequest(request_id=request_id):
                self._replies.fail(peer.route, request_id, "no_frame", NOT_MASKED)
            case message:
                text = f"{type(message).__name__} is for clients"
                self._replies.fail(peer.route, 0, "bad_message", text)

    def _camera(self) -> str:
        recorded = self.recording is not None and self.recording.is_recorded
        return "" if self._frames is None else self._frames.describe(recorded=recorded)

    def _receive_bundle(
        self, peer: Peer, message: BundleMessage, buffers: Sequence[Buffer]
    ) -> None:
        if self._push is None:
            refusal = BundleRefusal(request_id=message.request_id, text=NOT_HERE)
            self._replies.send(peer.route, refusal)
        elif used_up := self.quotas.refusal(peer.client, sum(map(len, buffers)), self._clock()):
            self._replies.fail(peer.route, message.request_id, "overloaded", used_up)
        else:
            self._push.receive(peer, message, buffers)

    def _admit(self, peer: Peer, request: Infer | FrameRequest, buffer: Buffer) -> None:
        """Run the request at once, queue it, or refuse it."""
        now_s = self._clock()
        served = self.lifecycle.admit(request, now_s)
        if isinstance(served, tuple):
            self._replies.fail(peer.route, request.request_id, *served)
            return
        if used_up := self.quotas.refusal(peer.client, len(buffer), now_s):
            self._replies.fail(peer.route, request.request_id, "quota", used_up)
            return
        try:
            job = self._job(peer, request, buffer, served, now_s)
        except NoFrameError as error:
            self._replies.fail(peer.route, request.request_id, "no_frame", str(error))
            return
        with self._lock:
            at_once = self._queue.takes_at_once(job, now_s, UNATTENDED_S)
            rejected = [] if at_once else self._queue.offer(job, now_s)
        if at_once:
            self._run([job])
        self._replies.reject(rejected, self._queue.waiting, now_s)

    def _job(
        self,
        peer: Peer,
        request: Infer | FrameRequest,
        buffer: Buffer,
        served: ServedBundle,
        now_s: float,
    ) -> Job:
        """The admitted request; raises NoFrameError."""
        deadline_s = now_s + request.budget_ms / 1e3
        if isinstance(request, Infer):
            return PictureJob(
                route=peer.route,
                client=peer.client,
                request_id=request.request_id,
                served=served,
                arrived_s=now_s,
                deadline_s=deadline_s,
                traceparent=request.traceparent,
                infer=request,
                buffer=buffer,
            )
        if self._frames is None:
            raise NoFrameError(NO_SOURCE)
        self._frames.note(peer.route, suspected=request.suspect)
        frame = self._frames.match(
            view_of(served.source.assignment),
            ago_ms=request.ago_ms,
            within_ms=request.within_ms,
            route=peer.route,
        )
        return FrameJob(
            route=peer.route,
            client=peer.client,
            request_id=request.request_id,
            served=served,
            arrived_s=now_s,
            deadline_s=deadline_s,
            traceparent=request.traceparent,
            frame=frame,
            wants_map=request.wants_map,
        )

    # Away from the socket.

    def _take(self) -> list[Job]:
        """The next jobs, unless some are running; jobs that are too late are failed."""
        with self._lock:
            jobs, too_late = self._queue.take(self._clock())
            self._computing = jobs[0].digest if jobs else self._computing
        self._replies.fail_jobs(too_late, "too_late", "waited too long in the queue")
        return jobs

    def _run(self, jobs: list[Job]) -> None:
        batch, started_s = Batch(), self._clock()
        self._started_s = started_s
        try:
            # As the queue chose it for these jobs; nothing else is taken before they are done.
            batch = self._executor.run(jobs, self._queue.rung)
        finally:
            self._started_s = float("inf")
            with self._lock:
                self._queue.done(
                    batch.took_s,
                    pictures=batch.pictures,
                    decoding_s=batch.decoding_s,
                    elapsed_s=batch.elapsed_s,
                )
                self._computing = ""
            self.quotas.charge([job.client for job in jobs], started_s, self._clock())
        if self.state in ("DRAINING", "FAILED"):
            # Periodic tasks have a new time.
            self._router.wake()
