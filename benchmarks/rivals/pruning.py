"""Cut a teacher down to a member's width by what its activations on some pictures tell.

What remains is a teacher of the same depth, picture and patch, which
`partitioner.networks.weight_init` then turns into the member's trunk. Nothing is rescaled: the
member is retrained.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from mdp.errors import InputError
from mdp.formats.plan import SubModelSpec
from partitioner.estimates.macs import hidden_dim
from partitioner.networks.submodel import MEAN, STD, SubModel
from partitioner.networks.teacher import Teacher
from partitioner.training.cached_outputs import BATCH


@dataclass(frozen=True, slots=True)
class Energies:
    """Mean squares of activations, one tensor per block."""

    #: What a block adds up in each channel of the residual stream `[D]`.
    stream: list[Tensor] = field(default_factory=list)
    #: Queries, keys and values `[3 * D]`.
    qkv: list[Tensor] = field(default_factory=list)
    #: What the attention's projection reads `[D]`, head by head.
    attended: list[Tensor] = field(default_factory=list)
    #: What the MLP's second layer reads `[hidden]`.
    units: list[Tensor] = field(default_factory=list)


def pruned_for(teacher: Teacher, spec: SubModelSpec, pixels: Tensor) -> Teacher:
    """The teacher cut to the width, heads and MLP of `spec`, for pixels `[B, 3, S, S]`.

    Raises InputError where the teacher is no plain ViT or has less than `spec` asks for.
    """
    old: Any = teacher.network
    _check(old, spec)
    energies = measured(teacher, pixels)
    stream = torch.stack([energy / energy.mean() for energy in energies.stream]).mean(dim=0)
    channels = _strongest(stream, spec.embed_dim)
    narrow: Any = _empty(old, spec)
    state = {key: value for key, value in old.state_dict().items() if not key.startswith("head.")}
    for key in ("cls_token", "pos_embed"):
        state[key] = state[key][..., channels]
    for key in ("patch_embed.proj.weight", "patch_embed.proj.bias", "norm.weight", "norm.bias"):
        state[key] = state[key][channels]
    for i, block in enumerate(old.blocks):
        for key, value in _block(block, spec, channels, energies, i).items():
            state[f"blocks.{i}.{key}"] = value
    narrow.load_state_dict(state)
    pruned = Teacher(narrow, MEAN, STD)
    pruned.normalise = teacher.normalise
    return pruned.to(channels.device)


def measured(teacher: Teacher, pixels: Tensor) -> Energies:
    """Energies of one pass over the pixels."""
    energies, network = Energies(), teacher.network
    with _watched(network, energies), torch.inference_mode():
        for part in torch.split(pixels, BATCH):
            teacher.eval()(part)
    depth = len(network.blocks)  # type: ignore[arg-type]
    for values in (energies.stream, energies.qkv, energies.attended, energies.units):
        # One entry per block and pass; passes may differ in size by one picture, which is nothing.
        values[:] = [torch.stack(values[i::depth]).mean(dim=0) for i in range(depth)]
    return energies


@contextmanager
def _watched(network: Any, energies: Energies) -> Iterator[None]:
    def of_output(into: list[Tensor]) -> Any:
        return lambda _module, _inputs, output: into.append(_energy(output))

    def of_input(into: list[Tensor]) -> Any:
        return lambda _module, inputs, _output: into.append(_energy(inputs[0]))

    handles = []
    for block in network.blocks:
        handles += [
            block.register_forward_hook(of_output(energies.stream)),
            block.attn.qkv.register_forward_hook(of_output(energies.qkv)),
            block.attn.proj.register_forward_hook(of_input(energies.attended)),
            block.mlp.fc2.register_forward_hook(of_input(energies.units)),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _energy(values: Tensor) -> Tensor:
    return values.flatten(0, -2).float().square().mean(dim=0)


def _strongest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of `scores[n]`, ascending."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def _block(
    block: Any, spec: SubModelSpec, channels: Tensor, energies: Energies, i: int
) -> dict[str, Tensor]:
    """One block's weights with fewer channels, heads, units of a head, and units of the MLP."""
    qk, value = _attention(block.attn, spec, channels, energies, i)
    read = energies.units[i] * block.mlp.fc2.weight[channels].square().sum(dim=0)
    units = _strongest(read, hidden_dim(spec))
    width = block.attn.qkv.in_features
    rows = torch.cat([qk, width + qk, 2 * width + value])
    attn, mlp = block.attn, block.mlp
    return {
        **{f"{norm}.weight": getattr(block, norm).weight[channels] for norm in ("norm1", "norm2")},
        **{f"{norm}.bias": getattr(block, norm).bias[channels] for norm in ("norm1", "norm2")},
        "attn.qkv.weight": attn.qkv.weight[rows][:, channels],
        "attn.qkv.bias": attn.qkv.bias[rows],
        "attn.proj.weight": attn.proj.weight[channels][:, value],
        "attn.proj.bias": attn.proj.bias[channels],
        "mlp.fc1.weight": mlp.fc1.weight[units][:, channels],
        "mlp.fc1.bias": mlp.fc1.bias[units],
        "mlp.fc2.weight": mlp.fc2.weight[channels][:, units],
        "mlp.fc2.bias": mlp.fc2.bias[channels],
    }


def _attention(
    attn: Any, spec: SubModelSpec, channels: Tensor, energies: Energies, i: int
) -> tuple[Tensor, Tensor]:
    """Rows of queries (and keys), and of values, that stay: heads first, then units inside."""
    heads, size = attn.num_heads, attn.head_dim
    kept_size = spec.embed_dim // spec.num_heads
    q, k, _ = energies.qkv[i].reshape(3, heads, size)
    written = attn.proj.weight[channels].square().sum(dim=0)
    value = (energies.attended[i] * written).reshape(heads, size)
    kept = _strongest(value.sum(dim=1), spec.num_heads).tolist()
    qk_rows = [head * size + _strongest((q * k)[head], kept_size) for head in kept]
    value_rows = [head * size + _strongest(value[head], kept_size) for head in kept]
    return torch.cat(qk_rows), torch.cat(value_rows)


def _empty(old: Any, spec: SubModelSpec) -> nn.Module:
    """A trunk as deep as the teacher, on the teacher's pictures, with the member's width."""
    shape = SubModelSpec(
        image_size=old.patch_embed.img_size[0],
        patch_size=old.patch_embed.patch_size[0],
        embed_dim=spec.embed_dim,
        depth=len(old.blocks),
        num_heads=spec.num_heads,
        mlp_ratio=spec.mlp_ratio,
    )
    return SubModel(shape, 2).trunk


def _check(old: Any, spec: SubModelSpec) -> None:
    """Raise InputError where the teacher cannot be cut to `spec`."""
    block, size = old.blocks[0], spec.embed_dim // spec.num_heads
    sizes = [
        ("embed_dim", spec.embed_dim, old.embed_dim),
        ("num_heads", spec.num_heads, block.attn.num_heads),
        ("width of a head", size, block.attn.head_dim),
        ("width of the MLP", hidden_dim(spec), block.mlp.fc1.out_features),
        ("depth", spec.depth, len(old.blocks)),
    ]
    for name, wanted, most in sizes:
        if wanted > most:
            raise InputError(f"teacher cannot be pruned: {name} is {most}, expected {wanted}")
    own = {key for key in old.state_dict() if not key.startswith("head.")}
    odd = own ^ set(_empty(old, spec).state_dict())
    if odd:
        raise InputError(f"teacher cannot be pruned: expected a plain ViT, found {min(odd)!r}")
