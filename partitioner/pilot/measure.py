"""Measure networks with given weights on the user's own pictures, and fit classifiers to them.

Nothing but a linear classifier on frozen features is fitted, and its accuracy is that on pictures
left out of the fit. All depths of a plain ViT are measured in one pass at each picture size.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from mdp.errors import InputError
from mdp.formats.plan import SubModelSpec
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, PictureSet, thinned
from partitioner.data.memmaps import Views
from partitioner.data.scenes import Places, places, single_pictures
from partitioner.networks.families import Backbone, FamilyMember, Pooling
from partitioner.networks.teacher import teacher_spec
from partitioner.pilot.candidates import (
    DeviceLatency,
    FrozenNetwork,
    candidates,
    check_fit,
    remark_on_unknown,
    remarks_on_extrapolation,
)
from partitioner.pilot.choice import ChosenNetworks, choose
from partitioner.pilot.features import Features, cut_features, network_features
from partitioner.pilot.linear import (
    Array,
    HeldOutPredictions,
    Index,
    fit,
    interval,
    leave_groups_out,
)
from partitioner.run.progress import Advance, Progress

#: Most pictures that candidates are compared on.
COMPARED = 1000
#: Pictures of each class, or scenes, that are compared in any case, where there are so many.
LEAST = 5


@dataclass(frozen=True, slots=True)
class Pictures:
    """Single training pictures: classes, and where they stand in scenes if they do."""

    pictures: PictureSet
    #: Pictures of one group are left out together: a scene, or a picture by itself.
    groups: Index
    #: None without scenes.
    places: Places | None

    @classmethod
    def of(cls, data: Dataset, limit: int) -> "Pictures":
        """At most `limit` training pictures, in scenes with a picture of every camera."""
        if not data.cameras:
            kept = thinned(data.train, limit, least=LEAST)
            return cls(kept, np.arange(len(kept)), None)
        whole = thinned(_whole_scenes(data), limit // len(data.cameras), least=LEAST)
        where = places(whole, data.cameras)
        return cls(single_pictures(replace(data, train=whole)).train, where.scene, where)

    def remark_on_single(self, labels: Sequence[str]) -> str:
        """One line on classes of which nothing is left where one is left out; empty without any."""
        first = np.unique(self.groups, return_index=True)[1]
        counts = np.bincount(self.pictures.targets[first], minlength=len(labels))
        single = [label for label, count in zip(labels, counts, strict=True) if count == 1]
        what = "picture" if self.places is None else "scene"
        return (
            f"one training {what} alone, so that it counts as wrong in what is predicted: "
            f"{', '.join(single)}"
            if single
            else ""
        )

    def rows_of(self, camera: str | None) -> slice:
        """The pictures of one camera, ascending by scene; all of them without scenes."""
        return slice(None) if self.places is None else self.places.of(camera)


@dataclass(frozen=True, slots=True)
class Measured:
    """A candidate and its predictions for pictures left out."""

    candidate: FrozenNetwork
    left_out: HeldOutPredictions


@dataclass(frozen=True, slots=True)
class Pilot:
    """Everything that was measured, and the choice made by it."""

    measured: dict[int, Measured]
    #: The class of every single picture.
    targets: Index
    choice: ChosenNetworks
    #: Predicted milliseconds by device, of what was chosen there.
    latency_ms: dict[str, float]
    #: Pictures or scenes that it was measured on.
    count: int

    def accuracy_of(self, row: int) -> float:
        """Share of right answers of a candidate to single pictures left out of its fit."""
        found = self.measured[row].left_out.log_probabilities.argmax(axis=1)
        return float((found == self.targets).mean())

    def predict_words(self, tested: int) -> str:
        """The accuracy together, with its intervals on many new pictures and on `tested` ones."""
        right = round(self.choice.together * self.count)
        many, like = interval(right, self.count), interval(right, self.count, tested)
        return (
            f"predicted {self.choice.together:.1%} ({many[0]:.1%} to {many[1]:.1%} on many new "
            f"pictures, {like[0]:.1%} to {like[1]:.1%} on {tested:,})"
        )

    def to_json(self) -> dict[str, Any]:
        """Every candidate's accuracy, and the choice."""
        low, high = interval(round(self.choice.together * self.count), self.count)
        return {
            "pictures": self.count,
            "candidates": [
                {
                    "network": one.candidate.name,
                    "image_size": one.candidate.spec.image_size,
                    "depth": one.candidate.depth or None,
                    "accuracy": self.accuracy_of(row),
                }
                for row, one in sorted(self.measured.items())
            ],
            "chosen": {
                device: {
                    "network": self.measured[row].candidate.words,
                    "accuracy": self.choice.alone[device],
                    "latency_ms": self.latency_ms[device],
                }
                for device, row in self.choice.rows.items()
            },
            "together": {"accuracy": self.choice.together, "low": low, "high": high},
            "without": self.choice.without,
        }


def _whole_scenes(data: Dataset) -> PictureSet:
    """The scenes to train on that have a picture of every camera."""
    train = data.train
    kept = [
        row
        for row, source in enumerate(train.sources)
        if isinstance(source, Mapping) and len(source) == len(data.cameras)
    ]
    return PictureSet(
        sources=[train.sources[row] for row in kept],
        names=tuple(train.names[row] for row in kept),
        targets=train.targets[kept],
        digest=hashlib.sha256(f"{train.digest} whole".encode()).hexdigest(),
    )


