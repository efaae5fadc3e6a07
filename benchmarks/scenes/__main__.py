"""Gain of several cameras over one, in simulated scenes, nothing trained.

    python -m benchmarks.scenes --data imagenette/val --weights FOLDER --scratch FOLDER

WEIGHTS has lite0.safetensors to lite2.safetensors and imagenet1k.txt. Each photograph of --data
becomes a scene that four cameras see (benchmarks/scenes/render.py); `mdp-partition assemble` makes
bundles of them and measures every subset. Writes benchmarks/results/scenes.json.
"""

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from benchmarks.scenes.render import cameras, view
from mdp.files import write_bytes, write_json
from mdp.formats.bundle import Bundle, SubsetAccuracy
from partitioner.cli.assemble import assemble
from partitioner.estimates.accuracy import fit_views, read_shipped_law
from partitioner.estimates.accuracy_law import LawMember, capability_of, together
from partitioner.estimates.accuracy_records import RecordedSubset

RESULT = RESULTS / "scenes.json"
DEVICES = ("laptop-cpu", "n100", "raspberry-pi-5", "jetson-orin-nano")
SEEDS, CAMERAS, SIZE_PX = (0, 1, 2), 4, 128
NAMES = tuple(f"camera-{number}" for number in range(CAMERAS))


def write_scenes(pictures: Sequence[Path], folder: Path, seed: int) -> float:
    """`<class>/<scene>/<camera>.jpg`; returns the mean bytes of a picture."""
    random = np.random.default_rng(seed)
    photographs = [Image.open(path).convert("RGB") for path in pictures]
    sizes = []
    for path, photograph in zip(pictures, photographs, strict=True):
        scene = folder / path.parent.name / path.stem
        scene.mkdir(parents=True)
        for name, camera in zip(NAMES, cameras(seed, CAMERAS), strict=True):
            file = scene / f"{name}.jpg"
            view(photograph, camera, photographs, random).save(file, quality=90)
            sizes.append(file.stat().st_size)
    return float(np.mean(sizes))


def subsets(
    scratch: Path, weights: Path, scenes: Path, members: Sequence[tuple[str, str]]
) -> Mapping[tuple[int, ...], SubsetAccuracy]:
    """Accuracies of a bundle of `(network, camera)`, by the members that answered."""
    labels = (weights / "imagenet1k.txt").read_text().lower()
    (scratch / "labels.txt").write_text(labels)
    models = [
        {
            "device": device,
            "timm": f"tf_efficientnet_{network}",
            "weights": str((weights / f"{network}.safetensors").resolve()),
            "image_size": SIZE_PX,
            "labels": "labels.txt",
            "camera": camera,
            "region": {},
        }
        for device, (network, camera) in zip(DEVICES, members, strict=False)
    ]
    write_bytes(scratch / "models.toml", msgspec.toml.encode({"models": models}))
    out = scratch / "bundle"
    assemble(
        models=scratch / "models.toml", data=str(scenes), profiles=list(DEVICES), out=out, json=True
    )  # fmt: skip
    evaluation = Bundle.open(out).manifest.evaluation
    assert evaluation is not None
    return {subset.members: subset for subset in evaluation.subsets}


