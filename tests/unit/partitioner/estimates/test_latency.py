"""Latency: fitted to a profile's points, sure of itself only where it may be, always monotone."""

import dataclasses
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.errors import InputError
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import DeviceProfile, LatencyPoint, profiles_in_package, read_profile
from partitioner.estimates import latency
from partitioner.estimates.latency import Way
from partitioner.estimates.latency_fit import non_negative_least_squares
from partitioner.estimates.latency_terms import terms
from tests.support.models.latencies import Formula, spec_from

TRUTH = Formula(fixed_ms=0.2, layer_ms=0.05, mac_ms=2e-8, value_ms=3e-8, weight_ms=1.2e-7)


def points_from(formula: Formula, *, threads: int = 1, count: int = 12) -> list[LatencyPoint]:
    """Latencies of varied shapes exactly as `formula` has them."""
    varied = [
        (image_size, embed_dim, depth)
        for image_size in (16, 32, 64)
        for embed_dim in (64, 192)
        for depth in (2, 12)
    ]
    return [
        formula.point(spec_from(image_size=i, embed_dim=d, depth=n, num_heads=d // 64), threads)
        for i, d, n in varied[:count]
    ]


def profile_with(points: list[LatencyPoint], threads: int = 1) -> DeviceProfile:
    like = read_profile("n100")
    return msgspec.structs.replace(like, latency=points, threads=threads)


def test_the_fit_finds_the_formula_that_made_the_points() -> None:
    model = latency.fit_latency(profile_with(points_from(TRUTH)))
    for shape in ({}, {"image_size": 96}, {"embed_dim": 384, "num_heads": 6}, {"mlp_ratio": 2.0}):
        spec = spec_from(**shape)
        for num_classes in (10, 1000):
            expected_ms = TRUTH.predict_ms(spec, num_classes)
            assert model.predict_ms(spec, num_classes) == pytest.approx(expected_ms, rel=1e-3)


def test_few_points_are_fitted_with_few_terms() -> None:
    plain = dataclasses.replace(TRUTH, value_ms=0.0, weight_ms=0.0)
    model = latency.fit_latency(profile_with(points_from(plain, count=5)))
    far = spec_from(image_size=128, embed_dim=512, depth=12, num_heads=8)
    assert model.predict_ms(far, 0) == pytest.approx(plain.predict_ms(far, 0), rel=1e-3)


def test_the_fit_uses_the_points_with_the_profile_s_threads() -> None:
    slow = points_from(dataclasses.replace(TRUTH, fixed_ms=50.0))
    fast = points_from(TRUTH, threads=2)
    model = latency.fit_latency(profile_with(slow + fast, threads=2))
    expected_ms = TRUTH.predict_ms(spec_from(), 0)
    assert model.predict_ms(spec_from(), 0) == pytest.approx(expected_ms, rel=1e-3)


def test_fewer_threads_stand_in_where_no_point_has_the_profile_s_and_more_do_not() -> None:
    points = points_from(TRUTH, threads=2)
    assert latency.matching_points(profile_with(points, threads=4)) == points
    model = latency.fit_latency(profile_with(points, threads=4))
    assert model.estimate(spec_from(), 10).outside == "threads 4 (measured: 2 and fewer)"
    with pytest.raises(InputError, match=r"'n100': expected at least 3 `latency` points with 1"):
        latency.fit_latency(profile_with(points, threads=1))


INT8 = Way(precision="int8", threads=2)


def both_precisions() -> DeviceProfile:
    """fp32 with one and two threads, int8 half as slow with two, and two stray OpenVINO points."""
    fast = dataclasses.replace(TRUTH, mac_ms=1e-8)
    replace = msgspec.structs.replace
    points = [
        *points_from(TRUTH, threads=1),
        *points_from(TRUTH, threads=2),
        *(replace(point, precision="int8") for point in points_from(fast, threads=2)),
        *(replace(point, runtime="openvino") for point in points_from(fast, count=2)),
    ]
    return profile_with(points, threads=2)


def test_every_way_with_enough_points_and_as_many_threads_as_allowed_is_listed() -> None:
    assert latency.ways(both_precisions()) == [Way(), Way(threads=2), INT8]
    careful = msgspec.structs.replace(both_precisions(), threads=1)
    assert latency.ways(careful) == [Way()]
    gpu = msgspec.structs.replace(
        careful,
        provider="CUDAExecutionProvider",
        latency=[
            msgspec.structs.replace(point, provider="CPUExecutionProvider")
            for point in careful.latency
        ],
    )
    assert latency.ways(gpu) == [Way(), Way(threads=2), INT8]


def test_a_device_of_openvino_s_is_a_way_beside_the_processor() -> None:
    profile = both_precisions()
    points = [
        msgspec.structs.replace(point, runtime="openvino", provider="NPU", precision="fp16")
        for point in points_from(TRUTH)
    ]
    with_npu = msgspec.structs.replace(profile, latency=[*profile.latency, *points])
    npu = Way(precision="fp16", runtime="openvino", provider="NPU")
    assert latency.ways(with_npu) == sorted([*latency.ways(profile), npu])
    assert latency.fit_latency(with_npu, npu).way == npu


def test_each_way_has_a_fit_of_its_own() -> None:
    profile = both_precisions()
    fp32, int8 = latency.fit_latency(profile), latency.fit_latency(profile, INT8)
    assert fp32.way == Way(threads=2)
    assert int8.way == INT8
    with pytest.raises(InputError, match=r"^expected sub-models of int8, got fp32$"):
        int8.predict_ms(spec_from(), 10)
    large: dict[str, Any] = {"image_size": 64, "embed_dim": 192, "depth": 12}
    slow_ms = fp32.predict_ms(spec_from(**large), 10)
    fast_ms = int8.predict_ms(spec_from(**large, precision="int8"), 10)
    assert 0.4 < fast_ms / slow_ms < 0.8


def test_a_way_that_was_not_measured_is_refused_by_name() -> None:
    expected = (
        "profile 'n100': expected at least 3 `latency` points of fp32 in openvino on "
        "CPUExecutionProvider with 1 thread, found 2 (ways with enough points: fp32 in "
        "onnxruntime on CPUExecutionProvider with 1 thread; fp32 in onnxruntime on "
        "CPUExecutionProvider with 2 threads; int8 in onnxruntime on CPUExecutionProvider with "
        "2 threads)"
    )
    with pytest.raises(InputError) as caught:
        latency.fit_latency(both_precisions(), Way(runtime="openvino"))
    assert str(caught.value) == expected


def test_a_point_s_own_provider_makes_another_way() -> None:
    cuda = [
        msgspec.structs.replace(point, provider="CUDAExecutionProvider")
        for point in points_from(TRUTH)
    ]
    slow = points_from(dataclasses.replace(TRUTH, fixed_ms=9.0))
    profile = profile_with(slow + cuda)
    way = Way(provider="CUDAExecutionProvider")
    assert latency.ways(profile) == [Way(), way]
    spec = spec_from()
    expected_ms = TRUTH.predict_ms(spec, 0)
    model = latency.fit_latency(profile, way)
    assert model.predict_ms(spec, 0) == pytest.approx(expected_ms, rel=1e-3)


def test_a_large_model_far_faster_than_a_small_one_is_refused() -> None:
    points = points_from(TRUTH)
    # In seconds, among milliseconds; unlike every other point in more than its depth.
    wide = TRUTH.point(spec_from(image_size=64, embed_dim=256, depth=7, num_heads=4))
    seconds = msgspec.structs.replace(wide, latency_ms=wide.latency_ms / 1000)
    with pytest.raises(
        InputError,
        match=r"^profile 'n100': `latency` contradicts itself: 16 px, patch 8, 64 wide, 2 deep "
        r"takes 0\.\d+ ms and 64 px, patch 8, 256 wide, 7 deep, larger, takes 0\.0\d+ ms$",
    ):
        latency.fit_latency(profile_with([*points, seconds]))


def test_a_small_disagreement_is_noise() -> None:
    points = points_from(TRUTH)
    again = msgspec.structs.replace(points[0], latency_ms=1.3 * points[0].latency_ms)
    model = latency.fit_latency(profile_with([again, *points]))
    assert model.predict_ms(latency.spec_of(again), 0) >= points[0].latency_ms


def test_many_predictions_are_those_of_each() -> None:
    model = latency.fit_latency(profile_with(points_from(TRUTH)))
    specs = [spec_from(depth=depth, embed_dim=64 * width) for depth in (1, 5) for width in (1, 3)]
    many = model.predict_many_ms(specs, 10)
    assert many.tolist() == pytest.approx([model.predict_ms(spec, 10) for spec in specs])
    assert np.array_equal(many, model.from_terms(terms(specs, 10)))


def noisy(points: list[LatencyPoint], factor: float) -> list[LatencyPoint]:
    """Every second point slower and every other one faster by `factor`."""
    return [
        msgspec.structs.replace(p, latency_ms=p.latency_ms * (factor if i % 2 else 1 / factor))
        for i, p in enumerate(points)
    ]


def test_an_estimate_is_surer_the_better_the_points_agree() -> None:
    widths = []
    for factor in (1.0, 1.1, 1.3):
        model = latency.fit_latency(profile_with(noisy(points_from(TRUTH), factor)))
        estimate = model.estimate(spec_from(), 10)
        assert estimate.ms == model.predict_ms(spec_from(), 10)
        assert estimate.low_ms < estimate.ms < estimate.high_ms
        widths.append(estimate.high_ms / estimate.low_ms)
    assert widths == sorted(widths)
    assert widths[0] < 1.15
    assert widths[2] > 1.5


def test_an_estimate_is_less_sure_far_from_what_was_measured() -> None:
    model = latency.fit_latency(profile_with(noisy(points_from(TRUTH), 1.05)))
    near = model.estimate(spec_from(), 10)
    far = model.estimate(spec_from(image_size=256, patch_size=4, num_heads=8), 10)
    assert far.high_ms / far.ms > 1.2 * near.high_ms / near.ms


def test_an_estimate_says_in_words_what_it_extrapolates() -> None:
    model = latency.fit_latency(profile_with(points_from(TRUTH)))
    assert model.estimate(spec_from(), 10).outside == ""
    far = spec_from(image_size=96, depth=24)
    assert model.estimate(far, 10, batch=2).outside == (
        "tokens 145 (measured: 5 to 65), depth 24 (measured: 2 to 12), "
        "image_size 96 (measured: 16 to 64), batch 2 (measured: 1 to 1), "
        "mega_macs 474.8 (measured: 0.5471 to 366.9)"
    )


def test_points_of_several_pictures_a_run_are_fitted_as_such() -> None:
    def batched(spec: SubModelSpec, batch: int) -> LatencyPoint:
        fixed_ms = TRUTH.fixed_ms + TRUTH.layer_ms * spec.depth
        once_ms = TRUTH.weight_ms * spec.depth * 12 * spec.embed_dim**2
        each_ms = TRUTH.predict_ms(spec, 0) - fixed_ms - once_ms
        return msgspec.structs.replace(
            TRUTH.point(spec), batch=batch, latency_ms=fixed_ms + once_ms + batch * each_ms
        )

    specs = [latency.spec_of(point) for point in points_from(TRUTH)]
    points = [batched(spec, batch) for spec in specs for batch in (1, 4)]
    model = latency.fit_latency(profile_with(points))
    asked = spec_from(embed_dim=128, depth=6)
    expected_ms = batched(asked, 8).latency_ms
    assert model.predict_ms(asked, 0, batch=8) == pytest.approx(expected_ms, rel=1e-3)
    assert "batch 8 (measured: 1 to 4)" in model.estimate(asked, 0, batch=8).outside


@pytest.mark.parametrize("name", sorted(profiles_in_package()))
def test_shipped_profiles_are_fitted_closely(name: str) -> None:
    profile = read_profile(name)
    for way in (None, *latency.ways(profile)):
        points = latency.matching_points(profile, way)
        model = latency.fit_latency(profile, way)
        predicted_ms = [model.predict_ms(latency.spec_of(p), 0, p.batch) for p in points]
        errors = np.abs(np.array(predicted_ms) / [p.latency_ms for p in points] - 1)
        assert np.median(errors) < 0.05
        assert errors.max() < 0.25


@settings(max_examples=60, deadline=None)
@given(
    noise=st.lists(st.floats(0.5, 2.0), min_size=12, max_size=12),
    image_size=st.sampled_from([16, 32, 48]),
    embed_dim=st.sampled_from([64, 128, 192]),
    depth=st.integers(1, 12),
    num_classes=st.integers(2, 1000),
)
def test_a_larger_model_is_never_predicted_to_be_faster(
    noise: list[float], image_size: int, embed_dim: int, depth: int, num_classes: int
) -> None:
    points = [
        msgspec.structs.replace(point, latency_ms=point.latency_ms * factor)
        for point, factor in zip(points_from(TRUTH), noise, strict=True)
    ]
    model = latency.fit_latency(profile_with(points))
    shape: dict[str, Any] = {"image_size": image_size, "embed_dim": embed_dim, "depth": depth}
    predicted_ms = model.predict_ms(spec_from(**shape), num_classes)
    assert predicted_ms > 0
    for larger in ({"image_size": 64}, {"embed_dim": 256}, {"depth": 13}):
        assert model.predict_ms(spec_from(**shape | larger), num_classes) >= predicted_ms
    assert model.predict_ms(spec_from(**shape), num_classes + 1) >= predicted_ms


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_non_negative_least_squares_is_optimal(seed: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(9, columns)), rng.normal(size=9)
    # A term that is zero in every point.
    a[:, -1] *= seed % 2
    x = non_negative_least_squares(a, b)
    gradient = a.T @ (a @ x - b)
    # Karush-Kuhn-Tucker: no used column can improve, no unused one would help.
    assert (x >= 0).all()
    assert gradient.min() > -1e-6
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6
