"""A class split with fused tokens: each member knows some classes, their class tokens are fused.

DeViT's decomposition and ensemble by knowledge distillation (DEKD; Xu et al., arXiv 2309.05015),
re-implemented from the paper's description: a small ViT per subset of the classes, whose feature is
matched to the teacher's; then all class tokens are concatenated under one head, which is trained
together with the members on labels and teacher. Deviates from it:

- Members differ in size, and larger ones get more classes.
- A member has one more class, `other`, so that it also learns what not to answer.
- The paper has no rule for a member that is missing; its token is zeros here. `run_dropping` gives
  the method a fair chance at that: random members are left out of the joint phase, as in our own.
"""

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.rivals.classifier import (
    Classifier,
    TaughtLoss,
    as_tensor,
    asked,
    new_classifier,
    train,
)
from benchmarks.rivals.dealing import Matched, OwnClassesLoss, dealt, epochs_of
from benchmarks.rivals.ground import Ground
from benchmarks.rivals.outcome import Outcome, Subset, measured
from mdp.fusion.fuse import Logits, probabilities
from partitioner.data.memmaps import Array, Index
from partitioner.export.evaluate import accuracy
from partitioner.training.cached_outputs import batch, device_of
from partitioner.training.joint import arrivals
from partitioner.training.loop import derived_seed


class Fused(nn.Module):
    """Members side by side; one linear head on their features, zeros where one is missing."""

    def __init__(self, members: Sequence[Classifier], widths: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.members, self.widths = nn.ModuleList(members), list(widths)
        self.head = nn.Linear(sum(widths), outputs)

    def forward(self, pixels: Mapping[int, Tensor]) -> Tensor:
        """Logits `[B, C]` from the pixels `[B, 3, S, S]` of the members that are there."""
        features = {k: self.members[k](x).feature for k, x in pixels.items()}
        logits: Tensor = self.head(joined(features, self.widths)).float()
        return logits


def joined(features: Mapping[int, Tensor], widths: Sequence[int]) -> Tensor:
    """Features `[B, D_k]` of some members -> `[B, sum of all D_k]`, zeros for the others."""
    some = next(iter(features.values()))
    every = [features.get(k, some.new_zeros(len(some), w)) for k, w in enumerate(widths)]
    return torch.cat(every, dim=1)


class FusedLoss:
    """Labels and teacher of the fused answer; each member is missing by chance `drop`."""

    def __init__(self, ground: Ground, first: int, drop: float) -> None:
        self.pixels = [ground.train_pixels(spec) for spec in ground.shapes]
        self.taught = TaughtLoss(ground, self.pixels[0], first)
        self.first, self.drop = first, drop

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        variant = (self.first + epoch) % len(self.pixels[0])
        members = tuple(range(len(self.pixels)))
        if self.drop:
            random = np.random.default_rng(int(torch.randint(2**62, ())))
            members = arrivals(len(self.pixels), self.drop, random)
        device = device_of(network)
        logits = network({k: batch(self.pixels[k][variant], index, device) for k in members})
        return {"loss": self.taught.of(logits, index, variant)}


def run(ground: Ground) -> Outcome:
    """As published: the joint phase always has every member."""
    return _run(ground, drop=0.0)


def run_dropping(ground: Ground) -> Outcome:
    """With random members missing in the joint phase, as often as in our joint pass."""
    return _run(ground, drop=ground.work.settings.joint_schedule.drop)


def _run(ground: Ground, drop: float) -> Outcome:
    first, second = epochs_of(ground)
    deal = dealt(ground.shapes, ground.num_classes)
    members = [_member(ground, k, classes, first) for k, classes in enumerate(deal)]
    torch.manual_seed(derived_seed(ground.work.settings.seed, "class-split", "head"))
    widths = [spec.embed_dim for spec in ground.shapes]
    fused = Fused(members, widths, ground.num_classes)
    train(ground, "fused", fused, lambda: FusedLoss(ground, first, drop), second)
    return outcome(ground, _features_of(fused), widths, fused.head, deal)


def _member(ground: Ground, k: int, classes: Sequence[int], epochs: int) -> Classifier:
    spec, name = ground.shapes[k], f"class-split-{k}"
    member = new_classifier(ground, name, spec, len(classes) + 1)
    matched = Matched(member, spec.embed_dim, ground.targets.features[0].shape[1])
    train(
        ground,
        name,
        matched,
        lambda: OwnClassesLoss(ground, ground.train_pixels(spec), classes, match=True),
        epochs,
    )
    return member


def _features_of(fused: Fused) -> list[nn.Module]:
    return [fused.members[k] for k in range(len(fused.widths))]


def outcome(
    ground: Ground,
    members: Sequence[nn.Module],
    widths: Sequence[int],
    head: nn.Module,
    deal: Sequence[Sequence[int]],
) -> Outcome:
    """Every subset under `head`, with zeros for the features of the members that are missing."""
    data, count = ground.work.data, len(members)
    features = {
        split: [
            asked(member, ground.pixels(spec, split))[1]
            for member, spec in zip(members, ground.shapes, strict=True)
        ]
        for split in ("calibration", "test")
    }
    subsets: list[Subset] = [
        measured(
            chosen,
            {"fused": probabilities(_answer(head, features["test"], chosen, widths))},
            data.test.targets,
        )
        for size in range(1, count + 1)
        for chosen in combinations(range(count), size)
    ]
    everyone = _answer(head, features["calibration"], range(count), widths)
    return Outcome(
        shapes=ground.shapes,
        alone=[subset.accuracy["fused"] for subset in subsets[:count]],
        subsets=subsets,
        headline="fused",
        calibration=accuracy(everyone, data.calibration.targets),
        notes={"classes": "; ".join(",".join(map(str, classes)) for classes in deal)},
    )


def _answer(
    head: nn.Module, features: Sequence[Array], members: Sequence[int], widths: Sequence[int]
) -> Logits:
    """Fused logits `[N, C]` of the members that arrived."""
    there = {k: as_tensor(features[k]) for k in members}
    with torch.inference_mode():
        logits: Logits = head.cpu().eval()(joined(there, widths)).float().numpy()
    return logits
