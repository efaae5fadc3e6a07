"""Features of a network: of all its tokens, and of its own pooling beside its stages."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from mdp.runtimes.base import CPU
from mdp.runtimes.onnxruntime import import_onnxruntime
from partitioner.assembly.imported import stage_of
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.families import (
    Backbone,
    FamilyMember,
    NetworkStage,
    Pooling,
    create,
    later_stages,
    token_features,
    trunk_of,
)
from partitioner.networks.feature_distance import attach_distance, features_at

pytestmark = pytest.mark.torch
SIDE = 64


def test_the_feature_of_tokens_has_their_mean_and_their_standard_deviation() -> None:
    network = create(Backbone("test_vit", SIDE), 0)
    tokens = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0))
    found = token_features(network, tokens)
    expected = [tokens[:, 0], tokens[:, 1:].mean(dim=1), tokens[:, 1:].std(dim=1, correction=0)]
    assert torch.allclose(found, torch.cat(expected, dim=1), atol=1e-5)
    network.cls_token = None
    network.num_prefix_tokens = 0
    without = torch.cat([tokens.mean(dim=1), tokens.std(dim=1, correction=0)], dim=1)
    assert torch.allclose(token_features(network, tokens), without, atol=1e-5)


def test_equal_tokens_have_a_finite_gradient() -> None:
    network = create(Backbone("test_vit", SIDE), 0)
    tokens = torch.ones(1, 17, 64, requires_grad=True)
    torch.autograd.backward(token_features(network, tokens).sum())
    assert tokens.grad is not None
    assert bool(tokens.grad.isfinite().all())


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        # Its head reads 1280 channels that are made of the last stage's 320.
        ("tf_efficientnet_lite0", {"blocks.2": 40, "blocks.4": 112, "blocks.6": 320}),
        # Its own feature is the mean of the last stage.
        ("resnet18", {"layer2": 128, "layer3": 256}),
        # All of its blocks work at one size.
        ("mixer_s16_224", {}),
        ("vit_tiny_patch16_224", {}),
    ],
)
def test_stages_whose_means_tell_more_than_the_own_feature(
    name: str, stages: dict[str, int]
) -> None:
    network = create(Backbone(name, 224), 0).eval()
    trunk = trunk_of(network, "stages").eval()
    if not stages:
        assert trunk is network
        assert later_stages(network) == []
        return
    means: list[Tensor] = []
    for place, channels in stages.items():
        stage = NetworkStage(place, channels)
        network.get_submodule(place).register_forward_hook(
            lambda _, __, output, stage=stage: means.append(stage.mean(output))
        )
    with torch.no_grad():
        x = torch.randn(2, 3, 224, 224, generator=torch.Generator().manual_seed(0))
        found = trunk(x)
        assert torch.allclose(
            found, torch.cat([network(x), *means[: len(stages)]], dim=1), atol=1e-5
        )


@pytest.mark.parametrize(
    ("name", "depth", "pooling"), [("test_efficientnet", 0, "stages"), ("test_vit", 2, "tokens")]
)
def test_a_device_serves_what_the_features_give(name: str, depth: int, pooling: Pooling) -> None:
    """The exported graph answers as the member, with the distance of the last stage as its mean."""
    torch.manual_seed(0)
    member = FamilyMember(Backbone(name, SIDE, depth, pooling), 3).eval()
    pixels = np.random.default_rng(0).integers(0, 256, (24, SIDE, SIDE, 3), dtype=np.uint8)
    with torch.inference_mode():
        expected = member(torch.from_numpy(pixels).permute(0, 3, 1, 2).float()).bag
    served = ServedMember(member).eval()
    stage = stage_of(served)
    assert stage == (None if depth else NetworkStage("submodel.trunk.network.blocks.4", 64))
    features = features_at(served, "submodel.bag", pixels, stage)
    assert features.shape == (24, member.width if depth else 64)
    attach_distance(served, "submodel.bag", features, stage)
    content = to_onnx(served, SIDE, ["bag"], {})
    session = import_onnxruntime().InferenceSession(content, providers=[CPU])
    (found,) = session.run(None, {"images": pixels})
    assert found.mean() == pytest.approx(-1.0, abs=0.01)
    apart = expected - expected.mean(dim=1, keepdim=True)
    np.testing.assert_allclose(found - found.mean(axis=1, keepdims=True), apart.numpy(), atol=1e-3)
