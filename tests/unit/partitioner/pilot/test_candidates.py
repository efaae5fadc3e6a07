"""Networks that a device may serve: sizes and depths, what fits, and what nothing fits."""

import pytest
from msgspec.structs import replace

from mdp.errors import InputError
from mdp.formats.plan import NetworkSpec, SubModelSpec
from mdp.formats.profile import read_profiles
from partitioner.pilot.candidates import (
    DeviceLatency,
    FrozenNetwork,
    candidates,
    check_fit,
    remark_on_unknown,
    remarks_on_extrapolation,
)

VIT = "vit_tiny_patch16_224"
SHAPE = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=192, depth=12, num_heads=3, mlp_ratio=4.0
)
(N100,) = read_profiles(["n100"])


def test_a_plain_vit_is_tried_at_every_depth_and_a_network_whole() -> None:
    found = candidates([VIT, "tf_efficientnet_lite0", "unknown_net"], {VIT: SHAPE})
    cuts = [one for one in found if one.name == VIT]
    assert {(one.spec.image_size, one.depth) for one in cuts} == {
        (side, depth) for side in (64, 96, 128, 160, 192, 224) for depth in range(1, 13)
    }
    whole = [one for one in found if one.name == "tf_efficientnet_lite0"]
    assert [one.spec.image_size for one in whole] == [64, 96, 128, 160, 192, 224]
    assert {one.depth for one in whole} == {0}
    assert len(found) == len(cuts) + len(whole)


def test_a_network_whose_weights_are_of_one_size_is_tried_at_that_alone() -> None:
    """Each pair of places has a parameter in LeViT, so others cannot be read."""
    assert [one.spec.image_size for one in candidates(["levit_128s"], {})] == [224]


def test_sides_are_multiples_of_the_patch() -> None:
    shape = SubModelSpec(
        image_size=140, patch_size=14, embed_dim=192, depth=2, num_heads=3, mlp_ratio=4.0
    )
    assert candidates([VIT], {VIT: shape}) == []


def test_words_name_the_cut() -> None:
    cut, whole = (candidates([name], {VIT: SHAPE})[-1] for name in (VIT, "tf_efficientnet_lite0"))
    assert cut.words == "vit_tiny_patch16_224, first 12 layers at 224 px"
    assert whole.words == "tf_efficientnet_lite0 at 224 px"


def test_fewer_layers_and_pixels_are_quicker_and_what_keeps_the_target_is_kept() -> None:
    device = DeviceLatency.of(N100, 10, sees=False)
    some = candidates([VIT], {VIT: SHAPE})
    took = {(one.depth, one.spec.image_size): device.predict_ms(one.spec) for one in some}
    assert took[1, 64] < took[1, 224] < took[12, 224]  # type: ignore[operator]
    target_ms = took[6, 128]
    assert target_ms is not None
    fitting = check_fit([device], some, target_ms)["n100"]
    assert {some[row].depth for row in fitting if some[row].spec.image_size == 128} == set(
        range(1, 7)
    )


def test_a_device_with_a_camera_gets_no_picture() -> None:
    """Over a slow link the crop takes most of the time."""
    some = candidates([VIT], {VIT: SHAPE})[-1]
    with_camera = DeviceLatency.of(N100, 10, sees=True).predict_ms(some.spec)
    without = DeviceLatency.of(N100, 10, sees=False).predict_ms(some.spec)
    assert with_camera is not None
    assert without is not None
    assert with_camera < without


def test_a_target_that_nothing_keeps_names_the_quickest() -> None:
    device = DeviceLatency.of(N100, 10, sees=False)
    with pytest.raises(
        InputError,
        match=r"--latency-ms 0\.1: nothing fits 'n100': the quickest, vit_tiny_patch16_224, first "
        r"1 layers at 64 px, is predicted to take \d+\.\d ms there",
    ):
        check_fit([device], candidates([VIT], {VIT: SHAPE}), 0.1)


def test_a_network_of_unknown_latency_fits_nowhere() -> None:
    other = NetworkSpec(name="other", image_size=64, parameters=1, macs=1)
    device = DeviceLatency.of(N100, 10, sees=False)
    assert device.predict_ms(other) is None
    with pytest.raises(InputError, match="the latency of no network of --weights is known"):
        check_fit([device], [FrozenNetwork("other", other)], 100.0)


def test_networks_whose_latency_is_unknown_are_named_with_the_device_if_others_know_it() -> None:
    device = DeviceLatency.of(N100, 10, sees=False)
    known = candidates([VIT, "tf_efficientnet_lite0"], {VIT: SHAPE})
    assert remark_on_unknown([VIT, "tf_efficientnet_lite0"], [device], known) == ""
    other = FrozenNetwork("other", NetworkSpec(name="other", image_size=64, parameters=1, macs=1))
    assert remark_on_unknown([VIT, "nothing", "other"], [device], [*known, other]) == (
        "not tried, as the latency is unknown: nothing; other on n100"
    )


def test_a_width_that_the_profile_never_measured_is_said_with_what_it_measured() -> None:
    """Milliseconds are predicted for it all the same, and by how much they err is not known."""
    device = DeviceLatency.of(N100, 10, sees=False)
    wide = replace(SHAPE, embed_dim=1024, num_heads=16)
    assert device.predict_ms(wide) is not None
    assert remarks_on_extrapolation({"n100": SHAPE}, [device]) == []
    (said,) = remarks_on_extrapolation({"n100": wide}, [device])
    assert said.startswith(
        "n100: predicted milliseconds are extrapolated, probe it for better ones: "
        "embed_dim 1024 (measured: 64 to 768), "
    )
