"""Defects of solid items: shapes and colours changed, as functions of an item and a draw.

A defect lies where it lies: which cameras see it is a matter of where they stand.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from benchmarks.scenes.solid_items import Floats, Indices, Item, Mesh

#: Kinds of defects; a twin is the whole item's look-alike in its place.
KINDS = ("pin missing", "pin bent", "scratch", "stain", "wrong colour", "twin")
#: Of the item's radius: extents of what may be a pin, at least and at most.
_PIN = (0.06, 0.9)
#: Sides of a stain's outline.
_CORNERS = 14


def parts_of(mesh: Mesh) -> list[Indices]:
    """Rows of the mesh's triangles, by connected parts; corners at one place are one."""
    _, place = np.unique(np.round(mesh.points, 4), axis=0, return_inverse=True)
    corners = place.reshape(-1)[mesh.triangles]
    label = np.arange(corners.max() + 1)
    while True:
        least = label[corners].min(axis=1)
        before = label.copy()
        for column in corners.T:
            np.minimum.at(label, column, least)
        label = label[label]
        if (label == before).all():
            break
    of_triangle = label[corners[:, 0]]
    return [np.flatnonzero(of_triangle == one) for one in np.unique(of_triangle)]


def pins_of(item: Item) -> list[tuple[int, Indices]]:
    """Mesh and triangles of each part that may be a pin: thin, long, and not the whole."""
    found = []
    low, high = item.bounds
    for number, mesh in enumerate(item.meshes):
        for rows in parts_of(mesh):
            corners = mesh.points[mesh.triangles[rows]].reshape(-1, 3)
            extent = np.sort(corners.max(axis=0) - corners.min(axis=0)) / item.radius
            reaches = corners[:, 2].min() < low[2] + 0.25 * (high[2] - low[2])
            if _PIN[0] < extent[2] < _PIN[1] and extent[0] < 0.35 * extent[2] and reaches:
                found.append((number, rows))
    return found


def with_defect(item: Item, kind: str, random: np.random.Generator, twin: Item) -> Item:
    """`item` with a defect of `kind`; of items without pins, a scratch stands for a pin's."""
    makers: Mapping[str, Callable[[Item, np.random.Generator], Item]] = {
        "pin missing": _pin_missing,
        "pin bent": _pin_bent,
        "scratch": _scratch,
        "stain": _stain,
        "wrong colour": _wrong_colour,
    }
    return twin if kind == "twin" else makers[kind](item, random)


def _any_pin(item: Item, random: np.random.Generator) -> tuple[int, Indices] | None:
    """Mesh and triangles of one of the item's pins; None without any."""
    pins = pins_of(item)
    return pins[int(random.integers(len(pins)))] if pins else None


def _pin_missing(item: Item, random: np.random.Generator) -> Item:
    pin = _any_pin(item, random)
    if pin is None:
        return _scratch(item, random)
    number, rows = pin
    mesh = item.meshes[number]
    kept = np.delete(mesh.triangles, rows, axis=0)
    return _exchanged(item, number, replace(mesh, triangles=kept) if len(kept) else None)


def _pin_bent(item: Item, random: np.random.Generator) -> Item:
    pin = _any_pin(item, random)
    if pin is None:
        return _scratch(item, random)
    number, rows = pin
    mesh = item.meshes[number]
    corners = mesh.points[mesh.triangles[rows]]
    top = corners.reshape(-1, 3)[:, 2].max()
    held = corners.reshape(-1, 3)
    held = held[held[:, 2] > top - 0.1 * np.ptp(held[:, 2]) - 1e-6].mean(axis=0)
    angle, turn = np.radians(random.uniform(18, 40)), random.uniform(0, 2 * math.pi)
    axis = np.array([math.cos(turn), math.sin(turn), 0.0])
    moved = (corners.reshape(-1, 3) - held) @ _rotation(axis, angle).T + held
    # The other pins carry the item: it lies no higher.
    moved[:, 2] = np.maximum(moved[:, 2], item.bounds[0][2])
    start = len(mesh.points)
    triangles = mesh.triangles.copy()
    triangles[rows] = start + np.arange(len(moved)).reshape(-1, 3)
    points = np.concatenate([mesh.points, moved.astype(np.float32)])
    return _exchanged(item, number, replace(mesh, points=points, triangles=triangles))


