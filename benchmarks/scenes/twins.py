"""Distances between the surfaces of near twins in a camera's picture.

    python -m benchmarks.scenes.twins --parts parts/ --models /usr/share/kicad/3dmodels

PARTS has a folder for each class, named after the model of Debian's kicad-packages3d that its
scenes were rendered from: classes in pairs, one after the other. Of both models of a pair as many
points are drawn on the surfaces. A point's distance is that to the nearest one of the other model,
both centred and turned by the quarter that brings them nearest, in pixels of a picture of 128 px as
in the scenes, where half of an item's diagonal has 53 px. Points whose nearest one has another
colour are counted beside it. Writes benchmarks/results/scenes-twins.json; `benchmarks.scenes.
verdict` shows it.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.scenes.solid_items import Item, Mesh, vrml_meshes
from mdp.files import write_json

RESULT = RESULTS / "scenes-twins.json"
#: Points on a surface, and pixels of half of an item's diagonal: a camera of 32 degrees that is
#: 4.2 such halves away.
POINTS, PIXELS = 60_000, 53.0
#: Characters of a class's name, which may be the beginning of a model's alone.
LABEL = 80
#: Largest difference of a channel, 0..1, of colours that count as one.
SAME_COLOUR = 0.1
Floats = NDArray[np.float64]


def model_of(models: Path, label: str) -> Item:
    """The model that a class is named after, by at most `LABEL` characters.

    Raises FileNotFoundError.
    """
    family = label.partition("-")[0]
    for folder in sorted(models.iterdir()):
        if folder.name.partition(".")[0] == family:
            for file in sorted(folder.glob("*.wrl")):
                if f"{family}-{file.stem}"[:LABEL] == label:
                    meshes = vrml_meshes(file.read_text(errors="replace"), str(file))
                    return Item(label, family, meshes)
    raise FileNotFoundError(f"{models}: expected a model of {label}")


def surface(item: Item, random: np.random.Generator) -> tuple[Floats, Floats]:
    """Points `[N, 3]` on the surface, about the middle of the bounds, and their colours."""
    corners, colours = zip(*(_triangles(mesh) for mesh in item.meshes), strict=True)
    a, b, c = np.moveaxis(np.concatenate(corners), 1, 0)
    area = np.linalg.norm(np.cross(b - a, c - a), axis=1)
    chosen = random.choice(len(area), POINTS, p=area / area.sum())
    u, v = random.random((2, POINTS, 1))
    u, v = np.where(u + v > 1, 1 - u, u), np.where(u + v > 1, 1 - v, v)
    points = a[chosen] + u * (b - a)[chosen] + v * (c - a)[chosen]
    low, high = item.bounds
    return points - (low + high) / 2, np.concatenate(colours)[chosen]


def _triangles(mesh: Mesh) -> tuple[Floats, Floats]:
    corners = mesh.points[mesh.triangles].astype(np.float64)
    return corners, np.tile(mesh.colour or (0.7, 0.7, 0.7), (len(corners), 1))


def compare(first: Item, second: Item) -> dict[str, Any]:
    """The mean distance in pixels, and the parts further than one and of another colour; beside
    them the mean distance of two draws of the first.
    """
    random = np.random.default_rng(0)
    scale = PIXELS / max(first.radius, second.radius)
    (one, own), (other, others) = surface(first, random), surface(second, random)
    found = []
    for quarter in range(4):
        turned = scale * other @ np.linalg.matrix_power(_QUARTER, quarter).T
        near, which = cKDTree(turned).query(scale * one)
        back, _ = cKDTree(scale * one).query(turned)
        apart = np.concatenate([near, back])
        painted = np.abs(own - others[which]).max(axis=1) > SAME_COLOUR
        found.append((apart.mean(), (apart > 1).mean(), painted.mean()))
    mean, far, colour = min(found)
    again, _ = cKDTree(scale * surface(first, random)[0]).query(scale * one)
    return {
        "classes": [first.label, second.label],
        "mean_px": float(mean),
        "of_itself_px": float(again.mean()),
        "over_a_pixel": float(far),
        "other_colour": float(colour),
    }


_QUARTER = np.array([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])


def rows(models: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each pair."""
    for first, second in zip(names[::2], names[1::2], strict=True):
        yield compare(model_of(models, first), model_of(models, second))


def main() -> None:
    options = arguments(__doc__, parts=Path, models=Path)
    names = sorted(path.name for path in options.parts.iterdir() if path.is_dir())
    write_json(RESULT, {"pixels": PIXELS, "rows": list(rows(options.models, names))})


if __name__ == "__main__":
    main()
