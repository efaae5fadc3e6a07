"""Classes dealt to the members, and a member that learns its own and rejects all others."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from benchmarks.rivals.classifier import taught
from benchmarks.rivals.ground import Ground
from mdp.errors import InputError
from mdp.formats.plan import SubModelSpec
from partitioner.data.memmaps import Index, Views, rows
from partitioner.estimates.macs import macs
from partitioner.training.cached_outputs import batch, device_of
from partitioner.training.losses import stack_loss

#: Share of the epochs in which every member learns its own classes; the rest is for the fusion.
OWN_SHARE = 0.7
#: Weight of imitating the teacher's feature, as in our stacking distillation.
MATCHING = 0.5


def epochs_of(ground: Ground) -> tuple[int, int]:
    """Epochs of the first and of the second phase, at least one each; raises InputError."""
    epochs = ground.work.settings.schedule.epochs
    if epochs < 2:
        raise InputError(f"--epochs: expected at least 2 for two phases, got {epochs}")
    first = min(max(1, round(OWN_SHARE * epochs)), epochs - 1)
    return first, epochs - first


def dealt(shapes: Sequence[SubModelSpec], num_classes: int) -> list[tuple[int, ...]]:
    """Classes per member, in order, in proportion to their cost, at least one for each.

    By largest remainders; raises InputError where there are fewer classes than members.
    """
    if num_classes < len(shapes):
        raise InputError(
            f"--data: expected at least {len(shapes)} classes for a class split, got {num_classes}"
        )
    costs = [macs(spec, num_classes) for spec in shapes]
    free = num_classes - len(shapes)
    exact = [free * cost / sum(costs) for cost in costs]
    counts = [1 + math.floor(share) for share in exact]
    order = sorted(range(len(shapes)), key=lambda k: math.floor(exact[k]) - exact[k])
    for k in order[: num_classes - sum(counts)]:
        counts[k] += 1
    ends = [sum(counts[: k + 1]) for k in range(len(counts))]
    return [tuple(range(end - count, end)) for count, end in zip(counts, ends, strict=True)]


def own_labels(labels: Tensor, classes: Sequence[int]) -> Tensor:
    """Probabilities `[B, C]` -> `[B, len(classes) + 1]`; the last one is all other classes."""
    own = labels[:, list(classes)]
    return torch.cat([own, 1 - own.sum(dim=1, keepdim=True)], dim=1)


def own_logits(logits: Tensor, classes: Sequence[int], temperature: float) -> Tensor:
    """The teacher's `[B, C]` -> `[B, len(classes) + 1]`, others summed up at that temperature."""
    others = [c for c in range(logits.shape[1]) if c not in classes]
    rest = (logits[:, others] / temperature).logsumexp(dim=1, keepdim=True) * temperature
    # A member with every class has none to reject: -30 is next to nothing and still finite.
    return torch.cat([logits[:, list(classes)], rest.clamp_min(-30)], dim=1)


class Matched(nn.Module):
    """A member with a projection to the teacher's feature, which exists only in training."""

    def __init__(self, member: nn.Module, width: int, wanted: int) -> None:
        super().__init__()
        self.member, self.projection = member, nn.Linear(width, wanted)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        logits, feature = self.member(pixels)
        return logits, self.projection(feature).float()


class OwnClassesLoss:
    """Labels and teacher, both restricted to a member's classes and to `other`.

    Also the distance to the teacher's feature, where the network is a `Matched` one.
    """

    def __init__(
        self, ground: Ground, pixels: Sequence[Views], classes: Sequence[int], *, match: bool
    ) -> None:
        self.ground, self.pixels, self.match = ground, pixels, match
        schedule = ground.work.settings.schedule
        every = range(ground.variants)
        self.labels = [ground.work.variants.labels(v) for v in every]
        self.classes, self.schedule = classes, schedule

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        variant, device = epoch % len(self.pixels), device_of(network)
        logits, feature = network(batch(self.pixels[variant], index, device))
        teacher = rows(self.ground.targets.train[variant], index).to(device)
        wanted = own_logits(teacher, self.classes, self.schedule.temperature)
        labels = own_labels(self.labels[variant][index], self.classes).to(device)
        own = taught(logits, labels, wanted, self.schedule)
        if not self.match:
            return {"loss": own}
        known = rows(self.ground.targets.features[variant], index).to(device)
        distance = stack_loss(feature, known)
        return {"loss": own + MATCHING * distance, "own": own, "matching": distance}