def _rotation(axis: NDArray[np.float64], angle: float) -> NDArray[np.float64]:
    """The matrix that turns by `angle` about a unit axis (Rodrigues)."""
    x, y, z = axis
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    turned: NDArray[np.float64] = (
        np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross
    )
    return turned


def _scratch(item: Item, random: np.random.Generator) -> Item:
    length, width = random.uniform(0.2, 0.4), random.uniform(0.02, 0.04)
    bright = random.uniform(0.75, 0.95) if random.random() < 0.7 else random.uniform(0.02, 0.1)
    outline = np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * (length / 2, width / 2)
    return _with_decal(item, outline, (bright, bright, bright), random)


def _stain(item: Item, random: np.random.Generator) -> Item:
    radius = random.uniform(0.07, 0.14)
    angles = np.linspace(0, 2 * math.pi, _CORNERS, endpoint=False)
    reach = radius * random.uniform(0.7, 1.2, _CORNERS)
    outline = np.stack([np.cos(angles) * reach, np.sin(angles) * reach], axis=1)
    dark = random.uniform(0.15, 0.4)
    return _with_decal(item, outline, (dark, dark * 0.65, dark * 0.3), random)


def _wrong_colour(item: Item, random: np.random.Generator) -> Item:
    sizes = [_areas(mesh).sum() for mesh in item.meshes]
    number = int(np.argmax(sizes))
    mesh = item.meshes[number]
    colour = np.array(mesh.colour if mesh.colour is not None else (0.7, 0.7, 0.7))
    change = np.roll((0.13, -0.03, 0.05), int(random.integers(3))) * random.choice((-1, 1))
    red, green, blue = np.clip(colour + change, 0, 1).tolist()
    return _exchanged(item, number, replace(mesh, colour=(red, green, blue)))


def _with_decal(
    item: Item,
    outline: NDArray[np.float64],
    colour: tuple[float, float, float],
    random: np.random.Generator,
) -> Item:
    """`item` with a flat polygon on one of its faces; the outline is in radii of the item."""
    corners = np.concatenate([mesh.points[mesh.triangles] for mesh in item.meshes])
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    areas = np.linalg.norm(normals, axis=1)
    normals = normals / np.maximum(areas, 1e-12)[:, None]
    low, high = item.bounds
    centre = (low + high) / 2
    middles = corners.mean(axis=1)
    outward = np.einsum("ij,ij->i", middles - centre, normals)
    # Normals of some models point inwards.
    normals = np.where(outward[:, None] < 0, -normals, normals)
    reach = np.abs(outward) / item.radius
    weights = areas * (normals[:, 2] > -0.3) * (reach > 0.15) * reach
    row = int(random.choice(len(corners), p=weights / weights.sum()))
    # Between the middle and a corner, so that not all lie on one line of a face.
    mix = random.dirichlet((2, 2, 2))
    at = mix @ corners[row] + normals[row] * 0.012 * item.radius
    normal = normals[row]
    helper = np.array([0.0, 0.0, 1.0]) if abs(normal[2]) < 0.9 else np.array([1.0, 0.0, 0.0])
    along = np.cross(normal, helper)
    along /= np.linalg.norm(along)
    turn = random.uniform(0, math.pi)
    along = _rotation(normal.astype(np.float64), turn) @ along
    across = np.cross(normal, along)
    flat = outline * item.radius
    points = at + flat[:, :1] * along + flat[:, 1:] * across
    fan = np.array([(0, n, n + 1) for n in range(1, len(outline) - 1)], dtype=np.int64)
    decal = Mesh(points.astype(np.float32), np.concatenate([fan, fan[:, ::-1]]), colour, 5.0)
    return replace(item, meshes=(*item.meshes, decal))


def _areas(mesh: Mesh) -> Floats:
    corners = mesh.points[mesh.triangles]
    cross = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    found: Floats = np.linalg.norm(cross, axis=1) / 2
    return found


def _exchanged(item: Item, number: int, mesh: Mesh | None) -> Item:
    meshes = list(item.meshes)
    meshes[number : number + 1] = [] if mesh is None else [mesh]
    return replace(item, meshes=tuple(meshes))
