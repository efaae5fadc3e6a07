"""MDP against what a user would do instead, end to end, over links of 100 and of 20 Mbit/s.

    python -m benchmarks.end_to_end --out benchmarks/results/end-to-end.json

Needs root, iproute2 and two cores, and some twelve minutes; --quick takes a third of that and only
shows that everything runs. The HTTP servers need an environment of their own: see --http-python.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.end_to_end.check import in_parts, run_one
from benchmarks.end_to_end.devices import CLIENT, DEVICES, PERIOD_US, check_cores
from benchmarks.end_to_end.leaving import leave_when_told
from benchmarks.end_to_end.namespaces import Network, remove_remains
from benchmarks.end_to_end.outcomes import OURS, DeviceRow, LinkResult, Results
from benchmarks.end_to_end.page import PAGE, figures
from benchmarks.end_to_end.pictures import write_pictures
from benchmarks.end_to_end.prepare import (
    Models,
    export_untrained,
    make_bundle,
    make_models,
    plan_alone,
    write_profiles,
)
from benchmarks.end_to_end.processes import Machines, machines
from benchmarks.end_to_end.rivals.split import columns, dealt
from benchmarks.end_to_end.serve import Ready, ask_all
from benchmarks.end_to_end.setup import Amount
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from mdp import console
from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.plan import Plan
from mdp.formats.profile import Link

BANDWIDTHS_BPS = (100e6, 20e6)
#: What profiles say of a link without traffic: some of it is Python on both sides.
ROUND_TRIP_S = 0.001
#: Latency asked of each plan, as a share of the teacher's on the fastest device.
TARGETS = {OURS: 0.5, "MDP, smaller": 0.25}
#: What a user without MDP would think of first: a smaller model, as quick as the first plan.
ALONE = "smaller model on one device"
PICTURES = 20
WHOLE = Amount(rounds=10, per_round=10, stream_s=5.0, stream_rounds=3, in_flight=6)
QUICK = Amount(rounds=1, per_round=5, stream_s=1.0, stream_rounds=1, in_flight=6)
_HTTP_PACKAGES = "litserve, onnxruntime, numpy and pillow"


def main() -> None:
    """Measure, print and keep; of what is kept in the project, also the page and its picture."""
    options = parsed()
    check_here()
    machine = describe_machine()
    remove_remains()
    with tempfile.TemporaryDirectory(prefix="mdp-e2e-") as folder:
        results = measure(options, machine, Path(folder))
    write_json(options.out, results)
    print(figures(results))
    if options.out.resolve() == RESULTS / "end-to-end.json":
        PAGE.write()


def parsed() -> argparse.Namespace:
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
    return options


def check_here() -> None:
    """Raise InputError where this cannot be run."""
    if os.geteuid() != 0:
        raise InputError("network namespaces and control groups need root: expected user id 0")
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(program) is None:
            raise InputError(f"expected the program {program!r}, which {package} has; found none")
    check_cores()


def measure(options: argparse.Namespace, machine: dict[str, object], folder: Path) -> Results:
    amount = QUICK if options.quick else WHOLE
    targets = {OURS: TARGETS[OURS]} if options.quick else TARGETS
    pictures = write_pictures(folder / "pictures", PICTURES)
    with machines(folder) as (network, programs):
        seconds = 2.0 if options.quick else 8.0
        models = make_models(options.teacher, programs, folder, seconds, note)
        size = models.spec.shape.image_size
        pixels = np.full((1, size, size, 3), 127, dtype=np.uint8)
        expected = run_one(models.whole, pixels)
        error = float(np.abs(in_parts(models.parts, pixels) - expected).max())
        ready = Ready(
            models=models,
            bundles={},
            pictures=pictures,
            http_python=options.http_python,
            amount=amount,
        )
        links = [
            measure_link(bps, (network, programs), folder / f"{bps / 1e6:.0f}", ready, targets)
            for bps in BANDWIDTHS_BPS
        ]
    return Results(
        machine=machine,
        teacher=options.teacher,
        quick=options.quick,
        period_us=PERIOD_US,
        devices=device_rows(models),
        client_share=CLIENT.share,
        in_flight=amount.in_flight,
        without_http=""
        if options.http_python
        else f"no --http-python, an environment with {_HTTP_PACKAGES}",
        split_error=error,
        picture_bytes=round(np.mean([path.stat().st_size for path in pictures])),
        links=links,
    )


def measure_link(
    bandwidth_bps: float,
    place: tuple[Network, Machines],
    folder: Path,
    ready: Ready,
    targets: dict[str, float],
) -> LinkResult:
    """Everybody over one kind of link, MDP with the plans that it makes for that link."""
    (network, programs), models = place, ready.models
    network.set_rate(bandwidth_bps)
    link = Link(bandwidth_bps=bandwidth_bps, round_trip_s=ROUND_TRIP_S)
    profiles = write_profiles(models, link, folder / "profiles")
    plans, bundles = dict[str, Plan](), dict[str, Path]()
    for name, share in targets.items():
        target_ms = share * models.teacher_ms[0]
        note(f"{bandwidth_bps / 1e6:.0f} Mbit/s: planning {name} for {target_ms:.0f} ms")
        plans[name], bundles[name] = make_bundle(
            models.spec, profiles, target_ms, folder / f"plan-{len(plans)}"
        )
    alone = plan_alone(plans[OURS], link)
    if alone is not None:
        note("exporting what one device can do alone in that time")
        plans[ALONE] = alone
        bundles[ALONE] = export_untrained(alone, folder / "alone")
    found = ask_all(replace(ready, bundles=bundles), network, programs, folder / "serving", note)
    return LinkResult(bandwidth_bps=bandwidth_bps, plans=plans, found=found)


def device_rows(models: Models) -> list[DeviceRow]:
    """Each device, and what it has of the teacher."""
    shape, speeds = models.spec.shape, [1 / ms for ms in models.teacher_ms]
    parts = zip(
        DEVICES,
        models.teacher_ms,
        dealt(shape.depth, speeds),
        dealt(shape.num_heads, speeds),
        columns(round(shape.embed_dim * shape.mlp_ratio), speeds),
        strict=True,
    )
    return [
        DeviceRow(name=device.name, core=device.core, share=device.share, teacher_ms=ms,
                  blocks=blocks, heads=heads, hidden=end - begin)
        for device, ms, blocks, heads, (begin, end) in parts
    ]  # fmt: skip


def note(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    leave_when_told()
    console.run(main, "benchmarks.end_to_end")
