"""What members see, decided before they are trained: calibration pictures, judged by what is given.

A network that starts from pretrained weights with rows for the data's classes judges for itself;
for any other member the teacher does, on the member's pixels enlarged to its own picture size.
"""

import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mdp.files import Record, read_json, write_json
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import NetworkSpec, Plan, Region, Spec
from mdp.fusion.fuse import Contribution
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, thinned
from partitioner.data.memmaps import Views
from partitioner.export.write import ServedMember
from partitioner.fusion.region_choice import CHOSEN_ON, chosen_regions
from partitioner.networks.families import Backbone, FamilyMember, cut_classifier, own_classifier
from partitioner.planner.make_plan import Planned, with_regions
from partitioner.regions import REGIONS
from partitioner.run.settings import Asked
from partitioner.run.weights import weights_of
from partitioner.run_setup import class_rows
from partitioner.training.cached_outputs import BATCH
from partitioner.training.compute import training_device
from partitioner.training.distributed import first_then_others, together
from partitioner.training.teacher import GivenTeacher


class _Chosen(Record, frozen=True):
    regions: list[Region]


class _Enlarged(nn.Module):
    """A teacher that is shown pictures of another size: uint8 `[N, S, S, 3]` -> logits."""

    def __init__(self, given: GivenTeacher) -> None:
        super().__init__()
        self.teacher, self.size = given.build(), given.spec.shape.image_size

    def forward(self, images: Tensor) -> tuple[Tensor]:
        pixels = images.permute(0, 3, 1, 2).float()
        return (self.teacher(F.interpolate(pixels, size=self.size, mode="bilinear")),)


def seen_on_data(
    planned: Planned, data: Dataset, asked: Asked, given: GivenTeacher | None
) -> Planned:
    """The plan with the regions that suit its members best on the data.

    With a teacher that is yet to be trained from nothing the plan's regions stay.
    """
    if given is None:
        return planned
    named = [a.network.name for a in planned.plan.assignments if a.network is not None]
    with together():
        weights = weights_of(asked.options.weights_folder, dict.fromkeys(named))
        rows = class_rows(asked, data, weights)
    # The first process's answer is in the run folder when the others ask.
    with first_then_others():
        regions = tried_regions(planned.plan, given, weights, rows)
    return with_regions(planned, regions)


def tried_regions(
    plan: Plan,
    given: GivenTeacher,
    weights: Mapping[str, Path],
    rows: Mapping[str, list[int]],
) -> list[Region]:
    """The regions that suit the plan's members best on the data; see `chosen_regions`.

    `weights`, and the `rows` of their classifiers, are of networks by name. What was found is kept
    in the run's cache. Raises InputError for weights that do not fit.
    """
    specs, run, progress = [a.spec for a in plan.assignments], given.run, given.progress
    pictures = thinned(given.data.calibration, CHOSEN_ON)
    facts = msgspec.structs.replace(given.facts, file=None)
    own = {name: sha256_of(weights[name]) for name in sorted(rows)}
    made_of = msgspec.json.encode([specs, own, facts, pictures.digest], order="sorted")
    kept = run.cache / f"regions-{hashlib.sha256(made_of).hexdigest()[:16]}.json"
    if kept.exists():
        return read_json(kept, _Chosen).regions

    @cache
    def judge(name: str, image_size: int) -> nn.Module:
        if name:
            return _start(Backbone(name, image_size), weights[name], rows[name])
        return _Enlarged(given)

    @cache
    def answers(name: str, image_size: int, region: Region) -> Contribution:
        views, what = [View(image_size, each) for each in REGIONS], f"{image_size} px, in parts"
        pixels = load_views(pictures, views, run.cache, progress, what)[REGIONS.index(region)]
        return _logits(judge(name, image_size if name else 0), pixels)

    def seen(k: int, region: Region) -> Contribution:
        name = _name(specs[k])
        return answers(name if name in rows else "", specs[k].image_size, region)

    progress.note(f"choosing what {len(specs)} sub-models see, on {len(pictures):,} pictures")
    regions = chosen_regions([REGIONS] * len(specs), seen, pictures.targets)
    write_json(kept, _Chosen(regions))
    return regions


def _name(spec: Spec) -> str:
    return spec.name if isinstance(spec, NetworkSpec) else ""


def _start(backbone: Backbone, weights: Path, rows: list[int]) -> nn.Module:
    """A pretrained network as its training would find it."""
    classifier = own_classifier(backbone.name, weights)
    assert classifier is not None
    member = FamilyMember(backbone, len(rows), weights)
    member.start_heads(cut_classifier(classifier, rows))
    return ServedMember(member)


def _logits(judge: nn.Module, pixels: Views) -> Contribution:
    device = training_device()
    judge.eval().to(device)
    found: list[Tensor] = []
    with torch.inference_mode():
        for start in range(0, len(pixels), BATCH):
            part = np.array(pixels[start : start + BATCH])
            (logits,) = judge(torch.from_numpy(part).to(device))
            found.append(logits.float().cpu())
    return Contribution(None, torch.cat(found).numpy())
