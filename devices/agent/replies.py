"""Replies to clients, and their count."""

from collections.abc import Callable, Iterable

from devices.agent.counters import Counters
from devices.agent.jobs import Job
from mdp.protocol.messages import Buffer, FailureCode, Message, as_line, encode, failure
from mdp.queueing.queue import Reason
from mdp.tracing import trace_id
from mdp.transport import Router


class Replies:
    """Sends replies; any thread."""

    def __init__(self, router: Router, counters: Counters, report: Callable[[str], None]) -> None:
        """Failures of sampled traces are reported with their trace's id."""
        self._report = report
        self._router = router
        self._counters = counters

    def send(self, route: bytes, message: Message, *buffers: Buffer) -> None:
        """Send `message`; it is lost where the client has disconnected or does not read."""
        if not self._router.send(route, encode(message, *buffers)):
            self._counters.count("undeliverable")

    def fail(self, route: bytes, request_id: int, code: FailureCode, text: str) -> None:
        """Send a failure; `request_id` is 0 for a request that could not be decoded."""
        self._counters.count(code)
        self.send(route, failure(request_id, code, text))

    def fail_jobs(self, jobs: Iterable[Job], code: FailureCode, text: str) -> None:
        """Send the same failure for each of `jobs`."""
        for job in jobs:
            self.fail(job.route, job.request_id, code, text)
            if trace := trace_id(job.traceparent):
                self._report(as_line(f"trace {trace} not answered: {code}: {text}"))

    def reject(self, rejected: Iterable[tuple[Job, Reason]], waiting: int, now_s: float) -> None:
        """Send why requests do not wait, or no longer wait, where so many are `waiting`."""
        for job, code in rejected:
            if code == "overloaded":
                text = f"{waiting} requests wait already"
            else:
                text = f"{max(0.0, job.deadline_s - now_s) * 1e3:.1f} ms left do not suffice"
            self.fail_jobs([job], code, text)
