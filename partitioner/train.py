"""Decompose: teach K sub-models one after another, each on what those before it leave over."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from mdp.files import write_bytes
from mdp.plan import Assignment
from partitioner.augment import Geometry, geometry
from partitioner.data import SplitName
from partitioner.loop import Index, derived_seed, fit
from partitioner.losses import bag_loss, boost_loss, stack_loss
from partitioner.outputs import BATCH, Array, Seen, keep_outputs, load, rows
from partitioner.submodel import MEAN, STD, MemberOutput, Normalise, SubModel
from partitioner.teach import Targets
from partitioner.views import load_views, view_of
from partitioner.work import Work

#: Pictures, at most, from which the variance of the teacher's logits is taken.
_MEASURED = 20_000
#: Keeps a teacher that answers everything alike from being divided by.
_LEAST_VARIANCE = 1e-6


class Student(nn.Module):
    """A sub-model in training: pixels in 0..255 in, and the projection that imitates."""

    def __init__(self, submodel: SubModel, width: int, width_before: int | None) -> None:
        super().__init__()
        self.submodel = submodel
        self.normalise = Normalise(MEAN, STD)
        self.projection = nn.Linear(width, width_before) if width_before else None

    def forward(self, pixels: Tensor) -> MemberOutput:
        """Heads and feature of pixels `[B, 3, S, S]`, in float32."""
        output = self.submodel(self.normalise(pixels))
        return MemberOutput(*(part.float() for part in output))


@dataclass(frozen=True, slots=True)
class Before:
    """What the members before k leave behind, per variant: F_{k-1} `[N, C]`, h_{k-1} `[N, D]`."""

    sums: list[Array]
    features: list[Array]


def train_members(work: Work, targets: Targets) -> None:
    """Train every sub-model that the run folder does not have yet, in boosting order."""
    assignments = work.plan.assignments
    for assignment in assignments:
        k = assignment.k
        if not work.run.member(k).exists():
            seen = member_views(work, assignment)
            _train_member(work, assignment, targets, seen)
        if k + 1 < len(assignments):
            _ensure_left_behind(work, assignment)
            _forget(work, k - 1)


def member_views(work: Work, assignment: Assignment, split: SplitName = "train") -> Seen:
    """A split as one device sees it."""
    views = [view_of(a) for a in work.plan.assignments]
    what = f"{split} split, for the sub-models"
    arrays = load_views(work.data.split(split), views, work.run.cache, work.progress, what)
    return Seen(arrays[assignment.k], assignment.region)


def load_member(work: Work, assignment: Assignment) -> SubModel:
    """The trained sub-model k."""
    submodel = SubModel(assignment.submodel, len(work.data.labels))
    submodel.load_state_dict(load_file(work.run.member(assignment.k)))
    return submodel.eval()


def _train_member(work: Work, assignment: Assignment, targets: Targets, seen: Seen) -> None:
    k, settings = assignment.k, work.settings
    before = _left_behind(work, k - 1) if k else None
    torch.manual_seed(derived_seed(settings.seed, "member", k, "init"))
    student = Student(
        SubModel(assignment.submodel, len(work.data.labels)),
        assignment.submodel.embed_dim,
        before.features[0].shape[1] if before else None,
    )
    loss_of = _MemberLoss(work, student, targets, seen, before)
    what = f"training sub-model {k} for {assignment.device}"
    stage = work.stage(f"member-{k}", what, settings.schedule)
    work.run.keep_curve(f"member-{k}", fit(student, stage, loss_of, work.progress))
    _report(work, assignment, student)
    write_bytes(work.run.member(k), save(student.submodel.state_dict()))
    stage.checkpoint.unlink(missing_ok=True)


class _MemberLoss:
    """The weighted sum of the boost, stack and bag losses of one batch."""

    def __init__(
        self, work: Work, student: Student, targets: Targets, seen: Seen, before: Before | None
    ) -> None:
        self.student, self.seen, self.before = student, seen, before
        self.schedule = work.settings.schedule
        self.labels = torch.from_numpy(work.data.train.targets)
        self.targets = targets.train
        self.shapes = [work.shapes(variant) for variant in range(work.variants)]
        self.variance = max(self._variance(), _LEAST_VARIANCE)

    def _variance(self) -> float:
        """Mean square of the teacher's centred logits, by which the boost loss is divided.

        The loss is then the share of the teacher that is still unexplained. Dividing by the
        residual's own variance was tried: late members then chase its noise, and their bag heads
        lose 1 to 5 points on the digits.
        """
        some = np.arange(0, len(self.labels), math.ceil(len(self.labels) / _MEASURED))
        return float(rows(self.targets[0], some).square().mean())

    def _residual(self, variant: int, index: Index) -> Tensor:
        target = rows(self.targets[variant], index)
        return target - rows(self.before.sums[variant], index) if self.before else target

    def __call__(self, index: Index, epoch: int) -> dict[str, Tensor]:
        variant, schedule = epoch % len(self.shapes), self.schedule
        output = self.student(self.seen.batch(index, self.shapes[variant]))
        losses = {
            "boost": boost_loss(output.boost, self._residual(variant, index)) / self.variance,
            "bag": bag_loss(
                output.bag,
                self.labels[index],
                rows(self.targets[variant], index),
                distillation=schedule.distillation,
                temperature=schedule.temperature,
                label_smoothing=schedule.label_smoothing,
            ),
        }
        total = schedule.boost_weight * losses["boost"] + schedule.bag_weight * losses["bag"]
        if self.before is not None and self.student.projection is not None:
            projected = self.student.projection(output.feature).float()
            imitated = rows(self.before.features[variant], index)
            losses["stack"] = stack_loss(projected, imitated)
            total = total + schedule.stack_weight * losses["stack"]
        return {"loss": total, **losses}


def _report(work: Work, assignment: Assignment, student: Student) -> None:
    """Say how good the finished sub-model is on its own, on the calibration split."""
    seen = member_views(work, assignment, "calibration")
    targets = work.data.calibration.targets
    shapes = geometry(work.settings.augmentation, seed=0, variant=0, count=len(targets))
    right = 0
    for index in np.array_split(np.arange(len(targets)), math.ceil(len(targets) / BATCH)):
        with torch.inference_mode():
            chosen = student(seen.batch(index, shapes)).bag.argmax(dim=1).numpy()
        right += int((chosen == targets[index]).sum())
    work.progress.note(
        f"sub-model {assignment.k} for {assignment.device}: {right / len(targets):.1%} alone "
        f"on {len(targets)} calibration pictures"
    )


def _ensure_left_behind(work: Work, assignment: Assignment) -> None:
    """Keep F_k and h_k of every variant, so that no later training runs a predecessor again."""
    k, count = assignment.k, len(work.data.train)
    missing = [v for v in range(work.variants) if not all(p.exists() for p in _kept(work, k, v))]
    if not missing:
        return
    student = Student(load_member(work, assignment), 1, None).eval()
    seen = member_views(work, assignment)
    before = _left_behind(work, k - 1) if k else None
    what, done = f"sub-model {k}'s outputs", (work.variants - len(missing)) * count
    with work.progress.task(what, work.variants * count, done=done) as advance:
        for variant in missing:
            shapes = work.shapes(variant)

            def outputs_of(
                index: Index, variant: int = variant, shapes: Geometry = shapes
            ) -> list[Tensor]:
                output = student(seen.batch(index, shapes))
                boost = output.boost
                if before is not None:
                    boost = boost + rows(before.sums[variant], index)
                return [boost, output.feature]

            keep_outputs(
                _kept(work, k, variant),
                outputs_of,
                count,
                autocast=work.settings.autocast,
                dtype=np.float16,
                advance=advance,
            )


def _kept(work: Work, k: int, variant: int) -> tuple[Path, Path]:
    """Where F_k and h_k of one variant lie."""
    cache = work.run.cache
    return cache / f"sum-{k}-{variant}.npy", cache / f"feature-{k}-{variant}.npy"


def _left_behind(work: Work, k: int) -> Before:
    files = [_kept(work, k, variant) for variant in range(work.variants)]
    return Before([load(sums) for sums, _ in files], [load(features) for _, features in files])


def _forget(work: Work, k: int) -> None:
    """Remove what only sub-model k + 1 needed."""
    for variant in range(work.variants):
        for path in _kept(work, k, variant):
            path.unlink(missing_ok=True)
