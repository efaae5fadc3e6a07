"""Scenes of a block before four cameras, good ones and ones with a patch before one of them."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

#: The bundle with four cameras that the repository has, and its cameras.
PARTS = Path(__file__).parents[2] / "examples/bundles/parts"
CAMERAS = ("top", "left", "right", "back")


def block(random: np.random.Generator, *, patched: bool = False, shift: int = 0) -> bytes:
    """A picture of a block, as a JPEG; it lies a little elsewhere in each."""
    picture = Image.new("RGB", (160, 160), (90, 90, 95))
    draw = ImageDraw.Draw(picture)
    x, y = (random.integers(-3, 4, 2) + shift).tolist()
    draw.rectangle((50 + x, 40 + y, 110 + x, 120 + y), fill=(180, 170, 60))
    draw.ellipse((65 + x, 60 + y, 95 + x, 90 + y), fill=(30, 30, 40))
    if patched:
        draw.rectangle((80 + x, 92 + y, 104 + x, 116 + y), fill=(40, 40, 200))
    seen = np.asarray(picture, dtype=np.float64) * random.uniform(0.95, 1.05)
    seen += random.normal(0, 4, seen.shape)
    content = BytesIO()
    Image.fromarray(np.clip(seen, 0, 255).astype(np.uint8)).save(content, format="JPEG", quality=90)
    return content.getvalue()


def write_scenes(folder: Path, count: int, *, patched: Sequence[int] = (), seed: int = 0) -> Path:
    """So many scenes; those that are `patched` have it before one camera, the next in turn."""
    random = np.random.default_rng(seed)
    for number in range(count):
        scene = folder / f"s{number:03d}"
        scene.mkdir(parents=True)
        for place, camera in enumerate(CAMERAS):
            shown = number in patched and place == number % len(CAMERAS)
            (scene / f"{camera}.jpg").write_bytes(block(random, patched=shown))
    return folder
