"""Shapes of solid items: parametric mechanical parts, or models of electronic parts.

bd-warehouse (Apache-2.0) makes the first, Debian's kicad-packages3d (VRML with colours, CC-BY-SA
4.0) holds the others.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]
Colour = tuple[float, float, float]
#: A class of bd-warehouse, as module and name, its arguments, and by name.
Recipe = tuple[str, str, tuple[object, ...], Mapping[str, object]]

#: Sizes in bytes of VRML files that are neither trivial nor slow, and models of a folder at least.
VRML_BYTES = range(8_000, 260_000)
LEAST_MODELS = 4
#: Tolerance of tessellation, in millimetres and radians.
_TOLERANCE = 0.1, 0.3

#: Near twins side by side: shapes of one size that differ in one thing.
PAIRS: Sequence[tuple[str, Recipe]] = (
    ("hex_nut", ("fastener", "HexNut", ("M8-1.25", "iso4032"), {"simple": False})),
    ("square_nut", ("fastener", "SquareNut", ("M8-1.25", "din557"), {"simple": False})),
    ("flange_nut", ("fastener", "HexNutWithFlange", ("M8-1.25", "din1665"), {"simple": False})),
    ("cap_nut", ("fastener", "DomedCapNut", ("M8-1.25", "din1587"), {"simple": False})),
    ("socket_screw", ("fastener", "SocketHeadCapScrew", ("M6-1", 16), {"simple": False})),
    ("button_screw", ("fastener", "ButtonHeadScrew", ("M6-1", 16), {"simple": False})),
    (
        "countersunk_screw",
        ("fastener", "CounterSunkScrew", ("M6-1", 18, "iso2009"), {"simple": False}),
    ),
    (
        "oval_screw",
        ("fastener", "RaisedCounterSunkOvalHeadScrew", ("M6-1", 18, "iso2010"), {"simple": False}),
    ),
    ("plain_washer", ("fastener", "PlainWasher", ("M8", "iso7089"), {})),
    ("lock_washer", ("fastener", "InternalToothLockWasher", ("M8", "din6797"), {})),
    ("ball_bearing", ("bearing", "SingleRowDeepGrooveBallBearing", ("M10-35-11",), {})),
    ("roller_bearing", ("bearing", "SingleRowCylindricalRollerBearing", ("M15-35-11",), {})),
    ("cheese_screw", ("fastener", "CheeseHeadScrew", ("M6-1", 16, "iso1207"), {"simple": False})),
    ("pan_screw", ("fastener", "PanHeadScrew", ("M6-1", 16, "iso1580"), {"simple": False})),
    ("spur_gear", ("gear", "SpurGear", (1.0, 20, 20.0, 6.0), {})),
    ("helical_gear", ("gear", "HelicalGear", (1.0, 20, 20.0, 20.0, 6.0), {})),
    ("blind_flange", ("flange", "BlindFlange", ("1", 150), {})),
    ("slip_on_flange", ("flange", "SlipOnFlange", ("1", 150), {})),
    ("external_ring", ("retaining_ring", "ExternalSnapRing", ("20",), {})),
    ("internal_ring", ("retaining_ring", "InternalSnapRing", ("20",), {})),
)
#: Items of no class: every other one is for the test.
OTHERS: Sequence[tuple[str, Recipe]] = (
    ("shaft_key", ("shaft_key", "ShaftKey", (12, 30), {})),
    ("sprocket", ("sprocket", "Sprocket", (14,), {"bore_diameter": 10})),
    ("l_bracket", ("open_builds", "LBracket", (), {})),
    ("coupler", ("open_builds", "FlexibleCoupler", ("8mm",), {})),
    ("spacer", ("open_builds", "AluminumSpacer", ("10mm",), {})),
    ("v_wheel", ("open_builds", "XtremeSolidVWheel", (), {})),
    ("t_nut", ("open_builds", "TNut", (), {})),
    ("spacer_block", ("open_builds", "SpacerBlock", (), {})),
    ("weld_neck", ("flange", "WeldNeckFlange", ("1", 150), {})),
    ("rack", ("gear", "RackGear", (1.0, 8, 20.0, 6.0), {})),
    ("nut_block", ("open_builds", "AcmeAntiBacklashNutBlock8mm", (), {})),
    ("end_mount", ("open_builds", "CBeamEndMount", (), {})),
)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Triangles of one material."""

    #: Corners `[N, 3]`, and the three of each triangle `[M, 3]`.
    points: Floats
    triangles: Indices
    #: None: a finish is drawn for every scene.
    colour: Colour | None = None
    #: Exponent of the highlights, and how much is seen through.
    shine: float = 30.0
    transparency: float = 0.0


@dataclass(frozen=True, slots=True)
class Item:
    """One shape; items of a group are shown in one scale."""

    label: str
    group: str
    meshes: tuple[Mesh, ...]

    @property
    def bounds(self) -> tuple[Floats, Floats]:
        """The lowest and highest x, y and z."""
        low = np.min([mesh.points.min(axis=0) for mesh in self.meshes], axis=0)
        high = np.max([mesh.points.max(axis=0) for mesh in self.meshes], axis=0)
        return low, high

    @property
    def radius(self) -> float:
        """Half of the diagonal."""
        low, high = self.bounds
        return float(np.linalg.norm(high - low)) / 2


