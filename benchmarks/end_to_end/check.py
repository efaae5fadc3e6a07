"""Whether a teacher in pieces still says what the whole one says."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdp.runtimes.onnxruntime import open_session


def run_one(model: Path, values: Any) -> Any:
    """The only output of a model for its only input."""
    session = open_session(model)
    return session.run(None, {session.get_inputs()[0].name: values})[0]


def in_stages(stages: Sequence[Path], pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Logits of uint8 `[1, S, S, 3]` through one stage after another."""
    values: Any = pixels
    for stage in stages:
        values = run_one(stage, values)
    return np.asarray(values)


def in_parts(folders: Sequence[Path], pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Logits of uint8 `[1, S, S, 3]` through every layer's parts, summed over the devices."""
    tokens = run_one(folders[0] / "embedding.onnx", pixels)
    for layer in sorted(path.name for path in folders[0].glob("layer-*.onnx")):
        tokens = np.sum([run_one(folder / layer, tokens) for folder in folders], axis=0)
    return np.asarray(run_one(folders[0] / "head.onnx", tokens))
