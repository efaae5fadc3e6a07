"""The teacher: a timm ViT by name, its shape and its normalisation."""

import difflib
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mdp.errors import InputError
from mdp.formats.plan import SubModelSpec, TeacherArgument, TeacherSpec
from partitioner.networks.submodel import Normalise
from partitioner.torchvision_shim import import_timm

#: timm's modules with plain encoders, and the names of their models.
_MODULES = ("timm.models.vision_transformer", "timm.models.deit")
FAMILIES = (
    "vit_*",
    "deit_*",
    "deit3_*",
    "flexivit_*",
    "eva_large_*",
    "beit3_*",
    "aimv2_*",
    "test_vit*",
)
_WORKS = (
    f"works: timm's plain vision transformers ({', '.join(FAMILIES)}), also with register tokens, "
    "distillation token, pooling, LayerScale, QK-norm or gated MLP"
)
#: Arguments for the normalisation of pixels 0..1, where a checkpoint's recipe is not timm's.
_RECIPE = ("mean", "std")


class Teacher(nn.Module):
    """A timm ViT with its normalisation: pixels `[B, 3, S, S]` in 0..255 -> logits `[B, C]`."""

    def __init__(self, network: Any, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.normalise = Normalise(tuple(mean), tuple(std))
        self.network: nn.Module = network

    def forward(self, pixels: Tensor) -> Tensor:
        """Logits `[B, C]`."""
        logits: Tensor = self.network(self.normalise(pixels))
        return logits


def teacher_spec(name: str, args: dict[str, TeacherArgument]) -> TeacherSpec:
    """The teacher's shape, from the model built without memory; raises InputError."""
    return TeacherSpec(name=name, args=args, shape=_shape(name, outline(name, args)))


def outline(name: str, args: dict[str, TeacherArgument]) -> Any:
    """The teacher's network without memory for its weights; raises InputError if it is unusable.

    Its forward pass is run once, as some arguments only fail there.
    """
    with torch.device("meta"), torch.no_grad():
        network = _create(name, args, num_classes=2, pretrained=False).eval()
        try:
            logits = network(torch.empty(1, 3, *network.patch_embed.img_size))
        except Exception as error:
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise InputError(f"--teacher: {name!r} ({args}) cannot run: {reason}") from error
    if tuple(logits.shape) != (1, 2):
        raise InputError(
            f"--teacher: {name!r} ({args}) gives {list(logits.shape)} numbers for one picture, "
            "expected one logit per class"
        )
    return network


def build_teacher(spec: TeacherSpec, num_classes: int, *, pretrained: bool) -> Teacher:
    """The teacher with a head for `num_classes`, with random weights or timm's.

    Raises InputError when timm cannot build it or its weights cannot be fetched.
    """
    network = _create(spec.name, spec.args, num_classes=num_classes, pretrained=pretrained)
    facts = network.pretrained_cfg
    return Teacher(network, facts["mean"], facts["std"])


def _create(
    name: str, args: Mapping[str, TeacherArgument], *, num_classes: int, pretrained: bool
) -> Any:
    timm = import_timm()
    recipe = {key: _channels(key, args[key]) for key in _RECIPE if key in args}
    if not timm.is_model(name):
        known = [n for m in _MODULES for n in timm.list_models(module=m.rpartition(".")[2])]
        close = difflib.get_close_matches(name, known, n=3)
        hint = f"; close to it: {', '.join(close)}" if close else f"; {_WORKS}"
        raise InputError(f"--teacher: timm has no model {name!r}{hint}")
    module = timm.models.model_entrypoint(name).__module__
    if module not in _MODULES:
        raise _refusal(name, f"it comes from {module}")
    # Without a network the hub's client logs every retry.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        network = timm.create_model(
            name,
            pretrained=pretrained,
            pretrained_cfg_overlay=recipe,
            num_classes=num_classes,
            **{key: value for key, value in args.items() if key not in _RECIPE},
        )
    except Exception as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        given = "".join(f" {key}={value}" for key, value in args.items())
        if pretrained:
            raise InputError(
                f"--pretrained: timm's weights of {name!r}{given} cannot be fetched: {reason}; "
                "where there is no network, give them as a file: --teacher-checkpoint FILE"
            ) from error
        with_given = f" with --teacher-arg{given}" if args else ""
        raise InputError(f"--teacher: {name!r} cannot be built{with_given}: {reason}") from error
    _check_plain(name, network)
    return network


def _channels(key: str, value: TeacherArgument) -> tuple[float, ...]:
    """One number for all channels or three with commas; raises InputError."""
    try:
        numbers = [float(part) for part in str(value).split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        raise InputError(
            f"--teacher-arg: {key} expected a number, or three with commas, got {value!r}"
        )
    if key == "std" and min(numbers) <= 0:
        raise InputError(f"--teacher-arg: std expected numbers above 0, got {value!r}")
    return tuple(numbers * (3 // len(numbers)))


def _check_plain(name: str, network: Any) -> None:
    """Raise InputError unless `network` is a plain ViT: square, one patch grid, usual blocks."""
    from timm.layers import Attention, GluMlp, Mlp, PatchEmbed, SwiGLU
    from timm.models.deit import VisionTransformerDistilled
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(network) not in (VisionTransformer, VisionTransformerDistilled):
        raise _refusal(name, f"it is a {type(network).__name__}")
    if not len(network.blocks):
        raise _refusal(name, "it has no blocks")
    block, embed = network.blocks[0], network.patch_embed
    if type(embed) is not PatchEmbed:
        raise _refusal(name, f"its patch embedding is a {type(embed).__name__}")
    if type(block) is not Block:
        raise _refusal(name, f"its blocks are {type(block).__name__}, not pre-norm blocks")
    if type(block.attn) is not Attention:
        raise _refusal(name, f"its attention is a {type(block.attn).__name__}")
    if type(block.mlp) not in (Mlp, GluMlp, SwiGLU):
        raise _refusal(name, f"its MLP is a {type(block.mlp).__name__}")
    if len({*embed.img_size}) != 1 or len({*embed.patch_size}) != 1:
        raise _refusal(name, "its picture or patch is not square")


def _refusal(name: str, reason: str) -> InputError:
    return InputError(f"--teacher: {name!r} cannot be decomposed: {reason}; {_WORKS}")


def _shape(name: str, network: Any) -> SubModelSpec:
    """The encoder's shape as a sub-model's.

    A gated MLP counts as the plain one with as many weights. Register and distillation tokens and
    attention pooling are left out, a few hundredths of the teacher's latency (4 registers beside
    196 patches: 2 %), in the teacher's favour.
    """
    embed, block, width = network.patch_embed, network.blocks[0], network.embed_dim
    matrices = [m for m in block.mlp.modules() if isinstance(m, nn.Linear)]
    try:
        return SubModelSpec(
            image_size=embed.img_size[0],
            patch_size=embed.patch_size[0],
            embed_dim=width,
            depth=len(network.blocks),
            num_heads=block.attn.num_heads,
            mlp_ratio=sum(m.weight.numel() for m in matrices) / (2 * width * width),
        )
    except ValueError as error:
        raise InputError(f"--teacher: {name!r} has an unusable shape: {error}") from error
