"""Measure networks with given weights on the user's own pictures, and fit classifiers to them.

Nothing but a linear classifier on frozen features is fitted, blended with rows of the network's own
where it knows the classes. Its accuracy is that on pictures left out of the fit. All depths of a
plain ViT are measured in one pass at each picture size.
"""

import hashlib
import io
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from threadpoolctl import threadpool_limits

from mdp.errors import InputError
from mdp.files import write_bytes
from mdp.formats.bundle import sha256_of
from mdp.formats.plan import SubModelSpec
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, PictureSet, thin_out
from partitioner.data.memmaps import Views
from partitioner.data.scenes import Places, places, single_pictures
from partitioner.networks.families import Backbone, FamilyMember, Pooling
from partitioner.networks.teacher import teacher_spec
from partitioner.pilot.blend import Blend, find_blend
from partitioner.pilot.candidates import (
    DeviceLatency,
    FrozenNetwork,
    candidates,
    check_fit,
    remark_on_unknown,
    remarks_on_extrapolation,
)
from partitioner.pilot.choice import ChosenNetworks, choose, without_slow
from partitioner.pilot.features import (
    Features,
    NetworkFeatures,
    cut_features,
    network_features,
    own_rows,
)
from partitioner.pilot.linear import (
    Array,
    HeldOutPredictions,
    Index,
    LabelCalibration,
    fit,
    interval,
    leave_groups_out,
)
from partitioner.pilot.several import fit_several, leave_out_several
from partitioner.pilot.truth import Flags, LabelTruth, OneLabel, SeveralLabels
from partitioner.run.progress import Advance, Progress

#: Most pictures that candidates are compared on.
COMPARED = 1000
#: Changed with what kept predictions mean.
_KEPT_FORMAT = 5
#: PilotPictures of each class, or scenes, that are compared in any case, where there are so many.
LEAST = 5


