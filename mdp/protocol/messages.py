"""Messages <-> frames. No sockets, no clocks; docs/reference/protocol.md has every byte.

A message is one or two frames, as a frame takes as long as hundreds of bytes:

    0  head     b"MDP", one byte version, one byte message kind, then a msgpack map, strictly
                typed per kind, at most 16 KiB
    1  buffer   raw contiguous bytes: the crop, or both heads' logits (float32, little endian)

Nothing is ever unpickled; sizes, shapes and counts are checked before an array is made.
"""

import math
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from mdp.errors import WireError
from mdp.files import Record
from mdp.formats.plan import MAX_MEMBERS, MAX_RUNGS, Encoding
from mdp.fusion.anomaly_table import MAP_BYTES, MAP_SIDE
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.fields import Digest, Milliseconds, RequestId, Text, check_printable
from mdp.protocol.masking import MaskReply, MaskRequest
from mdp.protocol.recording import PictureReply, PictureRequest
from mdp.protocol.rest import RestReply, RestRequest
from mdp.protocol.transfer import (
    PIECE_BYTES,
    BundleContent,
    BundlePiece,
    BundleRead,
    BundleRefusal,
    BundleRequest,
    BundleState,
)

VERSION = 1
MAGIC = b"MDP"
#: Magic, version and kind, before the header in the first frame.
PREAMBLE_BYTES = 5
MAX_HEADER_BYTES = 16 * 1024
#: Largest buffer: a raw crop of the largest image size a plan may ask for.
MAX_BUFFER_BYTES = 1024 * 1024 * 3
#: Accepted by every agent, so that a link can be measured with crops of 256 pixels, and a header
#: that is too long is refused with a reason.
MIN_FRAME_BYTES = 256 * 256 * 3
MAX_CLASSES = 100_000
#: Made once: a lookup by name takes 0.3 us.
_FLOAT32 = np.dtype("<f4")

Buffer = bytes | bytearray | memoryview
#: The caller's trace context (W3C), by which an agent's spans are of the caller's trace.
Traceparent = Annotated[str, Meta(pattern=r"^(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")]
State = Literal["STARTING", "WARMING", "READY", "DRAINING", "FAILED"]
#: Which rung has answered, counted from the top. Left out at the top, for clients that predate it:
#: they refuse bundles with others.
RungNumber = Annotated[int, Meta(ge=0, lt=MAX_RUNGS)]
#: Why an agent did not answer, for programs; a Failure's `text` is for people.
FailureCode = Literal[
    "bad_message",
    "wrong_bundle",
    "wrong_submodel",
    "not_ready",
    "draining",
    "failed",
    "overloaded",
    "too_late",
    "quota",
    "no_frame",
]
#: With this before its text, a refusal for a client's quota travels as `overloaded`: clients that
#: predate the code `quota` cannot read it.
_QUOTA = "quota: "


#: Outcomes of requests, and of changes of bundle, that an agent counts (`Status.counts`).
OUTCOMES = ("answered", "undeliverable", *get_args(FailureCode))
RELOADS = ("renewed", "not_renewed")
#: Why a camera is suspected: looks at it disagree with those at the others, or its picture never
#: changes.
Suspicion = Literal["disagrees", "frozen"]


class Infer(Record, frozen=True, omit_defaults=True):
    """Client -> agent: run the sub-model on the crop, the only buffer."""

    kind: ClassVar[int] = 1
    buffers: ClassVar[int] = 1

    request_id: RequestId
    #: Identity of the client's bundle; the agent refuses another.
    digest: Digest
    #: The requested sub-model; the agent refuses if it serves another.
    k: Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
    #: Time left until the caller's deadline when this is sent. Clocks are never compared.
    budget_ms: Milliseconds
    image_size: Annotated[int, Meta(ge=1, le=1024)]
    encoding: Encoding
    #: Left out without one, for agents that predate it.
    traceparent: Traceparent = ""


class StatusRequest(Record, frozen=True):
    """Client -> agent: request a Status. No buffer."""

    kind: ClassVar[int] = 2
    buffers: ClassVar[int] = 0

    request_id: RequestId


class Result(Record, frozen=True, omit_defaults=True):
    """Agent -> client: float32 logits follow, `[heads, num_classes]`: boost, if any, then bag."""

    kind: ClassVar[int] = 3
    buffers: ClassVar[int] = 1

    request_id: RequestId
    num_classes: Annotated[int, Meta(ge=1, le=MAX_CLASSES)]
    #: Milliseconds waiting for the compute thread, and computing.
    queue_ms: Milliseconds
    compute_ms: Milliseconds
    rung: RungNumber = 0
    #: Of a model with an anomaly head. Left out without one, for clients that predate it.
    anomaly: float | None = None


class Failure(Record, frozen=True):
    """Agent -> client: no result for this request, 0 if it could not be decoded."""

    kind: ClassVar[int] = 4
    buffers: ClassVar[int] = 0

    request_id: RequestId
    code: FailureCode
    text: Text

    def __post_init__(self) -> None:
        check_printable(self, "text")


