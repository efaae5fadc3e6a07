"""A sub-model in training: its trunk and heads, what it imitates, and the loss of one batch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from partitioner.arrays import Array, Index, Views, rows
from partitioner.losses import boost_loss, divergence, stack_loss, taught_loss
from partitioner.outputs import batch, device_of
from partitioner.settings import MemberSchedule
from partitioner.submodel import MEAN, STD, Normalise, SubModel

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

    def __init__(self, submodel: SubModel, imitated: Sequence[int] = ()) -> None:
        """`imitated` are the widths of the features that the last one of `submodel` imitates."""
        super().__init__()
        self.submodel = submodel
        self.normalise = Normalise(MEAN, STD)
        width = submodel.spec.embed_dim
        self.projections = nn.ModuleList(nn.Linear(width, wanted) for wanted in imitated)

    def forward(self, pixels: Tensor) -> StudentOutput:
        """Heads, feature and projections of pixels `[B, 3, S, S]`."""
        boost, bag, feature = self.submodel(self.normalise(pixels))
        projected = [projection(feature).float() for projection in self.projections]
        return StudentOutput(boost.float(), bag.float(), feature.float(), projected)


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one sub-model is trained on, as arrays per variant of the train split."""

    #: Its own views `[N, S, S, 3]`.
    pixels: list[Views]
    #: Labels as probabilities `[N, C]`.
    labels: list[Tensor]
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
        teacher = rows(lesson.teacher[variant], index).to(device)
        losses = {
            "boost": self._boost(output.boost, teacher, variant, index),
            "bag": taught_loss(
                output.bag,
                lesson.labels[variant][index].to(device),
                teacher,
                distillation=schedule.distillation,
                temperature=schedule.temperature,
                label_smoothing=schedule.label_smoothing,
            ),
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

    def _boost(self, boost: Tensor, teacher: Tensor, variant: int, index: Index) -> Tensor:
        before = torch.zeros_like(boost)
        if self.lesson.before:
            before = rows(self.lesson.before[variant], index).to(boost.device)
        if self.schedule.boost_target == "probabilities":
            return divergence(before + boost, teacher, self.schedule.temperature)
        return boost_loss(boost, self.schedule.shrinkage * (teacher - before)) / self.scale