@dataclass(frozen=True, slots=True)
class PilotPictures:
    """Single training pictures: classes, and where they stand in scenes if they do."""

    pictures: PictureSet
    #: PilotPictures of one group are left out together: a scene, or a picture by itself.
    groups: Index
    #: None without scenes.
    places: Places | None
    #: Whether each label holds `[N, L]`, where several may; None: `targets` are classes.
    held: Flags | None = None

    @classmethod
    def of(cls, data: Dataset, limit: int) -> "PilotPictures":
        """At most `limit` training pictures, in scenes with a picture of every camera."""
        if not data.cameras:
            kept = thin_out(data.train, limit, least=LEAST)
            held = None if data.sets is None else data.flags(kept)
            return cls(kept, np.arange(len(kept)), None, held)
        whole = thin_out(_whole_scenes(data), limit // len(data.cameras), least=LEAST)
        where = places(whole, data.cameras)
        singles = single_pictures(replace(data, train=whole)).train
        held = None if data.sets is None else data.flags(singles)
        return cls(singles, where.scene, where, held)

    @property
    def truth(self) -> LabelTruth:
        """The labels of the pictures."""
        if self.held is None:
            return OneLabel(self.pictures.targets)
        return SeveralLabels.of(self.held)

    def remark_on_single(self, labels: Sequence[str]) -> str:
        """One line on classes of which nothing is left where one is left out; empty without any.

        Of labels that do not exclude each other a set that was never seen can be answered.
        """
        if self.held is not None:
            return ""
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
    #: Rows of the network's own classifier in the predictions; None: they have no part in them.
    blend: Blend | None = None
    #: Features of the pilot's pictures; None where kept predictions were read instead.
    features: NetworkFeatures | None = None

    def accuracy(self, truth: LabelTruth) -> float:
        """Share of right answers to single pictures left out of the fit."""
        return float(truth.right(self.left_out.answers).mean())


@dataclass(frozen=True, slots=True)
class Pilot:
    """Everything that was measured, and the choice made by it."""

    measured: dict[int, Measured]
    #: Single pictures, of all cameras.
    singles: int
    truth: LabelTruth
    choice: ChosenNetworks
    #: Predicted milliseconds by device, of what was chosen there.
    latency_ms: dict[str, float]
    #: PilotPictures or scenes that it was measured on.
    count: int
    #: Digest of the single pictures.
    digest: str

    def accuracy_of(self, row: int) -> float:
        """Share of right answers of a candidate to single pictures left out of its fit."""
        return self.measured[row].accuracy(self.truth)

    def between(self, tested: int) -> tuple[float, float]:
        """The shares that the measured one lies between nine times of ten, on `tested` pictures."""
        return interval(round(self.choice.together * self.count), self.count, tested)

    def predict_words(self, tested: int) -> str:
        """The accuracy together, with the interval on `tested` pictures."""
        low, high = self.between(tested)
        return (
            f"predicted {self.choice.together:.1%} ({low:.1%} to {high:.1%} on a test split of "
            f"{tested:,})"
        )

    def to_json(self, tested: int) -> dict[str, Any]:
        """Every candidate's accuracy, and the choice, whose interval is for `tested` pictures."""
        low, high = self.between(tested)
        return {
            "pictures": self.count,
            "candidates": [
                {
                    "network": one.candidate.name,
                    "image_size": one.candidate.spec.image_size,
                    "depth": one.candidate.depth or None,
                    "accuracy": self.accuracy_of(row),
                    "own_rows": one.blend is not None,
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


def find_candidates(
    weights: Collection[str], devices: Sequence[DeviceLatency], target_ms: float
) -> tuple[list[FrozenNetwork], dict[str, list[int]]]:
    """All candidates of the networks `weights`, and the places of those that keep the target.

    The latter are by device. Raises InputError where there are none.
    """
    some = candidates(list(weights), plain_shapes(list(weights)))
    if not some:
        raise InputError(
            "--weights: expected a plain vision transformer or a network of the catalogue "
            f"(docs/results/families.md), found {', '.join(weights) or 'no weights'}"
        )
    return some, check_fit(devices, some, target_ms)


def run_pilot(
    data: Dataset,
    weights: Mapping[str, Path],
    devices: Sequence[DeviceLatency],
    cameras: Mapping[str, str],
    target_ms: float,
    cache: Path,
    progress: Progress,
    class_rows: Mapping[str, Sequence[int]] = MappingProxyType({}),
    kept: Path | None = None,
    *,
    shared: bool = False,
    epochs: Callable[[FrozenNetwork], float] | None = None,
) -> Pilot:
    """Measure every candidate that keeps the target on some device, and choose one for each.

    With `shared` devices of different cameras that have the time for the same candidates get the
    same one. `epochs` are those that there will be time to train a candidate for; None where none
    is trained.

    `weights` are files by timm's name, `cameras` the devices' in scenes, `class_rows` the row of
    each class in the own classifiers of networks that have them. Predictions are kept in the folder
    `kept`, by network and pictures, and not computed again. Raises InputError.
    """
    some, allowed = find_candidates(weights, devices, target_ms)
    pictures = PilotPictures.of(data, COMPARED)
    for remark in (
        remark_on_unknown(list(weights), devices, some),
        pictures.remark_on_single(data.set_names),
    ):
        if remark:
            progress.note(remark)
    wanted = sorted(set().union(*allowed.values()))
    measured = _measure(
        {row: some[row] for row in wanted},
        weights,
        class_rows,
        pictures,
        len(data.labels),
        cache,
        progress,
        KeptPredictions(kept),
    )

    def predictions(device: str, row: int) -> Array:
        return measured[row].left_out.answers[pictures.rows_of(cameras.get(device))]

    alike, truth = _alike(allowed, cameras) if shared else [], pictures.truth
    if epochs is not None:
        allowed = without_slow(
            allowed,
            {row: 1 - one.accuracy(truth) for row, one in measured.items()},
            {row: epochs(one.candidate) for row, one in measured.items()},
        )
    first = pictures.rows_of(next(iter(cameras.values()), None))
    targets = pictures.pictures.targets[first]
    with progress.step("choosing networks"), threadpool_limits(1, user_api="blas"):
        choice = choose(
            allowed,
            predictions,
            targets,
            alike,
            {row: one.candidate.name for row, one in measured.items()},
            truth.part(first),
            cameras,
        )
    # Those of all candidates are more than a hundred MB.
    measured = {
        row: one if row in choice.rows.values() else replace(one, features=None)
        for row, one in measured.items()
    }
    specs = {device: some[row].spec for device, row in choice.rows.items()}
    for remark in remarks_on_extrapolation(specs, devices):
        progress.note(remark)
    latency = {
        device.profile.name: device.predict_ms(some[choice.rows[device.profile.name]].spec) or 0.0
        for device in devices
    }
    return Pilot(
        measured,
        len(pictures.groups),
        truth,
        choice,
        latency,
        len(targets),
        pictures.pictures.digest,
    )


def _alike(allowed: Mapping[str, Sequence[int]], cameras: Mapping[str, str]) -> list[list[str]]:
    """Devices of different cameras that have the time for the same candidates."""
    groups: dict[tuple[int, ...], list[dict[str, str]]] = {}
    for device, rows in allowed.items():
        camera, like = cameras[device], groups.setdefault(tuple(rows), [])
        group = next((one for one in like if camera not in one), None)
        if group is None:
            like.append(group := {})
        group[camera] = device
    return [list(group.values()) for like in groups.values() for group in like]


def _measure(
    wanted: Mapping[int, FrozenNetwork],
    weights: Mapping[str, Path],
    class_rows: Mapping[str, Sequence[int]],
    pictures: PilotPictures,
    num_classes: int,
    cache: Path,
    progress: Progress,
    kept: "KeptPredictions",
) -> dict[int, Measured]:
    """The predictions of each candidate for pictures left out."""
    passes: dict[tuple[str, int], dict[int, int]] = {}
    found: dict[int, Measured] = {}
    digests = {name: sha256_of(weights[name]) for name in {one.name for one in wanted.values()}}
    keys = {}
    for row, one in wanted.items():
        rows = tuple(class_rows.get(one.name, ()))
        keys[row] = kept.key(one, digests[one.name], rows, pictures, num_classes)
        known = kept.read(keys[row])
        if known is None:
            passes.setdefault((one.name, one.spec.image_size), {})[one.depth] = row
            continue
        left_out, factors = known
        own = None
        if factors is not None:
            own = own_rows(one.name, one.depth, weights[one.name], rows)
        blend = None if own is None or factors is None else Blend(own, *factors)
        found[row] = Measured(one, left_out, blend)
    if not passes:
        return found
    sides = sorted({side for _, side in passes})
    views = dict(zip(sides, _views(pictures.pictures, sides, cache, progress), strict=True))
    total = len(passes) * len(pictures.pictures)
    count = len(wanted) - len(found)
    with progress.task(f"measuring {count} candidates", total) as advance:
        for (name, side), by_depth in passes.items():
            features = _features(name, side, weights[name], sorted(by_depth), views[side], advance)
            for depth, row in by_depth.items():
                left_out, blend = _predict_left_out(
                    features[depth].read,
                    wanted[row],
                    weights[name],
                    class_rows.get(name),
                    pictures,
                    num_classes,
                )
                found[row] = Measured(wanted[row], left_out, blend, features[depth])
                kept.write(keys[row], found[row])
    return found


def _predict_left_out(
    features: Features,
    one: FrozenNetwork,
    weights: Path,
    rows: Sequence[int] | None,
    pictures: PilotPictures,
    num_classes: int,
) -> tuple[HeldOutPredictions, Blend | None]:
    """Predictions for pictures left out of the fit, and the blend with the network's own rows."""
    targets = pictures.pictures.targets
    # Several threads spin-wait on each other in such small products: 13 times the processor time.
    with threadpool_limits(1, user_api="blas"):
        if pictures.held is not None:
            return leave_out_several(features, pictures.held, targets, pictures.groups), None
        left_out = leave_groups_out(features, targets, pictures.groups, num_classes)
    own = None
    if rows is not None:
        own = own_rows(one.name, one.depth, weights, rows)
    return (left_out, None) if own is None else find_blend(left_out, own, features, targets)


class KeptPredictions:
    """Predictions of candidates in a folder, by network, picture size, depth and pictures."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder nothing is kept."""
        self._folder = folder

    def key(
        self,
        one: FrozenNetwork,
        weights: str,
        rows: tuple[int, ...],
        pictures: PilotPictures,
        num_classes: int,
    ) -> str:
        """The name of a file; `weights` is the sha256 of the network's, `rows` its own ones."""
        facts = (
            _KEPT_FORMAT,
            one.name,
            one.spec.image_size,
            one.depth,
            weights,
            rows,
            pictures.pictures.digest,
            num_classes,
            hashlib.sha256(pictures.groups.tobytes()).hexdigest(),
            None if pictures.held is None else hashlib.sha256(pictures.held.tobytes()).hexdigest(),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]

    def read(self, key: str) -> tuple[HeldOutPredictions, tuple[float, float] | None] | None:
        """The predictions of a candidate, and the factors of a blend with its own rows, if any.

        None where there are no predictions, or they are damaged.
        """
        if self._folder is None:
            return None
        try:
            with np.load(self._folder / f"{key}.npz") as kept:
                left_out = HeldOutPredictions(
                    answers=kept["answers"].astype(np.float64),
                    penalty=float(kept["penalty"]),
                    sharpness=float(kept["sharpness"]),
                    by_label=LabelCalibration(*kept["by_label"]) if len(kept["by_label"]) else None,
                )
                factors = [float(factor) for factor in kept["factors"]]
                return left_out, (factors[0], factors[1]) if factors else None
        except (OSError, ValueError, KeyError, IndexError, EOFError, zipfile.BadZipFile):
            return None

    def write(self, key: str, found: Measured) -> None:
        """Keep the predictions of a candidate; raises InputError where they cannot be written."""
        if self._folder is None:
            return
        content, blend, own = io.BytesIO(), found.blend, found.left_out.by_label
        np.savez(
            content,
            answers=found.left_out.answers.astype(np.float32),
            penalty=found.left_out.penalty,
            sharpness=found.left_out.sharpness,
            by_label=[] if own is None else [own.scale, own.shift, own.base],
            factors=[] if blend is None else [blend.own_factor, blend.fitted_factor],
        )
        write_bytes(self._folder / f"{key}.npz", content.getvalue())


def _features(
    name: str, side: int, weights: Path, depths: Sequence[int], pixels: Views, advance: Advance
) -> Mapping[int, NetworkFeatures]:
    if depths == [0]:
        return {0: network_features(name, side, weights, pixels, advance)}
    cuts = cut_features(name, side, weights, depths, pixels, advance)
    return {depth: NetworkFeatures(read=one, distance=one) for depth, one in cuts.items()}


def _views(
    pictures: PictureSet, sides: Sequence[int], cache: Path, progress: Progress
) -> list[Views]:
    return load_views(pictures, [View(side) for side in sides], cache, progress, "train split")


def fit_member(
    one: FrozenNetwork,
    weights: Path,
    rows: Sequence[int] | None,
    pictures: PilotPictures,
    num_classes: int,
    cache: Path,
    progress: Progress,
    path: Path,
    known: Measured | None = None,
) -> tuple[NetworkFeatures, HeldOutPredictions, Blend | None]:
    """Write a member's weights to `path`, with a classifier fitted to `pictures`.

    `rows` are those of the classes in the network's own classifier, where it has them. `known` is
    what was measured on the very same pictures: nothing of it is computed again. Returns the
    features, the predictions for pictures left out of the fit, and the network's own rows in them.
    Raises InputError.
    """
    if known is not None and known.features is not None:
        features, left_out, blend = known.features, known.left_out, known.blend
    else:
        side = one.spec.image_size
        (pixels,) = _views(pictures.pictures, [side], cache, progress)
        with progress.task(f"fitting the classifier of {one.words}", len(pixels)) as advance:
            features = _features(one.name, side, weights, [one.depth], pixels, advance)[one.depth]
        left_out, blend = _predict_left_out(
            features.read, one, weights, rows, pictures, num_classes
        )
    with threadpool_limits(1, user_api="blas"):
        if pictures.held is not None and left_out.by_label is not None:
            classifier = fit_several(
                features.read, pictures.held, left_out.penalty, left_out.by_label
            )
        else:
            classifier = fit(
                features.read,
                pictures.pictures.targets,
                num_classes,
                penalty=left_out.penalty,
                sharpness=left_out.sharpness,
            )
    if blend is not None:
        classifier = blend.with_fitted(classifier)
    member = FamilyMember(backbone_of(one), num_classes, weights)
    with torch.no_grad():
        member.bag.weight.copy_(torch.from_numpy(classifier.weight))
        member.bag.bias.copy_(torch.from_numpy(classifier.bias))
    save_file({name: tensor.contiguous() for name, tensor in member.state_dict().items()}, path)
    return features, left_out, blend


def backbone_of(one: FrozenNetwork) -> Backbone:
    """The network of a candidate, as members are built from it."""
    pooling: Pooling = "tokens" if one.depth else "stages"
    return Backbone(one.name, one.spec.image_size, one.depth, pooling)
