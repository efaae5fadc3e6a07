"""The teacher's part of a run: get it, train it if asked, and keep its answers."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn import functional as F

from mdp.files import write_bytes
from partitioner.augment import Geometry, geometry
from partitioner.data import SplitName
from partitioner.loop import Index, derived_seed, fit
from partitioner.losses import centred
from partitioner.outputs import Array, Seen, keep_outputs, load
from partitioner.submodel import draw_weights
from partitioner.teacher import Teacher, build_teacher, load_checkpoint
from partitioner.views import View, load_views
from partitioner.work import Work


@dataclass(frozen=True, slots=True)
class Targets:
    """Mean-centred teacher logits `[N, C]`: of the train split per variant, of calibration."""

    train: list[Array]
    calibration: Array


def teacher_view(work: Work, split: SplitName) -> Seen:
    """A split as the teacher sees it."""
    view = View(work.plan.teacher.shape.image_size)
    what = f"{split} split, {view.image_size} px for the teacher"
    arrays = load_views(work.data.split(split), [view], work.run.cache, work.progress, what)
    return Seen(arrays[0])


def ensure_teacher(work: Work, checkpoint: Path | None) -> Teacher:
    """The trained teacher: from the run folder if it is there, else made as the settings say.

    `checkpoint` is the user's file to start from. Raises InputError where it does not fit.
    """
    settings, spec = work.settings, work.plan.teacher
    classes = len(work.data.labels)
    torch.manual_seed(derived_seed(settings.seed, "teacher", "init"))
    if work.run.teacher.exists():
        teacher = build_teacher(spec, classes, pretrained=False)
        teacher.load_state_dict(load_file(work.run.teacher))
        return teacher.eval()
    epochs, pretrained = settings.teacher_schedule.epochs, settings.teacher.pretrained
    if pretrained:
        work.progress.note(f"getting timm's weights of {spec.name}")
    teacher = build_teacher(spec, classes, pretrained=pretrained)
    if checkpoint is not None:
        load_checkpoint(teacher, checkpoint)
    elif not pretrained:
        draw_weights(teacher.network)
    if epochs:
        _train(work, teacher)
    write_bytes(work.run.teacher, save(teacher.state_dict()))
    work.run.checkpoint("teacher").unlink(missing_ok=True)
    return teacher.eval()


def _train(work: Work, teacher: Teacher) -> None:
    """Plain supervised training, every epoch on a variant of its own."""
    seen, settings = teacher_view(work, "train"), work.settings
    targets = torch.from_numpy(work.data.train.targets)
    seed = derived_seed(settings.seed, "teacher", "variants")

    def loss_of(index: Index, epoch: int) -> dict[str, Tensor]:
        shapes = geometry(settings.augmentation, seed=seed, variant=epoch, count=len(targets))
        logits = teacher(seen.batch(index, shapes)).float()
        smoothing = settings.teacher_schedule.label_smoothing
        return {"loss": F.cross_entropy(logits, targets[index], label_smoothing=smoothing)}

    stage = work.stage("teacher", "training the teacher", settings.teacher_schedule)
    work.run.keep_curve("teacher", fit(teacher, stage, loss_of, work.progress))


def ensure_targets(work: Work, teacher: Teacher) -> Targets:
    """The teacher's answers to every variant of the train split, and to calibration and test."""
    cache = work.run.cache
    train = [cache / f"teacher-train-{variant}.npy" for variant in range(work.variants)]
    missing = [variant for variant, path in enumerate(train) if not path.exists()]
    if missing:
        seen = teacher_view(work, "train")
        count = len(work.data.train)
        what = f"teacher's answers, {len(train)} variants"
        done = (len(train) - len(missing)) * count
        with work.progress.task(what, len(train) * count, done=done) as advance:
            for variant in missing:
                shapes = work.shapes(variant)
                keep_outputs(
                    [train[variant]],
                    partial(_answers, teacher, seen, shapes),
                    count,
                    autocast=work.settings.autocast,
                    dtype=np.float16,
                    advance=advance,
                )
    for split in ("calibration", "test"):
        _ensure_plain(work, teacher, split)
    return Targets([load(path) for path in train], load(cache / "teacher-calibration.npy"))


def _ensure_plain(work: Work, teacher: Teacher, split: SplitName) -> None:
    """The teacher's fp32 answers to an unchanged split."""
    path = work.run.cache / f"teacher-{split}.npy"
    if path.exists():
        return
    seen, count = teacher_view(work, split), len(work.data.split(split))
    shapes = geometry(work.settings.augmentation, seed=0, variant=0, count=count)
    with work.progress.task(f"teacher's answers, {split} split", count) as advance:
        keep_outputs(
            [path],
            partial(_answers, teacher, seen, shapes),
            count,
            autocast="fp32",
            dtype=np.float32,
            advance=advance,
        )


def _answers(teacher: Teacher, seen: Seen, shapes: Geometry, index: Index) -> list[Tensor]:
    return [centred(teacher(seen.batch(index, shapes)))]


def accuracy(logits: Array, targets: Index) -> float:
    """Share of the rows of `logits[N, C]` whose largest entry is the target's."""
    return float((logits.argmax(axis=1) == targets).mean())
