"""Given weights of a teacher, adapted to its picture size and to the data's classes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from mdp.errors import InputError
from mdp.formats.plan import TeacherSpec
from partitioner.networks.families import adapt_positions, cut_classifier
from partitioner.networks.teacher import Teacher, build_teacher, outline
from partitioner.torchvision_shim import import_timm

State = Mapping[str, Tensor]


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or .pth (never executed: `weights_only`); raises InputError.

    A .pth may hold the state dict itself or have it under `state_dict`, `model` or `model_state`.
    """
    from safetensors.torch import load_file

    if not path.is_file():
        raise InputError(f"{path}: expected a teacher checkpoint, found no file")
    try:
        if path.suffix == ".safetensors":
            content: Any = load_file(path)
        else:
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Damaged files raise errors of many types. torch's message about other pickles advises to
        # execute them.
        reason = "expected tensors alone" if isinstance(error, UnpicklingError) else _reason(error)
        raise InputError(f"{path}: not a readable checkpoint: {reason}") from error
    for key in ("state_dict", "model", "model_state"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise InputError(f"{path}: expected a state dict, a mapping from names to tensors")
    return {key.removeprefix("module.").removeprefix("network."): v for key, v in content.items()}


def count_classes(spec: TeacherSpec, checkpoint: Path | None) -> int:
    """The number of classes of the weights' classifier; 0 where they have none.

    The weights are the file's, else timm's own. Raises InputError where the file's do not fit the
    teacher; timm's are not fetched for this.
    """
    if checkpoint is None:
        config = import_timm().get_pretrained_cfg(spec.name)
        return int(config.num_classes) if config else 0
    network = outline(spec.name, spec.args)
    return _check(
        network, _adapt_positions(network, read_state(checkpoint), checkpoint), checkpoint
    )


def load_teacher(
    spec: TeacherSpec, num_classes: int, checkpoint: Path | None, rows: Sequence[int] | None = None
) -> Teacher:
    """The teacher with the weights of a file, or else timm's own, for `num_classes` classes.

    Its classifier is the rows `rows` of theirs; without `rows` it is theirs, or random where the
    number of classes differs. Raises InputError where the weights do not fit.
    """
    known = num_classes if rows is None else count_classes(spec, checkpoint)
    teacher = build_teacher(spec, known, pretrained=checkpoint is None)
    if checkpoint is not None:
        load_checkpoint(teacher, checkpoint)
    if rows is not None:
        network: Any = teacher.network
        for name in classifiers(network):
            network.set_submodule(name, cut_classifier(network.get_submodule(name), list(rows)))
        network.num_classes = num_classes
    return teacher


def load_checkpoint(teacher: Teacher, path: Path) -> None:
    """Load a file's weights into `teacher`, positions resampled to its picture size.

    Its classifier is left alone where the file's has another number of classes. Raises InputError.
    """
    network = teacher.network
    state = _adapt_positions(network, read_state(path), path)
    heads, own = classifiers(network), network.state_dict()
    if _check(network, state, path) != len(own[f"{heads[0]}.weight"]):
        state = {key: value for key, value in state.items() if not _of_heads(key, heads)}
    try:
        network.load_state_dict(state, strict=False)
    except Exception as error:
        # A tensor of the right shape may be of a type that cannot be copied.
        raise InputError(f"{path}: not a readable checkpoint: {_reason(error)}") from error


def start_classifier(teacher: Teacher, weight: Tensor, bias: Tensor) -> None:
    """Copy a classifier `[C, D]` and `[C]` into the teacher's head, or into each of two."""
    network: Any = teacher.network
    with torch.no_grad():
        for name in classifiers(network):
            head = network.get_submodule(name)
            head.weight.copy_(weight)
            head.bias.copy_(bias)


def classifiers(network: Any) -> list[str]:
    """Names of the classifier: one, or two where a distillation token has a head of its own."""
    names = network.pretrained_cfg["classifier"]
    return [names] if isinstance(names, str) else list(names)


def _of_heads(key: str, heads: Sequence[str]) -> bool:
    return key.rpartition(".")[0] in heads


def _adapt_positions(network: nn.Module, state: State, path: Path) -> State:
    """`state` with positions resampled to the picture of `network`; raises InputError."""
    try:
        return adapt_positions(network, state)
    except Exception as error:
        # timm's filter takes the tensors' shapes for granted.
        raise InputError(
            f"{path}: not a checkpoint of this teacher: its positions or patches cannot be "
            f"resampled: {_reason(error)}"
        ) from error


def _check(network: Any, state: State, path: Path) -> int:
    """The number of classes of the classifier of `state`, 0 without one.

    Raises InputError unless `state` has every other tensor of `network` in the same shape.
    """
    own, heads = network.state_dict(), classifiers(network)
    headless = not any(_of_heads(key, heads) for key in state)
    wanted = {key for key in own if not (headless and _of_heads(key, heads))}
    missing, unknown = sorted(wanted - state.keys()), sorted(state.keys() - wanted)
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has unknown {unknown[0]!r}"
        raise InputError(
            f"{path}: not a checkpoint of this teacher: it {what}{_pooling(missing, unknown)}"
        )
    classes: dict[str, int] = {}
    for key in sorted(wanted):
        found, expected = list(state[key].shape), list(own[key].shape)
        if _of_heads(key, heads) and found:
            classes[key], expected[0] = found[0], found[0]
        if found != expected:
            raise InputError(f"{path}: {key!r} has shape {found}, this teacher needs {expected}")
    if len({*classes.values()}) > 1:
        rows = ", ".join(f"{key!r} has {count} rows" for key, count in classes.items())
        raise InputError(f"{path}: not one number of classes: {rows}")
    return next(iter(classes.values()), 0)


def _pooling(missing: Sequence[str], unknown: Sequence[str]) -> str:
    """The argument that a teacher lacks whose norm is on the other side of the pooling."""
    if "fc_norm.weight" in unknown:
        return " (a norm after pooling: --teacher-arg global_pool=avg has it)"
    if "fc_norm.weight" in missing and "norm.weight" in unknown:
        return " (a norm before pooling: --teacher-arg global_pool=token has it)"
    return ""


def _reason(error: Exception) -> str:
    """The first line of an error's text, or its type."""
    return str(error).partition("\n")[0] or type(error).__name__
