"""Builds by measurement, frozen and trained: what was predicted, and what the bundle is worth.

    python -m benchmarks.pilot.builds --data FOLDER --weights FOLDER --scratch FOLDER --minutes 10

DATA is a folder of pictures or, with --cameras, of scenes, as `mdp-partition build` takes it;
WEIGHTS has files by timm's names. The build is asked for on the named devices, each with a camera
of --cameras where these are given, and reports the accuracy of the frozen networks and of what is
served in the end. With --teacher NAME and its --teacher-weights FILE the build is the rival: it
trains sub-models by this teacher, which begin with WEIGHTS of their own, for --epochs, of which as
many are to be asked for as the minutes of the other build take.

With --part SHARE the devices are the three of `benchmarks.pilot.depths`: as quick as the machine on
which it timed networks, half and a quarter as quick. Each has to compute its answer in this share
of the teacher's time there, and --profiles and --latency-ms do not count. The row is added to
benchmarks/results/measured-builds.json, in place of an earlier one of the same build.
"""

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, format_machine, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json, write_toml
from mdp.formats.bundle import Bundle
from mdp.formats.profile import read_profiles
from partitioner.config import Given
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.training.compute import own_threads, use_threads

if TYPE_CHECKING:
    from partitioner.build.bundle import BuildOutcome
    from partitioner.export.evaluate import Report

RESULT = RESULTS / "measured-builds.json"
#: What tells builds apart.
_KEYS = ("data", "devices", "part", "latency_ms", "minutes", "seed", "teacher")


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
    result = read_result("measured-builds")
    return "\n\n".join((
        f"Builds: {len(result['rows'])}; {format_machine(result['machine'])}.",
        table(
            result["rows"],
            ("pictures", _pictures),
            ("draw", lambda row: row["seed"]),
            ("classes", lambda row: row["classes"]),
            ("devices", lambda row: ", ".join(row["devices"])),
            ("ms", _limit),
            ("build", _way),
            ("predicted, %", lambda row: _share(row["predicted"])),
            ("frozen: best alone", lambda row: _frozen(row, "alone")),
            ("together", lambda row: _frozen(row, "together")),
            ("trained: best alone", lambda row: _format_trained(row, "alone")),
            ("together", lambda row: _format_trained(row, "together")),
            ("one missing, at least", lambda row: _best(row["served"]["one_missing"])),
            ("epochs", _epochs),
            ("seconds", lambda row: f"{row['seconds']:.0f}"),
        ),
    ))  # fmt: skip


def _pictures(row: Mapping[str, Any]) -> str:
    compared = f", {row['train']:,} compared" if row["train"] else ""
    return f"{row['data']}{compared}"


def _limit(row: Mapping[str, Any]) -> str:
    part = f", {row['part']:g} of the teacher's" if row.get("part") else ""
    return f"{row['latency_ms']:g}{part}"


def _way(row: Mapping[str, Any]) -> str:
    if row.get("teacher"):
        return f"by the teacher, {row['epochs']} epochs"
    return f"measured, {row['minutes']:g} minutes"


def _frozen(row: Mapping[str, Any], key: str) -> str:
    return "" if row["frozen"] is None else _best(row["frozen"][key])


def _format_trained(row: Mapping[str, Any], key: str) -> str:
    return _best(row["served"][key]) if row["kept"] else "frozen"


def _epochs(row: Mapping[str, Any]) -> str:
    """Of each network that was trained."""
    return ", ".join(f"{one['epochs']:.0f}" for one in row["trained"].values())


def _best(value: float | list[float] | None) -> str:
    return _share(max(value) if isinstance(value, list) else value)


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


PAGE = Page("benchmarks.pilot.builds", figures)


