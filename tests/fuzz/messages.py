"""Targets: what comes over the network, as far as the agent and the client go with it."""

import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from zmq.utils import z85

from mdp.client.status import device_status
from mdp.errors import InferenceError, PictureError, WireError
from mdp.formats.bundle import FileEntry
from mdp.formats.device_part import Version
from mdp.formats.fleet import FleetEntry
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import decode_jpeg
from mdp.protocol.messages import (
    PREAMBLE_BYTES,
    Buffer,
    Failure,
    FrameReply,
    FrameRequest,
    Infer,
    Result,
    Status,
    StatusRequest,
    contribution_of,
    decode,
    encode,
    logits_buffer,
    pixels_of,
)
from mdp.protocol.transfer import BundlePiece, BundleRequest, BundleState
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import DEVICES, LABELS, SIZES, write_bundle
from mdp.transport import zap
from mdp.transport.greeting import GREETING_BYTES, NOT_ZMTP, PROBE, mechanism_of
from tests.fuzz.target import Structure, Target, refuse, scratch
from tests.support.exchanges import Desk
from tests.support.pictures import encode_picture, four_corners

DIGEST = "ab" * 32
_LENGTH = struct.Struct(">H")


def join_frames(frames: Sequence[Buffer]) -> bytes:
    """Frames as one input, each after its length; the last one goes on to the end."""
    whole = [_LENGTH.pack(min(len(frame), 0xFFFF)) + bytes(frame) for frame in frames[:-1]]
    return b"".join([*whole, b"\xff\xff", bytes(frames[-1])]) if frames else b""


def frames_of(data: bytes, most: int = 8) -> list[bytes]:
    """Frames that `join_frames` put together; any bytes are some frames, `most` at most."""
    frames: list[bytes] = []
    while len(data) >= _LENGTH.size and len(frames) < most:
        (length,) = _LENGTH.unpack_from(data)
        frames.append(data[_LENGTH.size :][:length])
        data = data[_LENGTH.size + length :]
    return frames


def parse_frames(data: bytes) -> Any:
    """The frames, the first one's header taken apart where it is msgpack."""
    frames: list[Any] = list(frames_of(data))
    if frames and len(frames[0]) >= PREAMBLE_BYTES:
        head = frames[0]
        frames[0] = [head[:PREAMBLE_BYTES], msgspec.msgpack.decode(head[PREAMBLE_BYTES:])]
    return frames


def render_frames(frames: Any) -> bytes:
    """The inverse of `parse_frames`."""
    if frames and isinstance(frames[0], list):
        preamble, header = frames[0]
        frames = [preamble + msgspec.msgpack.encode(header), *frames[1:]]
    return join_bytes(frames)


def join_bytes(frames: Any) -> bytes:
    """`join_frames` for what a mutation has made of frames; raises ValueError."""
    if not all(isinstance(frame, bytes) for frame in frames):
        raise ValueError("frames hold bytes only")
    return join_frames(frames)


def read_frames(data: bytes) -> bool:
    """Read a message as agent and client do before they know its sender's intent."""
    frames = frames_of(data)
    try:
        envelope = decode(frames)
    except WireError as error:
        return refuse(error)
    message, buffers = envelope.message, envelope.buffers
    again = decode(encode(message, *buffers))
    assert again.message == message, "another message once it was sent on"
    try:
        match message:
            case Infer():
                _use_crop(message, buffers[0])
            case Result() | FrameReply():
                _use_logits(message, buffers[0])
            case Failure():
                assert message.text.isprintable()
            case Status():
                shown = (
                    message.device,
                    message.bundle,
                    message.provider,
                    message.reason,
                    message.source,
                )
                assert all(text.isprintable() for text in (*shown, *message.counts))
            case BundleState():
                name = message.current.name if message.current else ""
                assert (message.device + name + message.error).isprintable()
    except (PictureError, WireError):
        return False
    return True


def _use_crop(infer: Infer, buffer: Buffer) -> None:
    assert math.isfinite(infer.budget_ms)
    assert len(infer.digest) == 64
    if infer.encoding == "jpeg":
        pixels = decode_jpeg(bytes(buffer), infer.image_size)
    else:
        pixels = pixels_of(infer, buffer)
    assert pixels.shape == (infer.image_size, infer.image_size, 3)
    assert pixels.dtype == np.uint8


