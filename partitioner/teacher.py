"""The teacher: a timm ViT by name, with weights from timm, from a file, or trained here."""

import difflib
import logging
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mdp.errors import InputError
from mdp.plan import SubModelSpec, TeacherArgument, TeacherSpec
from partitioner.submodel import Normalise
from partitioner.torchvision_shim import import_timm

_FAMILIES = "timm's plain vision transformers: vit_*, deit_* without distillation, and alike"
#: Arguments that this program sets itself.
_RESERVED = ("num_classes", "in_chans", "pretrained", "checkpoint_path", "dynamic_img_size")


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


def parse_arguments(pairs: Sequence[str]) -> dict[str, TeacherArgument]:
    """`["img_size=24", "qkv_bias=false"]` -> typed constructor arguments; raises InputError."""
    parsed: dict[str, TeacherArgument] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not (equals and key.isidentifier() and text):
            raise InputError(f"--teacher-arg: expected key=value, got {pair!r}")
        if key in _RESERVED:
            raise InputError(f"--teacher-arg: {key!r} is set by mdp-partition itself")
        if key in parsed:
            raise InputError(f"--teacher-arg: {key!r} is given twice")
        parsed[key] = _value(text)
    return parsed


def _value(text: str) -> TeacherArgument:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def teacher_spec(name: str, args: dict[str, TeacherArgument]) -> TeacherSpec:
    """The teacher's shape, read off the built model (which gets no memory); raises InputError."""
    with torch.device("meta"):
        network = _create(name, args, num_classes=2, pretrained=False)
    return TeacherSpec(name=name, args=args, shape=_shape(name, network))


def build_teacher(spec: TeacherSpec, num_classes: int, *, pretrained: bool) -> Teacher:
    """The teacher with a head for `num_classes`, freshly drawn or with timm's weights.

    Raises InputError when timm cannot build it or its weights cannot be had.
    """
    network = _create(spec.name, spec.args, num_classes=num_classes, pretrained=pretrained)
    facts = network.pretrained_cfg
    return Teacher(network, facts["mean"], facts["std"])


def check_knows_classes(spec: TeacherSpec, num_classes: int, *, pretrained: bool) -> None:
    """Raise InputError unless timm's weights already answer with `num_classes` classes."""
    known = import_timm().get_pretrained_cfg(spec.name).num_classes if pretrained else None
    if known != num_classes:
        raise InputError(
            f"--teacher: {spec.name!r} does not know these {num_classes} classes: "
            "give --teacher-epochs N to train it, or --teacher-checkpoint FILE"
        )


def load_checkpoint(teacher: Teacher, path: Path) -> None:
    """Load weights from .safetensors or .pth (never executed: `weights_only`); raises InputError.

    A .pth may hold the state dict itself or have it under `state_dict`, `model` or `model_state`.
    """
    state = _read_checkpoint(path)
    state = {key.removeprefix("module.").removeprefix("network."): v for key, v in state.items()}
    own = teacher.network.state_dict()
    missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has unknown {unknown[0]!r}"
        raise InputError(f"{path}: not a checkpoint of this teacher: it {what}")
    for key, value in own.items():
        if tuple(state[key].shape) != tuple(value.shape):
            raise InputError(
                f"{path}: {key!r} has shape {list(state[key].shape)}, this teacher and data set "
                f"need {list(value.shape)}"
            )
    teacher.network.load_state_dict(state)


def _read_checkpoint(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not path.is_file():
        raise InputError(f"{path}: expected a teacher checkpoint, found no file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (
        SafetensorError,
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        KeyError,
        EOFError,
        OSError,
    ) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"{path}: not a readable checkpoint: {reason}") from error
    for key in ("state_dict", "model", "model_state"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise InputError(f"{path}: expected a state dict, a mapping from names to tensors")
    return content


def _create(
    name: str, args: dict[str, TeacherArgument], *, num_classes: int, pretrained: bool
) -> Any:
    timm = import_timm()
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models("vit_*"), n=3)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        raise InputError(f"--teacher: timm has no model {name!r}{hint}")
    if not timm.is_model(name) or timm.models.model_entrypoint(name).__module__ not in (
        "timm.models.vision_transformer",
        "timm.models.deit",
    ):
        raise InputError(f"--teacher: {name!r} cannot be decomposed: expected {_FAMILIES}")
    # Without a network the hub's client reports every one of its retries; the outcome is enough.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        network = timm.create_model(name, pretrained=pretrained, num_classes=num_classes, **args)
    except Exception as error:
        # timm hands arguments through to many constructors and weights through to a download.
        reason = str(error).partition("\n")[0] or type(error).__name__
        where = "with timm's weights " if pretrained else ""
        raise InputError(
            f"--teacher: {name!r} cannot be built {where}({args}): {reason}"
        ) from error
    _check_plain(name, network)
    return network


def _check_plain(name: str, network: Any) -> None:
    """Raise InputError unless `network` is a plain ViT: square, one class token, usual blocks."""
    from timm.layers import Attention, Mlp, PatchEmbed
    from timm.models.vision_transformer import Block, VisionTransformer

    if type(network) is not VisionTransformer:
        raise InputError(f"--teacher: {name!r} cannot be decomposed: expected {_FAMILIES}")
    odd = None
    if type(network.patch_embed) is not PatchEmbed:
        odd = "its patch embedding"
    elif network.num_reg_tokens:
        odd = "its register tokens"
    elif any(
        type(b) is not Block or type(b.attn) is not Attention or type(b.mlp) is not Mlp
        for b in network.blocks
    ):
        odd = "its blocks"
    elif len({*network.patch_embed.img_size}) != 1 or len({*network.patch_embed.patch_size}) != 1:
        odd = "its picture or patch, which is not square"
    if odd:
        raise InputError(f"--teacher: {name!r} cannot be decomposed because of {odd}")


def _shape(name: str, network: Any) -> SubModelSpec:
    embed, block = network.patch_embed, network.blocks[0]
    try:
        return SubModelSpec(
            image_size=embed.img_size[0],
            patch_size=embed.patch_size[0],
            embed_dim=network.embed_dim,
            depth=len(network.blocks),
            num_heads=block.attn.num_heads,
            mlp_ratio=block.mlp.fc1.out_features / network.embed_dim,
        )
    except ValueError as error:
        raise InputError(f"--teacher: {name!r} has an unusable shape: {error}") from error
