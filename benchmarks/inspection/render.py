"""Scenes of good and defective parts at an inspection station, rendered for four cameras.

    runs/solids/bin/python -m benchmarks.inspection.render --kicad FOLDER --out inspection/

needs what `make solids` with KICAD needs: VTK, and the VRML models of Debian's kicad-packages3d. It
writes, of each product, `PRODUCT/good/sNNN/CAMERA.jpg` to learn from, and the same below `test/`,
`defects/KIND/`, `light/`, `background/`, `pose/` and `moved/`; `visible.json` of a defective scene
has, of each camera, the share of its pixels that the defect changed.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from benchmarks.inspection.defects import KINDS, with_defect
from benchmarks.inspection.draws import CHANGES, Change, draw_station
from benchmarks.scenes.solid_draws import PLACES, SolidScene, develop
from benchmarks.scenes.solid_items import Item, kicad_items

#: Products and their look-alikes: folder, and two models of it.
PRODUCTS = (
    ("Package_DIP", "DIP-8_W7.62mm", "DIP-8_W10.16mm"),
    ("Package_SO", "SOIC-8_3.9x4.9mm_P1.27mm", "SOIC-8_5.275x5.275mm_P1.27mm"),
    (
        "Connector_JST",
        "JST_XH_B4B-XH-A_1x04_P2.50mm_Vertical",
        "JST_EH_B4B-EH-A_1x04_P2.50mm_Vertical",
    ),
    (
        "Potentiometer_THT",
        "Potentiometer_Bourns_3006W_Horizontal",
        "Potentiometer_Bourns_3006Y_Horizontal",
    ),
    ("Relay_THT", "Relay_SPDT_Finder_40.31", "Relay_SPDT_Finder_40.51"),
    (
        "TerminalBlock_Phoenix",
        "TerminalBlock_Phoenix_MKDS-1,5-3-5.08_1x03_P5.08mm_Horizontal",
        "TerminalBlock_Phoenix_MKDS-3-3-5.08_1x03_P5.08mm_Horizontal",
    ),
)
CAMERAS = 4
#: A pixel is changed by a defect from this difference of a level on.
_CHANGED = 12


def options_of(words: list[str]) -> argparse.Namespace:
    """The options."""
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inspection.render", description=first
    )
    parser.add_argument("--kicad", type=Path, required=True, help="folder of KiCad's VRML models")
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    parser.add_argument("--products", type=int, default=len(PRODUCTS))
    parser.add_argument("--good", type=int, default=200, help="scenes to learn from")
    parser.add_argument("--test", type=int, default=300, help="further good scenes")
    parser.add_argument("--defects", type=int, default=20, help="scenes of each kind")
    parser.add_argument("--changed", type=int, default=40, help="good scenes of each change")
    parser.add_argument("--side", type=int, default=160, help="pixels")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out: {options.out}: expected a new or empty folder")
    if not 1 <= options.products <= len(PRODUCTS):
        parser.error(f"--products: expected 1 to {len(PRODUCTS)}, got {options.products}")
    return options


def read_product(models: Path, row: tuple[str, str, str]) -> tuple[Item, Item]:
    """A product and its look-alike, centred alike."""
    family, *names = row
    files = [models / f"{family}.3dshapes" / f"{name}.wrl" for name in names]
    item, twin = kicad_items(files)
    return item, twin


def main(words: list[str]) -> int:
    """Render what the options ask for."""
    options = options_of(words)
    for row in PRODUCTS[: options.products]:
        _product(options, row)
    return 0


def _product(options: argparse.Namespace, row: tuple[str, str, str]) -> None:
    item, twin = read_product(options.kicad, row)
    name = row[0]
    seed, side = options.seed, options.side
    folder = options.out / name
    plain = _Stage(side, item, item.radius)
    count = 0
    for kind, scenes in (("good", options.good), ("test", options.test)):
        for number in range(scenes):
            scene = draw_station(seed, name, kind, number, PLACES[:CAMERAS])
            plain.save(scene, folder / kind / f"s{number:03d}", None)
            count += 1
    change: Change
    for change in CHANGES:
        for number in range(options.changed):
            scene = draw_station(seed, name, change, number, PLACES[:CAMERAS], change)
            plain.save(scene, folder / change / f"s{number:03d}", None)
            count += 1
    for kind in KINDS:
        for number in range(options.defects):
            random = np.random.default_rng([seed, number, *f"{name} {kind} defect".encode()])
            broken = with_defect(item, kind, random, twin)
            scene = draw_station(seed, name, kind, number, PLACES[:CAMERAS])
            stage = _Stage(side, broken, item.radius, twin if broken is twin else item)
            where = folder / "defects" / kind.replace(" ", "_") / f"s{number:03d}"
            stage.save(scene, where, plain)
            stage.close()
            count += 1
    plain.close()
    print(f"{name}: {count} scenes", flush=True)


class _Stage:
    """A renderer of one item, and what it sees."""

    def __init__(self, side: int, item: Item, radius: float, like: Item | None = None) -> None:
        # Here, so that the rest is used without VTK.
        from benchmarks.scenes.solid_views import ItemRenderer

        self._renderer = ItemRenderer(side, item, radius, like)

    def close(self) -> None:
        self._renderer.close()

    def save(self, scene: SolidScene, folder: Path, beside: "_Stage | None") -> None:
        """Write a picture of each camera, and how much differs from the good item."""
        folder.mkdir(parents=True, exist_ok=True)
        visible = {}
        good = None if beside is None else [view for _, view in beside._renderer.views(scene)]
        for number, (shot, view) in enumerate(self._renderer.views(scene)):
            develop(view, shot).save(folder / f"{shot.place.name}.jpg", quality=92)
            if good is not None:
                apart = np.abs(view.astype(np.int16) - good[number].astype(np.int16)).max(axis=2)
                visible[shot.place.name] = round(float((apart > _CHANGED).mean()), 6)
        if good is not None:
            (folder / "visible.json").write_text(json.dumps(visible))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
