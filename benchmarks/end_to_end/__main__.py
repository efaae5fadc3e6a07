"""MDP against what a user would do instead, end to end, over links of 100 and of 20 Mbit/s.

    python -m benchmarks.end_to_end --out benchmarks/results/end-to-end.json

Needs root, iproute2 and two cores, and some twelve minutes; --quick takes a third of that and only
shows that everything runs. The HTTP servers need an environment of their own: see --http-python.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.end_to_end.machines import CLIENT, DEVICES, PERIOD_US, Network, remove_remains
from benchmarks.end_to_end.page import OURS, PAGE, figures
from benchmarks.end_to_end.prepare import (
    export_untrained,
    make_bundle,
    make_models,
    plan_alone,
    write_pictures,
    write_profiles,
)
from benchmarks.end_to_end.rivals.pieces import dealt
from benchmarks.end_to_end.serve import Ready, ask_all
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from mdp import console
from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.plan import Plan
from mdp.formats.profile import Link
from mdp.testing.machine_faults import groups_work
from mdp.testing.wires import wiring_works

BANDWIDTHS_BPS = (100e6, 20e6)
#: What profiles say of a link without traffic: some of it is Python on both sides.
ROUND_TRIP_S = 0.001
#: Latency asked of each plan, as a share of the teacher's on the fastest device.
TARGETS = {OURS: 0.5, "MDP, smaller": 0.25}
#: What a user without MDP would think of first: a smaller model, as quick as the first plan.
ALONE = "smaller model on one device"
PICTURES = 20
#: Pictures one at a time, of each round; then of each row's own answers how many seconds' worth are
#: asked for at once, in each round.
WHOLE = {"rounds": 10, "per_round": 10, "stream_s": 5.0, "stream_rounds": 3, "in_flight": 6}
QUICK = {"rounds": 1, "per_round": 5, "stream_s": 1.0, "stream_rounds": 1, "in_flight": 6}
_HTTP_PACKAGES = "litserve, onnxruntime, numpy and pillow"


def main() -> None:
    """Measure, print and keep; of what is kept in the project, also the page and its picture."""
    parser = argparse.ArgumentParser(description="MDP against what a user would do instead.")
    parser.add_argument("--out", type=Path, required=True, help="results file to write")
    parser.add_argument("--teacher", default="vit_small_patch16_224")
    parser.add_argument("--quick", action="store_true", help="few pictures, to see that it runs")
    parser.add_argument(
        "--http-python", type=Path, help=f"interpreter of an environment with {_HTTP_PACKAGES}"
    )
    options = parser.parse_args()
    if options.http_python is not None and shutil.which(options.http_python) is None:
        raise InputError(f"--http-python: {options.http_python}: found no such program")
    check_here()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    remove_remains()
    with tempfile.TemporaryDirectory(prefix="mdp-e2e-") as folder:
        results = measure(options, describe_machine(), Path(folder))
    write_json(options.out, results)
    print(figures(json.loads(options.out.read_text())))
    if options.out.resolve() == RESULTS / "end-to-end.json":
        PAGE.write()


def check_here() -> None:
    """Raise InputError where this cannot be run."""
    if why := wiring_works() or groups_work("cpu"):
        raise InputError(f"devices cannot be emulated here: {why}")
    if missing := {machine.core for machine in (CLIENT, *DEVICES)} - os.sched_getaffinity(0):
        raise InputError(f"expected cores 0 and 1 to be usable, {sorted(missing)} are not")


def measure(
    options: argparse.Namespace, machine: dict[str, object], folder: Path
) -> dict[str, Any]:
    """The content of benchmarks/results/end-to-end.json."""
    amount = QUICK if options.quick else WHOLE
    pictures = write_pictures(folder / "pictures", PICTURES)
    with ExitStack() as stack:
        network = Network(stack, folder)
        seconds = 2.0 if options.quick else 8.0
        models = make_models(options.teacher, network, folder, seconds, note)
        ready = Ready(models=models, bundles={}, pictures=pictures, amount=amount,
                      http_python=options.http_python)  # fmt: skip
        links = [
            measure_link(bps, network, folder / f"{bps / 1e6:.0f}", ready, quick=options.quick)
            for bps in BANDWIDTHS_BPS
        ]
    blocks = dealt(models.spec.shape.depth, [1 / ms for ms in models.teacher_ms])
    return {
        "machine": machine,
        "teacher": options.teacher,
        "quick": options.quick,
        "period_us": PERIOD_US,
        "devices": [
            {"name": device.name, "core": device.core, "share": device.share,
             "teacher_ms": ms, "blocks": count}
            for device, ms, count in zip(DEVICES, models.teacher_ms, blocks, strict=True)
        ],
        "client_share": CLIENT.share,
        "in_flight": amount["in_flight"],
        "without_http": ""
        if options.http_python
        else f"no --http-python, an environment with {_HTTP_PACKAGES}",
        "picture_bytes": round(np.mean([path.stat().st_size for path in pictures])),
        "links": links,
    }  # fmt: skip


def measure_link(
    bandwidth_bps: float, network: Network, folder: Path, ready: Ready, *, quick: bool
) -> dict[str, Any]:
    """Everybody over one kind of link, MDP with the plans that it makes for that link."""
    models = ready.models
    network.set_rate(bandwidth_bps)
    link = Link(bandwidth_bps=bandwidth_bps, round_trip_s=ROUND_TRIP_S)
    profiles = write_profiles(models, link, folder / "profiles")
    plans, bundles = dict[str, Plan](), dict[str, Path]()
    for name in [OURS] if quick else TARGETS:
        target_ms = TARGETS[name] * models.teacher_ms[0]
        note(f"{bandwidth_bps / 1e6:.0f} Mbit/s: planning {name} for {target_ms:.0f} ms")
        plans[name], bundles[name] = make_bundle(
            models.spec, profiles, target_ms, folder / f"plan-{len(plans)}"
        )
    alone = plan_alone(plans[OURS], link)
    if alone is not None:
        note("exporting what one device can do alone in that time")
        plans[ALONE] = alone
        bundles[ALONE] = export_untrained(alone, folder / "alone")
    found = ask_all(replace(ready, bundles=bundles), network, folder / "serving", note)
    return {"bandwidth_bps": bandwidth_bps, "plans": plans, "found": found}


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    console.run(main, "benchmarks.end_to_end")
