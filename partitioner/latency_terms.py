"""Terms of the latency formula: what running a ViT consists of, counted for many shapes at once.

No term depends on how a sub-model is run, so the terms of shapes are counted once and serve every
device, precision and number of threads. Every term grows, or stays, as any dimension grows.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mdp.plan import SubModelSpec
from partitioner.cost import hidden_dim

Array = NDArray[np.float64]

_HEADS, _CHANNELS = 2, 3

#: The columns of `terms`.
NAMES = (
    "call",
    "layers",
    "embedding_macs",
    "layer_macs",
    "attention_macs",
    "layer_weights",
    "head_weights",
    "map_values",
    "hidden_values",
    "width_values",
    "pixels",
)
COLUMN = {name: index for index, name in enumerate(NAMES)}


def dimensions(specs: Sequence[SubModelSpec], batch: int = 1) -> dict[str, Array]:
    """`{"tokens": [n], ...}`: the dimensions of shapes that the terms are made of."""
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
        "pixels": _CHANNELS * image**2,
        "batch": np.full(len(rows), float(batch)),
    }


def terms(specs: Sequence[SubModelSpec], num_classes: int, batch: int = 1) -> Array:
    """`[n, len(NAMES)]`: counts of one run of `batch` pictures through each shape."""
    d = dimensions(specs, batch)
    length, width, hidden, depth = d["tokens"], d["embed_dim"], d["hidden_dim"], d["depth"]
    rows = batch * length
    weights = width * (4 * width + 2 * hidden)
    counts = {
        "call": np.ones_like(width),
        "layers": depth,
        "embedding_macs": batch * d["pixels"] * width,
        "layer_macs": depth * rows * weights,
        "attention_macs": depth * rows * 2 * length * width,
        "layer_weights": depth * weights,
        "head_weights": _HEADS * width * num_classes,
        "map_values": depth * batch * d["num_heads"] * length**2,
        "hidden_values": depth * rows * hidden,
        "width_values": depth * rows * width,
        "pixels": batch * d["pixels"],
    }
    return np.stack([counts[name] for name in NAMES], axis=1)
