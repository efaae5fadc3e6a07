"""What training with a view per sub-model brings, in simulated scenes.

    python -m benchmarks.scenes.trained --data imagenette/ --weights FOLDER --teacher VIT \
        --scratch FOLDER --seed 0

WEIGHTS has lite0.safetensors and imagenet1k.txt, VIT is a .safetensors of vit_tiny_patch16_224,
DATA has train/ and val/. Photographs become scenes that four cameras see
(benchmarks/scenes/render.py); the steps of `mdp-partition train` train EfficientNet-Lite0, which
starts with its own classifier's rows, in several ways, and torch answers the test scenes. One seed
at a time is added to benchmarks/results/scenes-trained.json.
"""

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept
from benchmarks.harness.tables import table
from benchmarks.scenes.__main__ import CAMERAS, DEVICES, NAMES, write_scenes
from mdp.files import write_json
from mdp.formats.plan import Assignment, Plan, PredictedMs
from mdp.fusion.fuse import Contribution, Logits
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.data.scenes import fused_answers, places
from partitioner.estimates.catalogue import catalogue
from partitioner.export.evaluate import accuracy, subset_accuracies
from partitioner.fusion.stacking import fit_fusion
from partitioner.networks.teacher import teacher_spec
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import Asked, Augmentation, MemberSchedule, RunOptions
from partitioner.run_setup import settings_for
from partitioner.training.context import Work
from partitioner.training.members import train_members
from partitioner.training.teacher import ensure_targets, ensure_teacher

RESULT = RESULTS / "scenes-trained.json"
NETWORK, SIZE_PX, TEACHER_PX = "tf_efficientnet_lite0", 80, 112
#: Scenes of the training pictures, of which a tenth is only calibration, and of the other ones; of
#: these fusion is fitted on every third, and the rest is for the test.
TRAINED, HELD_OUT, FITTED = 360, 450, 3
EPOCHS, VARIANTS, BATCH = 2, 2, 16
#: Four networks on the camera that is best alone.
ONE = "one camera"
#: Way -> settings of the schedule.
WAYS: Mapping[str, dict[str, Any]] = {
    "own": {},
    "shared": {"shared": True},
    ONE: {},
    "both": {"teacher_views": "both"},
    "fused": {"teacher_views": "fused"},
}


def plan_of(cameras: tuple[str, ...]) -> Plan:
    """One Lite0 for each of `cameras`."""
    spec = catalogue()[NETWORK].spec(SIZE_PX, 10)
    ms = PredictedMs(compute=1, network=1, total=2)
    return Plan(
        teacher=teacher_spec("vit_tiny_patch16_224", {"img_size": TEACHER_PX}),
        target_ms=5,
        refused=False,
        reason="",
        assignments=[
            Assignment(
                k=k, device=device, network=spec, camera=camera, predicted_ms=ms, threads=1,
                memory_bytes=1, provider="CPUExecutionProvider", why="",
            )
            for k, (device, camera) in enumerate(zip(DEVICES, cameras, strict=False))
        ],
    )  # fmt: skip


def answers_of(work: Work) -> dict[int, Logits]:
    """Every sub-model's answers `[N, C]` to the held-out scenes."""
    found = {}
    for assignment in work.plan.assignments:
        member = work.load_member(assignment)
        pixels, parts = work.member_pixels(assignment, "test"), []
        with torch.inference_mode():
            for start in range(0, len(pixels), 100):
                part = torch.from_numpy(np.array(pixels[start : start + 100]))
                seen = member.normalise(part.permute(0, 3, 1, 2).float())
                parts.append(member.of_normalised(seen).bag.numpy())
        found[assignment.k] = np.concatenate(parts)
    return found


def measured(work: Work) -> dict[str, Any]:
    """Accuracies in percent of a trained run."""
    answers, targets = answers_of(work), work.data.test.targets
    fitted = np.arange(len(targets)) % FITTED == 0

    def some(rows: NDArray[np.bool_]) -> dict[int, Contribution]:
        return {k: Contribution(None, logits[rows]) for k, logits in answers.items()}

    fusion = fit_fusion(some(fitted), targets[fitted])
    found = subset_accuracies(some(~fitted), fusion, targets[~fitted])
    of_size = {
        size: [100 * one.stacked for one in found if len(one.members) == size]
        for size in range(1, len(answers) + 1)
    }
    return {
        "alone": of_size[1],
        "mean_of_size": {str(size): float(np.mean(of_size[size])) for size in of_size},
        "one_missing": of_size[len(answers) - 1],
        "all": of_size[len(answers)][0],
        "averaged": 100 * found[-1].bagged,
    }


