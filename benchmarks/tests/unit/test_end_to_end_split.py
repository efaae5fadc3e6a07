"""The end-to-end benchmark: who gets what of a teacher, and what exchanging is calculated to."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.end_to_end.outcomes import LinkFound
from benchmarks.end_to_end.rivals import frames
from benchmarks.end_to_end.rivals.part import Pass
from benchmarks.end_to_end.rivals.rivals import content, in_order
from benchmarks.end_to_end.rivals.split import bounds, columns, dealt, sum_bytes, sum_s
from benchmarks.end_to_end.rivals.split_rival import WIRE_FACTOR, Exchange, calculated
from benchmarks.end_to_end.rivals.stage import decoded, encoded
from benchmarks.end_to_end.setup import TensorSplit

SPLIT = TensorSplit(addresses=[("a", 1), ("b", 1), ("c", 1)], values=1_000, layers=2)
LINK = LinkFound(bandwidth_bps=80e6, round_trip_s=0.002)


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 1.0, 1.0), (0.6, 0.45, 0.3), (5.0, 0.1, 0.4)])
@pytest.mark.parametrize("parts", [1, 6, 12])
def test_nobody_could_be_done_sooner_with_other_parts(
    parts: int, speeds: tuple[float, ...]
) -> None:
    def slowest(counts: Sequence[int]) -> float:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    counts = dealt(parts, speeds)
    assert sum(counts) == parts
    every = itertools.product(range(parts + 1), repeat=len(speeds))
    assert slowest(counts) == min(slowest(other) for other in every if sum(other) == parts)


def test_bounds_follow_each_other() -> None:
    assert bounds([5, 4, 3]) == [(0, 5), (5, 9), (9, 12)]


@pytest.mark.parametrize(
    ("width", "speeds", "expected"),
    [
        (1536, (2.0, 1.0, 1.0), [(0, 768), (768, 1152), (1152, 1536)]),
        (40, (1.0, 1.0), [(0, 16), (16, 40)]),
        (24, (3.0, 1.0), [(0, 24), (24, 24)]),
    ],
)
def test_every_column_is_dealt_once(
    width: int, speeds: tuple[float, ...], expected: list[tuple[int, int]]
) -> None:
    assert columns(width, speeds) == expected


def test_a_sum_sends_two_thirds_of_the_values_twice() -> None:
    assert sum_bytes(300, 4, 3) == 2 * 2 / 3 * 300 * 4
    assert sum_bytes(300, 4, 1) == 0
    assert sum_s(1_000_000, 8e6, 0.004) == pytest.approx(1.004)


def a_pass(attention_ms: float, mlp_ms: float) -> Pass:
    return Pass(embedding_ms=1.0, attention_ms=attention_ms, mlp_ms=mlp_ms, head_ms=0.5)


def test_split_tensors_wait_for_the_slowest_part_of_each_kind_and_for_four_sums() -> None:
    passes = [[a_pass(3.0, 5.0)], [a_pass(4.0, 2.0)], [a_pass(1.0, 1.0)]]
    exchange = Exchange(SPLIT, LINK, value_bytes=4)
    each_bytes = sum_bytes(1_000, 4, 3)
    one_ms = each_bytes * 8e3 / 80e6 + 2.0
    answers, found = calculated(
        "split", split=SPLIT, link=LINK, exchange=exchange, passes=passes,
        requests=[(1_000, 7.0)], reply_bytes=400,
    )  # fmt: skip
    assert found.compute_ms == 2 * (4.0 + 5.0)
    assert found.exchange_ms == pytest.approx(4 * one_ms)
    # Decoding, a round trip, three pictures and an answer on the wire, embedding and head.
    ends_ms = 7.0 + 2.0 + 0.34 + 1.0 + 0.5
    assert found.ends_ms == pytest.approx(ends_ms)
    assert answers.latency_ms == [pytest.approx(18.0 + 4 * one_ms + ends_ms)]
    # The busiest device computes 2 * (3 + 5) ms, the wire carries 4 * 0.53 ms.
    assert answers.per_s == [pytest.approx(1e3 / 16.0)]
    assert answers.sent_bytes == [pytest.approx((3 * 4 * each_bytes + 3_400) * WIRE_FACTOR)]
    assert answers.calculated


def test_a_slow_link_bounds_the_throughput_of_split_tensors() -> None:
    slow = LinkFound(bandwidth_bps=8e5, round_trip_s=0.0)
    exchange = Exchange(SPLIT, slow, value_bytes=2)
    answers, _ = calculated(
        "split", split=SPLIT, link=slow, exchange=exchange, passes=[[a_pass(1.0, 1.0)]] * 3,
        requests=[(0, 0.0)], reply_bytes=0,
    )  # fmt: skip
    assert answers.per_s == [pytest.approx(1e3 / (4 * sum_bytes(1_000, 2, 3) * 8e3 / 8e5))]


@pytest.mark.parametrize(("between", "error"), [(frames.FP32, 0.0), (frames.FP16, 1e-3)])
def test_tokens_reach_the_next_stage_in_their_shape(between: bytes, error: float) -> None:
    tokens = np.random.default_rng(0).normal(size=(1, 5, 8)).astype(np.float32)
    frame = b"".join(encoded(between, tokens, last=False))
    assert len(frame) == 2 + tokens.size * (4 if between == frames.FP32 else 2)
    after, values = decoded(frame, [1, 5, 8])
    assert after == between
    assert values.dtype == np.float32
    assert np.abs(values.astype(np.float32) - tokens).max() <= error


def test_a_first_stage_gets_the_picture_raw_or_as_jpeg() -> None:
    pixels = np.full((32, 32, 3), (200, 30, 30), dtype=np.uint8)
    pixels[16:] = (30, 30, 200)
    raw = frames.RAW + frames.FP32 + content(pixels, "raw")
    assert np.array_equal(decoded(raw, [1, 32, 32, 3])[1][0], pixels)
    jpeg = frames.JPEG + frames.FP16 + content(pixels, "jpeg")
    between, seen = decoded(jpeg, [1, 32, 32, 3])
    assert between == frames.FP16
    assert seen.shape == (1, 32, 32, 3)
    assert np.abs(seen[0].astype(int) - pixels).mean() < 10


def test_logits_go_back_in_full_precision() -> None:
    logits = np.array([[0.1, 0.2]], dtype=np.float32)
    assert encoded(frames.FP16, logits, last=True) == [logits.tobytes()]


def test_no_more_pictures_are_under_way_than_asked_for() -> None:
    under_way, most = 0, 0

    def send(_: object) -> None:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)

    def receive() -> None:
        nonlocal under_way
        while not under_way:
            pass
        under_way -= 1

    moments = in_order([Path()] * 20, 3, send, receive)
    assert len(moments) == 20
    assert moments == sorted(moments)
    assert 1 <= most <= 3
