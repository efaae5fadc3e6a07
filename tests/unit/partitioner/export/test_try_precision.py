"""Trials of precisions: what a profile proves, what is too slow, how much all together may lose."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")

from mdp.formats.plan import NetworkSpec
from mdp.formats.profile import DeviceProfile, LatencyPoint, Precision, Provenance, read_profile
from mdp.testing.bundles import colour_plan
from partitioner.estimates import latency
from partitioner.estimates.catalogue import catalogue
from partitioner.export import try_precision
from partitioner.export.quantize import Way
from partitioner.export.try_precision import (
    ROUNDS,
    Trial,
    TrialTiming,
    accept,
    best_ms,
    pictures_needed,
    profile_timing,
    too_slow,
)

FP32: Way = ("fp32", "onnxruntime")
INT8: Way = ("int8", "onnxruntime")
BF16: Way = ("bf16", "openvino")
STATIC: Way = ("int8-static", "openvino")
SEAT = colour_plan().assignments[0]


def point(depth: int, latency_ms: float, way: Way, **more: Any) -> LatencyPoint:
    spec = msgspec.structs.asdict(msgspec.structs.replace(SEAT.vit, depth=depth))
    values = spec | {"precision": way[0], "runtime": way[1]}
    return LatencyPoint(**{"threads": 1, "latency_ms": latency_ms, **values, **more})


def profile(
    *points: LatencyPoint, method: Literal["measured", "estimated"] = "measured"
) -> DeviceProfile:
    read = read_profile("n100")
    source = Provenance(method=method, source="by this test, on no device")
    provenance = {**read.provenance, "latency": source}
    return msgspec.structs.replace(read, latency=list(points), provenance=provenance)


MEASURED = profile(
    point(2, 1.0, FP32), point(2, 0.8, INT8), point(8, 4.0, FP32), point(8, 2.0, INT8),
    point(4, 2.0, FP32),
    point(4, 9.0, INT8, threads=2), point(4, 9.0, INT8, batch=8),
    point(4, 9.0, INT8, provider="CUDAExecutionProvider"), point(6, 9.0, BF16),
)  # fmt: skip


def time_depth(depth: int) -> TrialTiming:
    spec = msgspec.structs.replace(SEAT.vit, depth=depth)
    found = profile_timing(MEASURED, msgspec.structs.replace(SEAT, submodel=spec), INT8, FP32)
    assert isinstance(found, TrialTiming), found
    return found


def test_a_measured_shape_has_its_own_timing_and_others_an_interpolated_ratio() -> None:
    assert time_depth(2) == TrialTiming(compute_ms=0.8, fp32_ms=1.0)
    assert 1.0 < time_depth(4).fp32_ms < 4.0
    # Halfway as logarithms: half of the way from 2 to 8 layers, as near as the patches let it be.
    assert time_depth(4).ratio == pytest.approx((0.8 * 0.5) ** 0.5, rel=0.02)
    # Beyond the measured shapes the ratio is constant.
    assert [time_depth(1).ratio, time_depth(40).ratio] == pytest.approx([0.8, 0.5])


@pytest.mark.parametrize(
    ("compute_ms", "expected"),
    [
        (0.97, ""),
        (0.98, "hardly faster: takes 0.98 ms on n100 and fp32 1 ms"),
        (1.0, "slower: takes 1 ms on n100 and fp32 1 ms"),
    ],
)
def test_a_gain_below_the_least_is_too_slow(compute_ms: float, expected: str) -> None:
    assert too_slow(TrialTiming(compute_ms=compute_ms, fp32_ms=1.0), "n100") == expected


@pytest.mark.parametrize(("max_loss", "pictures"), [(0.005, 200), (0.01, 100), (0.3, 4), (1.0, 1)])
def test_one_picture_may_be_worth_no_more_than_the_loss(max_loss: float, pictures: int) -> None:
    assert pictures_needed(max_loss) == pictures


def trial(k: int, way: Way, ms: float, reason: str = "") -> Trial:
    return Trial(k=k, way=way, timing=TrialTiming(compute_ms=ms, fp32_ms=1.0), reason=reason)


def decide(trials: list[Trial], losses: dict[tuple[int, Way], float]) -> None:
    def fused_loss(ways: Mapping[int, Way]) -> float:
        return sum(losses[k, way] for k, way in ways.items())

    accept(trials, fused_loss, {0: 1.0, 1: 3.0}, max_loss=0.005)


def test_the_fastest_that_loses_little_is_accepted() -> None:
    bf16, int8, static = trials = [trial(0, BF16, 0.6), trial(0, INT8, 0.5), trial(0, STATIC, 0.4)]
    decide(trials, {(0, BF16): 0.0, (0, INT8): 0.001, (0, STATIC): 0.0061})
    assert static.reason == "loses 0.61 points, more than 0.50 points"
    assert int8.reason == "50% of fp32's time, and the fused answer loses 0.10 points"
    assert bf16.reason == "slower than int8 in onnxruntime"
    assert [t.accepted for t in trials] == [False, True, False]


def test_all_together_lose_no_more_and_the_slowest_member_comes_first() -> None:
    quick, slow = trials = [trial(0, INT8, 0.1), trial(1, INT8, 0.9)]
    decide(trials, {(0, INT8): 0.003, (1, INT8): 0.004})
    assert (quick.accepted, slow.accepted) == (False, True)
    assert quick.reason == "loses 0.70 points together with sub-models 1, more than 0.50 points"


@pytest.mark.parametrize(
    ("reason", "losses", "accepted"),
    [
        ("", (0.006, -0.001), [True, True]),  # one member's gain makes up for another's loss
        ("", (float("nan"), 0.0), [False, True]),
        ("slower: x", (0.0, 0.0), [False, True]),
    ],
)
def test_what_is_accepted(reason: str, losses: tuple[float, float], accepted: list[bool]) -> None:
    trials = [trial(0, INT8, 0.1, reason), trial(1, INT8, 0.9)]
    decide(trials, {(0, INT8): losses[0], (1, INT8): losses[1]})
    assert [t.accepted for t in trials] == accepted
    assert not reason or trials[0].reason == reason


def test_models_are_timed_in_turns_and_the_best_round_counts() -> None:
    turns, now_s = list[str](), [0.0]

    def running(name: str, seconds: float) -> Callable[[object], None]:
        def run(pixels: object) -> None:
            if turns[-1:] != [name]:
                turns.append(name)
            disturbed = name == "fast" and turns.count(name) < ROUNDS
            now_s[0] += seconds * (9 if disturbed else 1)

        return run

    runs = [running("slow", 0.03), running("fast", 0.01)]
    pixels = np.zeros((1, 8, 8, 3), dtype=np.uint8)
    assert best_ms(runs, pixels, lambda: now_s[0]) == pytest.approx([30.0, 10.0])
    assert turns == ["slow", "fast"] * ROUNDS


def test_a_network_is_timed_by_the_networks_of_its_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    network = catalogue()["tf_efficientnet_lite0"].spec(160, 10)
    static: Way = ("int8-static", "onnxruntime")
    fits = [True]

    class Fitted:
        """4 ms in fp32 and 1 ms otherwise."""

        def __init__(self, precision: Precision) -> None:
            self.precision = precision

        def estimate(self, spec: NetworkSpec) -> latency.Estimate:
            assert spec.precision == self.precision
            ms = 4.0 if spec.precision == "fp32" else 1.0
            return latency.Estimate(ms=ms, low_ms=ms, high_ms=ms, outside="")

    def fit(_: DeviceProfile, way: latency.Way) -> Fitted | None:
        return Fitted(way.precision) if fits[0] else None

    monkeypatch.setattr(try_precision, "fit_networks", fit)
    points = [point(depth, 1.0, way) for depth in (1, 2, 3) for way in (FP32, static)]
    seat = msgspec.structs.replace(SEAT, submodel=None, network=network)

    def timing(asked: DeviceProfile) -> TrialTiming | str:
        return profile_timing(asked, seat, static, FP32)

    assert timing(profile(*points)) == TrialTiming(compute_ms=1.0, fp32_ms=4.0)
    unknown = (
        f"profile n100 has no networks in int8-static in onnxruntime with {SEAT.threads} threads: "
        "measure with --here"
    )
    assert timing(MEASURED) == unknown
    assert "are estimated" in str(timing(profile(*points, method="estimated")))
    fits[0] = False
    assert timing(profile(*points)) == unknown
