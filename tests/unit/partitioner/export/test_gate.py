"""The gate: what a profile proves, what is too slow, and how much may be lost by all together."""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import pytest

from mdp.formats.plan import NetworkSpec, SubModelSpec
from mdp.formats.profile import DeviceProfile, LatencyPoint, Provenance, read_profile
from partitioner.estimates import latency
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.latency_networks import Basis, NetworkEstimate
from partitioner.export import precision_choice
from partitioner.export.precision_choice import (
    Candidate,
    Timing,
    Way,
    choose,
    needed_pictures,
    network_timing,
    profile_timing,
    too_slow,
)

CPU = "CPUExecutionProvider"
INT8: Way = ("int8", "onnxruntime")
BF16: Way = ("bf16", "openvino")
STATIC: Way = ("int8-static", "openvino")


def shape(depth: int, image_size: int = 32) -> SubModelSpec:
    return SubModelSpec(
        image_size=image_size, patch_size=8, embed_dim=64, depth=depth, num_heads=2, mlp_ratio=4.0
    )


def point(spec: SubModelSpec, latency_ms: float, way: Way, **more: Any) -> LatencyPoint:
    values = msgspec.structs.asdict(spec) | {"precision": way[0], "runtime": way[1]}
    return LatencyPoint(**{"threads": 1, "latency_ms": latency_ms, **values, **more})


def profile(
    *points: LatencyPoint, method: Literal["measured", "estimated"] = "measured"
) -> DeviceProfile:
    read = read_profile("n100")
    latency = Provenance(method=method, source="by this test, on no device")
    return msgspec.structs.replace(
        read, latency=list(points), provenance={**read.provenance, "latency": latency}
    )


FP32: Way = ("fp32", "onnxruntime")
MEASURED = profile(
    point(shape(2), 1.0, FP32), point(shape(2), 0.8, INT8),
    point(shape(8), 4.0, FP32), point(shape(8), 2.0, INT8),
    point(shape(4), 2.0, FP32),
    point(shape(4), 9.0, INT8, threads=2), point(shape(4), 9.0, INT8, batch=8),
    point(shape(4), 9.0, INT8, provider="CUDAExecutionProvider"), point(shape(6), 9.0, BF16),
)  # fmt: skip


def timed(spec: SubModelSpec, way: Way, asked: DeviceProfile = MEASURED) -> Timing | str:
    return profile_timing(asked, spec, way, threads=1, provider=CPU)


def test_a_shape_that_was_measured_is_taken_as_it_was() -> None:
    assert timed(shape(2), INT8) == Timing(compute_ms=0.8, fp32_ms=1.0)


def test_a_shape_in_between_gets_a_ratio_in_between() -> None:
    timing = timed(shape(4), INT8)
    assert isinstance(timing, Timing)
    assert 0.5 < timing.ratio < 0.8
    assert 1.0 < timing.fp32_ms < 4.0
    # Halfway as logarithms: half of the way from 2 to 8 layers, as near as the patches let it be.
    assert timing.ratio == pytest.approx((0.8 * 0.5) ** 0.5, rel=0.02)


@pytest.mark.parametrize(("depth", "ratio"), [(1, 0.8), (40, 0.5)])
def test_beyond_what_was_measured_the_ratio_stays(depth: int, ratio: float) -> None:
    timing = timed(shape(depth), INT8)
    assert isinstance(timing, Timing)
    assert timing.ratio == pytest.approx(ratio)


@pytest.mark.parametrize(
    ("compute_ms", "expected"),
    [
        (0.97, ""),
        (0.98, "hardly faster: takes 0.98 ms on n100 and fp32 1 ms"),
        (1.0, "slower: takes 1 ms on n100 and fp32 1 ms"),
        (1.26, "slower: takes 1.26 ms on n100 and fp32 1 ms"),
    ],
)
def test_what_is_not_clearly_faster_is_not_worth_it(compute_ms: float, expected: str) -> None:
    assert too_slow(Timing(compute_ms=compute_ms, fp32_ms=1.0), "n100") == expected


@pytest.mark.parametrize(("max_loss", "pictures"), [(0.005, 200), (0.01, 100), (0.3, 4), (1.0, 1)])
def test_one_picture_may_be_worth_no_more_than_the_loss(max_loss: float, pictures: int) -> None:
    assert needed_pictures(max_loss) == pictures


