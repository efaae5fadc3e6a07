"""The same (seed, picture, variant) shows the same geometry in every view."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mdp.crop import crop  # noqa: E402
from mdp.plan import Region  # noqa: E402
from partitioner.augment import augmented, geometry  # noqa: E402
from partitioner.settings import Augmentation  # noqa: E402
from partitioner.views import WHOLE  # noqa: E402

pytestmark = pytest.mark.torch
MUCH = Augmentation(variants=4, shift=0.1, scale=0.2, flip=True)


def blob(side: int, *, column: float = 0.6, row: float = 0.45) -> np.ndarray:
    """One smooth bright spot `[1, side, side, 3]`, placed by shares of the side."""
    y, x = (np.mgrid[0:side, 0:side] + 0.5) / side
    spot = 255 * np.exp(-((x - column) ** 2 + (y - row) ** 2) / 0.005)
    return np.repeat(spot[np.newaxis, ..., np.newaxis], 3, axis=3).astype(np.uint8)


def centre(x: "torch.Tensor") -> tuple[float, float]:
    """(column, row) of the brightness of `[1, 3, S, S]`, as shares of the side."""
    weight = x[0, 0] / x[0, 0].sum()
    ticks = (torch.arange(weight.shape[0]) + 0.5) / weight.shape[0]
    return float((weight.sum(0) * ticks).sum()), float((weight.sum(1) * ticks).sum())


def test_variant_0_is_the_picture_itself():
    pixels = blob(16)
    x = augmented(pixels, geometry(MUCH, seed=1, variant=0, count=1), WHOLE)
    assert torch.equal(x, torch.from_numpy(pixels).permute(0, 3, 1, 2).float())


def test_geometry_is_keyed_by_seed_and_variant():
    one = geometry(MUCH, seed=1, variant=2, count=50)
    assert np.array_equal(one, geometry(MUCH, seed=1, variant=2, count=50))
    assert not np.array_equal(one, geometry(MUCH, seed=1, variant=3, count=50))
    assert not np.array_equal(one, geometry(MUCH, seed=2, variant=2, count=50))
    assert np.abs(one[:, :2]).max() <= 0.1
    assert one[:, 2].min() >= 1 / 1.2 - 1e-6
    assert one[:, 2].max() <= 1.2 + 1e-6
    assert set(one[:, 3]) == {-1.0, 1.0}


def test_no_flip_unless_asked():
    upright = Augmentation(variants=4, shift=0.1, scale=0.2, flip=None)
    assert set(geometry(upright, seed=1, variant=1, count=50)[:, 3]) == {1.0}


def test_shift_scale_and_mirror_move_as_they_say():
    shapes = np.array([[0.1, -0.05, 1.0, 1.0]], dtype=np.float32)
    assert centre(augmented(blob(48), shapes, WHOLE)) == pytest.approx((0.7, 0.4), abs=0.01)
    shapes = np.array([[0.0, 0.0, 1.0, -1.0]], dtype=np.float32)
    assert centre(augmented(blob(48), shapes, WHOLE)) == pytest.approx((0.4, 0.45), abs=0.01)
    shapes = np.array([[0.0, 0.0, 1.2, 1.0]], dtype=np.float32)
    assert centre(augmented(blob(48), shapes, WHOLE)) == pytest.approx((0.62, 0.44), abs=0.01)


@pytest.mark.parametrize("side", [12, 24, 96])
def test_every_size_shows_the_same_geometry(side: int):
    for variant in range(1, 4):
        shapes = geometry(MUCH, seed=3, variant=variant, count=1)
        big = centre(augmented(blob(192), shapes, WHOLE))
        assert centre(augmented(blob(side), shapes, WHOLE)) == pytest.approx(big, abs=0.01)


def test_a_region_shows_its_part_of_the_moved_picture():
    region = Region(left=0.25, top=0.125, right=1.0, bottom=0.875)
    for variant in range(1, 4):
        shapes = geometry(MUCH, seed=5, variant=variant, count=1)
        whole = augmented(blob(192), shapes, WHOLE)
        moved_then_cut = crop(whole[0].permute(1, 2, 0).byte().numpy(), region, 48)
        cut = crop(blob(192)[0], region, 48)[np.newaxis].copy()
        cut_then_moved = augmented(cut, shapes, region)
        wanted = centre(torch.from_numpy(moved_then_cut.copy()).permute(2, 0, 1)[None].float())
        assert centre(cut_then_moved) == pytest.approx(wanted, abs=0.015)
