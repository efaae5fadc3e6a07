"""Patient distillation: teacher and student see the same new view of a picture in every step.

After Beyer et al., Knowledge distillation: a good teacher is patient and consistent, CVPR 2022
(arXiv 2106.05237): random crops that the teacher sees too, mixtures, a long schedule. Pictures,
augmentation, teacher, predecessors and student are all on one device; no logits are kept.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mdp.formats.plan import Assignment
from partitioner.data.crops import View, view_of
from partitioner.data.live_views import Draw, Drawing, Draws, Pictures
from partitioner.networks.submodel import Member
from partitioner.networks.teacher import Teacher
from partitioner.run.curves import Curve
from partitioner.run.progress import Progress
from partitioner.run.settings import Augmentation, Autocast, MemberSchedule
from partitioner.run.step_size import learning_rate
from partitioner.training.compute import training_device
from partitioner.training.context import TrainingContext
from partitioner.training.loop import (
    STATISTICS,
    TrainingDiverged,
    check_batches,
    derive_seed,
    parameter_groups,
    retake_statistics,
)
from partitioner.training.losses import centre
from partitioner.training.student import BatchTargets, Student, member_losses

#: Share of the steps during which the learning rate rises.
_WARM_UP = 0.05
#: Largest norm of a step's gradient.
_MAX_NORM = 5.0
#: Pictures per copy to the device.
_CHUNK = 500

#: The targets of a batch: teacher's and predecessors' outputs for its views.
Teach = Callable[[Draw], BatchTargets]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Schedule, views and arithmetic of a distillation."""

    schedule: MemberSchedule
    drawing: Drawing
    autocast: Autocast
    seed: int
    #: Decay per step of the averaged weights, which are taken at the end.
    average: float = 0.998
    #: Where the schedule would not end by this time of `time.monotonic()`, it is shortened.
    until_s: float = math.inf


