"""Train a measured network further, on views drawn anew in every step, within a given time.

The classifier fitted to frozen features is where it starts, so that the first step does not undo
what is known. A better network, if there is one, teaches it: its answers to the same views are a
part of the targets (Beyer and others, Knowledge distillation: a good teacher is patient and
consistent, CVPR 2022, arXiv 2106.05237).
"""

import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mdp.errors import InputError
from mdp.files import write_bytes
from partitioner.data.crops import View
from partitioner.data.live_views import Draw, Drawing, Draws, Pictures
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.macs import macs
from partitioner.networks.families import FamilyMember
from partitioner.pilot.candidates import FrozenNetwork
from partitioner.run.progress import Progress
from partitioner.training.compute import quicker_autocast
from partitioner.training.live import Averaged, move_to
from partitioner.training.loop import TrainingDiverged, norms_of, parameter_groups
from partitioner.training.synchroniser import MAX_GRADIENT_NORM

#: Share of the time during which the step size rises.
_WARM_UP = 0.05
#: Multiply-accumulates a second of a forward pass on one thread, of a plain ViT in bf16 and of
#: other networks, on Zen 4.
_VIT_MACS_PER_S, _MACS_PER_S = 5e10, 2e10
#: Sides of pictures, at most, from which cuts of a ViT of 224 px learn in larger steps.
_SMALL_PX = 96
#: Seconds between checkpoints.
_CHECKPOINT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FineTuningRecipe:
    """Constants of a fine-tuning."""

    #: AdamW's peak step size, of the layers and, as a multiple, of the classifier.
    learning_rate: float
    classifier_rate: float
    weight_decay: float = 0.05
    batch: int = 32
    drawing: Drawing
    #: Share of a teacher's answers beside the labels.
    taught: float = 0.7
    #: Without a teacher.
    label_smoothing: float = 0.1
    #: Share of the training in smaller pictures, and their side as a share of the network's own: at
    #: 60 % of the side a step takes two thirds of the time (Touvron and others, Fixing the
    #: train-test resolution discrepancy, NeurIPS 2019, arXiv 1906.06423). For networks of any
    #: picture size.
    small_until: float = 0.0
    small: float = 0.6
    #: Passes over the pictures, at most.
    epochs: int = 60
    #: Time of a step as a multiple of a forward pass of the frozen network. Beside its own forward
    #: and backward pass, views are drawn and weights changed and averaged. Measured on two idle
    #: cores: EfficientNet-Lite0 5.1 at 96 px, Lite1 3.7 at 160 px, Lite2 5.2 at 128 px, ViT-Ti/16
    #: 3.4 for eleven layers at 160 px and 4.0 for eight at 96 px.
    step: float = 5.0
    #: Decay per step of the averaged weights, which are taken at the end.
    average: float = 0.99


@dataclass(frozen=True, slots=True)
class FineTuned:
    """The outcome of a fine-tuning, whose network was changed in place."""

    steps: int
    epochs: float
    seconds: float
    #: Mean losses by epoch.
    losses: list[float]


def fine_tune(
    member: FamilyMember,
    pictures: Pictures,
    teacher: FamilyMember | None,
    recipe: FineTuningRecipe,
    *,
    seconds: float,
    seed: int,
    checkpoint: Path,
    what: str,
    progress: Progress,
    clock: Callable[[], float] = time.monotonic,
) -> FineTuned:
    """Train `member` in place for `seconds`, or as long as was planned where it goes on.

    The state is kept in `checkpoint`, now and then and at the end. Raises TrainingDiverged, and
    InputError for a checkpoint of another training.
    """
    device = pictures.pixels.device
    move_to(member, device)
    if teacher is not None:
        move_to(teacher.eval(), device)
    optimiser = torch.optim.AdamW(_groups(member, recipe), lr=0.0, fused=True)
    averaged = Averaged(member, recipe.average)
    state = _State(member, optimiser, averaged, checkpoint, seconds)
    state.restore()
    seconds = state.planned_s
    # A training that goes on draws other views than those that it began with.
    seed += state.steps
    draws = Draws(len(pictures.pixels), recipe.batch, recipe.drawing, seed, device)
    started_s = clock() - state.seconds
    kept_s = clock()
    most = recipe.epochs * draws.per_epoch
    torch.manual_seed(seed)
    train_but_for_statistics(member)
    total = max(1, round(seconds))
    with progress.task(what, total, done=min(total, round(state.seconds))) as advance:
        shown = min(total, round(state.seconds))
        step_s = 0.0
        # No step is begun that would not end in time.
        while state.steps < most and (done_s := clock() - started_s) + step_s < seconds:
            done = max(done_s / seconds, state.steps / most)
            for group in optimiser.param_groups:
                group["lr"] = rate(done) * group["peak"]
            side = side_at(done, member.backbone.image_size, recipe)
            loss = _step(member, side, pictures, teacher, draws(), recipe, optimiser)
            averaged.step()
            state.add(loss, draws.per_epoch)
            if not math.isfinite(loss):
                raise TrainingDiverged(f"{what}: the loss became {loss} in step {state.steps}")
            now_s = clock()
            step_s = now_s - started_s - done_s
            if now_s - kept_s > _CHECKPOINT_S:
                state.seconds, kept_s = now_s - started_s, now_s
                state.save()
            if (whole := min(total, int(now_s - started_s))) > shown:
                advance(whole - shown, f"loss {state.mean:.3f}")
                shown = whole
    took_s = clock() - started_s
    averaged.into_network()
    state.seconds = took_s
    state.save()
    return FineTuned(state.steps, state.steps / draws.per_epoch, took_s, state.losses)


