"""Draws of scenes of solid items on a belt: pose, lights, belt, cameras, and what is in their way.

All of it is a function of the seed, the item's label and the scene's number. A camera's part is
drawn on its own: with fewer cameras the others see what they would see with more.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

Floats = NDArray[np.floating]
Pixels = NDArray[np.uint8]
Colour = tuple[float, float, float]

#: Share of views with something in the way.
OBSTRUCTED = 0.25
#: Pixels along each side of a belt's texture.
TEXTURE_PX = 192
#: How metals look: colour, and how narrow their highlights are.
FINISHES: tuple[tuple[Colour, float], ...] = (
    ((0.74, 0.75, 0.78), 30.0),  # zinc
    ((0.56, 0.56, 0.58), 45.0),  # steel
    ((0.66, 0.63, 0.58), 60.0),  # nickel
    ((0.78, 0.62, 0.32), 40.0),  # brass
    ((0.15, 0.15, 0.16), 25.0),  # black oxide
)


@dataclass(frozen=True, slots=True)
class CameraPlace:
    """Place of a fixed camera, in degrees seen from the item."""

    name: str
    elevation: float
    azimuth: float


#: Fixed cameras in the order in which they are added.
PLACES = (
    CameraPlace("top", 82, 0),
    CameraPlace("left", 38, 20),
    CameraPlace("right", 38, 140),
    CameraPlace("back", 38, 260),
    CameraPlace("front", 55, 80),
    CameraPlace("low", 18, 200),
)


@dataclass(frozen=True, slots=True)
class Pose:
    """Pose of an item on the belt, in degrees and in radii of its group."""

    #: 0 to 5: up is +z, -z, +y, -y, +x, -x of the item.
    face: int
    tilt: tuple[float, float]
    turn: float
    shift: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Light:
    """A lamp far away."""

    elevation: float
    azimuth: float
    intensity: float
    colour: Colour


@dataclass(frozen=True, slots=True)
class Belt:
    """A belt's colour and the relief on it."""

    colour: Colour
    pattern: Literal["plain", "ribbed", "woven", "speckled", "worn"]
    #: Depth of the pattern as a share of the brightness, its period in pixels, its turn in radians.
    depth: float
    period: float
    turn: float
    seed: int


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Something between a camera and the item, out of focus; lengths are shares of the side."""

    kind: Literal["bar", "disc", "edge"]
    x: float
    y: float
    width: float
    turn: float
    colour: Colour
    blur: float


@dataclass(frozen=True, slots=True)
class Shot:
    """One camera's picture: its aim, in degrees and radii, and its exposure."""

    place: CameraPlace
    elevation: float
    azimuth: float
    distance: float
    aim: tuple[float, float, float]
    #: Blur of the focus, as a share of the side.
    blur: float
    gamma: float
    gain: float
    balance: Colour
    noise: float
    #: Of the noise.
    seed: int
    obstacle: Obstacle | None


@dataclass(frozen=True, slots=True)
class SolidScene:
    """All of one scene but the item's shape."""

    pose: Pose
    #: Of `FINISHES`, for an item without colours of its own.
    finish: int
    lights: tuple[Light, ...]
    belt: Belt
    #: What is seen behind the belt.
    wall: Colour
    shots: tuple[Shot, ...]


def draw_scene(
    seed: int, label: str, number: int, size: Sequence[float], places: Sequence[CameraPlace]
) -> SolidScene:
    """Scene `number` of an item of `size`, its lengths along x, y and z, before `places`."""
    key = [seed, number, *label.encode()]
    random = np.random.default_rng([0, *key])
    weights = np.array(resting(size))
    pose = Pose(
        face=int(random.choice(6, p=weights)),
        tilt=(random.uniform(-4, 4), random.uniform(-4, 4)),
        turn=random.uniform(0, 360),
        shift=(random.uniform(-0.15, 0.15), random.uniform(-0.15, 0.15)),
    )
    lights = tuple(
        Light(
            elevation=random.uniform(25, 80),
            azimuth=random.uniform(0, 360),
            intensity=random.uniform(0.35, 0.9),
            colour=(random.uniform(0.9, 1), random.uniform(0.88, 1), random.uniform(0.8, 1)),
        )
        for _ in range(2)
    )
    finish, grey = int(random.integers(len(FINISHES))), random.uniform(0.1, 0.8)
    shots = tuple(
        _shot(place, np.random.default_rng([1 + n, *key])) for n, place in enumerate(places)
    )
    return SolidScene(
        pose=pose,
        finish=finish,
        lights=lights,
        belt=_belt(random),
        wall=(grey, grey * random.uniform(0.9, 1), grey * random.uniform(0.85, 1)),
        shots=shots,
    )


def resting(size: Sequence[float]) -> list[float]:
    """Chances of the six sides to be up: the larger the footprint and the lower, the likelier."""
    x, y, z = (max(float(length), 1e-6) for length in size)
    chances = [x * y / z] * 2 + [x * z / y] * 2 + [y * z / x] * 2
    return [chance / sum(chances) for chance in chances]


def _belt(random: np.random.Generator) -> Belt:
    grey = random.uniform(0.1, 0.75)
    red, green, blue = (float(np.clip(grey + random.uniform(-0.1, 0.1), 0, 1)) for _ in range(3))
    patterns: tuple[Literal["plain", "ribbed", "woven", "speckled", "worn"], ...] = (
        "plain", "ribbed", "woven", "speckled", "worn",
    )  # fmt: skip
    return Belt(
        colour=(red, green, blue),
        pattern=patterns[int(random.integers(len(patterns)))],
        depth=random.uniform(0.08, 0.4),
        period=random.uniform(5, 24),
        turn=random.uniform(0, math.pi),
        seed=int(random.integers(1 << 31)),
    )


