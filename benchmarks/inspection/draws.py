"""Draws of scenes at an inspection station: fixed cameras and lamps, items that lie nearly alike.

All of it is a function of the seed, the product's name, the kind of scene and its number.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from benchmarks.scenes.solid_draws import Belt, CameraPlace, Light, Pose, Shot, SolidScene

#: What may be unlike the good scenes without a defect.
Change = Literal["none", "light", "background", "pose", "moved"]
CHANGES: tuple[Change, ...] = ("light", "background", "pose", "moved")


def draw_station(
    seed: int,
    product: str,
    kind: str,
    number: int,
    places: Sequence[CameraPlace],
    change: Change = "none",
) -> SolidScene:
    """Scene `number` of a `kind`; a `moved` one has its first camera elsewhere."""
    random = np.random.default_rng([seed, number, *f"{product} {kind}".encode()])
    fixed = np.random.default_rng([seed, *product.encode()])
    turn, grey = float(fixed.uniform(0, 360)), float(fixed.uniform(0.3, 0.6))
    lamps = [(float(fixed.uniform(45, 75)), float(fixed.uniform(0, 360))) for _ in range(2)]
    wide = 4.0 if change == "pose" else 1.0
    pose = Pose(
        face=0,
        tilt=(random.uniform(-0.7, 0.7), random.uniform(-0.7, 0.7)),
        turn=turn + wide * random.uniform(-2.5, 2.5),
        shift=(wide * random.uniform(-0.025, 0.025), wide * random.uniform(-0.025, 0.025)),
    )
    dim = random.choice((0.72, 1.28)) if change == "light" else 1.0
    lights = tuple(
        Light(
            elevation=elevation,
            azimuth=azimuth,
            intensity=level * dim * random.uniform(0.97, 1.03),
            colour=(1.0, 0.97, 0.92),
        )
        for (elevation, azimuth), level in zip(lamps, (0.75, 0.5), strict=True)
    )
    belt = Belt(
        colour=(grey, grey, grey * 1.03),
        pattern="worn",
        depth=0.05,
        period=12.0,
        turn=0.0,
        seed=int(random.integers(1 << 31)),
    )
    if change == "background":
        belt = replace(belt, colour=(grey * 1.3, grey * 1.15, grey), pattern="ribbed", depth=0.15)
    shots = []
    for place in places:
        moved = change == "moved" and place is places[0]
        shots.append(_shot(place, random, moved=moved))
    return SolidScene(
        pose=pose, finish=0, lights=lights, belt=belt, wall=(0.4, 0.4, 0.42), shots=tuple(shots)
    )


def _shot(place: CameraPlace, random: np.random.Generator, *, moved: bool) -> Shot:
    return Shot(
        place=place,
        elevation=place.elevation - (5 if moved else 0),
        azimuth=place.azimuth + (8 if moved else 0),
        distance=4.6,
        aim=(0.08, 0.05, 0.0) if moved else (0.0, 0.0, 0.0),
        blur=random.uniform(0.002, 0.004),
        gamma=1.0,
        gain=random.uniform(0.97, 1.03),
        balance=(1.0, 1.0, 1.0),
        noise=0.012,
        seed=int(random.integers(1 << 31)),
        obstacle=None,
    )
