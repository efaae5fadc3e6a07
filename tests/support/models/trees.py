"""Small class-per-folder trees of pictures that a tiny ViT can learn."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cross", "ring", "stripes")


def pattern(label: str, random: np.random.Generator, side: int = 16) -> Image.Image:
    """A noisy picture of one of CLASSES, in a random colour and slightly moved."""
    y, x = np.mgrid[0:side, 0:side] - (side - 1) / 2 + random.uniform(-1, 1, (2, 1, 1))
    mask = {
        "cross": (np.abs(x) < 2) | (np.abs(y) < 2),
        "ring": np.abs(np.hypot(x, y) - side / 3) < 1.5,
        "stripes": np.floor(y / 2) % 2 == 0,
    }[label]
    colour = random.uniform(120, 255, 3)
    pixels = mask[..., np.newaxis] * colour + random.uniform(0, 40, (side, side, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def write_tree(
    root: Path, *, each: int, classes: tuple[str, ...] = CLASSES, seed: int = 0, suffix: str = "png"
) -> Path:
    """`each` pictures of every class in `root/<class>/`."""
    random = np.random.default_rng(seed)
    for label in classes:
        folder = root / label
        folder.mkdir(parents=True)
        for number in range(each):
            pattern(label, random).save(folder / f"{number:03d}.{suffix}")
    return root


def write_scenes(root: Path, *, each: int, seed: int = 0) -> Path:
    """`each` scenes of every class in `root/<class>/`, of the cameras left and right.

    One scene of the first class lacks a camera.
    """
    random = np.random.default_rng(seed)
    for label in CLASSES:
        for number in range(each):
            for camera in ("left", "right"):
                scene = root / label / f"{number:02d}"
                scene.mkdir(parents=True, exist_ok=True)
                pattern(label, random).save(scene / f"{camera}.png")
    (root / CLASSES[0] / "05" / "right.png").unlink()
    return root
