"""Checks of callers' arguments; a wrong one raises an InputError with what was expected."""

import math
import os
import re
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, TypedDict

from mdp.errors import InputError

#: Whether a stream raises an error or yields it in place of an answer.
Errors = Literal["raise", "yield"]
Raising = Literal["raise"]
#: Short enough for every clock and lock.
MAX_TIMEOUT_S = 1e6


class Watching(TypedDict, total=False):
    """Arguments of `watch` for both kinds of `errors`."""

    every_ms: float
    deadline_ms: float
    within_ms: float


class Streaming(TypedDict, total=False):
    """Arguments of `stream` for both kinds of `errors`."""

    deadline_ms: float
    in_flight: int


def check_number(name: str, value: object, expected: str, allowed: Callable[[float], bool]) -> None:
    """Raise InputError unless `value` is a finite number that is `allowed`."""
    if not isinstance(value, Real):
        raise InputError(f"{name}: expected {expected}, got {value!r}")
    number = float(value)
    if not (math.isfinite(number) and allowed(number)):
        raise InputError(f"{name}: expected {expected}, got {number:g}")


def check_timeout_s(timeout_s: object) -> None:
    """Raise InputError unless `timeout_s` is a time to wait."""
    expected = f"0 to {MAX_TIMEOUT_S:g}"
    check_number("timeout_s", timeout_s, expected, lambda value: 0 <= value <= MAX_TIMEOUT_S)


_SECONDS = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ms|s|)", re.ASCII)


def seconds(name: str, text: str) -> float:
    """The seconds that `0.5s`, `500ms` or `0.5` says; raises InputError."""
    found = _SECONDS.fullmatch(text)
    value_s = float(found[1]) / (1e3 if found[2] == "ms" else 1) if found else math.inf
    if value_s > MAX_TIMEOUT_S:
        raise InputError(f"{name}: expected a time such as 0.5s or 200ms, got {text!r}")
    return value_s


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InputError unless `value` is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        expected = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise InputError(f"{name}: expected {expected}, got {value!r}")


def as_path(name: str, value: str | os.PathLike[str]) -> Path:
    """`value` as a path; raises InputError."""
    try:
        return Path(value)
    except TypeError as error:
        kind = type(value).__name__
        raise InputError(f"{name}: expected a path, got {kind}") from error


def check_errors(errors: object) -> None:
    """Raise InputError unless `errors` is one of `Errors`."""
    check_choice("errors", errors, ("raise", "yield"))


def check_in_flight(in_flight: object) -> None:
    """Raise InputError unless so many pictures can be under way."""
    if not isinstance(in_flight, Integral) or in_flight < 1:
        raise InputError(f"in_flight: expected a whole number of at least 1, got {in_flight!r}")


def check_pictures(pictures: object) -> None:
    """Raise InputError for a single picture where several are expected."""
    expected = "expected several pictures, as in a list"
    kind = type(pictures).__name__
    single = isinstance(pictures, str | bytes | bytearray | memoryview | os.PathLike)
    # A file is iterable too, line by line.
    single = single or hasattr(pictures, "read")
    if single or not isinstance(pictures, Iterable | AsyncIterable):
        raise InputError(f"pictures: {expected}, got a {kind}")
    # An array is iterable too, row by row.
    shape = getattr(pictures, "shape", None)
    if shape is not None and len(shape) != 4:
        raise InputError(f"pictures: {expected}, got one array {list(shape)}")
