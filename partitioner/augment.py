"""Augmentation keyed by (seed, picture, variant), so that cached targets stay right.

There are R variants of every picture and variant 0 is the picture itself. All views of one
(picture, variant) show the same geometry, whatever their size and region.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from mdp.plan import Region
from partitioner.settings import Augmentation

#: Columns of a geometry: shift to the right and down, as shares of the side; scale; +1 or -1.
Geometry = NDArray[np.float32]
IDENTITY = (0.0, 0.0, 1.0, 1.0)


def geometry(augmentation: Augmentation, *, seed: int, variant: int, count: int) -> Geometry:
    """Geometry `[count, 4]` of pictures 0 .. count-1 in `variant`."""
    if variant == 0:
        return np.tile(np.array(IDENTITY, dtype=np.float32), (count, 1))
    random = np.random.Generator(np.random.PCG64([seed, variant]))
    drawn = random.uniform(-1, 1, (count, 4))
    scale = (1 + augmentation.scale) ** drawn[:, 2]
    mirror = np.where(bool(augmentation.flip) & (drawn[:, 3] > 0), -1.0, 1.0)
    columns = (augmentation.shift * drawn[:, 0], augmentation.shift * drawn[:, 1], scale, mirror)
    return np.stack(columns, axis=1).astype(np.float32)


def augmented(pixels: NDArray[np.uint8], shapes: Geometry, region: Region) -> Tensor:
    """uint8 views `[B, S, S, 3]` of `region` -> float32 `[B, 3, S, S]` in 0..255.

    `shapes[B, 4]` describes the movement of the whole centred square. What comes into view from
    beyond the region's edge repeats that edge.
    """
    x = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float()
    if bool((shapes == np.array(IDENTITY, dtype=np.float32)).all()):
        return x.contiguous()
    theta = torch.from_numpy(_sampling(shapes, region))
    grid = F.affine_grid(theta, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def _sampling(shapes: Geometry, region: Region) -> NDArray[np.float32]:
    """Affine maps `[B, 2, 3]` from a point of the new view to the point of the old one shown there.

    In coordinates u of the whole square, -1 to 1, the map is u -> A u + t. A region's own
    coordinates v, -1 to 1, are u = c + h v, which makes it v -> A v + (A c + t - c) / h.
    """
    x, y, scale, mirror = shapes.T
    rows = []
    for low, high, shift, sign in (
        (region.left, region.right, x, mirror),
        (region.top, region.bottom, y, np.ones_like(mirror)),
    ):
        centre, half = low + high - 1, high - low
        factor = sign / scale
        rows.append((factor, (factor * centre - 2 * shift * factor - centre) / half))
    theta = np.zeros((len(shapes), 2, 3), dtype=np.float32)
    for axis, (factor, offset) in enumerate(rows):
        theta[:, axis, axis] = factor
        theta[:, axis, 2] = offset
    return theta
