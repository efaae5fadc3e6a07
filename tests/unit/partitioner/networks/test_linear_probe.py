"""A classifier on frozen features."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from partitioner.networks.linear_probe import fit_classifier  # noqa: E402

pytestmark = pytest.mark.torch


def clouds(count: int, seed: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Features `[count, 8]` of three classes that overlap, of very different scales."""
    chance = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % 3
    features = 2 * F.one_hot(targets, 8) + noise * torch.randn(count, 8, generator=chance)
    return features * 10.0 ** torch.arange(-3, 5) + 7, targets


def loss(features: Tensor, targets: Tensor, factor: float = 1.0) -> float:
    weight, bias = fit_classifier(*clouds(300, seed=0), 3)
    return float(F.cross_entropy(factor * (features @ weight.T + bias), targets))


def test_it_tells_classes_apart_and_knows_how_surely() -> None:
    weight, bias = fit_classifier(*clouds(300, seed=0), 3)
    assert (weight.shape, bias.shape) == ((3, 8), (3,))
    features, targets = clouds(3000, seed=1)
    right = ((features @ weight.T + bias).argmax(dim=1) == targets).double().mean()
    assert right > 0.8
    assert loss(features, targets) < min(loss(features, targets, f) for f in (0.5, 2))


def test_a_picture_of_each_class_is_enough() -> None:
    features, targets = clouds(3, seed=0, noise=0)
    weight, bias = fit_classifier(features, targets, 3)
    assert torch.equal((features @ weight.T + bias).argmax(dim=1), targets)
