"""Patient distillation: teacher and student see the same fresh view of a picture in every step.

After Beyer et al., Knowledge distillation: a good teacher is patient and consistent, CVPR 2022
(arXiv 2106.05237): random crops that the teacher sees too, mixup, a long schedule and no labels.
Pictures, augmentation, teacher and student are all on one accelerator.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from partitioner.networks.members import Member
from partitioner.networks.submodel import MemberOutput
from partitioner.training.losses import stack_loss, taught_loss

#: Teacher and student in this type; weights and the optimiser's state stay float32.
HALF = torch.bfloat16
#: Share of the steps during which the learning rate rises.
_WARM_UP = 0.05
#: Largest norm of a step's gradient.
_MAX_NORM = 5.0
#: Steps at which progress is reported and the pace taken.
_STARTED, _PACED, _REPORTED = 10, (30, 100), 500
#: A crop's width over height, at most this and at least its inverse.
_ASPECT = 4 / 3


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how a student is taught."""

    epochs: float
    batch: int = 512
    #: Highest learning rate of AdamW; falls to 0 along half a cosine.
    learning_rate: float = 1e-3
    weight_decay: float = 0.02
    #: Smallest share of the picture's area in a crop.
    min_area: float = 0.3
    #: Pictures are mixed in pairs with a uniform share; 0 mixes none, 1 all of them.
    mixed: float = 0.5
    temperature: float = 1.0
    #: The teacher's share in what is taught, against labels.
    distillation: float = 1.0
    #: Weight of imitating a predecessor's feature, where the lesson has one.
    stack: float = 0.5
    #: Decay per step of the averaged weights that are returned; 0 returns the last ones.
    average: float = 0.998


def views_of(pictures: Tensor, boxes: Tensor, flips: Tensor, image_size: int) -> Tensor:
    """Float views `[B, 3, S, S]` in 0..255 of uint8 `pictures` `[B, 3, H, W]`.

    `boxes` `[B, 4]` are centre x and y and half-width and half-height in -1..1, `flips` `[B]` are 1
    or -1. Where a picture is reduced by half or more it is sampled twice as fine and averaged, so
    that it does not alias.
    """
    oversampling = 2 if pictures.shape[-1] >= 2 * image_size else 1
    theta = torch.zeros(len(boxes), 2, 3, device=boxes.device)
    theta[:, 0, 0], theta[:, 0, 2] = boxes[:, 2] * flips, boxes[:, 0]
    theta[:, 1, 1], theta[:, 1, 2] = boxes[:, 3], boxes[:, 1]
    fine = image_size * oversampling
    grid = F.affine_grid(theta, [len(boxes), 3, fine, fine], align_corners=False)
    # Bicubic, as served views are resized; it overshoots at edges.
    sampled = F.grid_sample(
        pictures.float(), grid, mode="bicubic", padding_mode="reflection", align_corners=False
    )
    return (
        F.avg_pool2d(sampled, oversampling).clamp_(0, 255)
        if oversampling > 1
        else sampled.clamp_(0, 255)
    )


def random_boxes(count: int, min_area: float, generator: torch.Generator) -> Tensor:
    """Boxes `[count, 4]` of random area, shape and place inside the picture, for `views_of`."""
    device = generator.device
    area = torch.empty(count, device=device).uniform_(min_area, 1.0, generator=generator)
    limit = math.log(_ASPECT)
    aspect = torch.empty(count, device=device).uniform_(-limit, limit, generator=generator).exp()
    half = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()], dim=1).clamp_(max=1.0)
    at = torch.empty(count, 2, device=device).uniform_(-1, 1, generator=generator)
    return torch.cat([at * (1 - half), half], dim=1)


def whole_boxes(count: int, device: torch.device) -> Tensor:
    """Boxes `[count, 4]` of whole pictures."""
    return torch.tensor([0.0, 0.0, 1.0, 1.0], device=device).expand(count, 4)


def mix_pairs(x: Tensor, share: Tensor) -> Tensor:
    """Views `[B, 3, S, S]`, each mixed with its neighbour by `share` `[B]`."""
    weight = share.view(-1, 1, 1, 1)
    return x * weight + x.roll(1, 0) * (1 - weight)


