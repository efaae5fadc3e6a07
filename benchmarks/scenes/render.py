"""Views of one scene by several cameras: a simulation, made of one photograph a scene.

The photograph is a plane that each camera looks at obliquely, with a framing, exposure, white
balance and focus of its own that vary a little from scene to scene; up to two patches of other
photographs stand in front of each camera; noise is added.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

#: Pixels along each side of a view.
SIDE_PX = 224
#: Distance of the plane and focal length, in half sides of the photograph.
_DISTANCE, _FOCAL = 3.2, 3.2
_CORNERS = ((-1.0, -1.0), (1.0, -1.0), (1.0, 1.0), (-1.0, 1.0))


@dataclass(frozen=True, slots=True)
class Camera:
    """Properties of a camera that stay the same from scene to scene."""

    yaw_rad: float
    pitch_rad: float
    zoom: float
    #: Of the picture's side.
    shift: tuple[float, float]
    exposure: float
    #: Red over green; green over blue is the same.
    warmth: float
    blur_px: float


def cameras(seed: int, count: int) -> list[Camera]:
    """`count` cameras, on alternating sides of the scene."""
    random = np.random.default_rng([seed, count])
    return [
        Camera(
            yaw_rad=(-1) ** number * random.uniform(0.1, 0.45),
            pitch_rad=random.uniform(-0.3, 0.3),
            zoom=random.uniform(0.75, 1.35),
            shift=(random.uniform(-0.12, 0.12), random.uniform(-0.12, 0.12)),
            exposure=float(np.exp(random.uniform(-0.6, 0.6))),
            warmth=float(np.exp(random.uniform(-0.15, 0.15))),
            blur_px=random.uniform(0.0, 1.6),
        )
        for number in range(count)
    ]


def view(
    photograph: Image.Image,
    camera: Camera,
    others: Sequence[Image.Image],
    random: np.random.Generator,
) -> Image.Image:
    """Picture that `camera` sees; `others` are the photographs that patches are cut from."""
    inverse = tuple(_homography(photograph.size, camera, random))
    size, cubic = (SIDE_PX, SIDE_PX), Image.Resampling.BICUBIC
    perspective = Image.Transform.PERSPECTIVE
    seen = photograph.transform(size, perspective, inverse, cubic)
    inside = Image.new("L", photograph.size, 255).transform(size, perspective, inverse)
    wall = Image.new("RGB", size, tuple(int(level) for level in random.integers(40, 200, 3)))
    wall.paste(seen, (0, 0), inside)
    for _ in range(random.integers(0, 3)):
        wide, high = (int(SIDE_PX * random.uniform(0.15, 0.5)) for _ in range(2))
        patch = (
            others[int(random.integers(len(others)))]
            .resize(size)
            .crop((40, 40, 40 + wide, 40 + high))
        )
        x, y = (int(SIDE_PX * random.uniform(-0.2, 0.9)) for _ in range(2))
        wall.paste(patch, (x, y))
    light = camera.exposure * np.exp(random.normal(0, 0.2))
    balance = light * np.array([camera.warmth, 1, 1 / camera.warmth])
    lit = _picture(np.asarray(wall) * balance)
    focused = lit.filter(ImageFilter.GaussianBlur(camera.blur_px))
    return _picture(np.asarray(focused) + random.normal(0, 6, (SIDE_PX, SIDE_PX, 1)))


def _picture(pixels: NDArray[np.floating]) -> Image.Image:
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _homography(
    size: tuple[int, int], camera: Camera, random: np.random.Generator
) -> NDArray[np.float64]:
    """Coefficients from pixels of the view to pixels of the photograph, as Pillow takes them."""
    yaw, pitch = camera.yaw_rad + random.normal(0, 0.06), camera.pitch_rad + random.normal(0, 0.06)
    zoom = camera.zoom * np.exp(random.normal(0, 0.08))
    shift = np.array(camera.shift) + random.normal(0, 0.04, 2)
    about_y = np.array([[np.cos(yaw), 0, np.sin(yaw)], [0, 1, 0], [-np.sin(yaw), 0, np.cos(yaw)]])
    about_x = np.array(
        [[1, 0, 0], [0, np.cos(pitch), -np.sin(pitch)], [0, np.sin(pitch), np.cos(pitch)]]
    )
    rows, values = [], []
    for corner in _CORNERS:
        x, y, z = about_x @ about_y @ np.array([*corner, 0.0]) + np.array([0, 0, _DISTANCE])
        u, v = (np.array([x, y]) * _FOCAL / z * zoom / 2 + 0.5 + shift) * SIDE_PX
        a, b = ((np.array(corner) + 1) / 2 * size).tolist()
        rows += [[u, v, 1, 0, 0, 0, -a * u, -a * v], [0, 0, 0, u, v, 1, -b * u, -b * v]]
        values += [a, b]
    solved: NDArray[np.float64] = np.linalg.solve(np.array(rows), np.array(values))
    return solved
