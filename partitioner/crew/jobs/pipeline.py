"""The teacher in stages of consecutive blocks, each on a trainer: torch's 1F1B over a crew's group.

Every trainer has its own stage's parameters, gradients and moments alone in memory. Several
pipelines share a batch, and those who have the same stage average its gradients. Weights are those
of one process, up to rounding: a batch's micro-batches are padded to one size with pictures that
have no part in the loss, and gradients are clipped by the norm over all stages.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn import functional as F

from mdp.formats.plan import TeacherSpec
from partitioner.crew.averaging.codecs import CODECS
from partitioner.crew.averaging.mean import Mean, Means, Meeting, Segment
from partitioner.data.memmaps import Views
from partitioner.data.variants import Labels
from partitioner.networks.teacher import Teacher, build_teacher
from partitioner.run.settings import Autocast
from partitioner.training.cached_outputs import batch
from partitioner.training.checkpoint import epochs_of
from partitioner.training.distributed import Crew
from partitioner.training.synchroniser import EveryStep, Index, Share, step_clipped

#: Pieces of a timm ViT before its blocks; all others but the blocks come after them.
_FIRST = {
    "cls_token", "reg_token", "dist_token", "pos_embed",
    "patch_embed", "pos_drop", "patch_drop", "norm_pre",
}  # fmt: skip
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A network in stages, and which of them this process trains."""

    #: Of every stage.
    blocks: tuple[int, ...]
    index: int
    micro_batches: int
    #: Most micro-batches here between forward and backward; more than never waits is of no use.
    in_flight: int
    #: Pipelines that share every batch, and which of them this process is in.
    pipelines: int = 1
    pipeline: int = 0

    @property
    def is_first(self) -> bool:
        """Tell whether it takes the pictures."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Tell whether it gives the logits."""
        return self.index == len(self.blocks) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGroups:
    """Groups of a trainer of a stage."""

    #: All trainers of all stages.
    crew: Crew
    #: Those of the own pipeline, and their ranks in its group, by stage.
    pipeline: Crew
    ranks: tuple[int, ...]
    #: The way in which those who train the same stage average its gradients.
    means: Means = field(default_factory=Means)
    #: These; None where there is one pipeline.
    meeting: Meeting | None = None


def stage_of(name: str, blocks: Sequence[int]) -> int:
    """The stage that holds a tensor or module of a Teacher, by its name."""
    _, piece, *rest = name.split(".")
    if piece == "blocks":
        return bisect_right(list(accumulate(blocks)), int(rest[0]))
    return 0 if piece in _FIRST else len(blocks) - 1


def part_of(
    spec: TeacherSpec, num_classes: int, cut: Cut, tensors: dict[str, Tensor]
) -> tuple[Teacher, tuple[int, int]]:
    """The teacher with one stage's `tensors` alone, and the shape `[L, D]` between its blocks.

    The rest never has memory. Raises RuntimeError where the tensors are not those of the stage.
    """
    with torch.device("meta"), torch.no_grad():
        network: Any = build_teacher(spec, num_classes, pretrained=False).network
        side = spec.shape.image_size
        shape = network.forward_features(torch.empty(1, 3, side, side)).shape[1:]
    for i in range(len(network.blocks)):
        if stage_of(f"network.blocks.{i}", cut.blocks) != cut.index:
            network.blocks[i] = nn.Identity()
    others = [name for name, _ in network.named_children() if name != "blocks"]
    for name in others:
        if stage_of(f"network.{name}", cut.blocks) != cut.index:
            setattr(network, name, nn.Identity())
    for name, _ in list(network.named_parameters(recurse=False)):
        if stage_of(f"network.{name}", cut.blocks) != cut.index:
            setattr(network, name, None)
    teacher = Teacher(network, network.pretrained_cfg["mean"], network.pretrained_cfg["std"])
    teacher.load_state_dict(tensors, assign=True)
    return teacher, (shape[0], shape[1])


