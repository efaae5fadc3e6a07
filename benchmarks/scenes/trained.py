"""Gain of training with a view per sub-model, in simulated scenes.

    python -m benchmarks.scenes.trained --data imagenette/ --weights FOLDER --teacher VIT \
        --scratch FOLDER --seed 0

WEIGHTS has lite0.safetensors and imagenet1k.txt, VIT is a .safetensors of vit_tiny_patch16_224,
DATA has train/ and val/. Photographs become scenes that four cameras see
(benchmarks/scenes/render.py); the steps of `mdp-partition train` train EfficientNet-Lite0, which
starts with its own classifier's rows, in several ways, and torch answers the test scenes. One seed
at a time is added to benchmarks/results/scenes-trained.json.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from benchmarks.scenes.__main__ import CAMERAS, DEVICES, NAMES, write_scenes
from mdp.files import write_json
from mdp.formats.plan import Assignment, Plan, PredictedMs
from mdp.fusion.fuse import Contribution, FusionWeights, Logits, fuse, weights_for
from partitioner.build.inputs import TrainingInputs
from partitioner.build.settings import run_settings
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.data.memmaps import Index
from partitioner.data.scenes import fuse_answers, places
from partitioner.estimates.catalogue import catalogue
from partitioner.export.evaluate import accuracy, subset_accuracies
from partitioner.fusion.stacking import fit_fusion
from partitioner.networks.teacher import Teacher, teacher_spec
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import Augmentation, MemberSchedule, RunOptions, TrainingConfig
from partitioner.training.context import TrainingContext
from partitioner.training.largest_logits import Answers
from partitioner.training.members import train_members
from partitioner.training.teacher import ensure_targets, ensure_teacher

RESULT = RESULTS / "scenes-trained.json"
NETWORK, SIZE_PX, TEACHER_PX = "tf_efficientnet_lite0", 80, 112
#: Scenes of the training pictures, of which a tenth is only calibration; of those of all pictures
#: in val/ fusion is fitted on every third, and the rest is for the test.
TRAINED, FITTED = 2500, 3
EPOCHS, VARIANTS, BATCH = 2, 2, 16
#: Four networks on the camera that is best alone.
ONE = "one camera"
#: Way -> settings of the schedule.
WAYS: Mapping[str, dict[str, Any]] = {"own": {}, "shared": {"shared": True}, ONE: {}}
#: Way with a camera for each sub-model -> what the page calls it.
NAMED = {"own": "each its own network", "shared": "one shared network"}


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


def answers_of(work: TrainingContext) -> dict[int, Logits]:
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


def without(
    logits: Mapping[int, Logits], fusion: FusionWeights, targets: Index
) -> NDArray[np.float64]:
    """Points that every scene loses without each member, -100, 0 or 100, `[K, N]`."""

    def right(members: Sequence[int]) -> NDArray[np.bool_]:
        parts = {k: Contribution(None, logits[k]) for k in members}
        fused = fuse(parts, weights_for(members, "stacked", fusion))
        found: NDArray[np.bool_] = fused.argmax(axis=1) == targets
        return found

    every = right(list(logits)).astype(np.float64)
    return np.stack([100 * (every - right([k for k in logits if k != gone])) for gone in logits])


def measure_accuracies(answers: Mapping[int, Logits], targets: Index) -> dict[str, Any]:
    """Accuracies in percent of the members' answers `[N, C]` to the held-out scenes."""
    fitted = np.arange(len(targets)) % FITTED == 0
    parts = [{k: logits[rows] for k, logits in answers.items()} for rows in (fitted, ~fitted)]
    known, test = parts
    fusion = fit_fusion({k: Contribution(None, part) for k, part in known.items()}, targets[fitted])
    tested = {k: Contribution(None, part) for k, part in test.items()}
    found = subset_accuracies(tested, fusion, targets[~fitted])
    of_size = {
        size: [100 * one.stacked for one in found if len(one.members) == size]
        for size in range(1, len(answers) + 1)
    }
    lost = without(test, fusion, targets[~fitted])
    return {
        "alone": of_size[1],
        "mean_of_size": {str(size): float(np.mean(of_size[size])) for size in of_size},
        "all": of_size[len(answers)][0],
        "averaged": 100 * found[-1].bagged,
        "lost": lost.mean(axis=1).tolist(),
        "lost_error": (lost.std(axis=1) / np.sqrt(lost.shape[1])).tolist(),
        "lost_fitted": without(known, fusion, targets[fitted]).mean(axis=1).tolist(),
    }


