"""A class split of pruned teachers: each member is the teacher, cut to its shape for its classes.

ED-ViT (Liu et al., arXiv 2410.11650), re-implemented from the paper's description: each member
starts as the teacher pruned by what matters for its classes, is retrained on them, and an MLP fuses
the frozen members' outputs. Deviates from it:

- Importance is the energy of the activations on pictures of the member's classes (times the norm of
  the weights that read them), where the paper compares outputs with and without a part.
- Layers are chosen evenly, and picture and patch size are adapted, both by the product's `inherit`.
- A member has one more class, `other`, and learns from the teacher too, as all rivals do.
- The members' outputs are their class tokens and not their scores: they tell the MLP more.
- A missing member's output is zeros; the paper has no rule for it.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.rivals.class_split import joined, outcome
from benchmarks.rivals.classifier import Classifier, TaughtLoss, new_classifier, train
from benchmarks.rivals.dealing import OwnClassesLoss, dealt, epochs_of
from benchmarks.rivals.ground import Ground
from benchmarks.rivals.outcome import Outcome
from benchmarks.rivals.pruning import pruned_for
from partitioner.data.memmaps import Index, Views, load, rows
from partitioner.networks.weight_init import inherit
from partitioner.training.cached_outputs import batch, device_of, keep_outputs
from partitioner.training.loop import derived_seed

#: Pictures of a member's classes, at most, by which importance is measured.
_LOOKED_AT = 1024


def run(ground: Ground) -> Outcome:
    first, second = epochs_of(ground)
    deal = dealt(ground.shapes, ground.num_classes)
    members = [_member(ground, k, classes, first) for k, classes in enumerate(deal)]
    torch.manual_seed(derived_seed(ground.work.settings.seed, "class-pruned", "mlp"))
    widths = [spec.embed_dim for spec in ground.shapes]
    mlp = nn.Sequential(
        nn.Linear(sum(widths), sum(widths) // 2),
        nn.GELU(),
        nn.Linear(sum(widths) // 2, ground.num_classes),
    )
    train(ground, "mlp", mlp, lambda: _FusionLoss(ground, members, first), second)
    shutil.rmtree(ground.work.run.left_behind, ignore_errors=True)
    return outcome(ground, members, widths, mlp, deal)


def _member(ground: Ground, k: int, classes: Sequence[int], epochs: int) -> Classifier:
    spec, name = ground.shapes[k], f"class-pruned-{k}"
    member = new_classifier(ground, name, spec, len(classes) + 1)
    own = np.flatnonzero(np.isin(ground.work.data.train.targets, classes))
    looked_at = own[:: max(1, len(own) // _LOOKED_AT)]
    pixels = ground.work.variants.view(ground.work.teacher_view, 0)
    device = device_of(ground.teacher)
    shown = torch.cat(
        [batch(pixels, part, torch.device("cpu")) for part in np.array_split(looked_at, 4)]
    )
    inherit(member.trunk, pruned_for(ground.teacher, spec, shown.to(device)))
    train(
        ground,
        name,
        member,
        lambda: OwnClassesLoss(ground, ground.train_pixels(spec), classes, match=False),
        epochs,
    )
    return member


class _FusionLoss:
    """Labels and teacher of what the MLP makes of the frozen members' features."""

    def __init__(self, ground: Ground, members: Sequence[Classifier], first: int) -> None:
        self.widths = [spec.embed_dim for spec in ground.shapes]
        every = range(ground.variants)
        self.features = [[load(_kept(ground, members, k, v)) for v in every]
                         for k in range(len(members))]  # fmt: skip
        self.taught, self.first = TaughtLoss(ground, ground.train_pixels(ground.shapes[0])), first

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        variant, device = (self.first + epoch) % len(self.features[0]), device_of(network)
        known = {k: rows(kept[variant], index).to(device) for k, kept in enumerate(self.features)}
        logits = network(joined(known, self.widths)).float()
        return {"loss": self.taught.of(logits, index, variant)}


def _kept(ground: Ground, members: Sequence[Classifier], k: int, variant: int) -> Path:
    """Where member k's features of one variant lie; made where missing."""
    work = ground.work
    path = work.run.left_behind / f"feature-{k}-{variant}.npy"
    if path.exists():
        return path
    pixels, member = ground.train_pixels(ground.shapes[k])[variant], members[k].eval()
    what = f"member {k}'s features of variant {variant}"
    with work.progress.task(what, len(pixels)) as advance:
        keep_outputs(
            [path],
            _Features(member, pixels),
            len(pixels),
            arithmetic=work.settings.autocast,
            dtype=np.float16,
            advance=advance,
        )
    return path


@dataclass(frozen=True, slots=True)
class _Features:
    """A member's features of the pictures `index`."""

    member: Classifier
    pixels: Views

    def __call__(self, index: Index) -> list[Tensor]:
        return [self.member(batch(self.pixels, index, device_of(self.member))).feature]
