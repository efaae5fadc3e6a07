"""A sub-model in training: its member and projection, its targets, and the loss of one batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from partitioner.data.memmaps import Array, Index, Views, rows
from partitioner.data.variants import Labels
from partitioner.networks.submodel import Member
from partitioner.run.settings import MemberSchedule
from partitioner.training.cached_outputs import batch, device_of
from partitioner.training.largest_logits import Answers
from partitioner.training.losses import distillation_loss, stack_loss


class StudentOutput(NamedTuple):
    """Boost head f_k `[B, C]`, bag head c_k `[B, C]`, last feature and its projection; float32."""

    boost: Tensor | None
    bag: Tensor
    feature: Tensor
    projected: Tensor | None


class Student(nn.Module):
    """Pixels in 0..255 in; the projection exists only in training."""

    def __init__(self, submodel: Member, imitated: int | None = None) -> None:
        """`imitated` is the width of the feature that the last one of `submodel` imitates."""
        super().__init__()
        self.submodel = submodel
        self.projection = None if imitated is None else nn.Linear(submodel.width, imitated)

    def forward(self, pixels: Tensor) -> StudentOutput:
        """Heads, feature and projection of pixels `[B, 3, S, S]`."""
        boost, bag, feature = self.submodel.of_normalised(self.submodel.normalise(pixels))
        projected = None if self.projection is None else self.projection(feature).float()
        boost = None if boost is None else boost.float()
        return StudentOutput(boost, bag.float(), feature.float(), projected)


@dataclass(frozen=True, slots=True)
class DistillationTargets:
    """A sub-model's inputs and targets, as arrays per variant of the train split."""

    #: The sub-model's own views `[N, S, S, 3]`.
    pixels: list[Views]
    #: Labels as probabilities `[B, C]` of the pictures `[B]` that are asked for.
    labels: Sequence[Labels | Tensor]
    #: The teacher's centred logits t `[N, C]`.
    teacher: Sequence[Answers]
    #: F_{k-1} `[N, C]`; empty without boosting or predecessors.
    before: list[Array]
    #: The predecessor's feature `[N, D]`; empty without stacking distillation or predecessors.
    imitated: list[Array]


class BatchTargets(NamedTuple):
    """The targets of one batch."""

    #: Labels as probabilities `[B, C]`.
    labels: Tensor
    #: The teacher's centred logits t `[B, C]`.
    teacher: Tensor
    #: F_{k-1} `[B, C]`, if any.
    before: Tensor | None = None
    #: The feature to imitate `[B, D]`, if any.
    imitated: Tensor | None = None


def member_losses(
    output: StudentOutput, targets: BatchTargets, schedule: MemberSchedule
) -> dict[str, Tensor]:
    """The losses of one batch by name, and as `loss` their weighted sum."""

    def of_logits(logits: Tensor) -> Tensor:
        return distillation_loss(
            logits,
            targets.labels,
            targets.teacher,
            distillation=schedule.distillation,
            temperature=schedule.temperature,
            label_smoothing=schedule.label_smoothing,
        )

    losses = {"bag": of_logits(output.bag)}
    total = losses["bag"]
    if output.boost is not None:
        # Gradient boosting (Friedman 2001, doi 10.1214/aos/1013203451) on the distillation loss of
        # F_k = F_{k-1} + f_k, with f_k fitted to the loss itself instead of its gradient.
        boosted = output.boost if targets.before is None else targets.before + output.boost
        losses["boost"] = of_logits(boosted)
        total = total + schedule.boost_weight * losses["boost"]
    if output.projected is not None and targets.imitated is not None:
        losses["stack"] = stack_loss(output.projected, targets.imitated)
        total = total + schedule.stack_weight * losses["stack"]
    return {"loss": total, **losses}


class MemberLoss:
    """The losses of one batch whose targets are kept on disk."""

    def __init__(self, targets: DistillationTargets, schedule: MemberSchedule) -> None:
        self.targets, self.schedule = targets, schedule

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        kept, device = self.targets, device_of(network)
        variant = epoch % len(kept.pixels)

        def of(arrays: list[Array]) -> Tensor | None:
            return rows(arrays[variant], index).to(device) if arrays else None

        targets = BatchTargets(
            labels=kept.labels[variant][index].to(device),
            teacher=rows(kept.teacher[variant], index).to(device),
            before=of(kept.before),
            imitated=of(kept.imitated),
        )
        output: StudentOutput = network(batch(kept.pixels[variant], index, device))
        return member_losses(output, targets, self.schedule)