def failure(request_id: int, code: FailureCode, text: str) -> Failure:
    """The message that tells a client of `code`, in words that older clients understand too."""
    if code == "quota":
        return Failure(request_id=request_id, code="overloaded", text=as_line(_QUOTA + text))
    return Failure(request_id=request_id, code=code, text=as_line(text))


def code_and_text(message: Failure) -> tuple[FailureCode, str]:
    """The code and the text of a Failure."""
    if message.code == "overloaded" and message.text.startswith(_QUOTA):
        return "quota", message.text.removeprefix(_QUOTA)
    return message.code, message.text


class Status(Record, frozen=True, omit_defaults=True):
    """Agent -> client: the reply to a StatusRequest. No buffer."""

    kind: ClassVar[int] = 5
    buffers: ClassVar[int] = 0

    request_id: RequestId
    device: Text
    state: State
    bundle: Text
    digest: Digest
    k: int
    provider: Text
    #: Whether the provider is not the planned one, as --allow-fallback permits.
    fallback: bool
    reason: Text
    queued: int
    #: Outcome -> number of requests since the start; of each served bundle, those `answers_key`.
    counts: dict[Text, int]
    #: The agent's camera and its condition. Left out without one, for clients that predate it.
    source: Text = ""
    #: Degrees Celsius of the warmest sensor. Left out where there is none.
    temperature_c: Annotated[float, Meta(ge=-300, le=3000)] | None = None
    #: Why the agent's camera is suspected: `disagrees` while the looks of any client say so. Left
    #: out if it is not, for clients that predate it.
    suspect: Suspicion | None = None

    def __post_init__(self) -> None:
        check_printable(self, "device", "bundle", "provider", "reason", "source")
        if not all(outcome.isprintable() for outcome in self.counts):
            raise ValueError("`counts`: expected printable characters only")


#: The digest in the status of an agent without a bundle.
NO_DIGEST = "0" * 64


def rung_answers_key(rung: int) -> str:
    """The key of a status's count of answers by a rung below the top."""
    return f"answered rung {rung}"


def answers_key(digest: Digest) -> str:
    """The key of a status's count of answers by a bundle."""
    return f"answered {digest[:12]}"


class FrameRequest(Record, frozen=True, omit_defaults=True):
    """Client -> agent: run the sub-model on a frame of the agent's camera. No buffer."""

    kind: ClassVar[int] = 6
    buffers: ClassVar[int] = 0

    request_id: RequestId
    digest: Digest
    k: Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
    budget_ms: Milliseconds
    #: Age of the requested frame when this arrives; 0 for the newest. Clocks are never compared.
    ago_ms: Milliseconds
    #: The largest difference from that age.
    within_ms: Milliseconds
    #: Whether the client's own looks suspect the camera, and not what an agent or another client
    #: said. Left out if not, for agents that predate it.
    suspect: bool = False
    traceparent: Traceparent = ""
    #: Whether the map of an anomaly head is wanted too. Left out if not, for agents that predate
    #: it.
    wants_map: bool = False


class FrameReply(Record, frozen=True, omit_defaults=True):
    """Agent -> client: the reply to a FrameRequest, with logits as in a Result."""

    kind: ClassVar[int] = 7
    buffers: ClassVar[int] = 1

    request_id: RequestId
    num_classes: Annotated[int, Meta(ge=1, le=MAX_CLASSES)]
    queue_ms: Milliseconds
    compute_ms: Milliseconds
    #: The frame's number since the agent's start, from 1.
    frame: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    #: Age of the frame when the request arrived.
    age_ms: Milliseconds
    #: Whether the picture never changes. Left out if it does, for clients that predate it.
    frozen: bool = False
    #: Whether the looks of another client suspect the camera. Left out if not, as above.
    suspected: bool = False
    rung: RungNumber = 0
    #: As in a Result.
    anomaly: float | None = None
    #: Rows of 16 x 16 cells of the view, where that was asked for: 128 is as strange as the
    #: strangest cell of one good picture in a hundred.
    anomaly_map: Annotated[bytes, Meta(max_length=MAP_BYTES)] = b""


def as_line(text: str) -> str:
    """`text` as one line of at most 1,024 printable characters."""
    line = " ".join(text.split())[:1024]
    return "".join(character if character.isprintable() else "?" for character in line)


Message = (
    Infer | StatusRequest | Result | Failure | Status | FrameRequest | FrameReply
    | BundleRequest | BundlePiece | BundleRead | BundleState | BundleContent | BundleRefusal
    | PictureRequest | PictureReply | RestRequest | RestReply | MaskRequest | MaskReply
)  # fmt: skip
_KINDS: dict[int, type[Message]] = {kind.kind: kind for kind in get_args(Message)}
_DECODERS = {number: msgspec.msgpack.Decoder(kind) for number, kind in _KINDS.items()}
_ENCODER = msgspec.msgpack.Encoder()
_PREAMBLES = {number: MAGIC + bytes((VERSION, number)) for number in _KINDS}
_BY_PREAMBLE = {_PREAMBLES[number]: (_KINDS[number], _DECODERS[number]) for number in _KINDS}


