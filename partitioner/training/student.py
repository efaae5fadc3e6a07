"""A sub-model in training: its trunk and heads, what it imitates, and the loss of one batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from partitioner.data.memmaps import Array, Index, Views, rows
from partitioner.data.variants import Labels
from partitioner.networks.members import Member
from partitioner.run.settings import MemberSchedule
from partitioner.training.cached_outputs import batch, device_of
from partitioner.training.losses import boost_loss, stack_loss, taught_loss

#: Keeps a teacher that answers everything alike from being divided by.
_LEAST_VARIANCE = 1e-6
#: Pictures, at most, from which the variance of the teacher's logits is taken.
_MEASURED = 20_000


class StudentOutput(NamedTuple):
    """Boost head f_k `[B, C]`, bag head c_k `[B, C]`, last feature and its projections; float32."""

    boost: Tensor
    bag: Tensor
    feature: Tensor
    projected: list[Tensor]


class Student(nn.Module):
    """Pixels in 0..255 in; the projections, one per imitated feature, exist only in training."""

    def __init__(self, submodel: Member, imitated: Sequence[int] = ()) -> None:
        """`imitated` are the widths of the features that the last one of `submodel` imitates."""
        super().__init__()
        self.submodel = submodel
        self.projections = nn.ModuleList(nn.Linear(submodel.width, wanted) for wanted in imitated)

    def forward(self, pixels: Tensor) -> StudentOutput:
        """Heads, feature and projections of pixels `[B, 3, S, S]`."""
        boost, bag, feature = self.submodel.of_normalised(self.submodel.normalise(pixels))
        projected = [projection(feature).float() for projection in self.projections]
        return StudentOutput(boost.float(), bag.float(), feature.float(), projected)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one sub-model is trained on, as arrays per variant of the train split."""

    #: Its own views `[N, S, S, 3]`.
    pixels: list[Views]
    #: Labels as probabilities `[B, C]` of the pictures `[B]` that are asked for.
    labels: Sequence[Labels | Tensor]
    #: The teacher's centred logits t `[N, C]`.
    teacher: list[Array]
    #: F_{k-1} `[N, C]`; empty for the first sub-model.
    before: list[Array]
    #: Features to imitate, `[N, D]` each; as many per variant as the student has projections.
    imitated: list[list[Array]]

    @property
    def variants(self) -> int:
        """How many variants there are; epoch e sees variant e modulo this."""
        return len(self.pixels)

    def scale(self) -> float:
        """Mean square of the teacher's centred logits, by which the boost loss is divided.

        The loss is then the share of the teacher that is still unexplained. Dividing by the
        residual's own variance was tried: late members then chase its noise, and their bag heads
        lose 1 to 5 points on the digits.
        """
        every = math.ceil(len(self.teacher[0]) / _MEASURED)
        known = np.asarray(self.teacher[0][::every], dtype=np.float32)
        return max(float(np.square(known).mean()), _LEAST_VARIANCE)


class MemberLoss:
    """The weighted sum of the boost, stack and bag losses of one batch."""

    def __init__(self, lesson: Lesson, schedule: MemberSchedule) -> None:
        self.lesson, self.schedule, self.scale = lesson, schedule, lesson.scale()

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        lesson, schedule, variant = self.lesson, self.schedule, epoch % self.lesson.variants
        device = device_of(network)
        output: StudentOutput = network(batch(lesson.pixels[variant], index, device))
        labels = lesson.labels[variant][index].to(device)
        teacher = rows(lesson.teacher[variant], index).to(device)
        before = torch.zeros_like(output.boost)
        if lesson.before:
            before = rows(lesson.before[variant], index).to(device)
        losses = {
            "boost": self._boost(output.boost, before, labels, teacher),
            "bag": self._taught(output.bag, labels, teacher),
        }
        total = schedule.boost_weight * losses["boost"] + schedule.bag_weight * losses["bag"]
        if output.projected:
            distances = [
                stack_loss(projected, rows(feature, index).to(device))
                for projected, feature in zip(
                    output.projected, lesson.imitated[variant], strict=True
                )
            ]
            losses["stack"] = torch.stack(distances).mean()
            total = total + schedule.stack_weight * losses["stack"]
        return {"loss": total, **losses}

    def _boost(self, boost: Tensor, before: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        """How far F_k = F_{k-1} + f_k is from what it is to be.

        In probabilities this is gradient boosting on the loss that counts (Friedman 2001,
        doi 10.1214/aos/1013203451), with f_k fitted to the loss itself instead of its gradient: a
        picture that the predecessors get right hardly counts any more.
        """
        if self.schedule.boost_target == "probabilities":
            return self._taught(before + boost, labels, teacher)
        return boost_loss(boost, self.schedule.shrinkage * (teacher - before)) / self.scale

    def _taught(self, logits: Tensor, labels: Tensor, teacher: Tensor) -> Tensor:
        return taught_loss(
            logits,
            labels,
            teacher,
            distillation=self.schedule.distillation,
            temperature=self.schedule.temperature,
            label_smoothing=self.schedule.label_smoothing,
        )