def _use_logits(result: Result | FrameReply, buffer: Buffer) -> None:
    assert math.isfinite(result.queue_ms)
    assert math.isfinite(result.compute_ms)
    contribution = contribution_of(buffer, result.num_classes)
    for logits in contribution.heads:
        assert logits.shape == (result.num_classes,)
        assert np.isfinite(logits).all()
    assert bytes(logits_buffer(contribution)) == bytes(buffer)


def _messages() -> dict[str, list[Buffer]]:
    infer = Infer(request_id=7, digest=DIGEST, k=1, budget_ms=80.5, image_size=4, encoding="raw")
    jpeg = msgspec.structs.replace(infer, encoding="jpeg", image_size=8)
    status = Status(
        request_id=9, device="beta", state="READY", bundle="colours", digest=DIGEST, k=1,
        provider="CPUExecutionProvider", fallback=False, reason="", queued=2,
        counts={"answered": 12, "too_late": 1},
    )  # fmt: skip
    look = FrameRequest(
        request_id=7, digest=DIGEST, k=1, budget_ms=80.5, ago_ms=250.0, within_ms=100.0
    )
    seen = FrameReply(
        request_id=1, num_classes=3, queue_ms=0.25, compute_ms=12.5, frame=812, age_ms=43.0
    )  # fmt: skip
    offer = BundleRequest(
        request_id=3, action="offer", manifest=DIGEST,
        files={"manifest.json": FileEntry(sha256=DIGEST, size_bytes=2)},
    )  # fmt: skip
    piece = BundlePiece(request_id=4, manifest=DIGEST, file="manifest.json", offset=0)
    version = Version(name="colours", digest=DIGEST, manifest=DIGEST)
    told = BundleState(
        request_id=4, device="beta", current=version, previous=version, serves=version,
        received={"manifest.json": 2}, switching=False, error="",
    )  # fmt: skip
    return {
        "infer": encode(infer, bytes(range(48))),
        "infer-jpeg": encode(jpeg, encode_picture(four_corners(8, 8), "JPEG")),
        "ask": encode(StatusRequest(request_id=0)),
        "result": encode(_result(3), _logits()),
        "failure": encode(Failure(request_id=1, code="bad_message", text="what?")),
        "status": encode(status),
        "status-source": encode(msgspec.structs.replace(status, source="camera:0: no frame yet")),
        "look": encode(look),
        "seen": encode(seen, _logits()),
        "bundle-offer": encode(offer),
        "bundle-piece": encode(piece, b"{}"),
        "bundle-state": encode(told),
    }


def _result(num_classes: int, request_id: int = 1) -> Result:
    return Result(request_id=request_id, num_classes=num_classes, queue_ms=0.25, compute_ms=12.5)


def _logits() -> Buffer:
    scores = np.arange(3, dtype="<f4")
    return logits_buffer(Contribution(scores, scores))


FRAMES = Target(
    name="frames",
    read=read_frames,
    seeds=lambda: {name: join_frames(frames) for name, frames in _messages().items()},
    share=0.305,
    structure=Structure(parse=parse_frames, render=render_frames),
    words=(b"MDP\x01\x01", b"MDP\x01\x03", b"MDP\x01\x05", b"\xff\xd8\xff\xda", b"\xff\xff"),
)


# A client in the middle of a call. An input is a row of events: a byte that says which one and of
# which device, then, for a message, how many frames and the frames as above.
_PASS_S = 0.03
_DEADLINE_MS = 100.0
_RECEIVE, _LOSE, _CONNECT, _WAIT = range(4)