def plain_shapes(names: Sequence[str]) -> dict[str, SubModelSpec]:
    """The shapes of those networks that are plain ViTs, which can be cut after each layer."""
    found = {}
    for name in names:
        try:
            found[name] = teacher_spec(name, {}).shape
        except InputError:  # another family
            continue
    return found


def run_pilot(
    data: Dataset,
    weights: Mapping[str, Path],
    devices: Sequence[DeviceLatency],
    cameras: Mapping[str, str],
    target_ms: float,
    cache: Path,
    progress: Progress,
) -> Pilot:
    """Measure every candidate that keeps the target on some device, and choose one for each.

    `weights` are files by timm's name, `cameras` the devices' in scenes. Raises InputError.
    """
    some = candidates(list(weights), plain_shapes(list(weights)))
    if not some:
        raise InputError(
            "--weights: expected a plain vision transformer or a network of the catalogue "
            f"(docs/results/families.md), found {', '.join(weights) or 'no weights'}"
        )
    allowed = check_fit(devices, some, target_ms)
    pictures = Pictures.of(data, COMPARED)
    for remark in (
        remark_on_unknown(list(weights), devices, some),
        pictures.remark_on_single(data.labels),
    ):
        if remark:
            progress.note(remark)
    wanted = sorted(set().union(*allowed.values()))
    measured = {
        row: Measured(some[row], left_out)
        for row, left_out in _measure(
            {row: some[row] for row in wanted}, weights, pictures, len(data.labels), cache, progress
        ).items()
    }

    def predictions(device: str, row: int) -> Array:
        return measured[row].left_out.log_probabilities[pictures.rows_of(cameras.get(device))]

    first = pictures.rows_of(next(iter(cameras.values()), None))
    targets = pictures.pictures.targets[first]
    choice = choose(allowed, predictions, targets)
    specs = {device: some[row].spec for device, row in choice.rows.items()}
    for remark in remarks_on_extrapolation(specs, devices):
        progress.note(remark)
    latency = {
        device.profile.name: device.predict_ms(some[choice.rows[device.profile.name]].spec) or 0.0
        for device in devices
    }
    return Pilot(measured, pictures.pictures.targets, choice, latency, len(targets))


def _measure(
    wanted: Mapping[int, FrozenNetwork],
    weights: Mapping[str, Path],
    pictures: Pictures,
    num_classes: int,
    cache: Path,
    progress: Progress,
) -> dict[int, HeldOutPredictions]:
    """The predictions of each candidate for pictures left out."""
    sides = sorted({one.spec.image_size for one in wanted.values()})
    views = dict(zip(sides, _views(pictures.pictures, sides, cache, progress), strict=True))
    passes: dict[tuple[str, int], dict[int, int]] = {}
    for row, one in wanted.items():
        passes.setdefault((one.name, one.spec.image_size), {})[one.depth] = row
    found: dict[int, HeldOutPredictions] = {}
    total = len(passes) * len(pictures.pictures)
    with progress.task(f"measuring {len(wanted)} candidates", total) as advance:
        for (name, side), by_depth in passes.items():
            features = _features(name, side, weights[name], sorted(by_depth), views[side], advance)
            for depth, row in by_depth.items():
                found[row] = leave_groups_out(
                    features[depth], pictures.pictures.targets, pictures.groups, num_classes
                )
    return found


def _features(
    name: str, side: int, weights: Path, depths: Sequence[int], pixels: Views, advance: Advance
) -> Mapping[int, Features]:
    if depths == [0]:
        return {0: network_features(name, side, weights, pixels, advance)}
    return cut_features(name, side, weights, depths, pixels, advance)


def _views(
    pictures: PictureSet, sides: Sequence[int], cache: Path, progress: Progress
) -> list[Views]:
    return load_views(pictures, [View(side) for side in sides], cache, progress, "train split")


def write_member(
    measured: Measured,
    weights: Path,
    pictures: Pictures,
    num_classes: int,
    cache: Path,
    progress: Progress,
    path: Path,
) -> None:
    """Write a member's weights with a classifier fitted to `pictures`; raises InputError."""
    one, side = measured.candidate, measured.candidate.spec.image_size
    (pixels,) = _views(pictures.pictures, [side], cache, progress)
    with progress.task(f"fitting the classifier of {one.words}", len(pixels)) as advance:
        features = _features(one.name, side, weights, [one.depth], pixels, advance)[one.depth]
    classifier = fit(
        features,
        pictures.pictures.targets,
        num_classes,
        penalty=measured.left_out.penalty,
        sharpness=measured.left_out.sharpness,
    )
    member = FamilyMember(backbone_of(one), num_classes, weights)
    with torch.no_grad():
        member.bag.weight.copy_(torch.from_numpy(classifier.weight))
        member.bag.bias.copy_(torch.from_numpy(classifier.bias))
    save_file({name: tensor.contiguous() for name, tensor in member.state_dict().items()}, path)


def backbone_of(one: FrozenNetwork) -> Backbone:
    """The network of a candidate, as members are built from it."""
    pooling: Pooling = "tokens" if one.depth else "own"
    return Backbone(one.name, one.spec.image_size, one.depth, pooling)
