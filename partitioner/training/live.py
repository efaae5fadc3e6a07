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

from partitioner.networks.submodel import MemberOutput
from partitioner.training.losses import divergence

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


#: The teacher's logits `[B, C]` for the views of a batch.
Teach = Callable[[Draw], Tensor]


def distil(
    student: nn.Module,
    image_size: int,
    teach: Teach | None,
    pictures: Pictures,
    recipe: Recipe,
    seed: int,
    report: Callable[[str], None],
    give_up_at_s: float = math.inf,
) -> dict[str, float]:
    """Train `student` (views in, MemberOutput out) in place; returns seconds, steps and epochs.

    Without a teacher it learns from the labels. The schedule is shortened where it would not end
    by `give_up_at_s` of `time.monotonic()`.
    """
    device = pictures.pixels.device
    draws = Draws(len(pictures.pixels), recipe, seed, device)
    per_epoch = max(1, len(pictures.pixels) // recipe.batch)
    steps = max(1, round(recipe.epochs * per_epoch))
    optimiser = _optimiser(student, recipe, device)
    averaged = Averaged(student, recipe.average) if recipe.average else None
    student.train()
    started_s, step, shown = time.monotonic(), 0, 0.0
    planned, since = steps, (started_s, 0)
    while step < steps:
        rate = recipe.learning_rate * _rate(step / steps)
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss = _loss(student, image_size, teach, pictures, recipe, draws())
        optimiser.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(student.parameters(), _MAX_NORM)
        optimiser.step()
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


def _optimiser(student: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.Optimizer:
    """AdamW without decay of biases and scales."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in student.parameters() if p.ndim > 1]},
        {"params": [p for p in student.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = device.type == "cuda"
    return torch.optim.AdamW(
        groups, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, fused=fused
    )


def _loss(
    student: nn.Module,
    image_size: int,
    teach: Teach | None,
    pictures: Pictures,
    recipe: Recipe,
    draw: Draw,
) -> Tensor:
    """Both heads' distance from the teacher, or from the labels where there is none."""
    views = draw.views(pictures.pixels, image_size)
    with torch.autocast(views.device.type, HALF):
        output: MemberOutput = student(views)
    heads = [output.boost.float(), output.bag.float()]
    if teach is None:
        labels = draw.labels(pictures)
        losses = [F.cross_entropy(head, labels) for head in heads]
    else:
        wanted = teach(draw)
        losses = [divergence(head, wanted, recipe.temperature) for head in heads]
    return torch.stack(losses).sum()


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
        with torch.autocast(pictures.device.type, HALF):
            found.append(network(views_of(chunk, boxes, flips, image_size)).float())
    return torch.cat(found)
