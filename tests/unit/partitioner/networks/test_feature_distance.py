"""Distances of features, which logits carry without a change of any probability."""

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

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