class _Piece(nn.Module):
    """A stage's forward pass, in and out on the processor, as gloo sends.

    It holds the trained module without owning it: torch would move it to the processor.
    """

    def __init__(self, teacher: nn.Module, cut: Cut, device: torch.device, autocast: Autocast):
        super().__init__()
        self._teacher, self._cut, self._device = [teacher], cut, device
        self._bf16 = autocast == "bf16"

    def forward(self, x: Tensor) -> Tensor:
        """Pictures or tokens -> tokens or logits, float32."""
        teacher: Any = self._teacher[0]
        network, x = teacher.network, x.to(self._device)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            if self._cut.is_first:  # what is not of this stage gives its input
                x = network.forward_features(teacher.normalise(x))
            else:
                x = network.blocks(x)
            if self._cut.is_last:
                x = network.forward_head(network.norm(x))
        return x.float().cpu()


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePictures:
    """The training pictures, by variant: pixels for the first stage, labels for the last."""

    pixels: Sequence[Views]
    labels: Sequence[Labels]
    #: Of the largest batch.
    batch_size: int
    label_smoothing: float
    classes: int
    side: int
    autocast: Autocast


class Pipeline(EveryStep):
    """A `Synchroniser` of trainers that have a stage each, and the loss of a batch over all.

    `default_group` of the own pipeline has to hold while it trains. between: tokens and width
    between two blocks. checkpoint: of this stage; the one before the last is kept beside it, as
    another stage may be lost before it has written its last.
    """

    def __init__(
        self,
        groups: StageGroups,
        cut: Cut,
        pictures: StagePictures,
        between: tuple[int, int],
        checkpoint: Path,
    ) -> None:
        super().__init__(groups.crew)
        self._between, self._groups = between, groups
        self._mean = Mean([], groups.means)
        self._cut, self._pictures, self._checkpoint = cut, pictures, checkpoint
        self._schedule: Any = None
        self._wanted: Tensor | None = None
        #: Pictures of the batch that goes on, those of other pipelines too.
        self._batch = np.zeros(0, dtype=np.int64)

    @property
    def sent_bytes(self) -> int:
        """Bytes of gradients that this trainer has sent to others of its stage."""
        return self._mean.sent_bytes

    def wrap(
        self, module: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
    ) -> nn.Module:
        """Make the stage; returns the module itself."""
        self._module, cut, seen = module, self._cut, self._pictures
        size = self._micro_size
        numbers = sum(p.numel() for p in module.parameters() if p.requires_grad)
        self._mean = Mean([Segment(0, numbers, CODECS["fp32"])], self._groups.means)
        between = torch.empty(size, *self._between, requires_grad=True)
        pixels = torch.empty(size, 3, seen.side, seen.side)
        stage = PipelineStage(
            _Piece(module, cut, device, seen.autocast),
            cut.index,
            len(cut.blocks),
            _CPU,
            input_args=pixels if cut.is_first else between,
            output_args=torch.empty(size, seen.classes) if cut.is_last else between,
        )
        stage.stage_index_to_group_rank = dict(enumerate(self._groups.ranks))
        # Schedule1F1B begins with as many forward passes as it sees stages from here on.
        in_flight = min(cut.in_flight, len(cut.blocks) - cut.index)
        stage.num_stages = cut.index + in_flight
        self._schedule = Schedule1F1B(stage, cut.micro_batches, self._micro_loss, scale_grads=False)
        stage.num_stages = len(cut.blocks)
        return module

    def shares(self, batches: Sequence[Index], epoch: int) -> Iterator[Share]:
        """The own pipeline's part of every batch, of which the loss is a part of the batch's."""
        for number, index in enumerate(batches):
            self._batch = index
            yield number, np.array_split(index, self._cut.pipelines)[self._cut.pipeline], 1.0

    @property
    def _micro_size(self) -> int:
        """Pictures of a micro-batch, those included that have no part in the loss."""
        return -(-self._pictures.batch_size // (self._cut.pipelines * self._cut.micro_batches))

    def loss_of(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        """The forward and backward passes of a batch: gradients are there when it returns.

        The loss is that of the last stage and 0 in all others; nothing depends on it any more.
        """
        seen, many, size = self._pictures, self._cut.micro_batches, self._micro_size
        #: Stands where a micro-batch has fewer pictures.
        any_picture = self._batch[0]
        # Padded micro by micro: a picture's rows are then those of its own micro-batch.
        padded = np.full((many, size), -1, dtype=np.int64)
        for row, part in zip(padded, np.array_split(index, many), strict=True):
            row[: len(part)] = part
        rows = padded.ravel()
        given: list[Tensor] = []
        losses: list[Tensor] = []
        said: dict[str, Any] = {}
        if self._cut.is_first:
            views = seen.pixels[epoch % len(seen.pixels)]
            given = [batch(views, np.where(rows < 0, any_picture, rows), _CPU)]
        if self._cut.is_last:
            labels = seen.labels[epoch % len(seen.labels)]
            self._wanted = labels[np.where(rows < 0, any_picture, rows)]
            said = {"target": torch.arange(len(rows)).where(torch.from_numpy(rows) >= 0, -1)}
            said["losses"] = losses
        self._schedule.step(*given, **said, return_outputs=False)
        loss = sum((one.detach() for one in losses), torch.zeros(()))
        return {"loss": loss.requires_grad_()}

    def _micro_loss(self, logits: Tensor, rows: Tensor) -> Tensor:
        """A micro-batch's part of the mean over the batch; `rows` are -1 where it is padded."""
        assert self._wanted is not None
        real = rows >= 0
        wanted = self._wanted[rows[real]]
        smoothing = self._pictures.label_smoothing
        total = F.cross_entropy(logits[real], wanted, label_smoothing=smoothing, reduction="sum")
        return total / len(self._batch)

    def update(self, optimiser: torch.optim.Optimizer) -> float:
        """Take a step with gradients clipped by their norm over all stages."""
        assert self._module is not None
        gradients = [p.grad for p in self._module.parameters() if p.grad is not None]
        if self._groups.meeting is not None:
            self._add_up(gradients, self._groups.meeting)
        norm = nn.utils.get_total_norm(gradients)
        squares = norm.double().cpu().square().reshape(1)
        self._groups.pipeline.require_group().allreduce([squares]).wait()
        if not squares.isfinite():  # all stages have to see it
            squares.fill_(torch.nan)
        total = squares.sqrt().float()[0].to(norm.device)
        return step_clipped(self._module, optimiser, total)

    def _add_up(self, gradients: Sequence[Tensor], meeting: Meeting) -> None:
        """Replace the own stage's gradients by the sums of all pipelines' parts of the batch."""
        own = torch.cat([gradient.flatten().float().cpu() for gradient in gradients])
        total = self._mean.spread(self._mean.collect(own, meeting)) * len(meeting.members)
        parts = torch.split(total, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def settle(self, sums: Tensor) -> Tensor:
        """Keep the checkpoint of the epoch before, which all stages have written."""
        if self._checkpoint.exists():
            self._checkpoint.replace(before(self._checkpoint))
        return sums


def before(checkpoint: Path) -> Path:
    """Path of the checkpoint before the last one."""
    return checkpoint.with_suffix(".before.pt")


def gather(crew: Crew, own: Tensor) -> list[Tensor]:
    """The tensors of all, in the group's order."""
    found = [torch.empty_like(own) for _ in range(crew.size)]
    crew.require_group().allgather([found], [own]).wait()
    return found


def take_common(crew: Crew, checkpoint: Path) -> int:
    """Put the last checkpoint that all stages have in place; returns its epochs, 0 for none."""
    files = {epochs_of(path): path for path in (before(checkpoint), checkpoint) if path.exists()}
    found = gather(crew, torch.tensor([*sorted(files), 0, 0][:2]))
    common = max(set.intersection(*({0, *map(int, one)} for one in found)))
    if common == 0:
        for path in files.values():
            path.unlink()
    elif files[common] != checkpoint:
        files[common].replace(checkpoint)
    return common


_group: list[object] = []


@contextmanager
def default_group(crew: Crew) -> Iterator[None]:
    """Make the crew's group torch's default group, which pipelines ask for their ranks."""
    name = "crew"
    if name not in distributed.Backend.backend_list:
        distributed.Backend.register_backend(name, lambda *_: _group[-1], devices=["cpu"])
    _group.append(crew.require_group())
    try:
        distributed.init_process_group(
            name, store=HashStore(), rank=crew.rank, world_size=crew.size
        )
        yield
    finally:
        _group.clear()
        if distributed.is_initialized():
            distributed.destroy_process_group()
