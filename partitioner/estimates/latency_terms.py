"""Terms of the latency formula of plain ViTs, counted for many shapes at once.

They do not depend on device, precision or threads, and no term falls as a dimension grows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mdp.formats.plan import SubModelSpec
from partitioner.estimates.macs import hidden_dim

Array = NDArray[np.float64]

_HEADS, _CHANNELS = 2, 3
#: Sizes of caches in weights; weights beyond are read anew for every picture.
_CACHES = (2_000_000, 8_000_000)
#: Multiply-accumulates up to which a matrix product may cost extra, by its set-up and edges and as
#: threads share it badly.
_SMALL = (100_000, 10_000_000)
#: Values up to which an elementwise operator may cost extra, for the same reasons.
_FEW_VALUES = 64_000
#: Reads and writes of each value in the exported graph: of the width by norms, biases, sums and
#: transposes, of the hidden layer by the GELU.
PASSES = {"width_values": 32, "hidden_values": 13, "map_values": 4, "pixels": 8}
#: Rows that the heads' products, of one row, count as, since they read all weights for it. With
#: 1,000 classes 8 fits better than 1, 4 and 16.
_HEAD_ROWS = 8

#: The columns of `terms`.
NAMES = (
    "call",
    "layers",
    "embedding_macs",
    "layer_macs",
    "attention_macs",
    "weights",
    "map_values",
    "hidden_values",
    "width_values",
    "pixels",
    "head_rows",
    "values_within",
    *(f"weights_beyond_{size}" for size in _CACHES),
    *(f"macs_within_{size}" for size in _SMALL),
)
COLUMN = {name: index for index, name in enumerate(NAMES)}


def dimensions(specs: Sequence[SubModelSpec]) -> dict[str, Array]:
    """`{"tokens": [n], ...}`: the dimensions of shapes."""
    rows = [
        (s.image_size, s.patch_size, s.embed_dim, s.depth, s.num_heads, hidden_dim(s))
        for s in specs
    ]
    columns = np.array(rows, dtype=np.float64).reshape(-1, 6).T
    image, patch, width, depth, heads, hidden = columns
    return {
        "tokens": (image // patch) ** 2 + 1,
        "embed_dim": width,
        "hidden_dim": hidden,
        "depth": depth,
        "num_heads": heads,
        "image_size": image,
    }


def terms(specs: Sequence[SubModelSpec], num_classes: int, batch: int | Array = 1) -> Array:
    """`[n, len(NAMES)]`: counts of one run of `batch` pictures (of all, or `[n]`) per shape."""
    d = dimensions(specs)
    length, width, hidden, depth = d["tokens"], d["embed_dim"], d["hidden_dim"], d["depth"]
    heads, rows = d["num_heads"], batch * length
    maps, pixels = heads * rows * length, batch * _CHANNELS * d["image_size"] ** 2
    head_weights = _HEADS * width * num_classes
    weights = depth * width * (4 * width + 2 * hidden) + head_weights
    products = (rows * 3 * width * width, rows * width * width, *2 * [rows * width * hidden])
    passes = (
        (rows * width, PASSES["width_values"] * depth),
        (rows * hidden, PASSES["hidden_values"] * depth),
        (maps, PASSES["map_values"] * depth),
        (pixels, PASSES["pixels"]),
    )
    counts = (
        np.ones_like(width),
        depth,
        pixels * width,
        depth * sum(products) + np.maximum(batch, _HEAD_ROWS) * head_weights,
        depth * 2 * rows * length * width,
        weights,
        depth * maps,
        depth * rows * hidden,
        depth * rows * width,
        pixels,
        depth * heads * rows,
        sum(times * np.minimum(values, _FEW_VALUES) for values, times in passes),
        *(np.maximum(0.0, weights - size) for size in _CACHES),
        *(depth * sum(np.minimum(macs, size) for macs in products) for size in _SMALL),
    )
    return np.stack(counts, axis=1)
