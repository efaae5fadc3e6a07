"""Whole pictures for clients that make data of them, in a thread of its own, and who gets them."""

import io
import threading
from collections.abc import Callable
from dataclasses import dataclass

from PIL import Image

from devices.agent.replies import Replies
from devices.camera.frames import FrameBuffer, NoFrameError, WholeFrame
from mdp.errors import PictureError
from mdp.logs import BackgroundWriter
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import MAX_BUFFER_BYTES, FailureCode, as_line
from mdp.protocol.recording import (
    MOST_SIDE,
    PICTURES_PER_S,
    SMALL_PER_S,
    SMALL_SIDE,
    PictureReply,
    PictureRequest,
)
from mdp.transport import Audit, Peer

#: Of a JPEG.
QUALITY = 90
#: A client that asks for no picture for so long records no more.
SILENT_S = 5.0
#: Pictures that may wait to be encoded, and that may be requested at once.
MOST_WAITING, AT_ONCE = 4, 2
NOT_HERE = "this agent's camera is not recorded (--allow-record)"
FORBIDDEN = "this client's key may not record (`record = true` in its .limits file)"
TOO_MANY = (
    f"expected at most {PICTURES_PER_S:g} pictures a second, or {SMALL_PER_S:g} of at most "
    f"{SMALL_SIDE} pixels, of all clients together"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordAccess:
    """The right to record, and who is told."""

    may_record: Callable[[str], bool]
    #: The name of a client's key.
    name_of: Callable[[str], str]
    audit: Audit = lambda *_: None


@dataclass(slots=True)
class _Recorder:
    """A client that records."""

    #: The connection of the newest request.
    address: str
    last_s: float
    pictures: int = 0


class Recording:
    """Answers requests for pictures; reports when a client begins to record, and has ended."""

    def __init__(
        self,
        access: RecordAccess,
        frames: FrameBuffer,
        replies: Replies,
        report: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """`frames` keeps whole pictures from now on."""
        self._access, self._frames, self._replies = access, frames, replies
        self._report, self._clock = report, clock
        # Decoded at least twice as large, a picture has all pixels that are asked for.
        frames.whole_side = MOST_SIDE // 2
        #: Until when the pictures so far use up the rate.
        self._paid_s = float("-inf")
        #: Guards what follows: the socket's thread adds, the main one removes.
        self._lock = threading.Lock()
        self._recorders: dict[str, _Recorder] = {}
        #: Closed with its `with` block, if anybody waits for it.
        self.worker: BackgroundWriter[tuple[Peer, PictureRequest, WholeFrame, float]]
        self.worker = BackgroundWriter(self._send, "pictures", MOST_WAITING)

    @property
    def is_recorded(self) -> bool:
        """Tell whether a client records. Any thread."""
        return bool(self._recorders)

    def receive(self, peer: Peer, request: PictureRequest) -> None:
        """Answer soon, or refuse now. For the thread at the socket; never waits."""
        if not self._access.may_record(peer.client):
            self._access.audit("refuse", peer.client, peer.address, f"record: {FORBIDDEN}")
            self._fail(peer, request, "no_frame", FORBIDDEN)
            return
        now_s = self._clock()
        paid_s = max(self._paid_s, now_s)
        if self.worker.is_full or paid_s > now_s + (AT_ONCE - 1) / PICTURES_PER_S:
            self._fail(peer, request, "overloaded", TOO_MANY)
            return
        try:
            whole, age_ms = self._frames.newest(within_ms=request.within_ms)
        except NoFrameError as error:
            self._fail(peer, request, "no_frame", str(error))
            return
        is_small = min(request.side, longest_side(whole.picture)) <= SMALL_SIDE
        self._paid_s = paid_s + 1 / (SMALL_PER_S if is_small else PICTURES_PER_S)
        # Told before the picture leaves.
        self._note(peer, now_s)
        self.worker.put((peer, request, whole, age_ms))

    def _note(self, peer: Peer, now_s: float) -> None:
        client, address = peer.client, peer.address
        with self._lock:
            begins = client not in self._recorders
            recorder = self._recorders.setdefault(client, _Recorder(address, now_s))
            recorder.address, recorder.last_s = address, now_s
            recorder.pictures += 1
        if begins:
            self._tell(client, address, "begins to record")

    def tend(self, *, over: bool = False) -> None:
        """Report which clients record no more, all if `over`; to be called every second or so."""
        now_s = self._clock()
        with self._lock:
            ended = {
                client: recorder
                for client, recorder in self._recorders.items()
                if over or now_s - recorder.last_s >= SILENT_S
            }
            for client in ended:
                del self._recorders[client]
        for client, recorder in ended.items():
            what = f"has ended recording: pictures {recorder.pictures}"
            self._tell(client, recorder.address, what)

    def _tell(self, client: str, address: str, what: str) -> None:
        self._access.audit("record", client, address, what)
        self._report(as_line(f"{self._access.name_of(client) or 'a client'} {what}"))

    def _send(self, item: tuple[Peer, PictureRequest, WholeFrame, float]) -> None:
        peer, request, whole, age_ms = item
        if whole.mask is not self._frames.mask:
            self._fail(peer, request, "no_frame", "the mask was changed: ask again")
            return
        try:
            content = to_jpeg(whole.picture, request.side)
        except Exception as error:  # Pillow's encoders raise any type
            self._fail(peer, request, "no_frame", str(error) or type(error).__name__)
            return
        reply = PictureReply(request_id=request.request_id, frame=whole.number, age_ms=age_ms)
        self._replies.send(peer.route, reply, content)

    def _fail(self, peer: Peer, request: PictureRequest, code: FailureCode, text: str) -> None:
        self._replies.fail(peer.route, request.request_id, code, text)


def longest_side(picture: Image.Image | Pixels) -> int:
    """The longer of a picture's height and width, in pixels."""
    longest: int = max(picture.size if isinstance(picture, Image.Image) else picture.shape[:2])
    return longest


def to_jpeg(picture: Image.Image | Pixels, side: int) -> bytes:
    """`picture` as a JPEG without metadata, its longest side at most `side` pixels.

    Raises PictureError if it does not fit into a message.
    """
    image = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    longest = longest_side(picture)
    if longest > side:
        width, height = (max(1, round(length * side / longest)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=2.0)
    content = io.BytesIO()
    image.save(content, "JPEG", quality=QUALITY)
    if content.tell() > MAX_BUFFER_BYTES:
        raise PictureError(f"a picture of {content.tell():,} bytes, more than a message takes")
    return content.getvalue()