def trained(
    name: str, cameras: tuple[str, ...], data: Dataset, options: argparse.Namespace, **schedule: Any
) -> Work:
    """A finished run; all of a seed have one cache."""
    scratch = options.scratch / f"trained-{options.seed}"
    folder, cache = RunFolder(scratch / name), scratch / "cache"
    cache.mkdir(exist_ok=True)
    folder.path.mkdir(exist_ok=True)
    if not folder.cache.exists():
        folder.cache.symlink_to(cache.resolve())
    labels = (options.weights / "imagenet1k.txt").read_text().lower()
    (scratch / "labels.txt").write_text(labels)
    weights = {NETWORK: options.weights / "lite0.safetensors"}
    asked = Asked(
        options=RunOptions(
            data=data.source, seed=options.seed, autocast="fp32", teaching="kept",
            teacher_checkpoint=str(options.teacher), weights=str(scratch),
        ),
        schedule=MemberSchedule(epochs=EPOCHS, later_share=1, batch_size=BATCH, **schedule),
        augmentation=Augmentation(variants=VARIANTS),
    )  # fmt: skip
    plan = plan_of(cameras)
    settings = settings_for(asked, data, plan.require_teacher(), weights)
    folder.start_or_continue(settings, plan)
    starts = {assignment.k: weights[NETWORK] for assignment in plan.assignments}
    work = Work(folder, settings, plan, data, Progress(), starts)
    # Measured on one thread: bf16 makes the teacher three times as fast, Lite0 slower.
    quick = replace(work, settings=msgspec.structs.replace(settings, autocast="bf16"))
    teacher = ensure_teacher(quick, options.teacher)
    train_members(work, teacher, ensure_targets(quick, teacher))
    return work


def teacher_accuracy(work: Work) -> dict[str, float]:
    """Percent that the teacher has right with one view and with all."""
    pictures, where = work.singles.test, places(work.data.test, work.data.cameras)
    logits: Logits = np.load(work.run.answers(pictures.digest[:16]))
    return {
        "one": 100 * accuracy(logits, pictures.targets),
        "all": 100 * accuracy(fused_answers(logits, where), work.data.test.targets),
    }


def of_seed(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One seed's row, after each way of training."""
    scenes = options.scratch / f"trained-{options.seed}" / "scenes"
    if not scenes.exists():
        for part, target, count in (("train", "train", TRAINED), ("val", "test", HELD_OUT)):
            files = sorted(path for path in (options.data / part).rglob("*") if path.is_file())
            chosen = np.random.default_rng(options.seed).permutation(len(files))[:count]
            write_scenes([files[index] for index in chosen], scenes / target, options.seed)
    data = open_dataset(str(scenes), cameras=NAMES)
    row: dict[str, Any] = {"seed": options.seed}
    for name, schedule in WAYS.items():
        if name == ONE:
            best = NAMES[int(np.argmax(row["own"]["alone"]))]
            single = open_dataset(str(scenes), cameras=[best])
            row[name] = measured(trained(name, (best,) * CAMERAS, single, options))
        else:
            work = trained(name, NAMES, data, options, **schedule)
            row[name] = measured(work)
            row["teacher"] = teacher_accuracy(work)
        yield row


def keep(row: dict[str, Any]) -> None:
    rows = kept(RESULT.stem)["rows"] if RESULT.exists() else []
    others = [other for other in rows if other["seed"] != row["seed"]]
    write_json(RESULT, {"rows": sorted([*others, row], key=lambda one: int(one["seed"]))})


def figures() -> str:
    rows = kept(RESULT.stem)["rows"]

    def line(what: str, value: Any, best: Any = lambda row: max(row["own"]["alone"])) -> Any:
        found = [value(row) for row in rows]
        over = np.mean([value(row) - best(row) for row in rows])
        share = f"{np.mean(found):.1f} ({min(found):.1f} to {max(found):.1f})"
        return {"what": what, "share": share, "over": f"{over:+.1f}"}

    named = {
        "own": "**4 cameras, each its own network**",
        "both": "4 cameras, taught by own and fused views",
        "fused": "4 cameras, taught by fused views",
        "shared": "**4 cameras, one shared network**",
    }
    lines = [
        line("the best camera alone", lambda row: max(row["own"]["alone"])),
        line("the same of the shared network", lambda row: max(row["shared"]["alone"])),
        line("the best camera with 4 networks", lambda row: row[ONE]["all"]),
    ]
    for way, what in named.items():
        lines.append(line(what, lambda row, w=way: row[w]["all"]))
        lines += [
            line(
                f"{size} of them, mean of all such subsets",
                lambda row, w=way, n=size: row[w]["mean_of_size"][str(n)],
            )
            for size in (2, 3)
            if way in ("own", "shared")
        ]
        lines.append(line("worst with one missing", lambda row, w=way: min(row[w]["one_missing"])))
        if way in ("own", "shared"):
            mean = line("outputs averaged without fitting", lambda row, w=way: row[w]["averaged"])
            lines.append(mean)
    lines.append(line("the teacher on all views, 450 scenes", lambda row: row["teacher"]["all"]))
    columns = (
        ("answered", "{what}"), ("accuracy, mean (range of seeds)", "{share}"),
        ("over the best camera", "{over}"),
    )  # fmt: skip
    return table(lines, *columns)


PAGE = Page("benchmarks.scenes.trained", figures)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenes.trained")
    for name in ("data", "weights", "teacher", "scratch"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    (options.scratch / f"trained-{options.seed}").mkdir(parents=True, exist_ok=True)
    for row in of_seed(options):
        keep(row)
    PAGE.write()


if __name__ == "__main__":
    main()
