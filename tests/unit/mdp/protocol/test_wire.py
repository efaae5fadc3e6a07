"""Messages <-> frames: every kind there and back, and nothing but WireError for anything else."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.errors import WireError
from mdp.formats.bundle import FileEntry
from mdp.formats.device_part import Version
from mdp.formats.mask import CameraMask, PictureBox
from mdp.fusion.fuse import Contribution
from mdp.protocol import messages as wire
from mdp.protocol.masking import MaskReply, MaskRequest
from mdp.protocol.messages import (
    MAX_HEADER_BYTES,
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

DIGEST = "ab" * 32
INFER = Infer(request_id=7, digest=DIGEST, k=1, budget_ms=80.5, image_size=4, encoding="raw")
PIXELS = bytes(range(48))
RESULT = Result(request_id=7, num_classes=3, queue_ms=0.25, compute_ms=12.5)
LOGITS = np.arange(6, dtype="<f4").tobytes()
STATUS = Status(
    request_id=9,
    device="beta",
    state="READY",
    bundle="colours",
    digest=DIGEST,
    k=1,
    provider="CPUExecutionProvider",
    fallback=False,
    reason="",
    queued=2,
    counts={"answered": 12, "too_late": 1},
)
FAILURE = Failure(request_id=0, code="bad_message", text="what?")
LOOK = FrameRequest(
    request_id=11, digest=DIGEST, k=2, budget_ms=80.5, ago_ms=250.0, within_ms=100.0
)
SEEN = FrameReply(
    request_id=11, num_classes=3, queue_ms=0.25, compute_ms=12.5, frame=812, age_ms=43.0
)
SHA256 = "cd" * 32
VERSION = Version(name="colours", digest=DIGEST, manifest=SHA256)
OFFER = BundleRequest(
    request_id=12,
    action="offer",
    manifest=SHA256,
    files={"manifest.json": FileEntry(sha256=SHA256, size_bytes=3)},
)
PIECE = BundlePiece(request_id=13, manifest=SHA256, file="model.onnx", offset=65536)
STATE = BundleState(
    request_id=13,
    device="beta",
    current=VERSION,
    previous=None,
    serves=VERSION,
    received={"manifest.json": 3},
    switching=True,
    error="",
)
MASK = CameraMask(
    width=1280, height=720, region=PictureBox(left=0.25), hidden=[PictureBox(bottom=0.5)]
)
VALID: list[tuple[wire.Message, list[Buffer]]] = [
    (INFER, [PIXELS]),
    (msgspec.structs.replace(INFER, encoding="jpeg"), [b"\xff\xd8\xff"]),
    (StatusRequest(request_id=0), []),
    (RESULT, [LOGITS]),
    (FAILURE, []),
    (STATUS, []),
    (msgspec.structs.replace(STATUS, source="folder:door: no frame yet", suspect="frozen"), []),
    (LOOK, []),
    (SEEN, [LOGITS]),
    (OFFER, []),
    (BundleRequest(request_id=1, action="state"), []),
    (PIECE, [bytes(PIECE_BYTES)]),
    (BundleRead(request_id=14, manifest=SHA256, file="signature.json", offset=0), []),
    (STATE, []),
    (BundleContent(request_id=14, size_bytes=0), [b""]),
    (BundleRefusal(request_id=15, text="no room"), []),
    (PictureRequest(request_id=16, within_ms=500.0, side=1280), []),
    (PictureReply(request_id=16, frame=3, age_ms=20.5), [b"\xff\xd8\xff"]),
    (RestRequest(request_id=17, within_ms=500.0), []),
    (RestReply(request_id=17, frame=3, age_ms=20.5, still_ms=310.0, changes=7), []),
    (MaskRequest(request_id=17, action="tell"), []),
    (MaskRequest(request_id=18, action="set", mask=MASK), []),
    (MaskReply(request_id=18, mask=MASK, width=640, height=360, settable=True), []),
]
KINDS = [type(message).__name__ for message, _ in VALID]
As = Callable[[Sequence[Buffer]], Sequence[Buffer]]


def as_bytes(frames: Sequence[Buffer]) -> Sequence[Buffer]:
    return [bytes(frame) for frame in frames]


def as_views(frames: Sequence[Buffer]) -> Sequence[Buffer]:
    return [memoryview(bytes(frame)) for frame in frames]


@pytest.mark.parametrize("received_as", [as_bytes, as_views])
@pytest.mark.parametrize(("message", "buffers"), VALID, ids=KINDS)
def test_there_and_back(message: wire.Message, buffers: list[Buffer], received_as: As) -> None:
    envelope = decode(received_as(encode(message, *buffers)))
    assert envelope.message == message
    assert [bytes(buffer) for buffer in envelope.buffers] == buffers


@pytest.mark.parametrize("reply", [RESULT, SEEN])
def test_a_reply_of_the_top_rung_is_one_that_older_clients_understand(reply: Any) -> None:
    (head, _) = encode(reply, LOGITS)
    assert "rung" not in msgspec.msgpack.decode(bytes(head)[wire.PREAMBLE_BYTES :])
    assert decode([head, LOGITS]).message.rung == 0  # type: ignore[union-attr]
    lower = msgspec.structs.replace(reply, rung=2)
    assert decode(encode(lower, LOGITS)).message == lower
    with pytest.raises(WireError, match="`int` <= 7"):
        decode(encode(msgspec.structs.replace(reply, rung=8), LOGITS))


def test_a_status_without_a_source_is_one_that_older_clients_understand() -> None:
    assert b"source" not in bytes(encode(STATUS)[0])


def test_a_look_is_small() -> None:
    assert 140 < sum(map(len, encode(LOOK))) < 160, "docs/how-to/cameras.md tells it"


def test_the_first_bytes_say_what_comes() -> None:
    for message, buffers in VALID:
        head = bytes(encode(message, *buffers)[0])
        assert head[:5] == b"MDP" + bytes((wire.VERSION, message.kind))
        assert msgspec.msgpack.decode(head[5:])["request_id"] == message.request_id


def test_buffers_are_passed_on_without_a_copy() -> None:
    pixels = np.zeros((4, 4, 3), dtype=np.uint8)
    view = pixels.data.cast("B")
    frames = encode(INFER, view)
    assert frames[1] is view
    crop = pixels_of(INFER, decode(frames).buffers[0])
    assert np.shares_memory(crop, pixels)
    assert crop.shape == (4, 4, 3)


def test_encode_takes_the_kind_s_number_of_buffers() -> None:
    with pytest.raises(ValueError, match="Infer takes 1 buffers"):
        encode(INFER)
    with pytest.raises(ValueError, match="StatusRequest takes 0 buffers"):
        encode(StatusRequest(request_id=1), b"x")


def head(number: int, content: dict[str, Any], version: int = wire.VERSION) -> bytes:
    return b"MDP" + bytes((version, number)) + msgspec.msgpack.encode(content)


def of(message: wire.Message, *, without: str = "", **changes: Any) -> bytes:
    """The first frame of `message` with other values, and one less."""
    content = {**msgspec.to_builtins(message), **changes}
    return head(message.kind, {key: value for key, value in content.items() if key != without})


@pytest.mark.parametrize("received_as", [as_bytes, as_views])
@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ([], "expected at least 1 frame, got 0"),
        ([b""], "expected a first frame that begins with 'MDP', version and kind"),
        ([b"MDP\x01"], "begins with 'MDP', version and kind"),
        ([b"GET / HTTP/1.1"], "begins with 'MDP', version and kind"),
        ([head(2, {"request_id": 1}, version=0)], "expected protocol version 1, got 0"),
        ([head(2, {"request_id": 1}, version=2)], "expected protocol version 1, got 2"),
        ([head(0, {})], "expected a message kind from 1 to 19, got 0"),
        ([head(20, {})], "expected a message kind from 1 to 19, got 20"),
        ([head(2, {"x": "y" * MAX_HEADER_BYTES})], "expected a header up to 16384 bytes, got 1"),
        ([b"MDP\x01\x02"], "StatusRequest header: "),
        ([b"MDP\x01\x02\xc1\xc1"], "StatusRequest header: "),
        ([head(2, {"request_id": 1}) + b"\x00"], "StatusRequest header: .*trailing"),
        ([head(2, {})], "StatusRequest header: .*missing required field `request_id`"),
        (
            [head(2, {"request_id": -1})],
            r"StatusRequest header: Expected `int` >= 0 - at `\$\.request_id`",
        ),
        ([head(2, {"request_id": 2**63})], r"StatusRequest header: Expected `int`"),
        ([head(2, {"request_id": 1.0})], "StatusRequest header: Expected `int`, got `float`"),
        ([head(2, {"request_id": 1, "more": 1})], "StatusRequest header: .*unknown field `more`"),
        ([b"MDP\x01\x02\x81\xaarequest_i\xff\x01"], "StatusRequest header: "),
        (
            [b"MDP\x01\x02" + b"\x91" * 16_000],
            "StatusRequest header: Expected `object`, got `array`",
        ),
        ([head(2, {"request_id": 1}), b"x"], r"StatusRequest: expected 0 buffer\(s\), got 1"),
        ([of(INFER)], r"Infer: expected 1 buffer\(s\), got 0"),
        ([of(INFER), PIXELS, b""], r"Infer: expected 1 buffer\(s\), got 2"),
        ([of(INFER, digest="ab"), PIXELS], r"Infer header: .*regex.* - at `\$\.digest`"),
        ([of(INFER, digest=DIGEST.upper()), PIXELS], r"at `\$\.digest`"),
        ([of(INFER, k=64), PIXELS], r"`int` <= 63 - at `\$\.k`"),
        ([of(INFER, budget_ms=-0.5), PIXELS], r"`float` >= 0.* - at `\$\.budget_ms`"),
        ([of(INFER, budget_ms=float("nan")), PIXELS], r"at `\$\.budget_ms`"),
        ([of(INFER, budget_ms=float("inf")), PIXELS], r"at `\$\.budget_ms`"),
        ([of(INFER, image_size=0), PIXELS], r"`int` >= 1 - at `\$\.image_size`"),
        ([of(INFER, image_size=1025), PIXELS], r"`int` <= 1024 - at `\$\.image_size`"),
        ([of(INFER, image_size=5), PIXELS], "expected 75 bytes of raw pixels, got 48"),
        ([of(INFER, image_size=3), PIXELS], "expected 27 bytes of raw pixels, got 48"),
        ([of(INFER, encoding="png"), PIXELS], "Invalid enum value 'png'"),
        ([of(INFER, encoding="jpeg"), b""], "expected 1 to 4096 bytes of JPEG, got 0"),
        ([of(INFER, encoding="jpeg"), b"x" * 4097], "expected 1 to 4096 bytes of JPEG, got"),
        ([encode(RESULT, LOGITS)[0], LOGITS[:-1]], "expected 12 bytes of logits, or twice, got 23"),
        ([encode(RESULT, LOGITS)[0], b""], "expected 12 bytes of logits, or twice, got 0"),
        (
            [of(RESULT, num_classes=10**9), LOGITS],
            r"Result header: Expected `int` <= 100000 - at `\$\.num_classes`",
        ),
        ([of(RESULT, without="queue_ms"), LOGITS], "missing required field `queue_ms`"),
        ([of(FAILURE, code="x")], "Invalid enum value 'x'"),
        ([of(FAILURE, text="x" * 1025)], r"length <= 1024 - at `\$\.text`"),
        (
            [of(FAILURE, text="\x1b[2J")],
            "Failure header: `text`: expected printable characters only",
        ),
        *(
            (
                [of(STATUS, **{key: "a\nb"})],
                f"Status header: `{key}`: expected printable characters only",
            )
            for key in ("device", "bundle", "provider", "reason", "source")
        ),
        (
            [of(STATUS, counts={"\x1b[2J": 1})],
            "Status header: `counts`: expected printable characters only",
        ),
        ([of(STATUS, reason="x" * 1025)], r"length <= 1024 - at `\$\.reason`"),
        ([of(STATUS, without="counts")], "Status header: .*missing required field `counts`"),
        ([of(STATUS, state="BORED")], "Invalid enum value 'BORED'"),
        ([encode(LOOK)[0], b"x"], r"FrameRequest: expected 0 buffer\(s\), got 1"),
        ([of(LOOK, without="ago_ms")], "FrameRequest header: .*missing required field `ago_ms`"),
        ([of(LOOK, ago_ms=-1.0)], r"at `\$\.ago_ms`"),
        ([of(LOOK, within_ms=float("inf"))], "within_ms"),
        ([encode(SEEN, LOGITS)[0], LOGITS[:-1]], "expected 12 bytes of logits, or twice, got 23"),
        ([of(PIECE), bytes(PIECE_BYTES + 1)], "expected up to 65536 bytes, got 65537"),
        ([of(PIECE, file="../model.onnx"), b""], r"Invalid enum value .* - at `\$\.file`"),
        ([of(PIECE, file="Model.onnx"), b""], "Invalid enum value 'Model.onnx'"),
        ([of(PIECE, offset=-1), b""], r"Expected `int` >= 0 - at `\$\.offset`"),
        ([of(OFFER, files={"submodels/0/model.onnx": {}})], "Invalid enum value"),
        ([of(OFFER, files={"model.onnx": {"sha256": SHA256, "size_bytes": -1}})], "size_bytes"),
        ([of(OFFER, manifest="../" + "a" * 61)], r"matching regex .* - at `\$\.manifest`"),
        ([of(OFFER, action="delete")], "Invalid enum value 'delete'"),
        ([of(STATE, error="\x1b[2J")], "`error`: expected printable characters only"),
        ([of(SEEN, frame=0), LOGITS], r"FrameReply header: Expected `int` >= 1 - at `\$\.frame`"),
    ],
)
def test_what_is_no_message(frames: list[Buffer], expected: str, received_as: As) -> None:
    with pytest.raises(WireError, match=expected):
        decode(received_as(frames))


@given(st.lists(st.floats(-(2.0**60), 2.0**60, width=32), min_size=2, max_size=40))
def test_logits_there_and_back(values: list[float]) -> None:
    half = len(values) // 2
    boost, bag = np.array(values[:half], "f4"), np.array(values[half : 2 * half], "f4")
    for heads in ([boost, bag], [bag]):
        back = contribution_of(logits_buffer(Contribution.of(heads)), half)
        np.testing.assert_array_equal(back.heads, heads)


def test_logits_are_little_endian_boost_first() -> None:
    boost, bag = np.array([1.0], ">f4"), np.array([-2.0], "f8")
    assert logits_buffer(Contribution(boost, bag)) == b"\x00\x00\x80?\x00\x00\x00\xc0"


def test_a_batch_of_one_gives_the_same_bytes() -> None:
    boost, bag = np.arange(3, dtype="f4"), np.arange(3, 6, dtype="f4")
    assert logits_buffer(Contribution(boost[None], bag[None])) == LOGITS


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38, -1e20])
@pytest.mark.parametrize("place", [0, 3, 5])
def test_logits_that_cannot_be_used(bad: float, place: int) -> None:
    values = np.zeros(6, dtype="<f4")
    values[place] = bad
    with pytest.raises(WireError, match="logits that are not finite"):
        contribution_of(values.tobytes(), 3)


@given(st.text())
def test_any_text_becomes_a_line_that_may_travel(text: str) -> None:
    line = wire.as_line(text)
    failure = Failure(request_id=1, code="failed", text=line)
    assert decode(encode(failure)).message == failure
    assert wire.as_line(line) == line


def test_a_line_keeps_what_can_be_shown() -> None:
    assert wire.as_line("the model\nis  on fire [really] \N{FIRE}") == (
        "the model is on fire [really] \N{FIRE}"
    )
    assert wire.as_line("\x1b[31mred\u202e\udc80") == "?[31mred??"


def test_frames_that_are_taken_hold_any_request_and_reply() -> None:
    for size in (4, 16, 256, 257, 1024):
        largest = wire.request_frame_bytes(size)
        infer = msgspec.structs.replace(INFER, image_size=size)
        assert all(len(frame) <= largest for frame in encode(infer, bytes(size * size * 3)))
        assert MAX_HEADER_BYTES <= largest <= wire.MAX_BUFFER_BYTES
    for classes in (2, 1000, wire.MAX_CLASSES):
        largest = wire.reply_frame_bytes(classes)
        result = msgspec.structs.replace(RESULT, num_classes=classes)
        assert all(len(frame) <= largest for frame in encode(result, bytes(classes * 8)))
        assert MAX_HEADER_BYTES <= largest <= wire.MAX_BUFFER_BYTES


def test_an_anomaly_score_and_its_map_travel_in_the_header() -> None:
    cells = bytes(range(256))
    reply = FrameReply(
        request_id=1, num_classes=3, queue_ms=0.0, compute_ms=1.0, frame=1, age_ms=0.0,
        anomaly=1.5, anomaly_map=cells,
    )  # fmt: skip
    logits = np.zeros(3, dtype=np.float32).tobytes()
    frames = encode(reply, logits)
    told = decode(frames)
    assert told.message == reply
    plain = encode(msgspec.structs.replace(reply, anomaly=None, anomaly_map=b""), logits)
    assert len(frames[0]) - len(plain[0]) < 300
    assert b"anomaly" not in bytes(plain[0])
    found = contribution_of(logits, 3, 1.5, cells)
    assert found.anomaly == 1.5
    assert found.anomaly_map is not None
    assert found.anomaly_map.shape == (16, 16)
    for wrong in (float("nan"), float("inf")):
        with pytest.raises(WireError, match="anomaly score that is not finite"):
            contribution_of(logits, 3, wrong)
    with pytest.raises(WireError, match="expected a map of 256 bytes, got 3"):
        contribution_of(logits, 3, 1.0, b"abc")
