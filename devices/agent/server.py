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
from collections.abc import Callable, Sequence

from devices.agent.bundles import (
    GRACE_S,
    Candidate,
    Service,
    Shelf,
    sighting_for,
    status_of,
    warmed,
    wrong_bundle,
)
from devices.agent.counters import Ledger
from devices.agent.executor import Computing, Run
from devices.agent.jobs import Job
from devices.agent.lookout import Lookout
from devices.agent.quotas import Quotas
from devices.agent.reload import Found, Refused, Renewal
from devices.agent.replies import Refusal, Replies, not_serving
from devices.camera.frames import Eyes, NoFrameError
from devices.events import LOG
from mdp.errors import WireError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Assignment
from mdp.protocol.messages import Ask, Buffer, Infer, Look, State, Status, as_line, decode
from mdp.queueing.queue import AgentQueue
from mdp.runtimes.base import Runtime
from mdp.transport import Peer, Router

#: How long a draining agent finishes what it has accepted.
DRAIN_S = 5.0
#: How often a draining agent looks whether it may leave.
DRAIN_LOOK_S = 0.05
#: A failed agent loads its bundle anew so often; what it lacked, as memory, may be there again.
RETRY_S = 30.0
#: How long threads that are about to end are waited for.
LEAVE_S = 1.0
#: A computation as short as this is done without leaving the socket to the other thread: waking it
#: would cost more than the socket's being unattended for so long.
UNATTENDED_S = 0.001

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
        batch: int | None = None,
        renewal: Renewal | None = None,
        eyes: Eyes | None = None,
        grace_s: float = GRACE_S,
        report: Report = LOG.info,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` makes the runtime beside the answering socket; what it raises ends `serve`.

        Up to `batch` pictures, by default as planned, are computed at once. `renewal` prepares
        other bundles; the one before is served for `grace_s` after its last request. `eyes` see
        what a Look asks for.
        """
        batch = assignment.batch if batch is None else batch
        self._first = Candidate(bundle=bundle, assignment=assignment, load=load, batch=batch)
        self._router = router
        self._renewal = renewal
        self._eyes = eyes
        self._report = report
        self._clock = clock
        self._ledger = Ledger()
        self._replies = Replies(router, self._ledger)
        #: Held by the thread that waits at the socket.
        self._turn = threading.Lock()
        #: Guards everything below.
        self._lock = threading.Lock()
        self._state: State = "STARTING"
        #: Why the last change of bundle came to nothing.
        self._not_renewed = ""
        self._shelf = Shelf(grace_s)
        self._computing = Computing(
            self._shelf, self._replies, self._ledger, clock=clock, give_up=self._give_up
        )
        self._queue: AgentQueue[Job] = AgentQueue(batch=batch)
        self._fatal: BaseException | None = None
        self._stopping = False
        self._drain_until_s = float("inf")
        self._retry_s = float("inf")
        #: When to keep house though nothing has happened; only whoever has the turn looks at this.
        self._house_s = float("-inf")
        self._over = False
        self.lookout = Lookout()
        #: What clients may use, and what is wrong with their files.
        self.quotas, self.trouble = Quotas(), ""
        #: The bundle of what is being computed.
        self._computed = ""
        #: Whether a thread still computes or loads after `serve` has returned.
        self.left_behind = False
        if eyes is not None:
            eyes.follow(lambda: [candidate.assignment for candidate in self.served])

    @property
    def state(self) -> State:
        """Where in its life the agent is."""
        return self._state

    @property
    def served(self) -> list[Candidate]:
        """What is served, the newest first, or going to be."""
        with self._lock:
            return [service.candidate for service in self._shelf.services] or [self._first]

    def stop(self) -> None:
        """Finish what was accepted, refuse the rest, and let `serve` return. Any thread."""
        self._stopping = True
        self._router.wake()

    def renew(self) -> None:
        """Look at the bundle again, and serve it if it is another one. Any thread."""
        if self._renewal is not None:
            self._renewal.ask()
            self._router.wake()

    def serve(self, look: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`; raises what loading or warming up the runtime raised.

        `look` is called now and then, in this thread, and when `lookout` is asked.
        """
        workers = [
            threading.Thread(target=self._until_over, args=(work,), name=name, daemon=True)
            for name, work in (("first", self._work), ("second", self._load_and_work))
        ]
        for worker in workers:
            worker.start()
        self.lookout.wait(look)
        if self._fatal is not None:
            raise self._fatal
        # A model that still loads, or a computation that outlasted the draining, is left behind.
        leave_s = self._clock() + LEAVE_S
        for worker in workers:
            worker.join(timeout=max(0.0, leave_s - self._clock()))
        self.left_behind = any(worker.is_alive() for worker in workers)
        if self._renewal is not None:
            self.left_behind |= not self._renewal.leave(max(0.0, leave_s - self._clock()))

    def _until_over(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # raised again in the thread that serves
            self._fatal, self._over = error, True
            self._router.wake()
        finally:
            self.lookout.end()

    def _load_and_work(self) -> None:
        runtime = self._first.load()
        self._enter("WARMING")
        service = warmed(self._first, runtime, self._clock)
        if service.measured_s:
            self._report(service.speeds)
        self._put(service)
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
        """Answer at the socket until there are jobs to run; none when the agent's life is over."""
        with self._turn:
            # First: the thread that was here before may have left with a job and a wake-up.
            self._keep_house()
            while not self._over:
                due_s = min(self._house_s, self._ledger.due_s)
                left_s = None if due_s == float("inf") else max(0.0, due_s - self._clock())
                came = self._receive_all(left_s)
                if self._queue.waiting and (jobs := self._take()):
                    return jobs
                # Whatever there is to do comes with a wake-up, and that with no messages.
                if not came or self._clock() >= due_s:
                    self._keep_house()
            # What has come by now is told that it came too late. Twice: a wake-up may come first.
            self._receive_all(0.0)
            self._receive_all(0.0)
            return []

    def _receive_all(self, timeout_s: float | None) -> bool:
        """Take in what comes within so long; whether anything has."""
        came = False
        for peer, frames in self._router.poll(timeout_s):
            came = True
            try:
                self._receive(peer, frames)
            except MemoryError:
                # This one's sender waits until its deadline; the others shall not.
                self._ledger.count("failed")
        return came

    def _keep_house(self) -> None:
        newest = self._shelf.newest
        if self._state == "WARMING" and newest is not None:
            newest.runtime.warm_up()
            self._enter("READY")
        if self._stopping and self._state != "DRAINING":
            self._drain_until_s = self._clock() + DRAIN_S
            self._enter("DRAINING")
        if self._state == "DRAINING" and not self._over:
            self._drain()
        if self._renewal is not None and self._state in ("READY", "FAILED"):
            self._change(self._renewal)
        self._ledger.turned_away(self._router.turned_away())
        if line := self._ledger.report(self._clock()):
            self._report(line)
        self._house_s = min(self._shelf.retires_s(), self._retry_s)
        if self._state == "DRAINING" or self._house_s <= self._clock():
            # Also while what is computed keeps a bundle whose grace is over.
            self._house_s = self._clock() + DRAIN_LOOK_S

    def _drain(self) -> None:
        waiting: list[Job] = []
        with self._lock:
            if self._clock() > self._drain_until_s:
                self._over, waiting = True, self._queue.clear()
            idle = self._queue.idle
        self._over = self._over or (idle and self._router.delivered())
        self._replies.fail_jobs(waiting, "draining", "this agent had to stop before its turn")

    def _change(self, renewal: Renewal) -> None:
        """Begin and end changes of bundle, and take down what nobody asks for any more."""
        failed = self._state == "FAILED"
        if failed and self._clock() >= self._retry_s:
            self._retry_s = self._clock() + RETRY_S
            renewal.ask()
        match renewal.collect():
            case Found(service):
                self._put(service)
                self._not_renewed = self._computing.reason = ""
                self._ledger.count("renewed")
                self._report(f"serves {service.candidate}")
                if failed:
                    self._retry_s = float("inf")
                    self._enter("READY")
            case Refused(error):
                self._stay(f"{error}" or type(error).__name__)
            case _:
                pass
        # After: it may have been asked for again while one was under way.
        renewal.begin(self._shelf, done=self._router.wake)
        with self._lock:
            former = self._shelf.former
            # What waits for it is answered first, however long that takes.
            held = former is not None and (
                former.digest == self._computed or self._queue.holds(former.digest)
            )
            retired = None if held else self._shelf.retire(now_s=self._clock())
        if retired is not None:
            self._report(f"serves {retired.candidate} no more")

    def _put(self, service: Service) -> None:
        with self._lock:
            self._shelf.put(service, now_s=self._clock())
            self._queue.times.renew(service.candidate.batch, service.measured_s)

    def _stay(self, why: str) -> None:
        self._not_renewed = as_line(f"the bundle is as before: {why}")
        self._ledger.count("not_renewed")
        self._report(self._not_renewed)

    def _enter(self, state: State) -> None:
        with self._lock:
            if self._state == "DRAINING":
                return
            self._state = state
        self._report(state)

    def _receive(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        try:
            envelope = decode(frames)
        except WireError as error:
            self._replies.fail(peer.route, 0, "bad_message", str(error))
            return
        match envelope.message:
            case Infer() as infer:
                self._admit(peer, infer, envelope.buffers[0])
            case Ask(request_id=request_id):
                self._replies.send(peer.route, self._status(request_id))
            case Look() as look:
                self._admit(peer, look, b"")
            case message:
                text = f"{type(message).__name__} is for clients"
                self._replies.fail(peer.route, 0, "bad_message", text)

    def _admit(self, peer: Peer, infer: Infer | Look, pixels: Buffer) -> None:
        now_s = self._clock()
        refusal, sighting = self._refusal(infer, now_s), None
        if refusal is None and (used_up := self.quotas.refusal(peer.client, len(pixels), now_s)):
            refusal = "overloaded", used_up
        if refusal is None and isinstance(infer, Look):
            try:
                sighting = sighting_for(self._eyes, infer, self._shelf)
            except NoFrameError as error:
                refusal = "no_frame", str(error)
        if refusal is not None:
            self._replies.fail(peer.route, infer.request_id, *refusal)
            return
        job = Job(
            peer=peer.route,
            client=peer.client,
            infer=infer,
            pixels=pixels,
            arrived_s=now_s,
            deadline_s=now_s + infer.budget_ms / 1e3,
            sighting=sighting,
        )
        with self._lock:
            at_once = self._queue.takes_at_once(job, now_s, UNATTENDED_S)
            sent_back = [] if at_once else self._queue.offer(job, now_s)
        if at_once:
            self._run([job])
        self._replies.send_back(sent_back, self._queue.capacity, now_s)

    def _refusal(self, infer: Infer | Look, now_s: float) -> Refusal | None:
        """Why this request is not even queued, whatever its budget."""
        if self._state == "READY":
            with self._lock:
                service = self._shelf.find(infer.digest, now_s=now_s)
            return wrong_bundle(self._shelf, infer) if service is None else service.refusal(infer)
        return not_serving(self._state, self._computing.reason)

    def _status(self, request_id: int) -> Status:
        with self._lock:
            return status_of(
                self._shelf,
                self._first,
                request_id=request_id,
                state=self._state,
                reasons=(self._computing.reason, self._not_renewed, self.trouble),
                queued=self._queue.waiting,
                counts=self._ledger.counts,
                source="" if self._eyes is None else self._eyes.describe(),
            )

    # Away from the socket.

    def _take(self) -> list[Job]:
        """The next jobs that can be on time, unless some are running; late ones are sent back."""
        with self._lock:
            jobs, dropped = self._queue.take(self._clock())
            self._computed = jobs[0].infer.digest if jobs else self._computed
        self._replies.fail_jobs(dropped, "too_late", "waited too long in the queue")
        return jobs

    def _run(self, jobs: list[Job]) -> None:
        run, started_s = Run(), self._clock()
        try:
            run = self._computing.run(jobs)
        finally:
            with self._lock:
                self._queue.done(**run._asdict())
                self._computed = ""
            self.quotas.computed([job.client for job in jobs], started_s, self._clock())
        if self._state == "DRAINING":
            self._router.wake()

    def _give_up(self, service: Service) -> None:
        """Go on with the other bundle, if there is one; else fail, and free the memory."""
        with self._lock:
            other = self._shelf.take_down(service)
            if other is None:
                self._first = service.candidate
        if other is not None:
            self._stay(f"{service.candidate} failed: {self._computing.reason}")
            return
        self._enter("FAILED")
        if self._renewal is not None:
            self._retry_s = self._clock() + RETRY_S
        with self._lock:
            waiting = self._queue.clear()
        self._replies.fail_jobs(waiting, "failed", self._computing.reason)
        # Whoever is at the socket has to know until when to wait there.
        self._router.wake()
