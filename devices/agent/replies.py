"""What an agent says to its clients, and the count of it."""

from collections.abc import Iterable

from devices.agent.counters import Ledger
from devices.agent.jobs import Job
from mdp.protocol.messages import Buffer, Failure, FailureCode, Message, State, as_line, encode
from mdp.queueing.queue import Reason
from mdp.transport import Router

#: Why a request is not answered: for programs, and for people.
Refusal = tuple[FailureCode, str]


def not_serving(state: State, reason: str) -> Refusal:
    """Why an agent that is not READY answers nothing; `reason` is why it FAILED."""
    if state == "FAILED":
        return "failed", reason
    if state == "DRAINING":
        return "draining", "this agent is about to stop"
    return "not_ready", state


class Replies:
    """Sends replies; any thread."""

    def __init__(self, router: Router, ledger: Ledger) -> None:
        self._router = router
        self._ledger = ledger

    def send(self, route: bytes, message: Message, *buffers: Buffer) -> None:
        """Send `message`; whoever has gone or does not read does not get it."""
        if not self._router.send(route, encode(message, *buffers)):
            self._ledger.count("undeliverable")

    def fail(self, route: bytes, request_id: int, code: FailureCode, text: str) -> None:
        """Say why a request, 0 for one that could not be read, is not answered."""
        self._ledger.count(code)
        self.send(route, Failure(request_id=request_id, code=code, text=as_line(text)))

    def fail_job(self, job: Job, code: FailureCode, text: str) -> None:
        """Say why an admitted request is not answered."""
        self.fail(job.peer, job.infer.request_id, code, text)

    def fail_jobs(self, jobs: Iterable[Job], code: FailureCode, text: str) -> None:
        """Say the same of several."""
        for job in jobs:
            self.fail_job(job, code, text)

    def send_back(
        self, sent_back: Iterable[tuple[Job, Reason]], capacity: int, now_s: float
    ) -> None:
        """Say why requests do not wait in a queue of `capacity`, or not any longer."""
        for job, code in sent_back:
            if code == "overloaded":
                text = f"{capacity} requests wait already"
            else:
                text = f"{max(0.0, job.deadline_s - now_s) * 1e3:.1f} ms left do not suffice"
            self.fail_job(job, code, text)
