"""Distances of features, which logits carry without a change of any probability."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from mdp.runtimes.base import CPU
from mdp.runtimes.onnxruntime import import_onnxruntime
from partitioner.export.write import to_onnx
from partitioner.networks.families import Backbone, NetworkStage, create, last_stage
from partitioner.networks.feature_distance import (
    DIRECTIONS,
    FARTHEST,
    PICTURES_EACH,
    DistanceClassifier,
    attach_distance,
    features_at,
)

pytestmark = pytest.mark.torch
WIDTH, CLASSES = 24, 5


def features(count: int, *, strange: bool = False, seed: int = 0) -> Tensor:
    """Features that vary in four directions, and a little outside of them; strange ones in all."""
    random = np.random.default_rng(seed)
    basis = np.random.default_rng(9).normal(size=(4, WIDTH))
    found = random.normal(size=(count, 4)) @ basis + 0.05 * random.normal(size=(count, WIDTH))
    return torch.from_numpy(random.normal(size=(count, WIDTH)) * 2 if strange else found).float()


def test_probabilities_stay_and_the_mean_of_the_logits_has_the_distance() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, CLASSES)
    carrying = DistanceClassifier(plain, features(400))
    x = features(50, seed=1)
    with torch.no_grad():
        before, after = plain(x), carrying(x)
        assert torch.allclose(before.softmax(1), after.softmax(1), atol=1e-6)
        mean = after.mean(dim=1, keepdim=True)
        assert torch.allclose(mean, -carrying.distance(x), atol=1e-5)


def test_what_is_taught_is_near_and_what_is_not_is_far() -> None:
    carrying = DistanceClassifier(nn.Linear(WIDTH, CLASSES), features(400))
    with torch.no_grad():
        near = carrying.distance(features(200, seed=1))
        far = carrying.distance(features(200, strange=True, seed=2))
    assert float(near.mean()) == pytest.approx(1.0, abs=0.2)
    assert float(carrying.distance(1e6 * torch.ones(1, WIDTH))) == FARTHEST
    assert float(far.min()) > float(near.max())


@pytest.mark.parametrize("count", [1, 2, 7, 100])
def test_few_pictures_have_few_directions_and_finite_distances(count: int) -> None:
    carrying = DistanceClassifier(nn.Linear(WIDTH, CLASSES), features(count))
    kept = carrying.directions.shape[1]
    assert kept == min(DIRECTIONS, count // PICTURES_EACH, WIDTH // 2)
    with torch.no_grad():
        assert torch.isfinite(carrying(features(5, strange=True))).all()


def test_a_feature_that_hardly_varied_does_not_decide() -> None:
    taught = features(400)
    taught[:, 0] *= 1e-6
    carrying = DistanceClassifier(nn.Linear(WIDTH, CLASSES), taught)
    moved = features(50, seed=1)
    moved[:, 0] = 0.001
    with torch.no_grad():
        before = carrying.distance(torch.cat([torch.zeros(50, 1), moved[:, 1:]], dim=1))
        assert float((carrying.distance(moved) - before).mean()) < 0.5


class Served(nn.Module):
    """A network of uint8 pictures with a linear classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"top": nn.Linear(3, CLASSES)})

    def forward(self, images: Tensor) -> tuple[Tensor]:
        found: Tensor = self.layers["top"](images.float().mean(dim=(1, 2)) / 255)
        return (found,)


def test_a_network_gets_the_distance_of_its_own_features() -> None:
    torch.manual_seed(0)
    served = Served()
    pixels = np.random.default_rng(0).integers(0, 60, (80, 4, 4, 3), dtype=np.uint8)
    with torch.no_grad():
        before = served(torch.from_numpy(pixels))[0]
        attach_distance(served, "layers.top", features_at(served, "layers.top", pixels))
        after = served(torch.from_numpy(pixels))[0]
        bright = served(torch.full((2, 4, 4, 3), 255, dtype=torch.uint8))[0]
    assert isinstance(served.layers["top"], DistanceClassifier)
    assert torch.allclose(before.softmax(1), after.softmax(1), atol=1e-5)
    assert float(after.mean()) == pytest.approx(-1.0, abs=0.01)
    assert float(bright.mean()) < float(after.min()) - 0.5


class Staged(nn.Module):
    """A network of uint8 pictures whose classifier reads an untold part of its last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Conv2d(3, 6, 1)
        self.top = nn.Linear(2, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Logits `[N, C]`."""
        output: Tensor = self.stage(images.permute(0, 3, 1, 2).float() / 255)
        found: Tensor = self.top(output[:, :2].mean(dim=(2, 3)))
        return (found,)


def test_the_distance_is_that_of_the_last_stage_though_the_classifier_reads_less() -> None:
    torch.manual_seed(0)
    served, stage = Staged(), NetworkStage("stage", 6)
    with torch.no_grad():
        served.stage.weight[:2] = 0.0  # nothing of a picture reaches the classifier
    pixels = np.random.default_rng(0).integers(0, 60, (80, 4, 4, 3), dtype=np.uint8)
    bright = torch.full((2, 4, 4, 3), 255, dtype=torch.uint8)
    with torch.no_grad():
        before = served(torch.from_numpy(pixels))[0]
        features = features_at(served, "top", pixels, stage)
        attach_distance(served, "top", features, stage)
        after = served(torch.from_numpy(pixels))[0]
        strange = served(bright)[0]
    assert features.shape == (80, 6)
    assert torch.allclose(before.softmax(1), after.softmax(1), atol=1e-5)
    assert float(after.mean()) == pytest.approx(-1.0, abs=0.01)
    assert float(strange.mean()) == pytest.approx(-FARTHEST)
    content = to_onnx(served, 4, ["bag"], {})
    session = import_onnxruntime().InferenceSession(content, providers=[CPU])
    (found,) = session.run(None, {"images": bright.numpy()})
    np.testing.assert_allclose(found, strange.numpy(), atol=1e-4)


def test_the_mean_of_a_stage_is_over_its_places() -> None:
    maps = torch.arange(2 * 3 * 2 * 5.0).reshape(2, 3, 2, 5)
    expected = maps.mean(dim=(2, 3))
    stage = NetworkStage("stage", 3)
    tokens = maps.flatten(2).transpose(1, 2)
    for output in (maps, maps.permute(0, 2, 3, 1), tokens):
        assert torch.allclose(stage.mean(output), expected)
    with pytest.raises(ValueError, match=r"stage: expected 3 channels, got \(2, 30\)"):
        stage.mean(maps.flatten(1))


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("tf_efficientnet_lite0", NetworkStage("blocks.6", 320)),
        ("resnet18", NetworkStage("layer4", 512)),
        ("swin_tiny_patch4_window7_224", NetworkStage("layers.3", 768)),
        ("vit_tiny_patch16_224", None),
    ],
)
def test_the_last_stage_of_networks(name: str, stage: NetworkStage | None) -> None:
    network = create(Backbone(name, 224), 0).eval()
    assert last_stage(network) == stage
    if stage is not None:
        seen: list[Tensor] = []
        network.get_submodule(stage.place).register_forward_hook(
            lambda _, inputs, output: seen.append(stage.mean(output))
        )
        with torch.no_grad():
            network(torch.zeros(1, 3, 224, 224))
        assert seen[0].shape == (1, stage.channels)
