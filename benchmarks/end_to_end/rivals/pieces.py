"""A timm teacher cut in two ways, as ONNX: into stages of blocks, and into parts of layers.

Stages run one after another and compute exactly what the teacher does. Parts of a layer run at the
same time, each with some of the heads and some of the MLP's columns; the sum over devices is the
layer's output. The first device's part also has what is to be added once: bias and residual.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.end_to_end.rivals.split import bounds, columns, dealt
from mdp.errors import InputError
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
            x = embedded(self._teacher, x)
        x = self._blocks(x)
        return (network.forward_head(network.norm(x)) if self._ends else x,)


def embedded(teacher: Teacher, images: Tensor) -> Tensor:
    """Tokens `[1, N, D]` of uint8 `[1, S, S, 3]`, before the first block."""
    network: Any = teacher.network
    x = network.patch_embed(teacher.normalise(images.permute(0, 3, 1, 2).float()))
    tokens: Tensor = network.norm_pre(network.patch_drop(network._pos_embed(x)))
    return tokens


class Embedding(nn.Module):
    """uint8 `[1, S, S, 3]` -> tokens `[1, N, D]`, which every device computes for itself."""

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self._teacher = teacher

    def forward(self, images: Tensor) -> tuple[Tensor]:
        return (embedded(self._teacher, images),)


class Parts(nn.Module):
    """One device's parts of all layers: as many tokens in as out, attention and MLP in turns."""

    def __init__(
        self, teacher: Teacher, heads: tuple[int, int], hidden: tuple[int, int], *, first: bool
    ) -> None:
        super().__init__()
        network: Any = teacher.network
        parts: list[nn.Module] = []
        for block in network.blocks:
            parts += [_Attention(block, heads, first=first), _Mlp(block, hidden, first=first)]
        self._parts = nn.ModuleList(parts)

    def forward(self, *tokens: Tensor) -> tuple[Tensor, ...]:
        """One partial sum `[1, N, D]` for each of the tokens."""
        return tuple(part(x) for part, x in zip(self._parts, tokens, strict=True))


