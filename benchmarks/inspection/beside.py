"""anomalib's PaDiM and PatchCore on the pictures that the heads of a bundle read.

    make anomalib    # an environment of its own, of 1.8 GB, in runs/anomalib
    python -m benchmarks.inspection.beside --scenes inspection/ --weights LITE0 \
        --scratch SCRATCH --out benchmarks/results/inspection-anomalib.json

reads what `benchmarks.inspection.render` has written: the scenes that the heads were measured on by
`benchmarks.inspection.measure`. LITE0 is a .safetensors of tf_efficientnet_lite0, the bundle's
network, as `mdp-partition weights --convert` writes it. Each camera has models of its own, and a
scene the largest of its cameras' scores. PatchCore's coreset is slow to choose: anomalib's own 10 %
of the patches take minutes a camera. What is in the result already of other products, or of other
ways, stays, and so do scores in SCRATCH.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.machine import describe_machine
from benchmarks.inspection.measure import ranked, seen_by
from mdp.formats.bundle import Bundle
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import open_scenes
from partitioner.export.sessions import open_member
from partitioner.run.progress import Progress

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "runs" / "anomalib" / "bin" / "python"
PROGRAM = "benchmarks.inspection.anomalib_scores"
PARTS = ("good", "test", "defects")
#: The coreset's large tensors stay in the heap: else half of the time is that of new pages.
KEEPS_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}
#: What a model costs, of the other program's figures.
COSTS = ("fit_s", "bytes", "network_ms", "whole_ms")
_TIMED = 20

Pictures = NDArray[np.uint8]


def views_by_camera(bundle: Bundle, folder: Path, cache: Path) -> dict[int, dict[str, Pictures]]:
    """Pictures `[N, S, S, 3]` as the members of a bundle read them, by member and part."""
    assignments = bundle.manifest.plan.assignments
    found: dict[int, dict[str, Pictures]] = {a.k: {} for a in assignments}
    for part in PARTS:
        pictures = open_scenes(str(folder / part), sorted({a.camera or "" for a in assignments}))
        views = load_views(pictures, [view_of(a) for a in assignments], cache, Progress(), part)
        for a, pixels in zip(assignments, views, strict=True):
            found[a.k][part] = np.asarray(pixels)
    return found


def score_by_anomalib(
    views: Mapping[int, Mapping[str, Pictures]], options: argparse.Namespace, folder: Path
) -> dict[int, dict[str, Any]]:
    """Answers of the other program about cameras' pictures, by member; it writes into `folder`."""
    for k, parts in views.items():
        (folder / str(k)).mkdir(parents=True, exist_ok=True)
        for part, pictures in parts.items():
            np.save(folder / str(k) / f"{part}.npy", pictures)
    words = [folder.resolve(), options.weights.resolve(), *map(str, options.kept)]
    command = [PYTHON, "-W", "ignore", "-m", PROGRAM, *words]
    environment = {**os.environ, **KEEPS_MEMORY}
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stderr=subprocess.DEVNULL)
    return {k: json.loads((folder / str(k) / "scores.json").read_text()) for k in views}


def network_ms(bundle: Bundle, picture: Pictures) -> float:
    """Median milliseconds of processor time of the first member, without a head, on one thread."""
    part = bundle.manifest.plan.assignments[0]
    runtime = open_member(bundle.model(part.k), part, len(bundle.manifest.labels))
    times_ms = []
    for _ in range(_TIMED):
        began_s = time.process_time()
        runtime.run(picture)
        times_ms.append((time.process_time() - began_s) * 1e3)
    return median(times_ms)


def product(
    bundle: Bundle, folder: Path, options: argparse.Namespace, cache: Path
) -> dict[str, Any]:
    """Figures of anomalib's models for one product."""
    visible = np.array(seen_by(folder / "defects")) > 0
    views = views_by_camera(bundle, folder, cache)
    told = score_by_anomalib(views, options, options.scratch / folder.name)
    ways = {}
    for name in sorted(set.intersection(*(set(one) for one in told.values()))):
        good, strange = (
            {k: np.array(one[name][part]) for k, one in told.items()} for part in PARTS[1:]
        )
        ways[name] = {
            **ranked(good, {k: one[visible] for k, one in strange.items()}),
            "cost": {key: median(one[name][key] for one in told.values()) for key in COSTS},
        }
    return {
        "defects": int(visible.sum()),
        "test": len(views[0]["test"]),
        "mdp_network_ms": round(network_ms(bundle, views[0]["test"][:1]), 2),
        "ways": ways,
    }


def anomalib_versions() -> dict[str, str]:
    """Versions in the other environment."""
    names = ["anomalib", "timm", "torch"]
    program = f"import importlib.metadata as m; print(*map(m.version, {names!r}))"
    said = subprocess.run([PYTHON, "-c", program], check=True, capture_output=True, text=True)
    return dict(zip(names, said.stdout.split(), strict=True))


def main(words: list[str]) -> int:
    """Score every product by both, and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inspection.beside")
    parser.add_argument("--scenes", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="of tf_efficientnet_lite0")
    parser.add_argument("--bundle", type=Path, default=Path("examples/bundles/parts"))
    parser.add_argument("--scratch", type=Path, required=True, help="keeps scores")
    parser.add_argument("--products", nargs="+", help="folders of --scenes; all of them")
    parser.add_argument(
        "--kept", nargs="*", type=float, default=[0.1], help="shares of patches of a PatchCore"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(words)
    if not PYTHON.exists():
        parser.error(f"{PYTHON}: expected anomalib's environment: make anomalib")
    bundle = Bundle.open(options.bundle)
    machine, versions = describe_machine(), anomalib_versions()
    found: dict[str, Any] = {}
    if options.out.exists():
        found = json.loads(options.out.read_text())["products"]
    for folder in sorted(one for one in options.scenes.iterdir() if one.is_dir()):
        if options.products and folder.name not in options.products:
            continue
        with TemporaryDirectory(prefix="mdp-inspection-") as cache:
            told = product(bundle, folder, options, Path(cache))
        for name, way in told["ways"].items():
            print(folder.name, name, way["4"]["auc"], way["4"]["found"], way["cost"], flush=True)
        before = found.get(folder.name, {}).get("ways", {})
        found[folder.name] = {**told, "ways": {**before, **told["ways"]}}
        written = {
            "machine": machine,
            "bundle": bundle.digest,
            "versions": versions,
            "products": found,
        }
        options.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
