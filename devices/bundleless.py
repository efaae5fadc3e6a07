"""An agent without a bundle: a camera that can be recorded, until a first bundle is pushed."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from devices.agent.bundles import LoadableBundle, ServedBundles
from devices.agent.counters import Counters
from devices.agent.masking import NOT_HERE as NOT_MASKED
from devices.agent.masking import MaskAccess, Masking
from devices.agent.push import NOT_HERE, BundleMessage, BundlePush, PushAccess
from devices.agent.record import NOT_HERE as NOT_RECORDED
from devices.agent.record import RecordAccess, Recording
from devices.agent.reload import NewBundle, Rejected, Reloader
from devices.agent.replies import Replies
from devices.agent.rest import answer_rest
from devices.camera.frames import FrameBuffer
from mdp.errors import AgentError, WireError
from mdp.protocol.masking import MaskRequest
from mdp.protocol.messages import (
    NO_DIGEST,
    Buffer,
    FrameRequest,
    Infer,
    State,
    Status,
    StatusRequest,
    as_line,
    decode,
)
from mdp.protocol.recording import PictureRequest
from mdp.protocol.rest import RestRequest
from mdp.protocol.transfer import BundlePiece, BundleRead, BundleRefusal, BundleRequest
from mdp.transport import Peer, Router

#: The longest time between two periodic tasks.
PERIOD_S = 1.0
CAMERA_ALONE = "this agent has a camera and no bundle (`mdp-agent camera`)"
NOT_PUSHED_YET = "this agent has no bundle yet (`mdp bundle push`)"


class BundlelessAgent:
    """Gives pictures to clients that may record, and its status, until `stop` or a first push."""

    def __init__(
        self,
        device: str,
        router: Router,
        report: Callable[[str], None],
        *,
        frames: FrameBuffer | None = None,
        record: RecordAccess | None = None,
        mask: MaskAccess | None = None,
        push: PushAccess | None = None,
    ) -> None:
        #: This device's name in the plan of a bundle.
        self.device = device
        #: For pushes, it is an agent that serves nothing.
        self.state: State = "READY"
        self.sources: list[LoadableBundle] = []
        #: What is wrong with the clients' files.
        self.clients_error = ""
        self._reason = CAMERA_ALONE if push is None else NOT_PUSHED_YET
        #: Why the last push was rejected.
        self._push_error = ""
        self._router, self._frames, self._report = router, frames, report
        self._counters = Counters()
        self._replies = Replies(router, self._counters, report)
        self._recording: Recording | None = None
        if record is not None and frames is not None:
            self._recording = Recording(record, frames, self._replies, report, time.monotonic)
        self._masking: Masking | None = None
        if mask is not None and frames is not None:
            self._masking = Masking(mask, frames, self._replies, report)
        self._reloader = Reloader(self._read_nothing, clock=time.monotonic)
        self._push: BundlePush | None = None
        if push is not None:
            self._push = BundlePush(push, self, self._replies, self._reloader.switch)
        self._stopping = False

    def stop(self) -> None:
        """Let `serve` return. Any thread, and a signal handler."""
        self._stopping = True
        self._router.wake()

    def serve(self, periodic: Callable[[], None]) -> bool:
        """Answer until `stop`, or until a pushed bundle is on disk and can be loaded.

        Returns whether there is such a bundle. A `periodic` call comes every `PERIOD_S`.
        """
        pushed, due_s = False, time.monotonic()
        with ExitStack() as stack:
            if self._push is not None:
                stack.enter_context(self._push.worker)
            if self._recording is not None:
                stack.enter_context(self._recording.worker)
            if self._masking is not None:
                stack.enter_context(self._masking.worker)
            if self._frames is not None:
                stack.enter_context(self._frames)
            self._report("READY")
            while not self._stopping and not pushed:
                for peer, frames in self._router.poll(max(0.0, due_s - time.monotonic())):
                    self._receive(peer, frames)
                pushed = self._load()
                if time.monotonic() >= due_s:
                    due_s = time.monotonic() + PERIOD_S
                    self._tend()
                    periodic()
            if self._recording is not None:
                self._recording.tend(over=True)
        return pushed

    def _tend(self) -> None:
        if self._recording is not None:
            self._recording.tend()
        self._counters.count_rejected(self._router.take_rejections())
        if line := self._counters.report(time.monotonic()):
            self._report(line)

    def _load(self) -> bool:
        """Load what was pushed, in another thread; whether it is done."""
        outcome = self._reloader.outcome()
        if isinstance(outcome, Rejected):
            why = f"{outcome.error}" or type(outcome.error).__name__
            self._push_error = as_line(f"the pushed bundle was rejected: {why}")
            self._report(self._push_error)
            self._reloader.settle(why)
        elif isinstance(outcome, NewBundle):
            self._report(f"was given {outcome.served.source}")
            self._reloader.settle()
            return True
        self._reloader.start(ServedBundles(), make_room=lambda: None, done=self._router.wake)
        return False

    @staticmethod
    def _read_nothing() -> LoadableBundle:
        raise AgentError(NOT_PUSHED_YET)

    def _receive(self, peer: Peer, frames: Sequence[Buffer]) -> None:
        try:
            envelope = decode(frames)
        except WireError as error:
            self._replies.fail(peer.route, 0, "bad_message", str(error))
            return
        match envelope.message:
            case PictureRequest() as wanted if self._recording is not None:
                self._recording.receive(peer, wanted)
            case PictureRequest(request_id=request_id):
                self._replies.fail(peer.route, request_id, "no_frame", NOT_RECORDED)
            case MaskRequest() as wanted if self._masking is not None:
                self._masking.receive(peer, wanted)
            case MaskRequest(request_id=request_id):
                self._replies.fail(peer.route, request_id, "no_frame", NOT_MASKED)
            case StatusRequest(request_id=request_id):
                self._replies.send(peer.route, self._status(request_id))
            case RestRequest() as asked:
                answer_rest(self._replies, peer, asked, self._frames)
            case Infer(request_id=request_id) | FrameRequest(request_id=request_id):
                self._replies.fail(peer.route, request_id, "wrong_bundle", self._reason)
            case BundleRequest() | BundlePiece() | BundleRead() as message:
                self._receive_bundle(peer, message, envelope.buffers)
            case _:
                self._replies.fail(peer.route, 0, "bad_message", self._reason)

    def _receive_bundle(
        self, peer: Peer, message: BundleMessage, buffers: Sequence[Buffer]
    ) -> None:
        if self._push is None:
            refusal = BundleRefusal(request_id=message.request_id, text=NOT_HERE)
            self._replies.send(peer.route, refusal)
        else:
            self._push.receive(peer, message, buffers)

    def _status(self, request_id: int) -> Status:
        recorded = self._recording is not None and self._recording.is_recorded
        frames = self._frames
        return Status(
            request_id=request_id,
            device=self.device,
            state=self.state,
            bundle="",
            digest=NO_DIGEST,
            k=0,
            provider="",
            fallback=False,
            reason="; ".join(filter(None, (self._reason, self._push_error, self.clients_error))),
            queued=0,
            counts=self._counters.counts,
            source="" if frames is None else frames.describe(recorded=recorded),
            suspect=None if frames is None else frames.suspicion(),
        )