class _Attention(nn.Module):
    def __init__(self, block: Any, heads: tuple[int, int], *, first: bool) -> None:
        super().__init__()
        attention, (begin, end) = block.attn, heads
        self._head = attention.head_dim
        self._norm, self._scale, self._first = block.norm1, block.ls1, first
        width = attention.num_heads * self._head
        rows = torch.cat(
            [torch.arange(begin * self._head, end * self._head) + part * width for part in range(3)]
        )
        own = rows[: len(rows) // 3]
        self._qkv = _linear(attention.qkv.weight[rows], _rows(attention.qkv.bias, rows))
        bias = attention.proj.bias if first else None
        self._project = _linear(attention.proj.weight[:, own], bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, _ = x.shape
        qkv = self._qkv(self._norm(x)).reshape(batch, count, 3, -1, self._head)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, count, -1)
        part: Tensor = self._scale(self._project(seen))
        return x + part if self._first else part


class _Mlp(nn.Module):
    def __init__(self, block: Any, hidden: tuple[int, int], *, first: bool) -> None:
        super().__init__()
        mlp, own = block.mlp, slice(*hidden)
        self._norm, self._scale, self._first = block.norm2, block.ls2, first
        self._into = _linear(mlp.fc1.weight[own], mlp.fc1.bias[own])
        self._act = mlp.act
        self._out = _linear(mlp.fc2.weight[:, own], mlp.fc2.bias if first else None)

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self._scale(self._out(self._act(self._into(self._norm(x)))))
        return x + part if self._first else part


def _rows(bias: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if bias is None else bias[rows]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


def check_splittable(teacher: Teacher, devices: int) -> None:
    """Raise InputError for a teacher whose layers these parts do not add up to."""
    network: Any = teacher.network
    for block in network.blocks:
        attention, mlp = block.attn, block.mlp
        between = (attention.q_norm, attention.k_norm, attention.norm, mlp.norm)
        if not all(isinstance(module, nn.Identity) for module in between):
            raise InputError("--teacher: expected one without norms inside attention or MLP")
    if network.blocks[0].attn.num_heads < devices or len(network.blocks) < devices:
        raise InputError(f"--teacher: expected at least {devices} heads and {devices} blocks")


def write_stages(teacher: Teacher, speeds: Sequence[float], folder: Path) -> list[Path]:
    """The teacher as one stage for each device, blocks in proportion to `speeds`."""
    network: Any = teacher.network
    size = network.patch_embed.img_size[0]
    paths = []
    x = torch.zeros(1, size, size, 3, dtype=torch.uint8)
    for number, (first, last) in enumerate(bounds(dealt(len(network.blocks), speeds))):
        stage = Stage(teacher, first, last).eval()
        paths.append(folder / f"stage-{number}.onnx")
        write_bytes(paths[-1], exported(stage, [x], ["x"], ["y"]).SerializeToString())
        with torch.no_grad():
            (x,) = stage(x)
    return paths


def write_parts(teacher: Teacher, speeds: Sequence[float], folder: Path) -> list[Path]:
    """Every device's folder with its part of each layer, embedding and head."""
    network: Any = teacher.network
    size, block = network.patch_embed.img_size[0], network.blocks[0]
    images = torch.zeros(1, size, size, 3, dtype=torch.uint8)
    with torch.no_grad():
        tokens = embedded(teacher, images)
    ends = {
        "embedding": exported(Embedding(teacher), [images], ["x"], ["y"]),
        "head": exported(Stage(teacher, len(network.blocks), len(network.blocks)), [tokens],
                         ["x"], ["y"]),
    }  # fmt: skip
    heads = bounds(dealt(block.attn.num_heads, speeds))
    hidden = columns(block.mlp.fc1.out_features, speeds)
    paths = []
    for number, (own_heads, own_hidden) in enumerate(zip(heads, hidden, strict=True)):
        own = folder / f"device-{number}"
        parts = Parts(teacher, own_heads, own_hidden, first=number == 0)
        for name, model in {**ends, **_layers(parts, tokens, 2 * len(network.blocks))}.items():
            write_bytes(own / f"{name}.onnx", model.SerializeToString())
        paths.append(own)
    return paths


def _layers(parts: Parts, tokens: Tensor, count: int) -> dict[str, Any]:
    """Name -> model of each part of a layer, cut from one export of them all."""
    inputs = [f"in-{number:02}" for number in range(count)]
    outputs = [f"out-{number:02}" for number in range(count)]
    whole = exported(parts, [tokens.clone() for _ in range(count)], inputs, outputs)
    return {
        f"layer-{number:02}": cut(whole, inputs[number], outputs[number]) for number in range(count)
    }


def exported(
    module: nn.Module, examples: Sequence[Tensor], inputs: Sequence[str], outputs: Sequence[str]
) -> Any:
    """`module` as ONNX for batches of one, by the exporter that makes the product's models."""
    with warnings.catch_warnings():
        # torch.export copies pytree specs in a way that its own pytree module has deprecated.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        program: Any = torch.onnx.export(
            module.eval(),
            tuple(examples),
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    return program.model_proto


def cut(model: Any, entry: str, result: str) -> Any:
    """What of `model` leads from its input `entry` to its output `result`, as a model."""
    import onnx

    graph, needed, nodes = model.graph, {result}, []
    for node in reversed(graph.node):
        if needed & set(node.output):
            nodes.append(node)
            needed.update(node.input)
    part = onnx.helper.make_graph(
        nodes[::-1],
        result,
        [value for value in graph.input if value.name == entry],
        [value for value in graph.output if value.name == result],
        [tensor for tensor in graph.initializer if tensor.name in needed],
    )
    made = onnx.helper.make_model(
        part, opset_imports=model.opset_import, functions=model.functions,
        ir_version=model.ir_version,
    )  # fmt: skip
    onnx.checker.check_model(made)
    return made