class Envelope(Struct, frozen=True):
    """A decoded message, and its buffers in the received frames."""

    message: Message
    buffers: Sequence[Buffer]


def encode(message: Message, *buffers: Buffer) -> list[Buffer]:
    """Frames of `message`; `buffers` are not copied."""
    if len(buffers) != message.buffers:
        raise ValueError(f"{type(message).__name__} takes {message.buffers} buffers")
    return [_PREAMBLES[message.kind] + _ENCODER.encode(message), *buffers]


def decode(frames: Sequence[Buffer]) -> Envelope:
    """The message in `frames`; raises WireError saying what was expected."""
    if not frames:
        raise WireError("expected at least 1 frame, got 0")
    head = bytes(frames[0])
    known = _BY_PREAMBLE.get(head[:PREAMBLE_BYTES])
    if known is None:
        raise WireError(_unknown(head))
    kind, decoder = known
    header = head[PREAMBLE_BYTES:]
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(f"expected a header up to {MAX_HEADER_BYTES} bytes, got {len(header)}")
    try:
        message = decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WireError(f"{kind.__name__} header: {error}") from error
    buffers = frames[1:]
    if len(buffers) != message.buffers:
        raise WireError(
            f"{kind.__name__}: expected {message.buffers} buffer(s), got {len(buffers)}"
        )
    _check_sizes(message, buffers)
    return Envelope(message, buffers)


def _unknown(head: bytes) -> str:
    """Reason why a first frame is not of this protocol."""
    if len(head) < PREAMBLE_BYTES or head[:3] != MAGIC:
        return "expected a first frame that begins with 'MDP', version and kind"
    if head[3] != VERSION:
        return f"expected protocol version {VERSION}, got {head[3]}"
    return f"expected a message kind from 1 to {max(_KINDS)}, got {head[4]}"


def request_frame_bytes(image_size: int) -> int:
    """Size of the largest frame that an agent accepts for a sub-model of `image_size`."""
    return max(MIN_FRAME_BYTES, image_size**2 * 3)


def reply_frame_bytes(num_classes: int) -> int:
    """Size of the largest frame that a client accepts."""
    return max(2 * MAX_HEADER_BYTES, 2 * _logit_bytes(num_classes))


def _logit_bytes(num_classes: int) -> int:
    return num_classes * 4


def _check_sizes(message: Message, buffers: Sequence[Buffer]) -> None:
    match message:
        case Result() | FrameReply():
            expected, got = _logit_bytes(message.num_classes), len(buffers[0])
            if got not in (expected, 2 * expected):
                raise WireError(f"expected {expected} bytes of logits, or twice, got {got}")
        case Infer():
            expected, got = message.image_size**2 * 3, len(buffers[0])
            if message.encoding == "raw" and got != expected:
                raise WireError(f"expected {expected} bytes of raw pixels, got {got}")
            if message.encoding == "jpeg" and not 0 < got <= max(expected, 4096):
                raise WireError(f"expected 1 to {max(expected, 4096)} bytes of JPEG, got {got}")
        case BundlePiece() | BundleContent():
            if len(buffers[0]) > PIECE_BYTES:
                raise WireError(f"expected up to {PIECE_BYTES} bytes, got {len(buffers[0])}")
        case PictureReply():
            if not 0 < len(buffers[0]) <= MAX_BUFFER_BYTES:
                raise WireError(
                    f"expected 1 to {MAX_BUFFER_BYTES} bytes of JPEG, got {len(buffers[0])}"
                )


def pixels_of(infer: Infer, buffer: Buffer) -> Pixels:
    """The raw crop `[image_size, image_size, 3]`, a view of the received frame."""
    shape = (infer.image_size, infer.image_size, 3)
    return np.frombuffer(buffer, dtype=np.uint8).reshape(shape)


def logits_buffer(contribution: Contribution) -> Buffer:
    """Each head's logits, boost (if any) then bag, as little-endian float32 bytes."""
    return b"".join([np.asarray(head, _FLOAT32).tobytes() for head in contribution.heads])


def contribution_of(
    buffer: Buffer, num_classes: int, anomaly: float | None = None, cells: bytes = b""
) -> Contribution:
    """Each head's logits `[num_classes]`, an anomaly head's score and its map of `cells`.

    Raises WireError on values that are not finite, and for another number of cells.
    """
    logits = np.frombuffer(buffer, _FLOAT32)
    # One pass: a sum of squares is finite only if all terms are (and none is above 1e19). `vdot`
    # needs no `errstate`, with which this takes 3.4 us instead of 1.8.
    if not math.isfinite(np.vdot(logits, logits)):
        raise WireError("logits that are not finite")
    boost, bag = logits[:-num_classes], logits[-num_classes:]
    if anomaly is not None and not math.isfinite(anomaly):
        raise WireError("an anomaly score that is not finite")
    if len(cells) not in (0, MAP_BYTES):
        raise WireError(f"expected a map of {MAP_BYTES} bytes, got {len(cells)}")
    places = np.frombuffer(cells, np.uint8).reshape(MAP_SIDE, MAP_SIDE) if cells else None
    return Contribution(boost if len(boost) else None, bag, anomaly, places)
