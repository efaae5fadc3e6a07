"""Train the chosen networks in the time that is left, and keep those that became better."""

import hashlib
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from mdp.files import Record, read_json, write_bytes, write_json
from partitioner.assembly.write import TAUGHT
from partitioner.build.inputs import BuildInputs
from partitioner.build.measured.fine_tuning import (
    FineTuningRecipe,
    binary_losses,
    epoch_seconds,
    expected_epoch_s,
    fine_tune,
    recipe_of,
)
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import DIGITS, PictureSet, thin_out
from partitioner.data.live_views import Pictures
from partitioner.data.memmaps import Views
from partitioner.data.scenes import single_pictures
from partitioner.estimates.macs import macs
from partitioner.networks.families import Backbone, FamilyMember
from partitioner.pilot.blend import Blend
from partitioner.pilot.candidates import FrozenNetwork
from partitioner.pilot.features import NetworkFeatures
from partitioner.pilot.linear import HeldOutPredictions
from partitioner.pilot.measure import Pilot, backbone_of
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.training.cached_outputs import BATCH, batch
from partitioner.training.compute import quicker_autocast, training_device
from partitioner.training.live import move_to
from partitioner.training.loop import derive_seed

#: Fewest seconds of training of one network that are worth their start, and epochs that are said
#: to be enough.
LEAST_S, ENOUGH = 20.0, 6
#: A pass in fp32 as a multiple of one in bf16; and how much longer than estimated it may take.
_IN_FP32, _MARGIN = 2.0, 1.5
#: Bytes of pictures, at most, that a training holds in memory.
_MEMORY_BYTES = 1_000_000_000
#: Part of every key; changed with what a training of the same key does.
_FORMAT = 5
#: Views are cut from pictures of this many times the side.
_CANVAS = 1.25
#: Shares of the trained weights that are tried, the rest being the frozen network's: weights in
#: between are often better than both (Wortsman and others, Robust fine-tuning of zero-shot models,
#: CVPR 2022, arXiv 2109.01903).
_SHARES = (0.5, 1.0)
#: Least accuracy of a network that teaches, and by how much it has to be better than its pupil.
TEACHES, BETTER = 0.8, 0.01
#: Files of a run folder.
_TRAINED, _RECORD = "trained-{}.safetensors", "trained-{}.json"


class TaughtRecord(Record, frozen=True):
    """Record of a training that is done, as a run folder keeps it."""

    seconds: float
    epochs: float
    #: Share of the trained weights in the kept ones; 0: the frozen network was better.
    share: float
    #: Cross-entropy of the calibration pictures by share.
    losses: dict[str, float]


@dataclass(frozen=True, slots=True)
class FittedMember:
    """A frozen network with a classifier that was fitted to the pictures."""

    candidate: FrozenNetwork
    path: Path
    #: Features of these pictures, and the predictions of each left out of the fit.
    features: NetworkFeatures
    left_out: HeldOutPredictions
    #: Rows of the network's own classifier in these predictions; None: they have no part in them.
    blend: Blend | None

    def load(self, num_classes: int) -> FamilyMember:
        """The network with its weights."""
        member = FamilyMember(backbone_of(self.candidate), num_classes)
        member.load_state_dict(load_file(self.path))
        return member


@dataclass(frozen=True, slots=True)
class Taught:
    """A network that was trained."""

    record: TaughtRecord
    #: The weights that are better than the frozen ones; None where none are.
    path: Path | None

    @property
    def words(self) -> str:
        """The training and its outcome, in a line."""
        record = self.record
        did = f"{record.epochs:.1f} epochs in {record.seconds / 60:.1f} minutes"
        if self.path is None:
            return f"{did}; worse than frozen on the calibration split, so frozen is kept"
        mixed = "" if record.share == 1 else f", {record.share:g} of them and the rest frozen"
        return f"{did}; trained weights are kept{mixed}"

    def to_json(self) -> dict[str, Any]:
        """The record."""
        return {**msgspec.to_builtins(self.record), "kept": self.path is not None}


def teacher_of(pilot: Pilot, row: int) -> int | None:
    """The row of the network that teaches the one in `row`: the best that was measured, if any.

    None where no measured one is better by `BETTER`, and where the best is often wrong: such
    answers would hold back a network that learns from the labels.
    """
    best = max(pilot.measured, key=lambda one: (pilot.accuracy_of(one), -one))
    share = pilot.accuracy_of(best)
    return best if share >= max(TEACHES, pilot.accuracy_of(row) + BETTER) else None