def _shot(place: CameraPlace, random: np.random.Generator) -> Shot:
    near = np.clip(random.uniform(0.97, 1.03, 3), 0, 2)
    aim = random.uniform(-0.12, 0.12, 3)
    return Shot(
        place=place,
        elevation=place.elevation + random.uniform(-3, 3),
        azimuth=place.azimuth + random.uniform(-5, 5),
        distance=random.uniform(3.9, 4.8),
        aim=(float(aim[0]), float(aim[1]), float(aim[2])),
        blur=random.uniform(0, 0.009),
        gamma=random.uniform(0.75, 1.4),
        gain=random.uniform(0.65, 1.25),
        balance=(float(near[0]), float(near[1]), float(near[2])),
        noise=random.uniform(0.005, 0.04),
        seed=int(random.integers(1 << 31)),
        obstacle=_obstacle(random) if random.random() < OBSTRUCTED else None,
    )


def _obstacle(random: np.random.Generator) -> Obstacle:
    kinds: tuple[Literal["bar", "disc", "edge"], ...] = ("bar", "disc", "edge")
    grey = random.uniform(0.03, 0.6)
    return Obstacle(
        kind=kinds[int(random.integers(len(kinds)))],
        x=random.uniform(0.25, 0.75),
        y=random.uniform(0.25, 0.75),
        width=random.uniform(0.2, 0.45),
        turn=random.uniform(0, 2 * math.pi),
        colour=(grey, grey * random.uniform(0.8, 1), grey * random.uniform(0.7, 1)),
        blur=random.uniform(0.004, 0.025),
    )


def texture(belt: Belt) -> Pixels:
    """A belt's surface `[TEXTURE_PX, TEXTURE_PX, 3]`."""
    random = np.random.default_rng(belt.seed)
    side = TEXTURE_PX
    y, x = np.mgrid[0:side, 0:side].astype(np.float64)
    along = (x * math.cos(belt.turn) + y * math.sin(belt.turn)) * 2 * math.pi / belt.period
    across = (y * math.cos(belt.turn) - x * math.sin(belt.turn)) * 2 * math.pi / belt.period
    if belt.pattern == "ribbed":
        relief = np.sin(along)
    elif belt.pattern == "woven":
        relief = np.sin(along) * np.sin(across)
    elif belt.pattern == "speckled":
        relief = np.where(random.random((side, side)) < 0.06, random.choice([-1.5, 1.5]), 0.0)
    elif belt.pattern == "worn":
        coarse = Image.fromarray(random.normal(0, 1, (9, 9)).astype(np.float32))
        relief = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), dtype=np.float64)
    else:
        relief = np.zeros((side, side))
    bright = 1 + belt.depth * relief + random.normal(0, 0.03, (side, side))
    levels: NDArray[np.float64] = np.array(belt.colour) * bright[..., None] * 255
    drawn: NDArray[np.uint8] = np.clip(levels, 0, 255).astype(np.uint8)
    return drawn


def develop(rendered: Pixels, shot: Shot) -> Image.Image:
    """The picture that a camera takes of a rendered view `[S, S, 3]`."""
    picture = Image.fromarray(rendered)
    side = picture.width
    if shot.obstacle is not None:
        picture = _obstruct(picture, shot.obstacle)
    focused = picture.filter(ImageFilter.GaussianBlur(shot.blur * side))
    light = np.clip(np.asarray(focused, dtype=np.float64) / 255, 1e-3, 1) ** shot.gamma
    random = np.random.default_rng(shot.seed)
    seen = light * shot.gain * np.array(shot.balance) + random.normal(0, shot.noise, light.shape)
    return Image.fromarray((np.clip(seen, 0, 1) * 255).astype(np.uint8))


def _obstruct(picture: Image.Image, obstacle: Obstacle) -> Image.Image:
    """`picture` with the obstacle before it."""
    side = picture.width
    mask = Image.new("L", picture.size, 0)
    draw = ImageDraw.Draw(mask)
    centre = np.array([obstacle.x, obstacle.y]) * side
    along = np.array([math.cos(obstacle.turn), math.sin(obstacle.turn)])
    across = np.array([-along[1], along[0]])
    far, half = 3 * side, obstacle.width * side / 2
    if obstacle.kind == "disc":
        # As large as a bar is over the item.
        corners = [*(centre - 1.4 * half), *(centre + 1.4 * half)]
        draw.ellipse([float(value) for value in corners], fill=255)
    else:
        # An edge covers one side from a little beside the centre on.
        low, high = (-half, half) if obstacle.kind == "bar" else (half / 2, far)
        points = [
            centre + a * along + b * across
            for a, b in ((-far, low), (far, low), (far, high), (-far, high))
        ]
        draw.polygon([(float(x), float(y)) for x, y in points], fill=255)
    soft = mask.filter(ImageFilter.GaussianBlur(obstacle.blur * side))
    red, green, blue = (int(255 * level) for level in obstacle.colour)
    return Image.composite(Image.new("RGB", picture.size, (red, green, blue)), picture, soft)


def splits(learn: int, test: int) -> list[tuple[str, range]]:
    """Folders below the output and their scenes: none where nothing is held out."""
    if not test:
        return [("", range(learn))]
    return [("train", range(learn)), ("test", range(learn, learn + test))]


def scene_folder(out: Path, below: str, label: str, number: int) -> Path:
    """The folder of one scene's pictures, as `--data` takes it."""
    return out / below / label / f"s{number:03d}"
