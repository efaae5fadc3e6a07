"""Start a sub-model from another network's weights: choose layers, heads and units, slice the rest.

The other one is the teacher or an earlier sub-model, called teacher here. The selection depends on
the weights alone; with all sizes equal the sub-model computes exactly the teacher's feature:

- *Layers*: evenly spaced, the first and the last among them, as in DistilBERT (Sanh et al. 2019,
  arXiv 1910.01108), which took every second one.
- *Width*: one choice of channels for the whole residual stream, as layers share it;
  the channels with the largest weights in all matrices that touch the stream.
  This is weight subcloning (Samragh et al. 2023, arXiv 2312.09299), which ranks neurons by their
  activations, here without pictures; weight selection (Xu et al. 2024, arXiv 2311.18823) showed
  that being consistent over layers matters.
- *Heads*: the ones with the largest value-output product (which heads matter: Michel et al. 2019,
  arXiv 1905.10650, measured there by gradients). A teacher's head may be split.
- *Units*, of the MLP and inside a head: by the product of the norms going in and out (for queries
  and keys: of both), that is, by the largest contribution they can make.
- *Scale*: a partial sum is multiplied to keep its variance if its terms are independent: by
  sqrt(old_in / new_in) where all terms weigh the same.
- *Picture and patch size*: timm's own resampling. The teacher's normalisation is folded into the
  patch embedding.

LayerScale is folded into the projections; registers and the distillation token are dropped; without
class token or final norm in the teacher the sub-model's stay random. GELU's approximations (tanh,
quick) become GELU. A teacher whose blocks have parts without counterpart (norm before the first
block, QK-norm, RMSNorm, gated MLP) is refused.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mdp.errors import InputError
from mdp.formats.plan import SubModelSpec, TeacherSpec
from partitioner.networks.submodel import MEAN, STD, Normalise
from partitioner.networks.teacher import outline

_CANNOT = "cannot start from the teacher's weights"


class WeightSource(Protocol):
    """A network whose weights are selected, and its normalisation."""

    @property
    def network(self) -> nn.Module:
        """A timm ViT."""

    @property
    def normalise(self) -> Normalise:
        """From pixels to the network's input."""


@dataclass(frozen=True, slots=True)
class TrainedMember:
    """A trained sub-model's trunk as a source of weights."""

    network: nn.Module
    normalise: Normalise = field(default_factory=lambda: Normalise(MEAN, STD))


def check_source(teacher: TeacherSpec, members: Iterable[SubModelSpec]) -> None:
    """Raise InputError unless every member can start from that teacher; needs no weights."""
    network = outline(teacher.name, teacher.args)
    _check_kind(network)
    for spec in members:
        _check_sizes(
            network,
            spec.embed_dim,
            spec.depth,
            spec.num_heads,
            int(spec.embed_dim * spec.mlp_ratio),
        )


def init_from(trunk: nn.Module, teacher: WeightSource) -> None:
    """Replace the weights of a sub-model's trunk, in place, by a selection of the teacher's.

    Raises InputError when the teacher's blocks have no counterpart in the trunk, or when the
    trunk is larger than the teacher anywhere but in its picture.
    """
    old: Any = teacher.network
    new: Any = trunk
    block = new.blocks[0]
    _check_kind(old)
    _check_sizes(
        old, new.embed_dim, len(new.blocks), block.attn.num_heads, block.mlp.fc1.out_features
    )
    with torch.no_grad():
        channels = _strongest(_channel_scores(old), new.embed_dim)
        state = dict(new.state_dict())
        state |= _embedding(new, old, teacher.normalise, channels)
        for i, layer in enumerate(select_evenly(len(old.blocks), len(new.blocks))):
            for key, value in _block(new.blocks[i], old.blocks[layer], channels).items():
                state[f"blocks.{i}.{key}"] = value
        # A teacher that pools before its norm has the norm in front of the head.
        for norm in (old.norm, old.fc_norm):
            if isinstance(norm, nn.LayerNorm):
                state |= {"norm.weight": norm.weight[channels], "norm.bias": norm.bias[channels]}
        new.load_state_dict(state)


def select_evenly(old: int, new: int) -> list[int]:
    """`new` of the layers 0 .. old-1, evenly spaced, with the first and, from two on, the last."""
    if new == 1:
        return [0]
    return [(2 * i * (old - 1) + new - 1) // (2 * (new - 1)) for i in range(new)]


def _check_kind(network: Any) -> None:
    """Raise InputError unless a sub-model's blocks can compute this teacher's."""
    block = network.blocks[0]
    odd = None
    if not isinstance(network.norm_pre, nn.Identity):
        odd = "norm before the first block"
    elif not isinstance(network.patch_embed.norm, nn.Identity):
        odd = "norm of the patch embedding"
    elif not isinstance(block.norm1, nn.LayerNorm):
        odd = type(block.norm1).__name__
    elif not isinstance(block.attn.q_norm, nn.Identity):
        odd = "QK-norm"
    elif not isinstance(block.attn.norm, nn.Identity):
        odd = "norm inside the attention"
    elif {name for name, _ in block.mlp.named_parameters()} - {
        f"fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")
    }:
        odd = "norm or gate inside the MLP"
    elif block.mlp.fc1.out_features != block.mlp.fc2.in_features:
        odd = "gated MLP"
    if odd:
        raise InputError(f"{_CANNOT}: its {odd} has no counterpart in a sub-model")


