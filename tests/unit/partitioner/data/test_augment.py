"""Variants are timm's, keyed by (seed, picture, variant), and nobody's randomness is disturbed."""

import random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mdp.errors import InputError  # noqa: E402
from partitioner.data.augment import Augmenter, mix, own_randomness  # noqa: E402
from partitioner.run.settings import Augmentation  # noqa: E402

pytestmark = pytest.mark.torch
MUCH = Augmentation(
    variants=4, min_area=0.5, flip=True, rand_augment="rand-m6-n2-mstd0.5", erasing=0.5
)


def picture(side: int = 24) -> np.ndarray:
    """A picture `[side, side, 3]` whose every part looks different."""
    ramp = np.linspace(0, 255, side, dtype=np.uint8)
    across, down = np.meshgrid(ramp, ramp)
    return np.stack([across, down, across[::-1]], axis=2)


def test_a_variant_is_keyed_by_seed_picture_and_variant() -> None:
    augmenter = Augmenter(MUCH, 24)
    first = augmenter.variant(picture(), 1, 2, 3)
    augmenter.variant(picture(), 9, 9, 9)
    assert first.shape == (24, 24, 3)
    assert first.dtype == np.uint8
    assert np.array_equal(first, Augmenter(MUCH, 24).variant(picture(), 1, 2, 3))
    for key in ((0, 2, 3), (1, 0, 3), (1, 2, 1)):
        assert not np.array_equal(first, augmenter.variant(picture(), *key))


def test_without_anything_asked_for_the_picture_stays() -> None:
    nothing = Augmentation(min_area=1.0, flip=False)
    augmenter = Augmenter(nothing, 24)
    # A crop of the whole area may still be a little wider than high.
    for number in range(5):
        difference = augmenter.variant(picture(), 0, number, 1).astype(int) - picture()
        assert np.abs(difference).mean() < 12


def test_mirrored_only_if_asked() -> None:
    def mirrored(flip: bool | None) -> int:
        augmenter = Augmenter(Augmentation(min_area=1.0, flip=flip), 24)
        variants = [augmenter.variant(picture(), 0, n, 1) for n in range(40)]
        return sum(int(v[:, 0, 0].mean() > v[:, -1, 0].mean()) for v in variants)

    assert mirrored(False) == mirrored(None) == 0
    assert 8 < mirrored(True) < 32


def test_erasing_leaves_noise() -> None:
    plain = Augmentation(min_area=1.0, flip=False)
    erased = Augmentation(min_area=1.0, flip=False, erasing=1.0)
    one, other = (Augmenter(a, 24).variant(picture(), 0, 0, 1) for a in (plain, erased))
    changed = np.abs(one.astype(int) - other).max(axis=2) > 0
    assert 0.01 < changed.mean() < 0.5


@pytest.mark.parametrize("text", ["much", "rand-", "rand-m6-n2-mstdx", "augmix-m3", "3a"])
def test_an_unknown_policy_is_one_line(text: str) -> None:
    with pytest.raises(InputError, match=rf"^augmentation\.rand_augment: .* got '{text}'"):
        Augmenter(Augmentation(rand_augment=text), 24)


@pytest.mark.parametrize("text", ["", "rand-m6-n2-mstd0.5", "rand-m9-mstd0.5-inc1"])
def test_a_known_policy_is_taken(text: str) -> None:
    assert Augmenter(Augmentation(rand_augment=text), 24).variant(picture(), 1, 1, 1).any()


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_mixed_pictures_carry_mixed_labels(mixup: float, cutmix: float) -> None:
    # Class c's pictures all have brightness 50 c: a blend's brightness tells its labels.
    targets = np.arange(301) % 5
    canvases = np.broadcast_to(
        (50 * targets).astype(np.uint8)[:, None, None, None], (301, 8, 8, 3)
    ).copy()
    labels = np.eye(5, dtype=np.float32)[targets]
    before = canvases.copy()
    with own_randomness():
        mix(canvases, labels, targets, Augmentation(mixup=mixup, cutmix=cutmix), (0, 1))
    assert np.allclose(labels.sum(axis=1), 1, atol=1e-5)
    assert (labels.max(axis=1) < 0.99).mean() > 0.3
    said = 50 * labels @ np.arange(5)
    assert np.allclose(canvases.mean(axis=(1, 2, 3)), said, atol=0.6)
    assert not np.array_equal(canvases, before)


def test_the_global_generators_are_left_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    wanted = random.random(), np.random.random(), float(torch.rand(1))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with own_randomness():
        Augmenter(MUCH, 24).variant(picture(), 1, 2, 3)
    assert (random.random(), np.random.random(), float(torch.rand(1))) == wanted
