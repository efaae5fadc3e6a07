"""Scenes of solid items on a belt for one to six cameras, as `mdp-partition --data` takes them.

    make solids OUT=solids/                                  # twelve mechanical parts
    make solids OUT=solids/ KICAD=/usr/share/kicad/3dmodels   # electronic parts of Debian's package

or, in an environment with vtk, pillow and, for mechanical parts, bd-warehouse, python -m
benchmarks.scenes.solids. It writes `CLASS/sNNN/CAMERA.jpg`: with --test below train/ and test/,
with --unknown scenes of other items into a folder unknown/, with both every other kind of these for
the test alone. Pictures depend on the options, and on how a graphics library rounds.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.scenes.solid_draws import PLACES, develop, draw_scene, scene_folder, splits
from benchmarks.scenes.solid_items import (
    PAIRS,
    Item,
    kicad_files,
    kicad_items,
    other_items,
    radii,
    warehouse_items,
)

#: The folder of items that are of no class.
UNKNOWN = "unknown"


def options_of(words: list[str]) -> argparse.Namespace:
    """The options; exits where one is out of bounds."""
    first = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenes.solids", description=first)
    parser.add_argument("--out", type=Path, required=True, help="a new or empty folder")
    parser.add_argument(
        "--kicad", type=Path, help="folder of KiCad's VRML models; else bd-warehouse"
    )
    parser.add_argument("--classes", type=int, default=12)
    parser.add_argument("--scenes", type=int, default=50, help="of each class")
    parser.add_argument("--test", type=int, default=0, help="further scenes of each class")
    parser.add_argument("--unknown", type=int, default=0, help="scenes of items of no class")
    parser.add_argument("--cameras", type=int, default=4)
    parser.add_argument("--side", type=int, default=128, help="pixels")
    parser.add_argument("--quality", type=int, default=88, help="of JPEG")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    if not 1 <= options.cameras <= len(PLACES):
        parser.error(f"--cameras: expected 1 to {len(PLACES)}, got {options.cameras}")
    if options.kicad is None and not 2 <= options.classes <= len(PAIRS):
        parser.error(f"--classes: expected 2 to {len(PAIRS)}, got {options.classes}")
    for name in ("scenes", "side"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(options, name)}")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out: {options.out}: expected a new or empty folder")
    return options


def items_of(options: argparse.Namespace) -> tuple[list[Item], list[Item]]:
    """The items of the classes, and those of none."""
    if options.kicad is None:
        return list(warehouse_items(options.classes)), list(
            other_items() if options.unknown else ()
        )
    # Of other folders than the classes: a look-alike would be a near twin.
    count = options.classes + (options.classes if options.unknown else 0)
    items = list(kicad_items(kicad_files(options.kicad, count + count % 2, options.seed)))
    return items[: options.classes], items[options.classes + options.classes % 2 :]


def folders(
    options: argparse.Namespace, items: list[Item], others: list[Item]
) -> Iterator[tuple[Item, Path, int]]:
    """Each scene's item, folder and number, the scenes of an item one after another."""
    for item in items:
        for below, scenes in splits(options.scenes, options.test):
            for number in scenes:
                yield item, scene_folder(options.out, below, item.label, number), number
    for place, item in enumerate(others):
        below = ("train", "test")[place % 2] if options.test else ""
        for number in range(place, options.unknown, len(others)):
            yield item, scene_folder(options.out, below, UNKNOWN, number), number


def main(words: list[str]) -> int:
    """Render what the options ask for."""
    options = options_of(words)
    # Here, so that the rest is used without VTK.
    from benchmarks.scenes.solid_views import ItemRenderer

    items, others = items_of(options)
    largest, places = radii([*items, *others]), PLACES[: options.cameras]
    stage: ItemRenderer | None = None
    shown: Item | None = None
    count = 0
    for item, folder, number in folders(options, items, others):
        if item is not shown:
            if stage is not None:
                stage.close()
            stage, shown = ItemRenderer(options.side, item, largest[item.group]), item
            print(item.label, flush=True)
        assert stage is not None
        low, high = item.bounds
        scene = draw_scene(options.seed, item.label, number, (high - low).tolist(), places)
        folder.mkdir(parents=True, exist_ok=True)
        for shot, view in stage.views(scene):
            picture = develop(view, shot)
            picture.save(folder / f"{shot.place.name}.jpg", quality=options.quality)
            count += 1
    print(f"{count} pictures in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
