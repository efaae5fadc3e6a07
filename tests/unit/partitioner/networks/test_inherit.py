"""Weights that a sub-model takes over from its teacher, and those that it cannot."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mdp.errors import InputError  # noqa: E402
from mdp.formats.plan import SubModelSpec  # noqa: E402
from partitioner.networks.submodel import MEAN, STD, Normalise, SubModel, init_weights  # noqa: E402
from partitioner.networks.teacher import Teacher, build_teacher, teacher_spec  # noqa: E402
from partitioner.networks.weight_init import TrainedMember, check_source, init_from, select_evenly  # noqa: E402

pytestmark = pytest.mark.torch
NAME = "vit_tiny_patch16_224"
ARGS: dict[str, Any] = {
    "img_size": 24,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 4,
    "num_heads": 3,
}
SAME = SubModelSpec(image_size=24, patch_size=8, embed_dim=48, depth=4, num_heads=3, mlp_ratio=4.0)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def teacher(name: str = NAME, **more: Any) -> Teacher:
    """A teacher without a single weight that is 0 or 1, normalised like ImageNet."""
    torch.manual_seed(1)
    spec = teacher_spec(name, ARGS | more)
    network = build_teacher(spec, 3, pretrained=False).network
    init_weights(network)
    with torch.no_grad():
        for weights in network.parameters():
            if weights.ndim == 1:
                weights.add_(0.1 * torch.randn_like(weights))
            elif weights.shape[:1] == (1,):
                weights.add_(0.2 * torch.randn_like(weights))
    return Teacher(network, *IMAGENET).eval()


def sub_model(**changes: Any) -> Any:
    torch.manual_seed(2)
    shape = {name: getattr(SAME, name) for name in SAME.__struct_fields__} | changes
    return SubModel(SubModelSpec(**shape), 3).trunk.eval()


def pixels(size: int = 24) -> Any:
    """Smooth pictures in 0..255, for these stay alike at every size."""
    torch.manual_seed(3)
    coarse = 255 * torch.rand(8, 3, 4, 4)
    return torch.nn.functional.interpolate(coarse, size=(size, size), mode="bilinear")


def feature(trunk: Any, size: int = 24) -> Any:
    with torch.no_grad():
        return trunk(Normalise(MEAN, STD)(pixels(size)))


def feature_of_head(source: Teacher) -> Any:
    """Feature that the teacher's head reads."""
    network: Any = source.network
    with torch.no_grad():
        tokens = network.forward_features(source.normalise(pixels()))
        return network.forward_head(tokens, pre_logits=True)


def stream(network: Any, x: Any) -> Any:
    """The residual stream `[B, N, D]` after the last block, before any norm."""
    with torch.no_grad():
        return network.blocks(network._pos_embed(network.patch_embed(x)))


@pytest.mark.parametrize(
    ("name", "more"),
    [
        (NAME, {}),
        (NAME, {"qkv_bias": False, "proj_bias": False}),
        (NAME, {"init_values": 0.3}),
        ("deit3_small_patch16_224", {}),
        ("vit_base_patch14_dinov2", {}),
    ],
)
def test_of_equal_shape_it_computes_the_teacher_s_feature(name: str, more: dict[str, Any]) -> None:
    source, trunk = teacher(name, **more), sub_model()
    before, wanted = feature(trunk), feature_of_head(source)
    init_from(trunk, source)
    assert (before - wanted).abs().max() > 0.1
    torch.testing.assert_close(feature(trunk), wanted, atol=1e-4, rtol=0)


def test_of_equal_shape_it_computes_what_an_earlier_sub_model_does() -> None:
    earlier, trunk = sub_model(), sub_model()
    with torch.no_grad():
        earlier.norm.bias.normal_()
    init_from(trunk, TrainedMember(earlier))
    torch.testing.assert_close(feature(trunk), feature(earlier), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"depth": 2},
        {"depth": 1},
        {"embed_dim": 32, "num_heads": 2},
        {"embed_dim": 24, "num_heads": 3},
        {"embed_dim": 32, "num_heads": 4},
        {"mlp_ratio": 0.5},
        {"image_size": 16},
        {"image_size": 32},
        {"patch_size": 4},
        {"image_size": 20, "patch_size": 4, "embed_dim": 24, "num_heads": 3, "depth": 2},
    ],
)
def test_a_smaller_one_fits_and_neither_dies_nor_explodes(changes: dict[str, Any]) -> None:
    source, trunk = teacher(), sub_model(**changes)
    shapes = {key: value.shape for key, value in trunk.state_dict().items()}
    size = changes.get("image_size", 24)
    init_from(trunk, source)
    assert {key: value.shape for key, value in trunk.state_dict().items()} == shapes
    assert feature(trunk, size).isfinite().all()
    own = stream(trunk, Normalise(MEAN, STD)(pixels(size)))
    old = stream(source.network, source.normalise(pixels()))
    # Every layer adds to the stream, so that fewer layers add less; 0.68 without the rescaling.
    least = 0.5 if "depth" in changes else 0.9
    assert least < own.std() / old.std() < 1.15


def test_it_is_close_to_the_teacher_where_little_is_left_out() -> None:
    source, inherited = teacher(), sub_model(mlp_ratio=3.5)
    drawn, wanted = feature(inherited), feature_of_head(source)
    init_from(inherited, source)

    def similarity(found: Any) -> float:
        return float(torch.nn.functional.cosine_similarity(found, wanted).mean())

    assert similarity(feature(inherited)) > 0.9 > similarity(drawn)