class Averaged:
    """Exponential moving average of a network's weights and buffers."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._decay, self._steps = decay, 0
        state = network.state_dict().values()
        self._current = [v.detach() for v in state if v.is_floating_point()]
        self._kept = [v.clone() for v in self._current]

    def step(self) -> None:
        """Move the average towards the network's present weights."""
        self._steps += 1
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(self._kept, self._current, 1 - decay)

    def state(self) -> dict[str, Any]:
        """The averages and the number of steps, for a checkpoint."""
        return {"steps": self._steps, "kept": self._kept}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state`."""
        self._steps = int(state["steps"])
        torch._foreach_copy_(self._kept, list(state["kept"]))

    def into_network(self) -> None:
        """Give the network the averaged weights."""
        with torch.no_grad():
            torch._foreach_copy_(self._current, self._kept)


class Replayed:
    """A step that is captured as a CUDA graph once it has warmed up, and then replayed.

    Launching the kernels of a small network one by one takes longer than they do.
    """

    _WARM = 4

    def __init__(self, step: Callable[[Draw], Tensor]) -> None:
        self._step, self._calls = step, 0
        self._graph: Any = None
        self._side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, draw: Draw) -> Tensor:
        """Take a step on `draw`; returns what it returns, until the next step."""
        self._calls += 1
        if self._calls <= self._WARM:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                found = self._step(draw)
            torch.cuda.current_stream().wait_stream(self._side)
            return found
        fields = ("rows", "boxes", "flips", "share")
        if self._graph is None:
            self._drawn = Draw(*(getattr(draw, name).clone() for name in fields))
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._found = self._step(self._drawn)
        for name in fields:
            getattr(self._drawn, name).copy_(getattr(draw, name))
        self._graph.replay()
        return self._found


def distil(
    student: Student,
    view: View,
    teach: Teach,
    pictures: Pictures,
    recipe: Recipe,
    what: str,
    progress: Progress,
) -> Curve:
    """Train `student` in place for the epochs of `recipe`; returns mean losses per epoch.

    `what` is the training's name in messages. The student is on the device of `pictures` already.
    Raises TrainingDiverged.
    """
    device, schedule = pictures.pixels.device, recipe.schedule
    draws = Draws(len(pictures.pixels), schedule.batch_size, recipe.drawing, recipe.seed, device)
    optimiser = _optimiser(student, schedule, device)
    averaged = Averaged(student.submodel, recipe.average)
    names: list[str] = []

    def learn(draw: Draw) -> Tensor:
        targets = teach(draw)
        with _arithmetic(device, recipe.autocast):
            output = student(draw.views(pictures.pixels, view))
        losses = member_losses(output, targets, schedule)
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(losses["loss"])
        torch.nn.utils.clip_grad_norm_(student.parameters(), _MAX_NORM)
        optimiser.step()
        names[:] = losses
        return torch.stack([loss.detach() for loss in losses.values()])

    torch.manual_seed(recipe.seed)
    student.train()
    take_step = Replayed(learn) if device.type == "cuda" else learn
    steps = planned = schedule.epochs * draws.per_epoch
    step, state, curve = 0, "", Curve()
    sums: Tensor | None = None
    started_s = epoch_s = time.monotonic()
    with progress.task(what, steps) as advance:
        while step < steps:
            rate = learning_rate(step, steps, schedule.learning_rate or 0.0, _WARM_UP)
            for group in optimiser.param_groups:
                # A tensor on an accelerator, so that a captured step reads it.
                group["lr"] = group["lr"].fill_(rate) if device.type == "cuda" else rate
            losses = take_step(draws())
            averaged.step()
            sums = losses.clone() if sums is None else sums.add_(losses)
            step += 1
            if step % draws.per_epoch == 0 or step == steps:
                counted = (step - 1) % draws.per_epoch + 1
                means: list[float] = (sums / counted).tolist()
                now_s = time.monotonic()
                curve.append(dict(zip(names, means, strict=True)) | {"seconds": now_s - epoch_s})
                epoch_s, sums = now_s, None
                state = f"epoch {len(curve)} of {schedule.epochs}, loss {means[0]:.3f}"
                _check(means, what, len(curve))
                if recipe.until_s < math.inf:
                    left = int((recipe.until_s - now_s) * step / (now_s - started_s))
                    steps = max(step, min(planned, step + left))
            advance(1, state)
    averaged.into_network()
    _check([float(v.abs().max()) for v in student.state_dict().values()], what, len(curve))

    def see() -> None:
        for _ in range(math.ceil(min(STATISTICS, len(pictures.pixels)) / draws.batch)):
            with _arithmetic(device, recipe.autocast):
                student(draws().views(pictures.pixels, view))

    retake_statistics(student, see)
    return curve


def _check(values: Sequence[float], what: str, epoch: int) -> None:
    """Raise TrainingDiverged unless all of `values` are finite."""
    if not all(map(math.isfinite, values)):
        raise TrainingDiverged(
            f"{what}: a loss or weight is no finite number after epoch {epoch}; nothing of this "
            "training is kept; try a smaller learning rate in another run folder"
        )


def _arithmetic(device: torch.device, autocast: Autocast) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=autocast == "bf16")


def _optimiser(
    student: nn.Module, schedule: MemberSchedule, device: torch.device
) -> torch.optim.Optimizer:
    cuda = device.type == "cuda"
    rate: Any = torch.tensor(0.0, device=device) if cuda else 0.0
    groups = parameter_groups(student, schedule.weight_decay)
    return torch.optim.AdamW(groups, lr=rate, fused=cuda, capturable=cuda)


def move_to(network: nn.Module, device: torch.device) -> None:
    """Move a network to the device, in the memory format that is fastest there.

    For training: its weights may be saved, the network itself can be neither pickled nor exported.
    """
    network.to(device)
    parts: list[Any] = list(network.modules())
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        for part in parts:
            if hasattr(part, "fused_attn"):
                part.fused_attn = True
    grouped: list[Any] = [part for part in parts if isinstance(part, nn.Conv2d) and part.groups > 1]
    if grouped and all(part.groups == part.out_channels for part in grouped):
        # EfficientNet-Lite0, a step: 46 instead of 135 ms with cudnn, 1.5 to 2.5 times as fast on a
        # processor, where FastViT, whose grouped convolutions are not depthwise, crashes torch.
        # torch's overloads leave this keyword alone out.
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if device.type == "cpu":
            for part in grouped:
                part.forward = MethodType(_convolve_in_fp32, part)


def _convolve_in_fp32(convolution: nn.Conv2d, x: Tensor) -> Tensor:
    """Forward pass of a depthwise convolution in single precision, whatever surrounds it.

    Its gradient in bf16 is slow on processors, while all other layers gain by bf16. A step of
    EfficientNet-Lite0 of 32 pictures on two cores of a Zen 4: 151 instead of 252 ms at 64 px, 269
    instead of 378 at 96 px; in single precision throughout 180 and 312.
    """
    with torch.autocast("cpu", enabled=False):
        found: Tensor = type(convolution).forward(convolution, x.float())
    return found


def drawing_of(augmentation: Augmentation) -> Drawing:
    """The distribution of drawn views by a run's settings."""
    return Drawing(
        min_area=augmentation.min_area,
        flip=bool(augmentation.flip),
        mixed=float(augmentation.mixup > 0),
        alpha=augmentation.mixup or 1.0,
    )


@dataclass(frozen=True, slots=True)
class LiveRun:
    """A run with live teaching: its pictures and teacher on the training device."""

    work: TrainingContext
    teacher: Teacher
    pictures: Pictures

    @classmethod
    def of(cls, work: TrainingContext, teacher: Teacher) -> "LiveRun":
        """Move the train split and the teacher to the training device."""
        device, canvases = training_device(), work.canvases()
        count, side = canvases.shape[:2]
        pixels = torch.empty((count, 3, side, side), dtype=torch.uint8, device=device)
        for start in range(0, count, _CHUNK):
            chunk = torch.from_numpy(np.array(canvases[start : start + _CHUNK]))
            pixels[start : start + _CHUNK] = chunk.to(device).permute(0, 3, 1, 2)
        move_to(teacher.eval().requires_grad_(requires_grad=False), device)
        targets = torch.from_numpy(work.data.train.targets).to(device)
        return cls(work, teacher, Pictures(pixels, targets, len(work.data.labels)))

    def train(self, assignment: Assignment, submodel: Member) -> Curve:
        """Train sub-model k in place."""
        work, k = self.work, assignment.k
        schedule, device = work.schedule_of(k), self.pictures.pixels.device
        known = [work.plan.assignments[number] for number in schedule.predecessors(k)]
        earlier = known if schedule.boosting else known[-1:] if schedule.stacking else []
        before = [(work.load_member(a), view_of(a)) for a in earlier]
        for member, _ in before:
            move_to(member.requires_grad_(requires_grad=False), device)
        stage = work.stage(
            f"member-{k}", f"training sub-model {k} for {assignment.device}", schedule
        )
        student = Student(submodel, before[-1][0].width if before and schedule.stacking else None)
        check_batches(student, replace(stage, pictures=min(schedule.batch_size, stage.pictures)))
        move_to(student, device)
        recipe = Recipe(
            schedule=schedule,
            drawing=drawing_of(work.settings.augmentation),
            autocast=work.settings.autocast,
            seed=derive_seed(stage.seed, "views"),
        )
        return distil(
            student, view_of(assignment), self._teach(before), self.pictures, recipe, stage.name,
            work.progress,
        )  # fmt: skip

    def _teach(self, before: Sequence[tuple[Member, View]]) -> Teach:
        """The outputs of the teacher and the trained sub-models `before` for the drawn view."""
        work, pixels = self.work, self.pictures.pixels

        @torch.no_grad()
        def teach(draw: Draw) -> BatchTargets:
            with _arithmetic(pixels.device, work.settings.autocast):
                logits = self.teacher(draw.views(pixels, work.teacher_view))
                outputs = [
                    member.of_normalised(member.normalise(draw.views(pixels, view)))
                    for member, view in before
                ]
            boosts = [output.boost.float() for output in outputs if output.boost is not None]
            return BatchTargets(
                labels=draw.labels(self.pictures),
                teacher=centre(logits.float()),
                before=torch.stack(boosts).sum(dim=0) if boosts else None,
                imitated=outputs[-1].feature.float() if outputs else None,
            )

        return teach
