"""A timm teacher cut into stages of blocks, as ONNX: one after another they compute its logits."""

import warnings
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mdp.files import write_bytes
from partitioner.export.write import OPSET
from partitioner.networks.teacher import Teacher


class Stage(nn.Module):
    """Blocks `first` to `last` (exclusive) of a teacher, with embedding or head at either end.

    The first takes uint8 `[1, S, S, 3]`, the others tokens `[1, N, D]`; the last gives logits.
    """

    def __init__(self, teacher: Teacher, first: int, last: int) -> None:
        super().__init__()
        network: Any = teacher.network
        self._begins, self._ends = first == 0, last == len(network.blocks)
        self._teacher = teacher
        self._blocks = network.blocks[first:last]

    def forward(self, x: Tensor) -> tuple[Tensor]:
        """Tokens, or logits."""
        network: Any = self._teacher.network
        if self._begins:
            x = network.patch_embed(self._teacher.normalise(x.permute(0, 3, 1, 2).float()))
            x = network.norm_pre(network.patch_drop(network._pos_embed(x)))
        x = self._blocks(x)
        return (network.forward_head(network.norm(x)) if self._ends else x,)


def dealt(parts: int, speeds: Sequence[float]) -> list[int]:
    """How many of `parts` equal parts each device gets so that the last one is done soonest.

    `speeds` are parts per any unit of time. Giving each part to whoever would be done with it
    first is optimal for equal parts.
    """
    counts = [0] * len(speeds)
    for _ in range(parts):
        soonest = min(range(len(speeds)), key=lambda i: (counts[i] + 1) / speeds[i])
        counts[soonest] += 1
    return counts


def write_stages(teacher: Teacher, speeds: Sequence[float], folder: Path) -> list[Path]:
    """The teacher as one stage for each device, blocks in proportion to `speeds`."""
    network: Any = teacher.network
    size = network.patch_embed.img_size[0]
    paths = []
    x = torch.zeros(1, size, size, 3, dtype=torch.uint8)
    bounds = pairwise(accumulate(dealt(len(network.blocks), speeds), initial=0))
    for number, (first, last) in enumerate(bounds):
        stage = Stage(teacher, first, last).eval()
        paths.append(folder / f"stage-{number}.onnx")
        with warnings.catch_warnings():
            # torch.export copies pytree specs in a way that its own pytree module has deprecated.
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
            program: Any = torch.onnx.export(
                stage, (x,), input_names=["x"], output_names=["y"], opset_version=OPSET,
                dynamo=True, verbose=False,
            )  # fmt: skip
        write_bytes(paths[-1], program.model_proto.SerializeToString())
        with torch.no_grad():
            (x,) = stage(x)
    return paths
