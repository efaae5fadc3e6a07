"""PatchCore as the rival: a memory of good patches, and the distance to the nearest of them.

Roth, Pemula, Zepeda, Schölkopf, Brox and Gehler, CVPR 2022: neighbourhoods of 3 x 3 places of two
middle layers, a greedy coreset, the largest distance of a picture's patches; without the paper's
re-weighting of that by the neighbours. Own code, as the rival has to read the same layers.
"""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
#: The share of patches that is kept, as in the paper's smallest.
KEPT = 0.01
#: Lengths of the random projections in which the coreset is chosen.
_PROJECTED = 64


def patches(grids: list[Floats]) -> Floats:
    """Patch features `[N, side^2, C]` of layers `[N, S, S, C]`, the finest grid's first."""
    side = max(grid.shape[1] for grid in grids)
    return np.concatenate([_spread(_averaged(grid), side) for grid in grids], axis=-1).reshape(
        len(grids[0]), side * side, -1
    )


def _averaged(grid: Floats) -> Floats:
    """The mean over each place's neighbours; over those inside at an edge."""
    padded = np.pad(grid, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    side = grid.shape[1]
    shifted = [padded[:, y : y + side, x : x + side] for y in range(3) for x in range(3)]
    found: Floats = np.mean(shifted, axis=0, dtype=np.float32)
    return found


def _spread(grid: Floats, side: int) -> Floats:
    rows = np.minimum(np.arange(side) * grid.shape[1] // side, grid.shape[1] - 1)
    return grid[:, rows][:, :, rows]


class Memory:
    """Good patches of one camera."""

    def __init__(self, features: Floats, seed: int = 0) -> None:
        """Choose a coreset of patch features `[N, P, C]`."""
        flat = features.reshape(-1, features.shape[-1])
        random = np.random.default_rng(seed)
        project = random.normal(size=(flat.shape[1], _PROJECTED)).astype(np.float32)
        small = flat @ (project / np.sqrt(_PROJECTED))
        count = max(1, round(KEPT * len(flat)))
        chosen = [int(random.integers(len(flat)))]
        nearest = ((small - small[chosen[0]]) ** 2).sum(axis=1)
        while len(chosen) < count:
            chosen.append(int(nearest.argmax()))
            nearest = np.minimum(nearest, ((small - small[chosen[-1]]) ** 2).sum(axis=1))
        self.kept = flat[chosen]
        self._squares = (self.kept**2).sum(axis=1)

    @property
    def size_bytes(self) -> int:
        """Bytes of what is kept."""
        return self.kept.nbytes

    def scores(self, features: Floats) -> NDArray[np.float64]:
        """Scores `[N]` of patch features `[N, P, C]`."""
        found = np.empty(len(features))
        for row, one in enumerate(features):
            apart = (one**2).sum(axis=1)[:, None] - 2 * one @ self.kept.T + self._squares
            found[row] = np.sqrt(np.maximum(apart.min(axis=1), 0).max())
        return found
