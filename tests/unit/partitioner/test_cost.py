"""What a ViT costs: counted against torch, predicted from profiles, and always monotone."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.crop import encode_jpeg
from mdp.errors import InputError
from mdp.plan import SubModelSpec
from mdp.profile import DeviceProfile, LatencyPoint, Link, read_profile, shipped_profiles
from partitioner import cost

SHAPES = [
    (12, 4, 48, 2, 3, 4.0),
    (24, 4, 96, 3, 3, 4.0),
    (32, 8, 64, 2, 2, 2.5),
    (48, 16, 96, 1, 1, 3.0),
]


def spec_from(
    image_size: int = 32,
    patch_size: int = 8,
    embed_dim: int = 64,
    depth: int = 4,
    num_heads: int = 2,
    mlp_ratio: float = 4.0,
) -> SubModelSpec:
    return SubModelSpec(
        image_size=image_size,
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=mlp_ratio,
    )


def points_from(
    model: cost.LatencyModel, *, threads: int = 1, count: int = 12
) -> list[LatencyPoint]:
    """Latencies of varied shapes exactly as `model` has them."""
    varied = [
        (image_size, embed_dim, depth)
        for image_size in (16, 32, 64)
        for embed_dim in (64, 192)
        for depth in (2, 12)
    ]
    specs = [
        spec_from(image_size=i, embed_dim=d, depth=n, num_heads=d // 64)
        for i, d, n in varied[:count]
    ]
    return [
        LatencyPoint(
            image_size=spec.image_size,
            patch_size=spec.patch_size,
            embed_dim=spec.embed_dim,
            depth=spec.depth,
            num_heads=spec.num_heads,
            mlp_ratio=spec.mlp_ratio,
            threads=threads,
            latency_ms=model.predict_ms(spec, 0),
        )
        for spec in specs
    ]


def profile_with(latency: list[LatencyPoint], threads: int = 1) -> DeviceProfile:
    like = read_profile("n100")
    return msgspec.structs.replace(like, latency=latency, threads=threads)


TRUTH = cost.LatencyModel(
    fixed_ms=0.2, layer_ms=0.05, mac_ms=2e-8, traffic_byte_ms=1e-7, weight_byte_ms=3e-8
)


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_built_sub_model(shape: tuple[int, ...]) -> None:
    from partitioner.submodel import SubModel

    spec = spec_from(*shape)
    built = SubModel(spec, 7)
    assert cost.parameters(spec, 7) == sum(p.numel() for p in built.parameters())
    assert cost.weight_bytes(spec, 7) == 4 * cost.parameters(spec, 7)


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES)
def test_macs_are_those_that_torch_counts(shape: tuple[int, ...]) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from partitioner.submodel import SubModel

    spec = spec_from(*shape)
    built = SubModel(spec, 7).eval()
    for module in built.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # the counter sees plain matrix products only
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        built(torch.zeros(1, 3, spec.image_size, spec.image_size))
    assert 2 * cost.macs(spec, 7) == counter.get_total_flops()


def test_vit_base_costs_what_is_published() -> None:
    # 86.6 M parameters and 17.58 G MACs with one head of 1,000 classes (torchvision, vit_b_16).
    base = spec_from(image_size=224, patch_size=16, embed_dim=768, depth=12, num_heads=12)
    one_head = 769 * 1000
    assert cost.parameters(base, 1000) - one_head == 86_567_656
    assert cost.macs(base, 1000) / 1e9 == pytest.approx(17.58, abs=0.02)


def test_memory_covers_weights_activations_and_the_session() -> None:
    small, large = spec_from(depth=2), spec_from(depth=8)
    assert cost.memory_bytes(small, 10) > cost.SESSION_BYTES + cost.weight_bytes(small, 10)
    grown = cost.memory_bytes(large, 10) - cost.memory_bytes(small, 10)
    assert grown == pytest.approx(2 * 4 * 6 * (12 * 64 * 64 + 13 * 64), rel=1e-6)


def test_activations_of_a_long_sequence_are_its_attention_maps() -> None:
    spec = spec_from(image_size=224, patch_size=4, embed_dim=32, num_heads=2)
    maps = 2 * spec.num_heads * cost.tokens(spec) ** 2 * 4
    assert maps < cost.activation_bytes(spec) < 1.1 * maps


def test_the_fit_finds_the_formula_that_made_the_points() -> None:
    model = cost.fit_latency(profile_with(points_from(TRUTH)))
    for name in ("fixed_ms", "layer_ms", "mac_ms", "traffic_byte_ms", "weight_byte_ms"):
        assert getattr(model, name) == pytest.approx(getattr(TRUTH, name), rel=1e-3)


def test_few_points_are_fitted_without_the_memory_terms() -> None:
    model = cost.fit_latency(profile_with(points_from(TRUTH, count=5)))
    assert model.traffic_byte_ms == model.weight_byte_ms == 0
    assert model.mac_ms > 0


def test_the_fit_uses_the_points_with_the_profile_s_threads() -> None:
    slow = points_from(dataclasses.replace(TRUTH, fixed_ms=50.0))
    fast = points_from(TRUTH, threads=2)
    model = cost.fit_latency(profile_with(slow + fast, threads=2))
    assert model.fixed_ms == pytest.approx(TRUTH.fixed_ms, rel=1e-3)


def test_fewer_threads_stand_in_where_no_point_has_the_profile_s() -> None:
    points = points_from(TRUTH, threads=1)
    assert cost.matching_points(profile_with(points, threads=4)) == points


def test_points_with_more_threads_are_no_ground_for_a_prediction() -> None:
    points = points_from(TRUTH, threads=4)
    with pytest.raises(InputError, match=r"'n100': expected at least 3 `latency` points with 2"):
        cost.fit_latency(profile_with(points, threads=2))


@pytest.mark.parametrize("name", sorted(shipped_profiles()))
def test_shipped_profiles_are_fitted_closely(name: str) -> None:
    profile = read_profile(name)
    errors = np.abs(cost.relative_errors(cost.fit_latency(profile), cost.matching_points(profile)))
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
    model = cost.fit_latency(profile_with(points))
    shape = {"image_size": image_size, "embed_dim": embed_dim, "depth": depth}
    predicted_ms = model.predict_ms(spec_from(**shape), num_classes)
    assert predicted_ms > 0
    for larger in ({"image_size": 64}, {"embed_dim": 256}, {"depth": 13}):
        assert model.predict_ms(spec_from(**shape | larger), num_classes) >= predicted_ms
    assert model.predict_ms(spec_from(**shape), num_classes + 1) >= predicted_ms


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_non_negative_least_squares_meets_its_optimality_conditions(
    seed: int, columns: int
) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.normal(size=(9, columns)), rng.normal(size=9)
    x = np.array(cost.non_negative_least_squares(a, b))
    gradient = a.T @ (a @ x - b)
    # Karush-Kuhn-Tucker: no used column can improve, no unused one would help.
    assert (x >= 0).all()
    assert gradient.min() > -1e-6
    assert np.abs(gradient[x > 0]).max(initial=0.0) < 1e-6


def test_network_time_counts_both_directions() -> None:
    link = Link(bandwidth_bps=1e6, round_trip_s=0.002)
    sent = 3 * 24 * 24 + cost.FRAMING_BYTES
    received = 2 * 10 * 4 + cost.FRAMING_BYTES
    expected_ms = 2 + (sent + received) * 8 / 1e3
    assert cost.network_ms(link, 24, 10, "raw") == pytest.approx(expected_ms)


def test_jpeg_is_chosen_where_the_link_is_slow() -> None:
    slow, fast = (
        Link(bandwidth_bps=20e6, round_trip_s=0.003),
        Link(bandwidth_bps=940e6, round_trip_s=0),
    )
    assert cost.choose_encoding(slow, 224, 1000) == "jpeg"
    assert cost.choose_encoding(slow, 24, 10) == "raw"
    assert cost.choose_encoding(fast, 224, 1000) == "raw"
    raw, jpeg = (cost.network_ms(slow, 224, 1000, encoding) for encoding in ("raw", "jpeg"))
    assert raw - jpeg >= cost.JPEG_MIN_SAVING_MS


def test_estimated_jpeg_bytes_are_those_of_a_soft_picture_within_a_factor_of_two() -> None:
    x = np.linspace(0, 20, 112)
    wave = 127 + 60 * np.sin(x[:, None] * 3) * np.cos(x[None, :] * 5)
    noise = np.random.default_rng(0).normal(0, 6, (112, 112, 3))
    view = np.clip(wave[..., None] + noise, 0, 255).astype(np.uint8)
    estimated = cost.request_bytes(112, "jpeg") - cost.FRAMING_BYTES
    assert 0.5 < len(encode_jpeg(view)) / estimated < 2


def test_a_prediction_adds_up_and_is_kept_to_the_microsecond() -> None:
    profile = read_profile("raspberry-pi-5")
    predicted = cost.predict(profile, cost.fit_latency(profile), spec_from(), 10)
    assert predicted.total == round(predicted.compute + predicted.network, 3)
    assert predicted.compute == round(predicted.compute, 3) > 0
