"""An agent without a bundle: the camera of a device too weak to compute."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from devices.access.audit import AuditLog
from devices.access.watch import ClientWatch, agent_keys
from devices.agent.counters import Counters
from devices.agent.quotas import Quotas
from devices.agent.record import RecordAccess, Recording
from devices.agent.replies import Replies
from devices.camera.capture import open_frame_buffer
from devices.camera.frames import FrameBuffer
from mdp.errors import InputError, WireError
from mdp.protocol.messages import (
    NO_DIGEST,
    Buffer,
    FrameRequest,
    Infer,
    Status,
    StatusRequest,
    decode,
)
from mdp.protocol.recording import PictureRequest
from mdp.transport import Audit, Peer, Router

#: The longest time between two periodic tasks.
PERIOD_S = 1.0
NO_BUNDLE = "this agent has a camera and no bundle (`mdp-agent camera`)"


class CameraAgent:
    """Gives a camera's pictures to the clients that may record, and its status, until `stop`."""

    def __init__(
        self,
        device: str,
        router: Router,
        frames: FrameBuffer,
        access: RecordAccess,
        report: Callable[[str], None],
    ) -> None:
        #: What is wrong with the clients' files.
        self.clients_error = ""
        self._device, self._router, self._frames, self._report = device, router, frames, report
        self._counters = Counters()
        self._replies = Replies(router, self._counters, report)
        self._recording = Recording(access, frames, self._replies, report, time.monotonic)
        self._stopping = False

    def stop(self) -> None:
        """Let `serve` return. Any thread, and a signal handler."""
        self._stopping = True
        self._router.wake()

    def serve(self, periodic: Callable[[], None]) -> None:
        """Answer until `stop`, with a `periodic` call every `PERIOD_S`."""
        due_s = time.monotonic()
        with self._recording.worker, self._frames:
            self._report("READY")
            while not self._stopping:
                for peer, frames in self._router.poll(max(0.0, due_s - time.monotonic())):
                    self._receive(peer, frames)
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + PERIOD_S
                    self._recording.tend()
                    periodic()
                    self._counters.count_rejected(self._router.rejected())
                    if line := self._counters.report(time.monotonic()):
                        self._report(line)
            self._recording.tend(over=True)

    def _receive(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        try:
            message = decode(frames).message
        except WireError as error:
            self._replies.fail(peer.route, 0, "bad_message", str(error))
            return
        match message:
            case PictureRequest():
                self._recording.receive(peer, message)
            case StatusRequest(request_id=request_id):
                self._replies.send(peer.route, self._status(request_id))
            case Infer(request_id=request_id) | FrameRequest(request_id=request_id):
                self._replies.fail(peer.route, request_id, "wrong_bundle", NO_BUNDLE)
            case _:
                self._replies.fail(peer.route, 0, "bad_message", NO_BUNDLE)

    def _status(self, request_id: int) -> Status:
        return Status(
            request_id=request_id,
            device=self._device,
            state="READY",
            bundle="",
            digest=NO_DIGEST,
            k=0,
            provider="",
            fallback=False,
            reason="; ".join(filter(None, (NO_BUNDLE, self.clients_error))),
            queued=0,
            counts=self._counters.counts,
            source=self._frames.describe(recorded=self._recording.is_recorded),
            suspect=self._frames.suspicion(),
        )


@contextmanager
def build_camera_agent(
    device: str,
    source: str,
    *,
    fps: float,
    bind: str,
    key: Path,
    clients: Path,
    audit: Path | None,
    report: Callable[[str], None],
) -> Iterator[tuple[CameraAgent, str, Callable[[], None]]]:
    """The agent, where it listens, and its periodic task; its socket closes with the block.

    Raises InputError, ConfigError or AgentError.
    """
    access = agent_keys(bind, key, clients, insecure=False)
    assert access is not None
    keys, allowed = access
    if source.startswith("mdp:"):
        raise InputError(f"--source {source}: expected a camera of this device's own")
    frames = open_frame_buffer(source, fps)
    frames.report_to(report)
    with ExitStack() as stack:
        told: Audit = _no_audit
        log: AuditLog | None = None
        if audit is not None:
            log = stack.enter_context(AuditLog(audit, allowed.name))
            told = log.record
        router = stack.enter_context(Router(bind, keys=keys, audit=told))
        may = RecordAccess(may_record=allowed.may_record, name_of=allowed.name, audit=told)
        agent = CameraAgent(device, router, frames, may, report)
        watch = ClientWatch(allowed, keys.allowed, router, Quotas(), agent, report)

        def tend() -> None:
            watch.tend()
            if log is not None:
                log.tend()

        yield agent, router.address, tend


def _no_audit(event: str, key: str, address: str, reason: str) -> None:
    """Without `--audit`."""