def recipe_of(candidate: FrozenNetwork, *, flips: bool) -> FineTuningRecipe:
    """The recipe of a network, by its family (docs/lab-log.md)."""
    drawing = Drawing(
        min_area=0.35 if candidate.depth else 0.5,
        mixed=0.0,
        flip=flips,
        turn=10.0,
        light=0.3,
        covered=0.25,
    )
    if candidate.depth:
        # Small pictures are further from those that the network was trained on: it has to change
        # more, where larger steps lose at 160 px.
        peak = 2e-4 if candidate.spec.image_size <= _SMALL_PX else 1e-4
        return FineTuningRecipe(learning_rate=peak, classifier_rate=3.0, drawing=drawing, step=4.0)
    known = catalogue().get(candidate.name)
    any_size = known is None or len(known.sizes_of_weights) > 1
    return FineTuningRecipe(
        learning_rate=3e-4,
        classifier_rate=1.0,
        drawing=drawing,
        small_until=0.6 if any_size else 0.0,
    )


def epoch_seconds(
    picture_s: float, pictures: int, recipe: FineTuningRecipe, teacher_share: float = 0.0
) -> float:
    """Estimated seconds of a pass over so many pictures, where a forward one takes `picture_s`.

    `teacher_share` is the work of a teacher's forward pass as a multiple of the network's.
    """
    # Smaller pictures save less than their pixels: 0.58 to 0.68 of the time at 0.6 of the side.
    sides = recipe.small_until * recipe.small + (1 - recipe.small_until)
    return picture_s * pictures * (recipe.step * sides + teacher_share)


def expected_epoch_s(
    one: FrozenNetwork, classes: int, pictures: int, teacher: FrozenNetwork | None = None
) -> float:
    """Seconds of a pass over so many pictures on one thread, by the networks' work alone."""
    picture_s = _forward_s(one, classes)
    answers = 0.0 if teacher is None else _forward_s(teacher, classes) / picture_s
    return epoch_seconds(picture_s, pictures, recipe_of(one, flips=True), answers)


def _forward_s(one: FrozenNetwork, classes: int) -> float:
    """Expected seconds of a picture's forward pass on one thread."""
    return macs(one.spec, classes) / (_VIT_MACS_PER_S if one.depth else _MACS_PER_S)


def _groups(member: FamilyMember, recipe: FineTuningRecipe) -> list[dict[str, Any]]:
    """Parameters of the layers and of the classifier, with their peak step sizes."""
    groups: list[dict[str, Any]] = []
    for module, factor in ((member.trunk, 1.0), (member.bag, recipe.classifier_rate)):
        for group in parameter_groups(module, recipe.weight_decay):
            groups.append({**group, "peak": factor * recipe.learning_rate})
    return [group for group in groups if group["params"]]


def rate(done: float) -> float:
    """The step size at a share `done` of the training, as a share of its peak."""
    if done < _WARM_UP:
        return max(0.05, done / _WARM_UP)
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - _WARM_UP) / (1 - _WARM_UP))))