class Averaged:
    """Exponential moving average of a network's weights and buffers."""

    def __init__(self, network: nn.Module, decay: float) -> None:
        self._decay, self._steps = decay, 0
        self._network = network
        self._kept = [v.detach().clone() for v in self._floats()]

    def _floats(self) -> list[Tensor]:
        return [v for v in self._network.state_dict().values() if v.is_floating_point()]

    def step(self) -> None:
        """Move the average towards the network's present weights."""
        self._steps += 1
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        torch._foreach_lerp_(self._kept, [v.detach() for v in self._floats()], 1 - decay)

    def into_network(self) -> None:
        """Give the network the averaged weights."""
        with torch.no_grad():
            torch._foreach_copy_(self._floats(), self._kept)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Labelled pictures on the device that trains: uint8 `[N, 3, H, W]` and classes `[N]`."""

    pixels: Tensor
    targets: Tensor
    num_classes: int


@dataclass(frozen=True, slots=True)
class Draw:
    """One batch: which pictures, which crops of them, mirrored or not, mixed by which share."""

    rows: Tensor
    boxes: Tensor
    flips: Tensor
    share: Tensor

    def views(self, pixels: Tensor, image_size: int) -> Tensor:
        """The mixed views `[B, 3, S, S]` in 0..255."""
        x = views_of(pixels[self.rows], self.boxes, self.flips, image_size)
        return mix_pairs(x, self.share)

    def labels(self, pictures: Pictures) -> Tensor:
        """The mixed labels as probabilities `[B, C]`."""
        one_hot = F.one_hot(pictures.targets[self.rows], pictures.num_classes).float()
        share = self.share[:, None]
        return one_hot * share + one_hot.roll(1, 0) * (1 - share)


class Draws:
    """Batches without end; every picture once an epoch, in an order of the seed."""

    def __init__(self, count: int, recipe: Recipe, seed: int, device: torch.device) -> None:
        self._count, self._recipe = count, recipe
        self._generator = torch.Generator(device).manual_seed(seed)
        self._order = torch.empty(0, dtype=torch.long, device=device)

    def __call__(self) -> Draw:
        """The next batch."""
        recipe, generator = self._recipe, self._generator
        size = min(recipe.batch, self._count)
        if len(self._order) < size:
            device = generator.device
            self._order = torch.randperm(self._count, device=device, generator=generator)
        rows, self._order = self._order[:size], self._order[size:]
        drawn = torch.rand(3, size, device=rows.device, generator=generator)
        return Draw(
            rows=rows,
            boxes=random_boxes(size, recipe.min_area, generator),
            flips=torch.where(drawn[0] < 0.5, 1.0, -1.0),
            share=torch.where(drawn[1] < recipe.mixed, drawn[2], torch.ones_like(drawn[2])),
        )


#: What some network says of the views of a batch, `[B, C]` logits or `[B, D]` features.
Teach = Callable[[Draw], Tensor]


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a student is taught on the views of every batch."""

    #: The teacher's logits `[B, C]`; without one the labels teach.
    teacher: Teach | None = None
    #: F_{k-1} `[B, C]`: the sum of the predecessors' boost heads.
    before: Teach | None = None
    #: A predecessor's last feature `[B, D]`, and D.
    imitated: tuple[Teach, int] | None = None


