"""Fuzz targets: a reader of other people's bytes, and what has to hold for every input."""

import functools
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).parent / "corpus"

#: Bytes as a tree of lists, dictionaries and plain values, or None if they are no such tree.
Parse = Callable[[bytes], Any]
Render = Callable[[Any], bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """Ways to take a target's inputs apart and together again, so that parts can be changed."""

    parse: Parse
    render: Render


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One reader under test."""

    name: str
    #: Reads one input. Returns whether it was accepted; raises only where a promise is broken.
    read: Callable[[bytes], bool]
    #: Inputs to begin with, by what they are; every one of them is accepted.
    seeds: Callable[[], Mapping[str, bytes]]
    #: Share of all inputs of a run, by what one costs.
    share: float
    max_bytes: int = 4096
    structure: Structure | None = None
    #: What a mutation may insert.
    words: tuple[bytes, ...] = field(default=())
    #: By how much the process may grow over all inputs of a run.
    growth_bytes: int = 128 * 2**20


def refuse(error: Exception, about: object = "") -> bool:
    """False, for an input that was refused in words which begin with what they are about."""
    words = str(error)
    assert words, "an error without words"
    assert words.startswith(str(about)), f"not about {about}: {words}"
    return False


def seeds_of(target: Target) -> dict[str, bytes]:
    """The target's seeds and its kept corpus, by name."""
    folder = CORPUS / target.name
    kept = sorted(folder.iterdir()) if folder.is_dir() else []
    return dict(target.seeds()) | {path.name: path.read_bytes() for path in kept}


@functools.cache
def _folder(name: str) -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix=f"mdp-fuzz-{name}-")


def scratch(name: str) -> Path:
    """A folder of this process, empty when it is first asked for."""
    return Path(_folder(name).name)