def train_networks(
    inputs: BuildInputs,
    members: Mapping[int, FittedMember],
    teachers: Mapping[int, FittedMember],
    run: RunFolder,
    until_s: float,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> dict[int, Taught]:
    """Train each of `members`, by row of the pilot, so that all are checked at `until_s`.

    `teachers` are those of members that have one. Time is shared out by the expected time of an
    epoch. Returns the trained ones by row.
    """
    found: dict[int, Taught] = {}
    classes = len(inputs.data.labels)
    epoch_s = {
        row: expected_epoch_s(
            member.candidate, classes, 1, teachers[row].candidate if row in teachers else None
        )
        for row, member in members.items()
    }
    for number, (row, member) in enumerate(members.items()):
        share = epoch_s[row] / sum(list(epoch_s.values())[number:])
        training = _NetworkTraining(
            inputs, member, teachers.get(row), len(members), share, run, progress
        )
        slot_s = clock() + share * (until_s - clock())
        if (taught := training.run_until(slot_s, clock)) is None:
            continue
        found[row] = taught
        # The features of what is served are computed when all is trained.
        until_s -= training.serving_s
        progress.note(f"{member.candidate.words}: {taught.words}")
    return found


@dataclass(frozen=True, slots=True)
class TrainingEstimate:
    """Estimated seconds of a training's parts, by the pace of the frozen network."""

    #: A pass over the pictures.
    epoch_s: float
    #: The check of the trained weights, and their features that a bundle needs.
    check_s: float
    serving_s: float

    def training_budget_s(self, left_s: float) -> float:
        """Seconds of `left_s` that the training itself may take."""
        return left_s - self.check_s - self.serving_s

    def is_enough(self, seconds: float) -> bool:
        """Tell whether it is worth to begin."""
        return seconds >= max(LEAST_S, self.epoch_s)


def minutes_needed(epoch_s: float, minutes: float, seconds: float, share: float) -> int:
    """Whole minutes for `ENOUGH` epochs where `minutes` leave `seconds` to train.

    `share` is that of this network in all of the time.
    """
    missing_s = max(LEAST_S, ENOUGH * epoch_s) - seconds
    return math.ceil(minutes + missing_s / 60 / share)


def estimate_training(
    picture_s: float,
    pictures: int,
    calibration: int,
    recipe: FineTuningRecipe,
    *,
    teacher_share: float = 0.0,
) -> TrainingEstimate:
    """The estimate for a network whose forward pass takes `picture_s` seconds a picture."""
    checked = len(_SHARES) * calibration
    served = _IN_FP32 * min(TAUGHT, pictures)
    return TrainingEstimate(
        epoch_s=epoch_seconds(picture_s, pictures, recipe, teacher_share),
        check_s=_MARGIN * picture_s * checked,
        serving_s=_MARGIN * picture_s * served,
    )


@dataclass(slots=True)
class _NetworkTraining:
    """One network's training: its pictures, its files, and the choice of its weights."""

    inputs: BuildInputs
    fitted: FittedMember
    teacher: FittedMember | None
    #: Those that share the time.
    networks: int
    #: Of all networks' time that is left.
    share: float
    run: RunFolder
    progress: Progress
    #: Seconds that its features will take when it is served.
    serving_s: float = 0.0

    @property
    def candidate(self) -> FrozenNetwork:
        """The network and its cut."""
        return self.fitted.candidate

    @property
    def key(self) -> str:
        """A name for the outcome, in files."""
        inputs = self.inputs
        facts = (
            _FORMAT,
            self._identify(self.candidate),
            inputs.class_rows.get(self.candidate.name),
            None if self.teacher is None else self._identify(self.teacher.candidate),
            self._pictures.digest,
            inputs.data.calibration.digest,
            inputs.data.labels,
            inputs.minutes,
            self.networks,
            inputs.seed,
            *(() if inputs.data.sets is None else ("several",)),
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def _identify(self, one: FrozenNetwork) -> tuple[str, Backbone]:
        """Whose weights these are, and how the network is cut."""
        return self.inputs.digests[one.name], backbone_of(one)

    @property
    def checkpoint(self) -> Path:
        """The state of a training that is not done."""
        return self.run.checkpoint(self.key)

    def run_until(self, until_s: float, clock: Callable[[], float]) -> Taught | None:
        """Train so that the check is done at `until_s`; None where there is no time for an epoch.

        What the run folder has of the very same training is taken.
        """
        weights = self.run.path / _TRAINED.format(self.key)
        record = self.run.path / _RECORD.format(self.key)
        if not record.exists() and not self._train(until_s, clock, weights, record):
            return None
        known = read_json(record, TaughtRecord)
        return Taught(known, weights if known.share else None)

    def _train(
        self, until_s: float, clock: Callable[[], float], weights: Path, record: Path
    ) -> bool:
        """Train and keep the outcome; False where there is no time for an epoch."""
        if not self.checkpoint.exists() and until_s - clock() < LEAST_S:
            self._note_frozen(until_s - clock(), self._expected_epoch_s())
            return False
        classes, candidate = len(self.inputs.data.labels), self.candidate
        recipe = recipe_of(candidate, flips=self.inputs.data.source != DIGITS)
        member = self.fitted.load(classes)
        frozen = {name: value.clone() for name, value in member.state_dict().items()}
        kept = self._on_device()
        calibration = single_pictures(self.inputs.data).calibration
        views = self._views(calibration, candidate.spec.image_size, "calibration split")
        # The first pass sets up what later ones find ready, which takes longer than a few pictures.
        move_to(member, training_device())
        _predict(member, views, 0)
        begun_s = clock()
        targets = torch.from_numpy(calibration.targets)
        if self.inputs.data.sets is not None:
            targets = torch.from_numpy(self.inputs.data.flags(calibration)).float()
        frozen_losses = _cross_entropies(member, views, targets)
        expected = estimate_training(
            (clock() - begun_s) / len(views),
            len(kept.pixels),
            len(views),
            recipe,
            teacher_share=self._teacher_share(),
        )
        seconds = expected.training_budget_s(until_s - clock())
        if not self.checkpoint.exists():
            if not expected.is_enough(seconds):
                self._note_frozen(seconds, expected.epoch_s)
                return False
            epochs, most = seconds / expected.epoch_s, recipe.epochs
            planned = f"about {epochs:.1f} epochs" if epochs < most else f"{most} epochs at most"
            self.progress.note(
                f"{candidate.words}: {seconds:.0f} s to train it, {planned} of "
                f"{len(kept.pixels):,} pictures"
            )
        tuned = fine_tune(
            member,
            kept,
            None if self.teacher is None else self.teacher.load(classes),
            recipe,
            seconds=seconds,
            seed=derive_seed(self.inputs.seed, "views", self.key),
            checkpoint=self.checkpoint,
            what=f"training {candidate.words}",
            progress=self.progress,
            clock=clock,
        )
        share, losses, state = _choose(member, frozen, frozen_losses, views, targets)
        if share:
            write_bytes(weights, save(state))
            self.serving_s = expected.serving_s
        write_json(
            record,
            TaughtRecord(seconds=tuned.seconds, epochs=tuned.epochs, share=share, losses=losses),
        )
        self.checkpoint.unlink(missing_ok=True)
        return True

    def _note_frozen(self, seconds: float, epoch_s: float) -> None:
        """Say that the network stays frozen, and the minutes that would train it."""
        minutes = self.inputs.minutes
        more = minutes_needed(epoch_s, minutes, seconds, self.share)
        self.progress.note(
            f"{self.candidate.words}: stays frozen: {max(0.0, seconds):.0f} s of --minutes "
            f"{minutes:g} are left to train it, an epoch of {len(self._pictures):,} pictures "
            f"takes about {max(1.0, epoch_s):.0f}: --minutes {more} has time for {ENOUGH} epochs"
        )

    def _expected_epoch_s(self) -> float:
        """Seconds of an epoch by the networks' work, where there is no time to measure any."""
        return (
            expected_epoch_s(
                self.candidate,
                len(self.inputs.data.labels),
                len(self._pictures),
                None if self.teacher is None else self.teacher.candidate,
            )
            / torch.get_num_threads()
        )

    def _teacher_share(self) -> float:
        """The work of the teacher's forward pass as a multiple of the network's; 0 without one."""
        if self.teacher is None:
            return 0.0
        classes = len(self.inputs.data.labels)
        return macs(self.teacher.candidate.spec, classes) / macs(self.candidate.spec, classes)

    @property
    def _side(self) -> int:
        """The side in pixels of the pictures that views are drawn from."""
        own = math.ceil(_CANVAS * self.candidate.spec.image_size)
        return own if self.teacher is None else max(own, self.teacher.candidate.spec.image_size)

    @property
    def _pictures(self) -> PictureSet:
        """The pictures to train on, evenly from all classes where the memory does not take all.

        Those of scenes that lack a camera are among them.
        """
        most = _MEMORY_BYTES // (3 * self._side**2)
        return thin_out(single_pictures(self.inputs.data).train, most)

    def _on_device(self) -> Pictures:
        """The training pictures on the device that trains."""
        chosen, data = self._pictures, self.inputs.data
        views = self._views(chosen, self._side, "train split")
        device, held = training_device(), None
        if data.sets is not None:
            held = torch.from_numpy(data.flags(chosen)).float().to(device)
        pixels = torch.from_numpy(np.ascontiguousarray(np.moveaxis(np.asarray(views), 3, 1)))
        return Pictures(
            pixels.to(device), torch.from_numpy(chosen.targets).to(device), len(data.labels), held
        )

    def _views(self, pictures: PictureSet, side: int, what: str) -> Views:
        return load_views(pictures, [View(side)], self.run.cache, self.progress, what)[0]


def _choose(
    member: FamilyMember,
    frozen: Mapping[str, Tensor],
    frozen_losses: Tensor,
    views: Views,
    targets: Tensor,
) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    """The share of trained weights that `choose_share` takes by the calibration split.

    Beside it the mean cross-entropy by share, and the weights. `views` are those of the split.
    """
    tuned = {name: value.clone() for name, value in member.state_dict().items()}
    states: dict[float, dict[str, Tensor]] = {0.0: dict(frozen)}
    losses = {0.0: frozen_losses}
    for share in _SHARES:
        if share < 1:
            states[share] = _between(frozen, tuned, share)
        else:
            states[share] = tuned
        member.load_state_dict(states[share])
        losses[share] = _cross_entropies(member, views, targets)
    best = choose_share(losses)
    state = {name: value.cpu().contiguous() for name, value in states[best].items()}
    return best, {f"{share:g}": float(found.mean()) for share, found in losses.items()}, state


def choose_share(losses: Mapping[float, Tensor]) -> float:
    """The share of trained weights with the least mean loss, of losses `[N]` of pictures by share.

    Share 0, the frozen weights, only where they are better by more than a standard error of the
    pictures' differences: few pictures say little, and training seldom harms (docs/lab-log.md).
    """
    best = min(_SHARES, key=lambda share: (float(losses[share].mean()), share))
    harm = losses[best] - losses[0.0]
    # Weights that are no numbers compare with nothing.
    is_harmless = bool(harm.mean() <= harm.std(correction=0) / math.sqrt(len(harm)))
    return best if is_harmless else 0.0


def _between(
    frozen: Mapping[str, Tensor], tuned: Mapping[str, Tensor], share: float
) -> dict[str, Tensor]:
    """Weights between two states; what is no floating-point number is the second one's."""
    return {
        name: torch.lerp(frozen[name].to(value), value, share)
        if value.is_floating_point()
        else value
        for name, value in tuned.items()
    }


def _cross_entropies(member: FamilyMember, views: Views, targets: Tensor) -> Tensor:
    """The cross-entropy `[N]` of a member on each of views `[N, S, S, 3]` of classes `[N]`.

    Of labels `[N, L]` that do not exclude each other the binary one, summed over them.
    """
    device, found = training_device(), list[Tensor]()
    for start in range(0, len(views), BATCH):
        logits = _predict(member, views, start)
        right = targets[start : start + BATCH].to(device)
        if right.ndim > 1:
            found.append(binary_losses(logits, right))
        else:
            found.append(torch.nn.functional.cross_entropy(logits, right, reduction="none"))
    return torch.cat(found).double().cpu()


def _predict(member: FamilyMember, views: Views, start: int) -> Tensor:
    """Logits of the batch of views that begins at `start`, on the device that trains."""
    device = training_device()
    index = np.arange(start, min(start + BATCH, len(views)))
    with (
        torch.inference_mode(),
        torch.autocast(device.type, torch.bfloat16, enabled=quicker_autocast() == "bf16"),
    ):
        found: Tensor = member.to(device).eval()(batch(views, index, device).contiguous()).bag
    return found.float()