def candidate(k: int, way: Way, ms: float, reason: str = "") -> Candidate:
    return Candidate(k=k, way=way, timing=Timing(compute_ms=ms, fp32_ms=1.0), reason=reason)


def decided(
    candidates: list[Candidate], losses: dict[tuple[int, Way], float], max_loss: float = 0.005
) -> dict[tuple[int, Way], Candidate]:
    def fused_loss(ways: Mapping[int, Way]) -> float:
        return sum(losses[k, way] for k, way in ways.items())

    made = choose(candidates, fused_loss, {0: 1.0, 1: 3.0}, max_loss)
    assert [(c.k, c.way) for c in made] == [(c.k, c.way) for c in candidates]
    return {(c.k, c.way): c for c in made}


def test_the_fastest_that_loses_little_is_kept() -> None:
    candidates = [candidate(0, BF16, 0.6), candidate(0, INT8, 0.5), candidate(0, STATIC, 0.4)]
    made = decided(candidates, {(0, BF16): 0.0, (0, INT8): 0.001, (0, STATIC): 0.0061})
    assert made[0, STATIC].reason == "loses 0.61 points, more than 0.50 points"
    assert made[0, INT8].kept
    assert made[0, INT8].reason == "50% of fp32's time, and the fused answer loses 0.10 points"
    assert made[0, BF16].reason == "slower than int8 in onnxruntime"
    assert [c.kept for c in made.values()] == [False, True, False]


def test_all_together_lose_no_more_and_the_slowest_member_comes_first() -> None:
    candidates = [candidate(0, INT8, 0.1), candidate(1, INT8, 0.9)]
    made = decided(candidates, {(0, INT8): 0.003, (1, INT8): 0.004})
    assert made[1, INT8].kept
    assert not made[0, INT8].kept
    assert made[0, INT8].reason == (
        "loses 0.70 points together with sub-models 1, more than 0.50 points"
    )


def test_a_gain_of_one_member_may_pay_for_another() -> None:
    candidates = [candidate(0, INT8, 0.1), candidate(1, INT8, 0.9)]
    made = decided(candidates, {(0, INT8): 0.006, (1, INT8): -0.001})
    assert made[0, INT8].kept
    assert made[1, INT8].kept


def test_what_speaks_against_a_candidate_stays() -> None:
    made = decided([candidate(0, INT8, 0.1, "slower: x")], {(0, INT8): 0.0})
    assert made[0, INT8] == candidate(0, INT8, 0.1, "slower: x")


def test_a_loss_that_is_no_number_is_too_much() -> None:
    made = decided([candidate(0, INT8, 0.1)], {(0, INT8): float("nan")})
    assert not made[0, INT8].kept


def test_a_network_is_timed_by_what_its_profile_measured_of_networks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = catalogue()["tf_efficientnet_lite0"].spec(160, 10)
    static: Way = ("int8-static", "onnxruntime")
    basis: list[Basis] = ["measured"]

    class Fitted:
        """4 ms in fp32 and 1 ms otherwise."""

        def __init__(self, _: DeviceProfile, way: latency.Way) -> None:
            self.precision = way.precision

        def estimate(self, spec: NetworkSpec) -> NetworkEstimate:
            assert spec.precision == self.precision
            ms = 4.0 if spec.precision == "fp32" else 1.0
            return NetworkEstimate(ms=ms, low_ms=ms, high_ms=ms, basis=basis[0])

    monkeypatch.setattr(precision_choice, "fit_networks", Fitted)
    points = [point(shape(depth), 1.0, way) for depth in (1, 2, 3) for way in (FP32, static)]

    def timing(asked: DeviceProfile) -> Timing | str:
        return network_timing(asked, network, static, threads=1, provider=CPU)

    assert timing(profile(*points)) == Timing(compute_ms=1.0, fp32_ms=4.0)
    assert "has no networks in int8-static in onnxruntime" in str(timing(MEASURED))
    assert "is estimated" in str(timing(profile(*points, method="estimated")))
    basis[0] = "ratio"
    assert "has no networks in int8-static in onnxruntime" in str(timing(profile(*points)))
