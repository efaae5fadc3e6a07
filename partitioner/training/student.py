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
LEAST_VARIANCE = 1e-6
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
        return max(float(np.square(known).mean()), LEAST_VARIANCE)


class Taught(NamedTuple):
    """What a sub-model is taught about one batch."""

    #: Labels as probabilities `[B, C]`.
    labels: Tensor
    #: The teacher's centred logits t `[B, C]`.
    teacher: Tensor
    #: F_{k-1} `[B, C]`, where there are predecessors.
    before: Tensor | None
    #: Features to imitate, `[B, D]` each.
    imitated: Sequence[Tensor]


def member_losses(
    output: StudentOutput, taught: Taught, schedule: MemberSchedule, scale: float
) -> dict[str, Tensor]:
    """The losses of one batch by name, and as `loss` their weighted sum.

    `scale` is the mean square of the teacher's centred logits.
    """

    def of_logits(logits: Tensor) -> Tensor:
        return taught_loss(
            logits,
            taught.labels,
            taught.teacher,
            distillation=schedule.distillation,
            temperature=schedule.temperature,
            label_smoothing=schedule.label_smoothing,
        )

    before = torch.zeros_like(output.boost) if taught.before is None else taught.before
    if schedule.boost_target == "probabilities":
        # How far F_k = F_{k-1} + f_k is from what it is to be. In probabilities this is gradient
        # boosting on the loss that counts (Friedman 2001, doi 10.1214/aos/1013203451), with f_k
        # fitted to the loss itself instead of its gradient: a picture that the predecessors get
        # right hardly counts any more.
        boost = of_logits(before + output.boost)
    else:
        boost = boost_loss(output.boost, schedule.shrinkage * (taught.teacher - before)) / scale
    losses = {"boost": boost, "bag": of_logits(output.bag)}
    total = schedule.boost_weight * losses["boost"] + schedule.bag_weight * losses["bag"]
    if output.projected:
        distances = [
            stack_loss(projected, feature)
            for projected, feature in zip(output.projected, taught.imitated, strict=True)
        ]
        losses["stack"] = torch.stack(distances).mean()
        total = total + schedule.stack_weight * losses["stack"]
    return {"loss": total, **losses}


class MemberLoss:
    """The losses of one batch whose teaching is kept."""

    def __init__(self, lesson: Lesson, schedule: MemberSchedule) -> None:
        self.lesson, self.schedule, self.scale = lesson, schedule, lesson.scale()

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        lesson, variant = self.lesson, epoch % self.lesson.variants
        device = device_of(network)
        output: StudentOutput = network(batch(lesson.pixels[variant], index, device))
        known = lesson.imitated[variant] if output.projected else []
        taught = Taught(
            labels=lesson.labels[variant][index].to(device),
            teacher=rows(lesson.teacher[variant], index).to(device),
            before=rows(lesson.before[variant], index).to(device) if lesson.before else None,
            imitated=[rows(feature, index).to(device) for feature in known],
        )
        return member_losses(output, taught, self.schedule, self.scale)
