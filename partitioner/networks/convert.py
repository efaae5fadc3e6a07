"""Weights with foreign names, under timm's: the same tensors by name, or in the same order."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mdp.errors import InputError
from mdp.files import replacing
from partitioner.networks.families import Backbone, check_known, create, read_state

Shapes = Mapping[str, tuple[int, ...]]

#: Of batch norms: a count of steps, which no inference reads and some files lack.
_COUNTER = "num_batches_tracked"
#: Last parts of names that mean the same wherever they are used.
_ROLES = frozenset({"weight", "bias", "running_mean", "running_var"})


@dataclass(frozen=True, slots=True)
class Pairing:
    """timm's name of each tensor by its foreign name."""

    names: Mapping[str, str]
    #: Whether the names agree, but for a prefix of all of them; else the order alone tells.
    by_name: bool

    @property
    def agreeing(self) -> int:
        """Tensors whose foreign name is timm's own."""
        return sum(foreign == own for foreign, own in self.names.items())


def pair(own: Shapes, foreign: Shapes, where: str) -> Pairing:
    """Pair foreign tensors with timm's `own`, by name or else in order; raises InputError.

    Shapes have to agree, and `weight`, `bias` and statistics of norms wherever both say so. The
    error begins with `where` and names the first tensor that differs.
    """
    own, foreign = _without_counters(own), _without_counters(foreign)
    plain = _without_prefix(foreign)
    by_name = set(plain.values()) == set(own)
    names = plain if by_name else dict(zip(foreign, own, strict=False))
    counts = "" if len(own) == len(foreign) else f" ({len(foreign)} tensors, not {len(own)})"
    for number, (name, ours) in enumerate(names.items(), 1):
        if foreign[name] != own[ours]:
            raise InputError(
                f"{where}: tensor {number}, {name!r}, is {list(foreign[name])}, expected "
                f"{list(own[ours])} as of {ours!r}{counts}"
            )
        if not by_name and (not _same_role(name, ours) or (name != ours and name in own)):
            raise InputError(
                f"{where}: tensor {number}, {name!r}, stands where {ours!r} is expected: they are "
                "in another order (a .safetensors sorts by name: take the .pth that it was made "
                f"from){counts}"
            )
    if len(own) != len(foreign):
        longer, what = (foreign, "unknown") if len(foreign) > len(own) else (own, "missing")
        raise InputError(
            f"{where}: expected {len(own)} tensors, found {len(foreign)}: the first {what} one is "
            f"{list(longer)[len(names)]!r}"
        )
    return Pairing(names, by_name)


def _without_counters(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape in shapes.items() if not name.endswith(_COUNTER)}


def _without_prefix(names: Iterable[str]) -> dict[str, str]:
    """Each dotted name without the parts that all of them begin with."""
    parts = {name: name.split(".") for name in names}
    common = takewhile(lambda column: len(set(column)) == 1, zip(*parts.values(), strict=False))
    skip = sum(1 for _ in common)
    return {name: ".".join(split[skip:]) for name, split in parts.items()}


def _same_role(foreign: str, own: str) -> bool:
    roles = {name.rpartition(".")[2] for name in (foreign, own)}
    return len(roles) == 1 or not roles <= _ROLES


@dataclass(frozen=True, slots=True)
class Conversion:
    """Facts about converted weights."""

    pairing: Pairing
    #: Rows of the classifier; 0 without one.
    classes: int


def convert(name: str, source: Path, out: Path) -> Conversion:
    """Write the weights `source` of timm's network `name` to `out`, a .safetensors, atomically.

    Raises InputError for an unknown network, for tensors that are not its own, and for numbers that
    are not finite in the answer to one picture.
    """
    if out.suffix != ".safetensors":
        raise InputError(f"{out}: expected a name that ends in .safetensors")
    config = check_known(name).get_pretrained_cfg(name)
    side = config.input_size[-1] if config else 224
    state = read_state(source)
    if not state or not all(isinstance(value, Tensor) for value in state.values()):
        raise InputError(f"{source}: expected tensors by their names, found something else")
    foreign = {key: tuple(value.shape) for key, value in state.items()}
    classes, pairing = _pair(Backbone(name, side), _classes(config, foreign), foreign, source)
    network = create(Backbone(name, side), classes)
    network.load_state_dict({own: state[key] for key, own in pairing.names.items()}, strict=False)
    _check_answer(network, side, source)
    try:
        with replacing(out) as temporary:
            save_file({k: v.contiguous() for k, v in network.state_dict().items()}, temporary)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{out}: cannot be written: {reason}") from error
    return Conversion(pairing, classes)


def _pair(backbone: Backbone, classes: int, foreign: Shapes, source: Path) -> tuple[int, Pairing]:
    """The number of classes with which the tensors are the network's; 0 without a classifier."""
    error: InputError | None = None
    for count in (classes, 0):
        with torch.device("meta"):
            network = create(backbone, count)
        own = {key: tuple(value.shape) for key, value in network.state_dict().items()}
        try:
            return count, pair(own, foreign, str(source))
        except InputError as refusal:
            error = error or refusal
    assert error is not None
    raise error


def _classes(config: Any, foreign: Shapes) -> int:
    """Rows of the classifier of foreign tensors: by timm's name for it, else of the last one."""
    place = config.classifier if config else None
    named = [shape for key, shape in foreign.items() if place and key.endswith(f"{place}.weight")]
    shape = (named or list(foreign.values()) or [()])[-1]
    return shape[0] if shape and shape[0] else 1


def _check_answer(network: Any, side: int, source: Path) -> None:
    """Raise InputError unless every number of the answer to a random picture is finite."""
    picture = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        answer = network.eval()(picture)
    if not bool(torch.isfinite(answer).all()):
        raise InputError(
            f"{source}: expected finite numbers in the answer to a picture, found others: its "
            "tensors are of another network, or in another order"
        )