def test_what_the_teacher_does_not_use_is_left_out_first() -> None:
    source, trunk = teacher(), sub_model(embed_dim=32, num_heads=2, mlp_ratio=3.0)
    network: Any = source.network
    keep = torch.tensor([c for c in range(48) if c % 3])
    with torch.no_grad():
        gone = torch.tensor([c for c in range(48) if c % 3 == 0])
        for block in network.blocks:
            # Head 1 says nothing; neither do the first 96 of 192 units, nor a third of channels.
            block.attn.proj.weight[:, 16:32] = 0
            block.mlp.fc2.weight[:, :96] = 0
            block.attn.proj.weight[gone] = 0
            block.mlp.fc2.weight[gone] = 0
        network.patch_embed.proj.weight[gone] = 0
        network.norm.weight.copy_(torch.arange(48.0))
    init_from(trunk, source)
    assert torch.equal(trunk.norm.weight, keep.float())
    inherited: Any = trunk.blocks[0]
    old: Any = network.blocks[0]
    assert torch.equal(inherited.mlp.fc2.bias, old.mlp.fc2.bias[keep])
    # All 96 units that say something are kept, in their order and, as nothing is lost, unscaled.
    torch.testing.assert_close(inherited.mlp.fc2.weight, old.mlp.fc2.weight[keep][:, 96:])
    heads = torch.cat([torch.arange(16), torch.arange(32, 48)])
    torch.testing.assert_close(inherited.attn.proj.weight, old.attn.proj.weight[keep][:, heads])


def test_a_split_head_uses_every_unit_once() -> None:
    source, trunk = teacher(), sub_model(num_heads=6)
    init_from(trunk, source)
    found: Any = trunk.blocks[0].attn.proj.weight
    network: Any = source.network
    old: Any = network.blocks[0].attn.proj.weight
    assert found.shape == old.shape
    torch.testing.assert_close(found.sort(dim=1).values, old.sort(dim=1).values)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("vit_base_patch14_reg4_dinov2", {}),
        ("vit_base_patch16_reg4_gap_256", {}),
        ("vit_base_patch16_gap_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_base_patch16_siglip_224", {}),
        (NAME, {"pos_embed": "none"}),
        (NAME, {"final_norm": False}),
    ],
)
def test_other_kinds_give_what_corresponds(name: str, more: dict[str, Any]) -> None:
    source, trunk = teacher(name, **more), sub_model()
    init_from(trunk, source)
    network: Any = source.network
    qkv = network.blocks[2].attn.qkv
    torch.testing.assert_close(trunk.blocks[2].attn.qkv.weight, qkv.weight)
    if network.pos_embed is not None:
        # Whatever tokens come before the patches, these keep their places.
        torch.testing.assert_close(trunk.pos_embed[:, 1:], network.pos_embed[:, -9:])
    assert feature(trunk).isfinite().all()


def test_the_teacher_stays_as_it_was() -> None:
    source = teacher()
    before = {key: value.clone() for key, value in source.state_dict().items()}
    trunk = sub_model()
    init_from(trunk, source)
    with torch.no_grad():
        for weights in trunk.parameters():
            weights += 1
    for key, value in source.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_layers_are_evenly_spaced() -> None:
    assert select_evenly(12, 12) == list(range(12))
    assert [select_evenly(12, new) for new in (2, 3)] == [[0, 11], [0, 6, 11]]
    assert select_evenly(12, 6) == [0, 2, 4, 7, 9, 11]
    assert select_evenly(6, 1) == select_evenly(1, 1) == [0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed_dim": 64, "num_heads": 4}, "embed_dim is 64, at most 48"),
        ({"depth": 5}, "depth is 5, at most 4"),
        ({"mlp_ratio": 4.5}, "width of the MLP is 216, at most 192"),
        ({"num_heads": 2}, "width of a head is 24, at most 16"),
        ({"embed_dim": 40, "num_heads": 4}, r"num_heads \(of width 10\) is 4, at most 3"),
    ],
)
def test_what_is_larger_than_the_teacher_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        init_from(sub_model(**changes), teacher())
    spec = SubModelSpec(
        **({name: getattr(SAME, name) for name in SAME.__struct_fields__} | changes)
    )
    with pytest.raises(InputError, match=message):
        check_source(teacher_spec(NAME, ARGS), [SAME, spec])
    check_source(teacher_spec(NAME, ARGS), [SAME])


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("vit_base_patch16_clip_224", {}, "norm before the first block"),
        (NAME, {"embed_norm_layer": "layernorm"}, "norm of the patch embedding"),
        ("test_vit4", {}, "RmsNorm has no counterpart"),
        (NAME, {"qk_norm": True}, "QK-norm has no counterpart"),
        ("beit3_base_patch16_224", {}, "norm inside the attention"),
        (NAME, {"scale_mlp_norm": True}, "norm or gate inside the MLP"),
        ("vit_giant_patch14_dinov2", {}, "gated MLP"),
    ],
)
def test_blocks_without_counterpart(name: str, more: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"cannot start from the teacher's weights: .*{message}"):
        init_from(sub_model(), teacher(name, **more))
    with pytest.raises(InputError, match=message):
        check_source(teacher_spec(name, ARGS | more), [])