def events_of(data: bytes, most: int = 16) -> list[tuple[int, str, list[bytes]]]:
    """(what, device, frames) of each event; any bytes are some events."""
    events: list[tuple[int, str, list[bytes]]] = []
    while data and len(events) < most:
        what, device = data[0] % 4, DEVICES[data[0] // 4 % len(DEVICES)]
        data, frames = data[1:], []
        if what == _RECEIVE and data:
            count, data = data[0] % 4, data[1:]
            for frame in frames_of(data, count):
                frames.append(frame)
                data = data[_LENGTH.size + len(frame) :]
        events.append((what, device, frames))
    return events


def event(what: int, device: int, frames: Sequence[Buffer] = ()) -> bytes:
    """One event as it stands in an input."""
    first = bytes([what + 4 * device])
    if what != _RECEIVE:
        return first
    whole = [_LENGTH.pack(len(frame)) + bytes(frame) for frame in frames]
    return b"".join([first, bytes([len(frames)]), *whole])


def read_replies(data: bytes) -> bool:
    """A call among three agents of which any may say anything: it ends once, and labelled."""
    desk = Desk(_bundle(), [(device, k) for k, device in enumerate(DEVICES)])
    desk.submit(_DEADLINE_MS)
    for what, device, frames in events_of(data):
        if what == _RECEIVE:
            desk.frames(device, frames)
        elif what == _LOSE:
            desk.disconnect(device)
        elif what == _CONNECT:
            desk.connect(device)
        else:
            desk.pass_s(_PASS_S)
    desk.pass_s(_DEADLINE_MS)
    (answer,) = desk.answers
    for k, device in enumerate(DEVICES):
        entry = FleetEntry(device=device, address="tcp://127.0.0.1:7500", k=k)
        status = desk.dispatcher.statuses.get(device)
        assert device_status(entry, status, desk.bundle, silent=False).reason.isprintable()
    if isinstance(answer, InferenceError):
        assert set(answer.outcomes) == set(DEVICES)
        return False
    assert isinstance(answer, Prediction)
    assert sorted([*answer.used, *answer.missing]) == sorted(DEVICES)
    assert 0 < answer.probability <= 1
    assert answer.label in LABELS
    return True


def _bundle() -> Path:
    folder = scratch("replies") / "bundle"
    return folder if folder.exists() else write_bundle(folder, devices=DEVICES, sizes=SIZES)


def _replies() -> Mapping[str, bytes]:
    result = encode(_result(len(LABELS)), _logits())
    others = _messages()
    reply = [event(_RECEIVE, device, result) for device in range(3)]
    return {
        "all": b"".join(reply),
        "late": reply[0] + event(_WAIT, 0) * 4 + reply[1],
        "twice": reply[0] * 2 + event(_RECEIVE, 1, others["failure"]),
        "lost": reply[2] + event(_LOSE, 1) + event(_CONNECT, 1) + reply[1],
        "status": reply[0] + event(_RECEIVE, 2, others["status"]),
    }


REPLIES = Target(
    name="replies",
    read=read_replies,
    seeds=_replies,
    share=0.003,
    words=tuple(event(_RECEIVE, device, [b"MDP\x01\x03"])[:2] for device in range(3)),
)


def read_greeting(data: bytes) -> bool:
    """A peer's first bytes, however they are cut: the verdict does not change as more come."""
    verdicts = [mechanism_of(data[:end]) for end in (0, 1, 9, 10, 11, 63, 64, 65)]
    verdicts.append(mechanism_of(data))
    known = [verdict for verdict in verdicts if verdict is not None]
    assert len(set(known)) <= 1, f"first {known[0]!r}, then {known[-1]!r}"
    assert verdicts[-1] is not None or len(data) < GREETING_BYTES
    return bool(known and known[0] != NOT_ZMTP)


def _greetings() -> Mapping[str, bytes]:
    return {
        name.lower(): PROBE + bytes([1]) + name.encode().ljust(20, b"\0") + bytes(32)
        for name in ("CURVE", "NULL", "PLAIN")
    }


GREETING = Target(
    name="greeting",
    read=read_greeting,
    seeds=_greetings,
    share=0.245,
    max_bytes=96,
    words=(PROBE, b"CURVE", b"NULL"),
)

_KEY = bytes(range(32))
_ALLOWED = frozenset([z85.encode(_KEY).decode()])


def read_knock(data: bytes) -> bool:
    """Answer libzmq about a visitor: nobody gets in but with the key that is allowed."""
    frames = frames_of(data)
    reply, let_in = zap.answer(frames, _ALLOWED)
    assert len(reply) == 6
    assert let_in == (reply[2] == b"200")
    assert not let_in or frames[5:] == [b"CURVE", _KEY]
    return let_in


KNOCK = Target(
    name="knock",
    read=read_knock,
    seeds=lambda: {"right": join_frames([b"1.0", b"1", b"mdp", b"10.0.0.9", b"", b"CURVE", _KEY])},
    share=0.147,
    max_bytes=256,
    structure=Structure(parse=frames_of, render=join_bytes),
    words=(b"1.0", b"CURVE", _KEY),
)

TARGETS = (FRAMES, REPLIES, GREETING, KNOCK)