def measure_seed(seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One seed's row: accuracies in percent."""
    files = sorted(path for path in options.data.rglob("*") if path.is_file())
    chosen = np.random.default_rng(seed).permutation(len(files))[: options.scenes]
    scratch: Path = options.scratch / f"seed-{seed}"
    scenes = scratch / "scenes"
    picture_bytes = write_scenes([files[index] for index in chosen], scenes, seed)

    def percent(subset: SubsetAccuracy, rule: str = "stacked") -> float:
        return 100 * float(getattr(subset, rule))

    own = subsets(scratch, options.weights, scenes, [("lite0", camera) for camera in NAMES])
    alone = [percent(own[k,]) for k in range(CAMERAS)]
    everyone = tuple(range(CAMERAS))
    best = NAMES[int(np.argmax(alone))]
    mixed = [(f"lite{number % 3}", camera) for number, camera in enumerate(NAMES)]
    networks = [(f"lite{number}", best) for number in range(3)]
    of_size = {
        size: [percent(own[members]) for members in own if len(members) == size]
        for size in range(1, CAMERAS + 1)
    }
    return {
        "seed": seed,
        "alone": alone,
        "mean_of_size": {str(size): float(np.mean(shares)) for size, shares in of_size.items()},
        "one_missing": of_size[CAMERAS - 1],
        "subsets": [{"members": m, "accuracy": percent(own[m]) / 100} for m in own],
        "all": percent(own[everyone]),
        "averaged": percent(own[everyone], "bagged"),
        "families": percent(subsets(scratch, options.weights, scenes, mixed)[everyone]),
        "networks_on_best": percent(subsets(scratch, options.weights, scenes, networks)[0, 1, 2]),
        "picture_bytes": picture_bytes,
    }


def figures() -> str:
    rows = read_result(RESULT.stem)["rows"]

    def spread(value: Any) -> str:
        found = [value(row) for row in rows]
        return f"{np.mean(found):.1f} ({min(found):.1f}-{max(found):.1f})"

    def line(what: str, value: Any) -> dict[str, str]:
        over = [value(row) - max(row["alone"]) for row in rows]
        return {"what": what, "share": spread(value), "over": f"{np.mean(over):+.1f}"}

    lines = [
        line("the best camera alone, Lite0", lambda row: max(row["alone"])),
        line("the best camera with Lite0, Lite1 and Lite2", lambda row: row["networks_on_best"]),
        *(
            line(f"{size} cameras, mean", lambda row, n=size: row["mean_of_size"][str(n)])
            for size in range(2, CAMERAS)
        ),
        line("4 cameras, worst with one missing", lambda row: min(row["one_missing"])),
        line("4 cameras, outputs averaged without fitting", lambda row: row["averaged"]),
        line("**4 cameras**", lambda row: row["all"]),
        line("4 cameras, Lite0, Lite1, Lite2, Lite0", lambda row: row["families"]),
    ]
    columns = (
        ("answered", "{what}"), ("accuracy, mean (range of seeds)", "{share}"),
        ("over the best camera", "{over}"),
    )  # fmt: skip
    own, views = law_errors(rows)
    sent = np.mean([row["picture_bytes"] for row in rows]) / 1e3
    return (
        f"{table(lines, *columns)}\n\nA picture has {sent:.1f} kB on average as JPEG. On a seed "
        f"left out, the planner's law of views errs by {views:.1f} points, that of one picture by "
        f"{own:.1f}."
    )


def law_errors(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Mean error in points of subsets of cameras by the law of one picture, and by that of views.

    The latter is fitted to the other seeds.
    """
    law, one, several = read_shipped_law().law, [], []
    scenes = [msgspec.convert(row["subsets"], list[RecordedSubset]) for row in rows]
    for number, subsets_of_seed in enumerate(scenes):
        views = fit_views(scenes[:number] + scenes[number + 1 :])
        assert views is not None
        alone = [capability_of(s.accuracy) for s in subsets_of_seed if len(s.members) == 1]
        for subset in subsets_of_seed:
            if len(subset.members) == 1:
                continue
            parts = [alone[k] for k in subset.members]
            members = [LawMember(capability=c, view=k, model=0) for k, c in enumerate(parts)]
            one.append(abs(-np.expm1(-together(law, members)) - subset.accuracy))
            several.append(abs(views.accuracy(parts) - subset.accuracy))
    return 100 * float(np.mean(one)), 100 * float(np.mean(several))


PAGE = Page("benchmarks.scenes", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenes", description=__doc__)
    for name in ("data", "weights", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=1500)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    write_json(
        RESULT, {"scenes": options.scenes, "rows": [measure_seed(s, options) for s in SEEDS]}
    )
    PAGE.write()


if __name__ == "__main__":
    main()
