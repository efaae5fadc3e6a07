"""Later sub-models trained side by side (star) against one after another (strict).

    python -m benchmarks.crew.star --data FOLDER [FOLDER ...] --scratch FOLDER

The shapes of docs/results/small-vits.md, with fewer pictures and epochs, on each class-per-folder
tree of --data. Runs in --scratch are taken up where they stopped. Writes
benchmarks/results/star.json.
"""

import argparse
import itertools
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.errors import MDPError
from mdp.files import write_json
from mdp.formats.plan import Assignment, Plan, PredictedMs, SubModelSpec
from mdp.fusion.fuse import Contribution

RESULT = RESULTS / "star.json"
SEEDS = (0, 1, 2)
#: Pictures of training and calibration, of which a tenth is calibration, and of the test.
LIMIT_TRAIN, LIMIT_TEST = 5_000, 5_000
TEACHER = {"img_size": 32, "patch_size": 8, "embed_dim": 192, "depth": 6, "num_heads": 3}
#: Picture, patch, width and depth of each sub-model.
SHAPES = ((32, 8, 96, 3), (24, 8, 96, 3), (32, 8, 64, 3), (16, 4, 96, 2))
EPOCHS, TEACHER_EPOCHS, LEARNING_RATE, VARIANTS = 6, 8, 1e-3, 4


class Row(NamedTuple):
    """A way to train, and the earlier one with which it shares the first sub-models."""

    name: str
    schedule: dict[str, Any]
    like: str = ""
    shared: int = 0


ROWS = (
    Row("bag heads alone", {}),
    Row("boosting, strict", {"boost_weight": 1.0}),
    Row("boosting, star", {"boost_weight": 1.0, "chain": "star"}, "boosting, strict", 2),
    Row(
        "bag heads alone, later share 1",
        {"chain": "star", "later_share": 1.0},
        "bag heads alone",
        1,
    ),
)


def plan() -> Plan:
    """Four plain ViTs; devices and latencies do not matter here."""
    from partitioner.networks.teacher import teacher_spec

    assignments = [
        Assignment(
            k=k,
            device=f"device-{k}",
            submodel=SubModelSpec(
                image_size=size,
                patch_size=patch,
                embed_dim=width,
                depth=depth,
                num_heads=2,
                mlp_ratio=4.0,
            ),
            predicted_ms=PredictedMs(compute=1, network=1, total=2),
            memory_bytes=1,
            provider="CPUExecutionProvider",
            threads=1,
            why="",
        )
        for k, (size, patch, width, depth) in enumerate(SHAPES)
    ]
    teacher = teacher_spec("vit_tiny_patch16_224", dict(TEACHER))
    return Plan(target_ms=5, refused=False, reason="", assignments=assignments, teacher=teacher)


class Ground(NamedTuple):
    """One data set and seed; all of its rows share views, variants and the teacher's answers."""

    data: Any
    seed: int
    folder: Path
    teacher: Path
    progress: Any

    def work(self, name: str, **schedule: Any) -> Any:
        """A run folder with the teacher in it."""
        from partitioner.build.inputs import TrainingInputs
        from partitioner.build.settings import run_settings
        from partitioner.run.folder import RunFolder
        from partitioner.run.settings import (
            Augmentation,
            MemberSchedule,
            RunOptions,
            TeacherSchedule,
            TrainingConfig,
        )
        from partitioner.training.context import TrainingContext

        run = RunFolder(self.folder / name.replace(", ", "-").replace(" ", "-"))
        cache = self.folder / "cache"
        for made in (cache, run.path):
            made.mkdir(parents=True, exist_ok=True)
        if not run.cache.exists():
            run.cache.symlink_to(cache.resolve())
        asked = TrainingConfig(
            options=RunOptions(
                data=self.data.source,
                limit_train=LIMIT_TRAIN,
                limit_test=LIMIT_TEST,
                seed=self.seed,
                teaching="kept",
            ),
            teacher_schedule=TeacherSchedule(
                epochs=TEACHER_EPOCHS, batch_size=128, learning_rate=5e-4
            ),
            schedule=MemberSchedule(epochs=EPOCHS, learning_rate=LEARNING_RATE, **schedule),
            augmentation=Augmentation(variants=VARIANTS),
        )
        settings = run_settings(TrainingInputs.of(asked, self.data, plan().require_teacher()))
        run.start_or_continue(settings, plan())
        if self.teacher.exists() and not run.teacher.exists():
            shutil.copy(self.teacher, run.teacher)
        return TrainingContext(run, settings, plan(), self.data, self.progress)