def begin_run(
    name: str, cameras: tuple[str, ...], data: Dataset, options: argparse.Namespace, **schedule: Any
) -> TrainingContext:
    """A run before its training; all of a seed have one cache."""
    scratch = options.scratch / f"trained-{options.seed}"
    folder, cache = RunFolder(scratch / name), scratch / "cache"
    cache.mkdir(exist_ok=True)
    folder.path.mkdir(exist_ok=True)
    if not folder.cache.exists():
        folder.cache.symlink_to(cache.resolve())
    labels = (options.weights / "imagenet1k.txt").read_text().lower()
    (scratch / "labels.txt").write_text(labels)
    weights = {NETWORK: options.weights / "lite0.safetensors"}
    asked = TrainingConfig(
        options=RunOptions(
            data=data.source, seed=options.seed, autocast="fp32", teaching="kept",
            teacher_checkpoint=str(options.teacher), weights=str(scratch),
        ),
        schedule=MemberSchedule(epochs=EPOCHS, later_share=1, batch_size=BATCH, **schedule),
        augmentation=Augmentation(variants=VARIANTS),
    )  # fmt: skip
    plan = plan_of(cameras)
    inputs = TrainingInputs.of(asked, data, plan.require_teacher(), weights)
    settings = run_settings(inputs, weights)
    folder.start_or_continue(settings, plan)
    starts = {assignment.k: weights[NETWORK] for assignment in plan.assignments}
    return TrainingContext(folder, settings, plan, data, Progress(), starts)


def targets_of(work: TrainingContext, options: argparse.Namespace) -> tuple[Teacher, list[Answers]]:
    """The teacher, and its logits of the training pictures."""
    # Measured on one thread: bf16 makes the teacher three times as fast, Lite0 slower.
    quick = replace(work, settings=msgspec.structs.replace(work.settings, autocast="bf16"))
    teacher = ensure_teacher(quick, options.teacher)
    return teacher, ensure_targets(quick, teacher)


def teacher_accuracy(work: TrainingContext) -> dict[str, float]:
    """Percent that the teacher has right with one view and with all."""
    pictures, where = work.singles.test, places(work.data.test, work.data.cameras)
    logits: Logits = np.load(work.run.answers(pictures.digest[:16]))
    return {
        "one": 100 * accuracy(logits, pictures.targets),
        "all": 100 * accuracy(fuse_answers(logits, where), work.data.test.targets),
    }


def scenes_of(options: argparse.Namespace) -> str:
    """The folder of a seed's scenes."""
    scenes = options.scratch / f"trained-{options.seed}" / "scenes"
    if not scenes.exists():
        for part, target, count in (("train", "train", TRAINED), ("val", "test", None)):
            files = sorted(path for path in (options.data / part).rglob("*") if path.is_file())
            chosen = np.random.default_rng(options.seed).permutation(len(files))[:count]
            write_scenes([files[index] for index in chosen], scenes / target, options.seed)
    return str(scenes)