def side_at(done: float, image_size: int, recipe: FineTuningRecipe) -> int:
    """The side in pixels of training pictures at a share `done` of the training."""
    if done >= recipe.small_until:
        return image_size
    return max(32, round(recipe.small * image_size / 16) * 16)


def _step(
    member: FamilyMember,
    side: int,
    pictures: Pictures,
    teacher: FamilyMember | None,
    draw: Draw,
    recipe: FineTuningRecipe,
    optimiser: torch.optim.Optimizer,
) -> float:
    """One step; returns its loss."""
    targets, several = draw.labels(pictures), pictures.held is not None
    if teacher is not None:
        with torch.inference_mode():
            found = _logits(teacher, teacher.backbone.image_size, pictures, draw)
            answers = found.sigmoid() if several else found.softmax(dim=1)
        targets = torch.lerp(targets, answers.clone(), recipe.taught)
    optimiser.zero_grad(set_to_none=True)
    logits = _logits(member, side, pictures, draw)
    smoothing = recipe.label_smoothing if teacher is None else 0.0
    if several:
        loss = binary_losses(logits, torch.lerp(targets, torch.full_like(targets, 0.5), smoothing))
        loss = loss.mean()
    else:
        loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(member.parameters(), MAX_GRADIENT_NORM)
    optimiser.step()
    return float(loss.detach())


def binary_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy `[B]`, summed over the labels `[B, L]`."""
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(dim=1)


def _logits(member: FamilyMember, side: int, pictures: Pictures, draw: Draw) -> Tensor:
    """Logits `[B, C]` of the drawn views at `side` pixels."""
    x = draw.views(pictures.pixels, View(side)).contiguous()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=quicker_autocast() == "bf16"):
        found: Tensor = member(x).bag
    return found.float()


def train_but_for_statistics(network: nn.Module) -> None:
    """Let a network train, with the statistics of its batch norms as they are given.

    They are those of the millions of pictures that it was trained on before. Of a few hundred
    pictures they are other ones, which the classifier was not fitted to, and what the first minutes
    of training learn is not worth what that loses (docs/lab-log.md).
    """
    network.train()
    for norm in norms_of(network):
        norm.eval()


class _State:
    """Progress of a fine-tuning, and its file."""

    def __init__(
        self,
        member: FamilyMember,
        optimiser: torch.optim.Optimizer,
        averaged: Averaged,
        path: Path,
        planned_s: float,
    ) -> None:
        self.planned_s = planned_s
        self._member, self._optimiser, self._averaged, self._path = (
            member,
            optimiser,
            averaged,
            path,
        )
        self.steps, self.seconds = 0, 0.0
        self.losses: list[float] = []
        self._sum, self._count = 0.0, 0

    @property
    def mean(self) -> float:
        """The mean loss of the present epoch, or of the one before."""
        return self._sum / self._count if self._count else (self.losses or [0.0])[-1]

    def add(self, loss: float, per_epoch: int) -> None:
        """Count a step."""
        self.steps += 1
        self._sum, self._count = self._sum + loss, self._count + 1
        if self.steps % per_epoch == 0:
            self.losses.append(self._sum / self._count)
            self._sum, self._count = 0.0, 0

    def save(self) -> None:
        """Write the checkpoint, atomically."""
        buffer = io.BytesIO()
        torch.save(
            {
                "module": self._member.state_dict(),
                "optimiser": self._optimiser.state_dict(),
                "averaged": self._averaged.state(),
                "steps": self.steps,
                "seconds": self.seconds,
                "losses": self.losses,
                "planned": self.planned_s,
            },
            buffer,
        )
        write_bytes(self._path, buffer.getvalue())

    def restore(self) -> None:
        """Go on from the checkpoint, if there is one; raises InputError for another one's."""
        if not self._path.exists():
            return
        try:
            kept = torch.load(self._path, weights_only=True, map_location="cpu")
            self._member.load_state_dict(kept["module"])
            self._optimiser.load_state_dict(kept["optimiser"])
            self._averaged.load(kept["averaged"])
            self.steps, self.seconds = int(kept["steps"]), float(kept["seconds"])
            self.losses = [float(loss) for loss in kept["losses"]]
            self.planned_s = float(kept["planned"])
        except Exception as error:
            # torch.load raises errors of many types for a damaged file.
            raise InputError(
                f"{self._path}: not a checkpoint of this build; remove it to start over"
            ) from error
