"""Pictures of one colour of a grid, and bundles whose label is that colour.

A sub-model's logits are the negative squared distances from the crop's mean to every colour of the
grid, so that an answer from two pictures' crops has another label, or a lower probability. Another
bundle lists the colours in the opposite order, so that the same holds for an answer from both.
"""

import random
from pathlib import Path

import numpy as np
from msgspec import structs

from mdp.files import read_json, write_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, file_entry, model_path
from mdp.fusion.fuse import FusionWeights
from mdp.pictures.crop import Pixels
from mdp.testing.bundles import write_bundle
from mdp.testing.onnx_writer import FLOAT, UINT8, Node, Value, onnx_model

#: Colours per channel, and how far apart they are.
LEVELS, STEP = 6, 51
#: Logits between a colour and its nearest neighbour: with one member weighted 1.5, the exact colour
#: has a probability of 0.99996 or more, and an answer with another picture's crop less.
SHARPNESS = 8.0
CERTAIN = 0.9999
DEVICES, SIZES = ("alpha", "beta", "gamma"), (128, 96, 64)
SIDE = 128


def colours() -> np.ndarray:
    """Every colour of the grid, `[LEVELS^3, 3]`."""
    levels = np.arange(LEVELS) * STEP
    return np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 3)


_LABELS = ["-".join(str(level) for level in colour) for colour in colours()]


def label_of(number: int, begin: str = "") -> str:
    """The label of colour `number` in the bundle whose labels begin so."""
    return begin + _LABELS[number]


def picture_of(number: int) -> Pixels:
    """A picture `[SIDE, SIDE, 3]` of one colour."""
    return np.full((SIDE, SIDE, 3), colours()[number], dtype=np.uint8)


def draw(chance: random.Random, before: int) -> int:
    """A colour that is not the one `before`."""
    number = chance.randrange(LEVELS**3 - 1)
    return number + (number >= before)


def write_colour_bundle(
    folder: Path, *, name: str = "colours", begin: str = "", opposite: bool = False
) -> Bundle:
    """A bundle of three members whose label is the picture's colour, after `begin`.

    The classes of an `opposite` one are in the opposite order.
    """
    write_bundle(folder, name=name, devices=DEVICES, sizes=SIZES, evaluated=False)
    order = range(LEVELS**3)[:: -1 if opposite else 1]
    labels = [label_of(number, begin) for number in order]
    manifest, weights = Bundle.open(folder).manifest, read_json(folder / FUSION, FusionWeights)
    write_json(folder / FUSION, structs.replace(weights, num_classes=len(labels)))
    for k, size in enumerate(SIZES):
        (folder / model_path(k)).write_bytes(_model(size, colours()[list(order)]))
    files = {path: file_entry(folder / path) for path in manifest.files}
    write_json(folder / MANIFEST, structs.replace(manifest, files=files, labels=labels))
    return Bundle.open(folder)


def _model(image_size: int, classes: np.ndarray) -> bytes:
    grid = classes.astype(np.float32) / STEP
    constants: dict[str, np.ndarray] = {
        "scale": np.array(1 / STEP, dtype=np.float32),
        "weight": np.ascontiguousarray(2 * SHARPNESS * grid.T, dtype=np.float32),
        "bias": (-SHARPNESS * (grid**2).sum(axis=1)).astype(np.float32),
    }
    nodes = [
        Node("Cast", ["images"], ["floats"], {"to": FLOAT}),
        Node("ReduceMean", ["floats"], ["mean"], {"axes": [1, 2], "keepdims": 0}),
        Node("Mul", ["mean", "scale"], ["steps"], {}),
        Node("MatMul", ["steps", "weight"], ["product"], {}),
        Node("Add", ["product", "bias"], ["boost"], {}),
        Node("Identity", ["boost"], ["bag"], {}),
    ]
    images = Value("images", UINT8, ["N", image_size, image_size, 3])
    heads = [Value(head, FLOAT, ["N", len(grid)]) for head in ("boost", "bag")]
    return onnx_model(nodes, [images], heads, constants)