def _check_sizes(network: Any, embed_dim: int, depth: int, num_heads: int, hidden: int) -> None:
    """Raise InputError where the sub-model is larger than the teacher."""
    block = network.blocks[0]
    size, own = embed_dim // num_heads, block.attn.head_dim
    sizes = [
        ("embed_dim", embed_dim, network.embed_dim),
        ("depth", depth, len(network.blocks)),
        ("width of the MLP", hidden, block.mlp.fc1.out_features),
        ("width of a head", size, own),
        # Heads may be split: 3 heads of 64 give up to 6 heads of 32.
        (f"num_heads (of width {size})", num_heads, block.attn.num_heads * (own // size)),
    ]
    for name, wanted, most in sizes:
        if wanted > most:
            raise InputError(f"{_CANNOT}: the sub-model's {name} is {wanted}, at most {most} fits")


def _strongest(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest of `scores[n]`, ascending; of equals the first."""
    return scores.argsort(descending=True, stable=True)[:count].sort().values


def _rescale(energy: Tensor, kept: Tensor) -> Tensor:
    """The factor for a partial sum of terms `kept`; `energy[n]` are the variances of all.

    At most sqrt(old / new).
    """
    share = (energy[kept].sum() / energy.sum()).nan_to_num(1.0)
    return share.clamp_min(len(kept) / len(energy)).rsqrt()


def _gamma(scale: Any) -> Tensor | float:
    """LayerScale's factors, or 1 without."""
    return 1.0 if isinstance(scale, nn.Identity) else scale.gamma


def _bias(linear: nn.Linear) -> Tensor:
    # nn.Linear's annotation has no None.
    bias: Tensor | None = linear.bias
    return linear.weight.new_zeros(linear.out_features) if bias is None else bias


def _channel_scores(network: Any) -> Tensor:
    """Mean weight `[D]` of each channel in the matrices that write to or read from the stream.

    Every matrix counts the same, whatever its size and scale.
    """
    norms = [network.patch_embed.proj.weight.flatten(1).norm(dim=1)]
    for block in network.blocks:
        norms += [
            (block.attn.qkv.weight * block.norm1.weight).norm(dim=0),
            block.attn.proj.weight.norm(dim=1) * _gamma(block.ls1),
            (block.mlp.fc1.weight * block.norm2.weight).norm(dim=0),
            block.mlp.fc2.weight.norm(dim=1) * _gamma(block.ls2),
        ]
    tiny = torch.finfo(torch.float32).tiny
    return torch.stack([n.abs() / n.abs().mean().clamp_min(tiny) for n in norms]).mean(dim=0)


def _embedding(new: Any, old: Any, normalise: Normalise, channels: Tensor) -> dict[str, Tensor]:
    """Patch, class and position embedding, for another normalisation and other sizes."""
    from timm.layers import resample_abs_pos_embed, resample_patch_embed

    # The sub-model's input is x = p * own.scale + own.offset for pixels p.
    own = Normalise(MEAN, STD).to(normalise.scale.device)
    factor = normalise.scale / own.scale
    constant = normalise.offset - own.offset * factor
    proj = old.patch_embed.proj
    weight = proj.weight[channels]
    state = {
        "patch_embed.proj.weight": resample_patch_embed(
            weight * factor, list(new.patch_embed.patch_size)
        ),
        "patch_embed.proj.bias": _bias(proj)[channels] + (weight * constant).sum(dim=(1, 2, 3)),
    }
    position = new.pos_embed.new_zeros(new.pos_embed.shape)
    # Without a class token in the teacher, the sub-model's and its position stay random.
    if old.cls_token is None:
        position[:, :1] = new.pos_embed[:, :1]
    else:
        state["cls_token"] = old.cls_token[..., channels]
    if old.pos_embed is not None:
        prefix = 0 if old.no_embed_class else old.num_prefix_tokens
        if prefix and old.cls_token is not None:
            position[:, :1] = old.pos_embed[:, :1, channels]
        position[:, 1:] = resample_abs_pos_embed(
            old.pos_embed[:, prefix:, channels],
            new_size=list(new.patch_embed.grid_size),
            old_size=list(old.patch_embed.grid_size),
            num_prefix_tokens=0,
        )
    return state | {"pos_embed": position}


def _block(new: Any, old: Any, channels: Tensor) -> dict[str, Tensor]:
    """One block's weights, by their names in the block."""
    state = {
        f"norm{i}.{kind}": getattr(norm, kind)[channels]
        for i, norm in ((1, old.norm1), (2, old.norm2))
        for kind in ("weight", "bias")
    }
    return state | _attention(new.attn, old, channels) | _mlp(new.mlp, old, channels)


def _read(weight: Tensor, bias: Tensor, norm: Any, channels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows `weight[n, D]` that read the normed stream -> `[n, D']`, and their bias `[n]`.

    The norm's bias is a constant input; the share of dropped channels moves to the bias.
    """
    energy = (weight * norm.weight).square().sum(dim=0)
    kept = weight[:, channels] * _rescale(energy, channels)
    return kept, bias + weight @ norm.bias - kept @ norm.bias[channels]


def _mlp(new: Any, old: Any, channels: Tensor) -> dict[str, Tensor]:
    first, bias = _read(old.mlp.fc1.weight, _bias(old.mlp.fc1), old.norm2, channels)
    gamma = old.ls2
    second = (old.mlp.fc2.weight.T * _gamma(gamma)).T[channels]
    strength = (first * old.norm2.weight[channels]).norm(dim=1) * second.norm(dim=0)
    units = _strongest(strength, new.fc1.out_features)
    return {
        "mlp.fc1.weight": first[units],
        "mlp.fc1.bias": bias[units],
        "mlp.fc2.weight": second[:, units] * _rescale(strength.square(), units),
        "mlp.fc2.bias": (_bias(old.mlp.fc2) * _gamma(gamma))[channels],
    }


def _attention(new: Any, old: Any, channels: Tensor) -> dict[str, Tensor]:
    """Queries, keys, values and projection: heads H of width d become H' of width d'."""
    attn, norm = old.attn, old.norm1
    heads, size, width = attn.num_heads, attn.head_dim, len(channels)
    pairs = zip(attn.qkv.weight.chunk(3), _bias(attn.qkv).chunk(3), strict=True)
    read = [_read(weight, bias, norm, channels) for weight, bias in pairs]
    # [3, H, d, D'] and [3, H, d]; the projection [D', H, d].
    qkv = torch.stack([weight for weight, _ in read]).reshape(3, heads, size, width)
    bias = torch.stack([b for _, b in read]).reshape(3, heads, size)
    proj = (attn.proj.weight.T * _gamma(old.ls1)).T[channels].reshape(width, heads, size)
    effective = qkv * norm.weight[channels]
    q, k, v = effective.norm(dim=-1)
    strength_qk, strength_v = q * k, v * proj.norm(dim=0)
    product = torch.einsum("dhi,hie->hde", proj, effective[2]).flatten(1).norm(dim=1)
    rows, biases, columns = [], [], []
    for head, piece in _pieces(product, size // new.head_dim, new.num_heads):
        qk = _piece(strength_qk[head], piece, new.head_dim)
        value = _piece(strength_v[head], piece, new.head_dim)
        # Attention divides by sqrt(d') instead of sqrt(d); queries and keys share the factor.
        ratio = (new.head_dim / size) ** 0.5 * _rescale(strength_qk[head].square(), qk)
        factors = torch.stack([ratio.sqrt(), ratio.sqrt(), torch.ones_like(ratio)])[:, None]
        units = torch.stack([qk, qk, value])
        three = torch.arange(3, device=units.device)[:, None]
        rows.append(qkv[three, head, units] * factors[..., None])
        biases.append(bias[three, head, units] * factors)
        columns.append(head * size + value)
    kept = torch.cat(columns)
    return {
        "attn.qkv.weight": torch.stack(rows, dim=1).reshape(-1, width),
        "attn.qkv.bias": torch.stack(biases, dim=1).flatten(),
        "attn.proj.weight": proj.flatten(1)[:, kept]
        * _rescale(strength_v.flatten().square(), kept),
        "attn.proj.bias": (_bias(attn.proj) * _gamma(old.ls1))[channels],
    }


def _pieces(scores: Tensor, per_head: int, count: int) -> list[tuple[int, int]]:
    """`count` pairs (head, piece), ascending: every head's first piece precedes second ones."""
    order: list[int] = scores.argsort(descending=True, stable=True).tolist()
    return sorted([(head, piece) for piece in range(per_head) for head in order][:count])


def _piece(scores: Tensor, piece: int, size: int) -> Tensor:
    """The `piece`-th `size` units of a head by descending strength; indices ascending."""
    ranked = scores.argsort(descending=True, stable=True)
    return ranked[piece * size : (piece + 1) * size].sort().values