def distil(
    student: Member,
    image_size: int,
    lesson: Lesson,
    pictures: Pictures,
    recipe: Recipe,
    seed: int,
    report: Callable[[str], None],
    give_up_at_s: float = math.inf,
) -> dict[str, float]:
    """Train `student` (views in, MemberOutput out) in place; returns seconds, steps and epochs.

    The schedule is shortened where it would not end by `give_up_at_s` of `time.monotonic()`.
    """
    device = pictures.pixels.device
    draws = Draws(len(pictures.pixels), recipe, seed, device)
    per_epoch = max(1, len(pictures.pixels) // recipe.batch)
    steps = max(1, round(recipe.epochs * per_epoch))
    projection = None
    if lesson.imitated:
        projection = nn.Linear(student.width, lesson.imitated[1], device=device)
    trained = nn.ModuleList([student] if projection is None else [student, projection])
    optimiser = _optimiser(trained, recipe, device)
    averaged = Averaged(student, recipe.average) if recipe.average else None
    student.train()

    def learn(draw: Draw) -> Tensor:
        loss = _loss(student, projection, image_size, lesson, pictures, recipe, draw)
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(trained.parameters(), _MAX_NORM)
        optimiser.step()
        return loss.detach()

    take_step = Replayed(learn) if device.type == "cuda" else learn
    started_s, step, shown = time.monotonic(), 0, 0.0
    planned, since = steps, (started_s, 0)
    while step < steps:
        rate = recipe.learning_rate * _rate(step / steps)
        for group in optimiser.param_groups:
            # A tensor on an accelerator, so that a captured step reads it.
            group["lr"] = group["lr"].fill_(rate) if device.type == "cuda" else rate
        loss = take_step(draws())
        if averaged:
            averaged.step()
        step += 1
        if step == _STARTED:
            # What the first steps take, compiling and choosing kernels, says nothing of the rest.
            shown = loss.item()
            since = (time.monotonic(), step)
        elif step in _PACED or step % _REPORTED == 0 or step == steps:
            shown = loss.item()
            step_s = (time.monotonic() - since[0]) / (step - since[1])
            if give_up_at_s < math.inf:
                left = int((give_up_at_s - time.monotonic()) / step_s)
                steps = max(step, min(planned, step + left))
            report(f"step {step}/{steps} loss {shown:.4f} {recipe.batch / step_s:,.0f} pictures/s")
    if averaged:
        averaged.into_network()
    student.eval()
    spent_s = time.monotonic() - started_s
    return {"seconds": spent_s, "steps": step, "epochs": step / per_epoch, "loss": shown}


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
        """Take a step on `draw`; returns the loss."""
        self._calls += 1
        if self._calls <= self._WARM:
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                loss = self._step(draw)
            torch.cuda.current_stream().wait_stream(self._side)
            return loss
        fields = ("rows", "boxes", "flips", "share")
        if self._graph is None:
            self._drawn = Draw(*(getattr(draw, name).clone() for name in fields))
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = self._step(self._drawn)
        for name in fields:
            getattr(self._drawn, name).copy_(getattr(draw, name))
        self._graph.replay()
        return self._loss


def _optimiser(student: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """AdamW without decay of biases and scales."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in student.parameters() if p.ndim > 1]},
        {"params": [p for p in student.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    cuda = device.type == "cuda"
    rate: Any = torch.tensor(recipe.learning_rate, device=device) if cuda else recipe.learning_rate
    return torch.optim.AdamW(
        groups, lr=rate, weight_decay=recipe.weight_decay, fused=cuda, capturable=cuda
    )


def _loss(
    student: nn.Module,
    projection: nn.Module | None,
    image_size: int,
    lesson: Lesson,
    pictures: Pictures,
    recipe: Recipe,
    draw: Draw,
) -> Tensor:
    """The sum of the boost, bag and stack losses of one batch."""
    views = draw.views(pictures.pixels, image_size)
    with torch.autocast(views.device.type, HALF):
        output: MemberOutput = student(views)
    labels = draw.labels(pictures)
    teacher = lesson.teacher(draw) if lesson.teacher else None
    boost = output.boost.float()
    if lesson.before:
        boost = boost + lesson.before(draw)
    loss = _taught(boost, labels, teacher, recipe) + _taught(
        output.bag.float(), labels, teacher, recipe
    )
    if lesson.imitated and projection is not None:
        feature = lesson.imitated[0](draw)
        loss = loss + recipe.stack * stack_loss(projection(output.feature.float()), feature)
    return loss


def _taught(logits: Tensor, labels: Tensor, teacher: Tensor | None, recipe: Recipe) -> Tensor:
    if teacher is None:
        return F.cross_entropy(logits, labels)
    return taught_loss(
        logits, labels, teacher,
        distillation=recipe.distillation, temperature=recipe.temperature, label_smoothing=0.0,
    )  # fmt: skip


def _rate(done: float) -> float:
    """Share of the highest learning rate after `done` of all steps."""
    if done < _WARM_UP:
        return (done + 1e-3) / _WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP)))


@torch.no_grad()
def answers(
    network: Callable[[Tensor], Tensor], pictures: Tensor, image_size: int, batch: int = 500
) -> Tensor:
    """Logits `[N, C]`, float32, of `network` (views in, logits out) on whole pictures."""
    found = []
    for start in range(0, len(pictures), batch):
        chunk = pictures[start : start + batch]
        boxes = whole_boxes(len(chunk), pictures.device)
        flips = torch.ones(len(chunk), device=pictures.device)
        found.append(network(views_of(chunk, boxes, flips, image_size)))
    return torch.cat(found)