def radii(items: Sequence[Item]) -> dict[str, float]:
    """The largest radius of each group."""
    found: dict[str, float] = {}
    for item in items:
        found[item.group] = max(found.get(item.group, 0.0), item.radius)
    return found


def warehouse_items(count: int) -> Iterator[Item]:
    """The first `count` items of `PAIRS`; twins are a group."""
    for number, (label, recipe) in enumerate(PAIRS[:count]):
        yield Item(label, PAIRS[number // 2 * 2][0], (_make(recipe),))


def other_items() -> Iterator[Item]:
    """The items of no class, each in a scale of its own."""
    for label, recipe in OTHERS:
        yield Item(label, label, (_make(recipe),))


def _make(recipe: Recipe) -> Mesh:
    module, name, positional, named = recipe
    maker: Callable[..., Any] = getattr(import_module(f"bd_warehouse.{module}"), name)
    points, triangles = maker(*positional, **named).tessellate(*_TOLERANCE)
    return Mesh(
        np.array([(point.X, point.Y, point.Z) for point in points], dtype=np.float32),
        np.array(triangles, dtype=np.int64),
    )


def kicad_files(models: Path, count: int, seed: int) -> list[Path]:
    """`count` VRML files in pairs: a model of a folder drawn by `seed`, and its look-alike.

    The look-alike is the one whose name begins most alike. Raises ValueError where there are too
    few folders with at least `LEAST_MODELS` models.
    """
    random = np.random.default_rng(seed)
    folders = {}
    for folder in sorted(path for path in models.iterdir() if path.is_dir()):
        files = sorted(f for f in folder.glob("*.wrl") if f.stat().st_size in VRML_BYTES)
        if len(files) >= LEAST_MODELS:
            folders[folder.name] = files
    pairs = (count + 1) // 2
    if len(folders) < pairs:
        raise ValueError(
            f"{models}: expected {pairs} folders with {LEAST_MODELS} or more models, found "
            f"{len(folders)}"
        )
    chosen: list[Path] = []
    for name in random.permutation(sorted(folders))[:pairs]:
        files = folders[str(name)]
        first = files[int(random.integers(len(files)))]
        others = [file for file in files if file != first]
        chosen += [first, max(others, key=lambda file: _alike(file, first))]
    return chosen[:count]


def _alike(file: Path, first: Path) -> tuple[int, str]:
    same = [one == other for one, other in zip(file.name, first.name, strict=False)]
    return [*same, False].index(False), file.name


def kicad_items(files: Sequence[Path]) -> Iterator[Item]:
    """An item of each VRML file; those of a folder are a group."""
    for file in files:
        family = file.parent.name.removesuffix(".3dshapes")
        label = re.sub(r"[^A-Za-z0-9.,+-]", "_", f"{family}-{file.stem}")
        yield Item(label, family, vrml_meshes(file.read_text(errors="replace"), str(file)))


_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_MATERIAL = re.compile(r"DEF\s+(\S+)\s+Material\s*\{([^}]*)\}", re.S)
_SHAPE = re.compile(
    r"coordIndex\s*\[([^\]]*)\].*?point\s*\[([^\]]*)\].*?material\s+(?:USE|DEF)\s+(\S+)", re.S
)


def vrml_meshes(text: str, name: str) -> tuple[Mesh, ...]:
    """The triangles of a KiCad model, by material; raises ValueError where there are none.

    Only what these files consist of is read: shapes that are each an IndexedFaceSet of triangles
    and an Appearance whose material is named.
    """
    materials = {found[1]: found[2] for found in _MATERIAL.finditer(text)}
    shapes: dict[str, list[tuple[Floats, Indices]]] = {}
    for index, coordinates, material in _SHAPE.findall(text):
        points = np.array(re.findall(_NUMBER, coordinates), dtype=np.float32).reshape(-1, 3)
        corners = np.array(re.findall(r"-?\d+", index), dtype=np.int64)
        faces = np.split(corners, np.flatnonzero(corners < 0) + 1)
        triangles = [face[:3] for face in faces if len(face) == 4]
        if triangles:
            shapes.setdefault(material, []).append((points, np.array(triangles)))
    if not shapes:
        raise ValueError(f"{name}: expected shapes of triangles, found none")
    meshes = []
    for material, parts in shapes.items():
        starts = np.cumsum([0, *(len(points) for points, _ in parts)])
        body = materials.get(material, "")
        colour = _values(body, "diffuseColor", 3)
        meshes.append(
            Mesh(
                np.concatenate([points for points, _ in parts]),
                np.concatenate([t + start for (_, t), start in zip(parts, starts, strict=False)]),
                (colour[0], colour[1], colour[2]) if colour else (0.7, 0.7, 0.7),
                1 + 60 * (_values(body, "shininess", 1) or [0.3])[0],
                (_values(body, "transparency", 1) or [0.0])[0],
            )
        )
    return tuple(meshes)


def _values(body: str, key: str, count: int) -> list[float]:
    """The numbers behind a key of a material; none where it is absent."""
    found = re.search(rf"{key}\s+" + r"\s+".join([f"({_NUMBER})"] * count), body)
    return [float(value) for value in found.groups()] if found else []