def of_seed(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One seed's row, after each way of training."""
    scenes = scenes_of(options)
    data = open_dataset(scenes, cameras=NAMES)
    row: dict[str, Any] = {"seed": options.seed, "test": int(len(data.test) * (1 - 1 / FITTED))}
    for name, schedule in WAYS.items():
        best = NAMES[int(np.argmax(row["own"]["alone"]))] if name == ONE else None
        cameras = (best,) * CAMERAS if best else NAMES
        seen = open_dataset(scenes, cameras=[best]) if best else data
        work = begin_run(name, cameras, seen, options, **schedule)
        train_members(work, *targets_of(work, options))
        answers = answers_of(work)
        np.savez(work.run.path / "answers.npz", *answers.values())
        row[name] = measure_accuracies(answers, work.data.test.targets)
        if not best:
            row["teacher"] = teacher_accuracy(work)
        yield row


def keep(row: dict[str, Any]) -> None:
    rows = read_result(RESULT.stem)["rows"] if RESULT.exists() else []
    others = [other for other in rows if other["seed"] != row["seed"]]
    write_json(RESULT, {"rows": sorted([*others, row], key=lambda one: int(one["seed"]))})


def figures() -> str:
    rows = read_result(RESULT.stem)["rows"]

    def line(what: str, value: Any, rows: Sequence[Any] = rows) -> dict[str, str]:
        found = [value(row) for row in rows]
        over = np.mean([value(row) - max(row["own"]["alone"]) for row in rows])
        spread = f" ({min(found):.1f}-{max(found):.1f})" if len(found) > 1 else ""
        share = f"{np.mean(found):.1f}{spread}"
        return {"what": what, "share": share, "over": f"{over:+.1f}"}

    lines = [
        line("the best camera alone", lambda row: max(row["own"]["alone"])),
        line("the same of the shared network", lambda row: max(row["shared"]["alone"])),
        *(
            line(
                f"the best camera with 4 networks, seed {row['seed']}",
                lambda r: r[ONE]["all"],
                [row],
            )
            for row in rows
            if ONE in row
        ),
    ]
    for way, what in NAMED.items():
        lines.append(line(f"**4 cameras, {what}**", lambda row, w=way: row[w]["all"]))
        lines += [
            line(f"{size} of them, mean", lambda row, w=way, n=size: row[w]["mean_of_size"][str(n)])
            for size in (2, 3)
        ]
        mean = line("outputs averaged without fitting", lambda row, w=way: row[w]["averaged"])
        lines.append(mean)
    lines.append(line("the teacher on all views", lambda row: row["teacher"]["all"]))
    columns = (
        ("answered", "{what}"), ("accuracy, mean (range of seeds)", "{share}"),
        ("over the best camera", "{over}"),
    )  # fmt: skip
    return f"{table(lines, *columns)}\n\n{losses(rows)}"


def losses(rows: Sequence[Mapping[str, Any]]) -> str:
    """Cost of every camera's absence."""
    lines = []
    for way in NAMED:
        for row in rows:
            one = row[way]
            cells = [
                f"{lost:.1f} ± {error:.1f}"
                for lost, error in zip(one["lost"], one["lost_error"], strict=True)
            ]
            lines.append(
                {"what": f"{way}, seed {row['seed']}", "chosen": f"{worst_camera(one)[0]:.1f}"}
                | dict(zip(NAMES, cells, strict=True))
            )
        every = np.mean([row[way]["lost"] for row in rows])
        worst = np.mean([max(row[way]["lost"]) for row in rows])
        found = np.array([worst_camera(row[way]) for row in rows])
        error = np.sqrt((found[:, 1] ** 2).sum()) / len(rows)
        what = f"{way}: mean {every:.1f}, worst {worst:.1f}"
        chosen_mean = f"{found[:, 0].mean():.1f} ± {error:.1f}"
        lines.append({"what": what, "chosen": chosen_mean} | dict.fromkeys(NAMES, ""))
    columns = (
        ("points lost without camera", "{what}"),
        *((str(number), f"{{{name}}}") for number, name in enumerate(NAMES)),
        ("worst in fitting", "{chosen}"),
    )
    return table(lines, *columns)


def worst_camera(one: Mapping[str, Any]) -> tuple[float, float]:
    """Points that the test scenes lose without the camera that costs most in fitting; its error.

    Of several that cost as much in fitting, the one that costs most in the test.
    """
    _, lost, error = max(zip(one["lost_fitted"], one["lost"], one["lost_error"], strict=True))
    return lost, error


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
