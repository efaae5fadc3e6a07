"""Builds by measurement, frozen and trained: what was predicted, and what the bundle is worth.

    python -m benchmarks.pilot.builds --data FOLDER --weights FOLDER --scratch FOLDER --minutes 10

DATA is a folder of pictures or, with --cameras, of scenes, as `mdp-partition build` takes it;
WEIGHTS has files by timm's names. The build is asked for on the named devices, each with a camera
of --cameras where these are given, and reports the accuracy of the frozen networks and of what is
served in the end. The row is added to benchmarks/results/measured-builds.json, in place of an
earlier one of the same build.
"""

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept, measured_on
from benchmarks.harness.tables import table
from mdp.files import write_json
from mdp.formats.profile import read_profiles
from partitioner.config import Given
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.training.compute import own_threads, use_threads

if TYPE_CHECKING:
    from partitioner.export.evaluate import Report

RESULT = RESULTS / "measured-builds.json"
#: What tells builds apart.
_KEYS = ("data", "devices", "latency_ms", "minutes", "seed")


def accuracies(report: "Report") -> dict[str, Any]:
    """Accuracy of every member alone, of all together, and of the worst with one missing."""
    members = [member.k for member in report.evaluation.members]
    by_members = {frozenset(one.members): one.stacked for one in report.evaluation.subsets}
    missing = [by_members[frozenset(members) - {k}] for k in members if len(members) > 1]
    return {
        "alone": [member.accuracy for member in report.evaluation.members],
        "together": by_members[frozenset(members)],
        "one_missing": min(missing, default=None),
    }


def figures() -> str:
    """Figures of the page."""
    result = kept("measured-builds")
    return "\n\n".join((
        f"Builds: {len(result['rows'])}; {measured_on(result['machine'])}.",
        table(
            result["rows"],
            ("pictures", lambda row: f"{row['data']}, {row['train']:,} compared"),
            ("classes", lambda row: row["classes"]),
            ("devices", lambda row: ", ".join(row["devices"])),
            ("ms", lambda row: f"{row['latency_ms']:g}"),
            ("minutes", lambda row: f"{row['minutes']:g}"),
            ("predicted, %", lambda row: f"{100 * row['predicted']:.1f}"),
            ("frozen: best alone", lambda row: _share(max(row["frozen"]["alone"]))),
            ("together", lambda row: _share(row["frozen"]["together"])),
            ("trained: best alone", lambda row: _trained(row, "alone")),
            ("together", lambda row: _trained(row, "together")),
            ("one missing, at least", lambda row: _trained(row, "one_missing")),
            ("seconds", lambda row: f"{row['seconds']:.0f}"),
        ),
    ))  # fmt: skip


def _trained(row: Mapping[str, Any], key: str) -> str:
    value = row["served"][key]
    return _share(max(value) if isinstance(value, list) else value) if row["kept"] else "frozen"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


PAGE = Page("benchmarks.pilot.builds", figures)


def main() -> None:
    asked = arguments(
        __doc__,
        data=Path,
        weights=Path,
        scratch=Path,
        profiles="raspberry-pi-5 n100 laptop-cpu",
        latency_ms=12.0,
        minutes=10.0,
        cameras="",
        seed=0,
    )
    use_threads(own_threads())
    # It loads torch, which reads then how its threads are to wait.
    from partitioner.build.bundle import build_bundle

    machine = describe_machine()
    profiles = asked.profiles.split()
    devices = [profile.name for profile in read_profiles(profiles)]
    cameras = dict(zip(devices, asked.cameras.split(), strict=False))
    config = Given(
        None,
        {
            "run.data": str(asked.data),
            "run.weights": str(asked.weights),
            "run.minutes": asked.minutes,
            "run.seed": asked.seed,
            "plan.profiles": profiles,
            "plan.latency_ms": asked.latency_ms,
            **({"plan.cameras": cameras} if cameras else {}),
        },
    ).build()
    out = asked.scratch / f"{asked.data.name}-{asked.minutes:g}-{asked.seed}"
    run, begun_s = RunFolder(Path(f"{out}.run")), time.monotonic()
    built = build_bundle(config, out, Progress(), run=run.path)
    seconds = time.monotonic() - begun_s
    assert built is not None
    assert built.measured is not None
    measured = built.measured
    row = {
        "data": asked.data.name,
        "train": measured.pilot.count,
        "classes": next(iter(measured.pilot.measured.values())).left_out.log_probabilities.shape[1],
        "tested": built.report.evaluation.pictures,
        "devices": devices,
        "cameras": cameras,
        "latency_ms": asked.latency_ms,
        "minutes": asked.minutes,
        "seed": asked.seed,
        "chosen": measured.to_json()["pilot"]["chosen"],
        "predicted": measured.pilot.choice.together,
        "frozen": accuracies(measured.frozen or built.report),
        "served": accuracies(built.report),
        "kept": measured.frozen is not None,
        "trained": measured.to_json()["trained"],
        "seconds": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "run_mb": sum(f.stat().st_size for f in run.path.rglob("*") if f.is_file()) / 1e6,
    }
    before = kept("measured-builds")["rows"] if RESULT.exists() else []
    others = [one for one in before if any(one[key] != row[key] for key in _KEYS)]
    write_json(RESULT, {"machine": machine, "rows": [*others, row]})


if __name__ == "__main__":
    main()
