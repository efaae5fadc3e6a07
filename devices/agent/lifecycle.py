"""The agent's state, the bundles it serves in it, and which requests it refuses for either.

STARTING ──> WARMING ──> READY ──> DRAINING
    └───────────┴──────────┴─────> FAILED
"""

import math
import threading
from collections.abc import Callable, Mapping

from devices.agent.bundles import GRACE_S, LoadableBundle, Refusal, ServedBundle, ServedBundles
from devices.agent.counters import Counters
from mdp.errors import AgentError
from mdp.protocol.messages import (
    FrameRequest,
    Infer,
    State,
    Status,
    Suspicion,
    answers_key,
    as_line,
)

Report = Callable[[str], None]


class Lifecycle:
    """Any thread may call it."""

    def __init__(
        self,
        first: LoadableBundle,
        counters: Counters,
        *,
        grace_s: float = GRACE_S,
        report: Report,
        clock: Callable[[], float],
    ) -> None:
        """`first` is loaded until a bundle is installed."""
        self.state: State = "STARTING"
        #: Why the last inference failed; empty after one that succeeded.
        self.failure = ""
        #: Why the last reload was rejected, and what is wrong with the clients' files.
        self.reload_error = self.clients_error = ""
        self.served = ServedBundles(grace_s)
        self._first = first
        self._counters = counters
        self._report = report
        self._clock = clock
        self._lock = threading.Lock()
        #: Set while no previous bundle is leaving.
        self._settled = threading.Event()
        self._settled.set()

    @property
    def device(self) -> str:
        """This device's name in the plan."""
        return self._first.assignment.device

    @property
    def sources(self) -> list[LoadableBundle]:
        """The bundles that are served, the current one first, or the one that is being loaded."""
        with self._lock:
            return [served.source for served in self.served.all] or [self._first]

    @property
    def description(self) -> dict[str, str | int]:
        """The bundle that is served, this device's part of it, and what runs it."""
        with self._lock:
            current = self.served.current
        if current is None:
            return {}
        return {
            "bundle": as_line(current.source.bundle.manifest.name),
            "digest": current.digest[:12],
            "k": current.k,
            "provider": as_line(current.runtime.provider),
        }

    def enter(self, state: State) -> None:
        """Change the state and report it; DRAINING is final."""
        with self._lock:
            if self.state == "DRAINING":
                return
            self.state = state
            if state == "DRAINING":
                self._settled.set()
        self._report(state)

    def admit(self, request: Infer | FrameRequest, now_s: float) -> ServedBundle | Refusal:
        """The bundle that computes `request`, or why none does."""
        if self.state != "READY":
            return self.not_served(request.digest)
        with self._lock:
            served = self.served.bundle_for(request.digest, now_s=now_s)
        if served is None:
            return self.not_served(request.digest)
        return served.refusal(request) or served

    def not_served(self, digest: str) -> Refusal:
        """Reason why no request for the bundle `digest`, or for any, is answered."""
        match self.state:
            case "FAILED":
                return "failed", self.failure
            case "DRAINING":
                return "draining", "this agent is about to stop"
            case "STARTING" | "WARMING":
                return "not_ready", self.state
        served = " and ".join(map(str, self.sources))
        return "wrong_bundle", (
            f"serves {served}: give client and agent the same bundle, and reload whichever had "
            f"another; asked for {digest[:12]}"
        )

    def install(self, served: ServedBundle) -> None:
        """Make `served` the current bundle."""
        with self._lock:
            self.served.install(served, now_s=self._clock())

    def withdraw(self, served: ServedBundle) -> None:
        """Serve the other bundle, if there is one; else fail, and free the memory."""
        with self._lock:
            other = self.served.withdraw(served)
            if other is None:
                self._first = served.source
        self._settled.set()
        if other is None:
            self.enter("FAILED")
        else:
            self.reject_reload(f"{served.source} failed: {self.failure}")

    def reject_reload(self, why: str) -> None:
        """Count and report that the served bundle stays."""
        self.reload_error = as_line(f"the bundle is as before: {why}")
        self._counters.count("not_renewed")
        self._report(self.reload_error)

    def make_room(self, wake: Callable[[], None]) -> None:
        """Have the previous bundle retired, for a further one; waits until it is.

        Its accepted requests are answered first; `wake` is called before waiting for them. Ends at
        once while the agent stops. Not for the thread at the socket. Raises AgentError until its
        grace period since it was replaced is over.
        """
        with self._lock:
            previous = self.served.previous
            if previous is None or self.state == "DRAINING":
                return
            left_s = self.served.make_room(now_s=self._clock())
            if left_s:
                raise AgentError(
                    f"two bundles are served, and {previous.source} for {math.ceil(left_s)} s "
                    "more: reload its clients, and try again then"
                )
            self._settled.clear()
        wake()
        self._settled.wait()

    def retire(self) -> None:
        """Stop serving the previous bundle after its grace period."""
        with self._lock:
            retired = self.served.retire(now_s=self._clock())
        if retired is not None:
            self._settled.set()
            self._report(f"serves {retired.source} no more")

    def status(
        self,
        request_id: int,
        *,
        queued: int,
        camera: str,
        suspect: Suspicion | None,
        temperature_c: float | None,
    ) -> Status:
        """The reply to a status request."""
        with self._lock:
            current = self.served.current
            source = self._first if current is None else current.source
            answered = {answers_key(each.digest): each.answered for each in self.served.all}
        counts: Mapping[str, int] = self._counters.counts
        reasons = (self.failure, self.reload_error, self.clients_error)
        return Status(
            request_id=request_id,
            device=source.assignment.device,
            state=self.state,
            bundle=as_line(source.bundle.manifest.name),
            digest=source.bundle.digest,
            k=source.assignment.k,
            provider=as_line(current.runtime.provider) if current else "",
            fallback=current.runtime.fallback if current else False,
            reason=as_line("; ".join(filter(None, reasons))),
            queued=queued,
            counts={**counts, **answered},
            source=camera,
            temperature_c=temperature_c,
            suspect=suspect,
        )
