"""Rank and number of torchrun's processes."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mdp.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Rank and number of processes, in all and on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def world(environment: Mapping[str, str] = os.environ) -> World:
    """This process as torchrun's variables describe it; raises InputError where they are odd."""
    size = _number(environment, "WORLD_SIZE", 1, least=1)
    local_size = _number(environment, "LOCAL_WORLD_SIZE", 1, least=1)
    return World(
        rank=_number(environment, "RANK", 0, below=size),
        size=size,
        local_rank=_number(environment, "LOCAL_RANK", 0, below=local_size),
        local_size=local_size,
    )


def _number(
    environment: Mapping[str, str], name: str, absent: int, *, least: int = 0, below: int = 2**31
) -> int:
    text = environment.get(name)
    if text is None:
        return absent
    if not text.isdecimal() or not least <= int(text) < below:
        raise InputError(
            f"environment variable {name}: expected a number from {least} to {below - 1}, as "
            f"torchrun sets it, got {text!r}"
        )
    return int(text)