def _facts(built: "BuildOutcome", bundle: Bundle) -> dict[str, Any]:
    """Members, predictions and accuracies of a build of either kind."""
    served, measured = accuracies(built.report), built.measured
    if measured is None:
        return {
            "train": None,
            "chosen": {
                part.device: {"network": part.spec.words}
                for part in bundle.manifest.plan.assignments
            },
            "predicted": None,
            "frozen": None,
            "served": served,
            "kept": True,
            "trained": {},
        }
    facts = measured.to_json()
    return {
        "train": measured.pilot.count,
        "chosen": facts["pilot"]["chosen"],
        "predicted": measured.pilot.choice.together,
        "frozen": accuracies(measured.frozen or built.report),
        "served": served,
        "kept": measured.frozen is not None,
        "trained": facts["trained"],
    }


def _key(row: Mapping[str, Any]) -> list[Any]:
    """The build that a row is of; rows from before a key was there lack it."""
    return [row.get(key) or "" for key in _KEYS]


def _write_profiles(part: float, folder: Path) -> tuple[list[str], float]:
    """Files of the three devices' profiles, and milliseconds of this share of the teacher's."""
    from benchmarks.pilot.speeds import speed_profiles, teacher_ms

    times = read_result("depth-cuts")
    files = list[str]()
    for profile in speed_profiles(times):
        file = folder / f"{profile.name}.toml"
        write_toml(file, profile)
        files.append(str(file))
    return files, round(part * teacher_ms(times), 3)


def main() -> None:
    asked = arguments(
        __doc__,
        data=Path,
        weights=Path,
        scratch=Path,
        profiles="raspberry-pi-5 n100 laptop-cpu",
        latency_ms=12.0,
        part=0.0,
        minutes=10.0,
        cameras="",
        seed=0,
        teacher="",
        teacher_weights="",
        epochs=0,
    )
    use_threads(own_threads())
    # It loads torch, which reads then how its threads are to wait.
    from partitioner.build.bundle import build_bundle

    machine = describe_machine()
    profiles, latency_ms = asked.profiles.split(), asked.latency_ms
    if asked.part:
        profiles, latency_ms = _write_profiles(asked.part, asked.scratch)
    devices = [profile.name for profile in read_profiles(profiles)]
    cameras = dict(zip(devices, asked.cameras.split(), strict=False))
    options: dict[str, Any] = {
        "run.data": str(asked.data),
        "run.weights": str(asked.weights),
        "run.seed": asked.seed,
        "plan.profiles": profiles,
        "plan.latency_ms": latency_ms,
    }
    if cameras:
        options["plan.cameras"] = cameras
    if asked.teacher:
        options["plan.teacher"] = asked.teacher
        options["plan.anyway"] = True
        options["run.teacher_checkpoint"] = asked.teacher_weights
        options["schedule.epochs"] = asked.epochs
        options["schedule.shared"] = bool(cameras)
    else:
        options["run.minutes"] = asked.minutes
    way = f"{asked.teacher}-{asked.epochs}" if asked.teacher else f"{asked.minutes:g}"
    if asked.part:
        way += f"-part-{asked.part:g}"
    out = asked.scratch / f"{asked.data.name}-{way}-{asked.seed}"
    run, begun_s = RunFolder(Path(f"{out}.run")), time.monotonic()
    built = build_bundle(Given(None, options).build(), out, Progress(), run=run.path)
    seconds = time.monotonic() - begun_s
    assert built is not None
    row = {
        "data": asked.data.name,
        "classes": len(Bundle.open(out).manifest.labels),
        "tested": built.report.evaluation.pictures,
        "devices": devices,
        "cameras": cameras,
        "latency_ms": latency_ms,
        "part": asked.part,
        "minutes": asked.minutes,
        "seed": asked.seed,
        "teacher": asked.teacher,
        "epochs": asked.epochs,
        **_facts(built, Bundle.open(out)),
        "seconds": seconds,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "run_mb": sum(f.stat().st_size for f in run.path.rglob("*") if f.is_file()) / 1e6,
    }
    before = read_result("measured-builds")["rows"] if RESULT.exists() else []
    others = [one for one in before if _key(one) != _key(row)]
    write_json(RESULT, {"machine": machine, "rows": [*others, row]})


if __name__ == "__main__":
    main()