def contributions(work: Any, split: Any) -> dict[int, Contribution]:
    """Every sub-model's logits `[N, C]` for one split, fp32."""
    import torch

    from partitioner.training.cached_outputs import BATCH, batch
    from partitioner.training.student import Student

    found = {}
    for assignment in work.plan.assignments:
        pixels = work.member_pixels(assignment, split)
        student = Student(work.load_member(assignment)).eval()
        boost, bag = [], []
        for index in np.array_split(np.arange(len(pixels)), -(-len(pixels) // BATCH)):
            with torch.inference_mode():
                output = student(batch(pixels, index, torch.device("cpu")))
            bag.append(output.bag.numpy())
            if output.boost is not None:
                boost.append(output.boost.numpy())
        head = np.concatenate(boost) if boost else None
        found[assignment.k] = Contribution(head, np.concatenate(bag))
    return found


def measure_row(ground: Ground, row: Row) -> dict[str, Any]:
    """Train one row where that is not done; returns percentages of right answers."""
    from partitioner.export.evaluate import subset_accuracies
    from partitioner.fusion.stacking import fit_fusion
    from partitioner.training.members import train_members
    from partitioner.training.teacher import ensure_targets, ensure_teacher

    work = ground.work(row.name, **row.schedule)
    outcome = work.run.path / "outcome.json"
    if outcome.is_file():
        found: dict[str, Any] = msgspec.json.decode(outcome.read_bytes())
        return found
    if row.like:
        like = ground.work(row.like, **next(r.schedule for r in ROWS if r.name == row.like))
        for k in range(row.shared):
            shutil.copy(like.run.member(k), work.run.member(k))
    teacher = ensure_teacher(work, None)
    started_s = time.process_time()
    train_members(work, teacher, ensure_targets(work, teacher))
    data = work.data
    fusion = fit_fusion(contributions(work, "calibration"), data.calibration.targets)
    subsets = subset_accuracies(contributions(work, "test"), fusion, data.test.targets)
    shutil.rmtree(work.run.predecessors, ignore_errors=True)
    found = {
        "data": Path(data.source).name,
        "seed": ground.seed,
        "row": row.name,
        "cpu_s": time.process_time() - started_s,
        "subsets": {"".join(map(str, one.members)): round(100 * one.stacked, 3) for one in subsets},
    }
    write_json(outcome, found)
    return found


def check_equal(ground: Ground) -> None:
    """Train the last sub-model of a star from the first alone: the bytes of a strict chain's.

    With bag heads alone the first sub-model is all that a later one needs, so that the two ways
    give the same weights. Raises MDPError where they do not.
    """
    from partitioner.training.members import train_members
    from partitioner.training.teacher import ensure_targets, ensure_teacher

    strict = ground.work(ROWS[0].name).run
    work, last = ground.work("bag heads alone, star", chain="star"), len(SHAPES) - 1
    shutil.copy(strict.member(0), work.run.member(0))
    teacher = ensure_teacher(work, None)
    train_members(work, teacher, ensure_targets(work, teacher), only=[last])
    if work.run.member(last).read_bytes() != strict.member(last).read_bytes():
        raise MDPError(f"{work.run.member(last)}: differs from that of a strict chain")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crew.star", description=__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    from partitioner.data.datasets import open_dataset
    from partitioner.run.progress import Progress
    from partitioner.training.compute import use_threads
    from partitioner.training.teacher import ensure_teacher

    use_threads(1)
    machine, rows = describe_machine(), []
    # What decides comes first, in case the rest is not waited for.
    for some, seed, source in itertools.product((ROWS[:3], ROWS[3:]), SEEDS, options.data):
        data = open_dataset(str(source), limit_train=LIMIT_TRAIN, limit_test=LIMIT_TEST)
        scratch = options.scratch / source.name
        teacher = scratch / "teacher.safetensors"
        ground = Ground(data, seed, scratch / f"seed-{seed}", teacher, Progress())
        if not teacher.exists():
            made = ground.work("teacher")
            ensure_teacher(made, None)
            shutil.copy(made.run.teacher, teacher)
        for row in some:
            rows.append(measure_row(ground, row))
            write_json(RESULT, {"machine": machine, "rows": rows})
        if seed == SEEDS[0] and some[0] == ROWS[0]:
            check_equal(ground)
    PAGE.write()


#: What is read of one run's subsets, in percent.
MEASURES: dict[str, Callable[[Mapping[str, float]], float]] = {
    "all in": lambda subsets: subsets[max(subsets, key=len)],
    "one missing": lambda subsets: float(np.mean(of_size(subsets, len(SHAPES) - 1))),
    "one in": lambda subsets: float(np.mean(of_size(subsets, 1))),
}
STRICT, STAR = "boosting, strict", "boosting, star"
#: Differences that decide something: (what, row, less this row).
DIFFERENCES = (
    ("boosting, star less strict", STAR, STRICT),
    ("later share 1 less 0.7", ROWS[3].name, ROWS[0].name),
)


def of_size(subsets: Mapping[str, float], size: int) -> list[float]:
    return [share for members, share in subsets.items() if len(members) == size]


def figures() -> str:
    runs = read_result(RESULT.stem)["rows"]
    found: dict[tuple[str, str], dict[int, Mapping[str, float]]] = {}
    for run in runs:
        found.setdefault((run["data"], run["row"]), {})[run["seed"]] = run["subsets"]

    def spread(values: Sequence[float]) -> str:
        error = np.std(values, ddof=1) / np.sqrt(len(values))
        return f"{np.mean(values):+.1f} ± {error:.1f}"

    rows: list[dict[str, str]] = []
    for data in sorted({data for data, _ in found}):
        base = found[data, ROWS[0].name].values()
        means = {name: f"{np.mean([of(one) for one in base]):.1f}" for name, of in MEASURES.items()}
        rows.append({"data": data, "what": ROWS[0].name} | means)
        for what, row, less in DIFFERENCES:
            ours, theirs = found.get((data, row), {}), found.get((data, less), {})
            both = sorted(ours.keys() & theirs.keys())
            if len(both) > 1:
                paired = {
                    name: spread([of(ours[seed]) - of(theirs[seed]) for seed in both])
                    for name, of in MEASURES.items()
                }
                rows.append({"data": "", "what": what} | paired)
    shown = tuple((name, "{" + name + "}") for name in MEASURES)
    return table(rows, ("data", "{data}"), ("trained", "{what}"), *shown)


PAGE = Page("benchmarks.crew.star", figures)


if __name__ == "__main__":
    main()
