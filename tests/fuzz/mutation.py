"""Inputs that nobody has written: known ones with bytes, or parts of their structure, changed.

Bytes alone would hardly ever give a file that is well formed and wrong in one value, which is what
a reader's later checks are about. All randomness is handed in.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

from tests.fuzz.target import Target

#: Values at the edges of types, ranges and alphabets.
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 15, 16, 17, 255, 1024, 4097, 65_535, 65_536, 2**31,
    2**48 + 1, 2**63 - 1, 2**63, 2**64, 0.0, -0.0, 0.5, 1.0, 1.0000001, -1e-9, 1e-308,
    1e15, 1e16, 1e308, float("inf"), float("-inf"), float("nan"), "", " ", "a", "A",
    "0", "\0", "\n", "\x1b[2J", "\u202e", "é", "a/b", "../x", "/", ".", "x\n", "a" * 64,
    "a" * 65, "a" * 300, "0" * 64, b"", b"\0", [], {}, [[]], [0], [0, 0], [1, 0], {"": 0},
    [[[[[[[[0]]]]]]]],
)  # fmt: skip
#: Where in a tree something is: the container and the key or index in it.
Place = tuple[Any, Any]


def mutate(target: Target, data: bytes, random: random.Random) -> bytes:
    """`data`, an input of `target`, changed in one to three ways."""
    for _ in range(random.choice((1, 1, 2, 3))):
        if target.structure is not None and random.random() < 0.6:
            data = mutate_structure(target, data, random)
        else:
            data = mutate_bytes(data, target.words, random)
    return data[: target.max_bytes]


def mutate_structure(target: Target, data: bytes, random: random.Random) -> bytes:
    """`data` with one part of its tree changed; as it was if it is no tree, or none any more."""
    assert target.structure is not None
    try:
        tree = target.structure.parse(data)
    except (ValueError, RecursionError):  # what decoders raise derives from ValueError
        return mutate_bytes(data, target.words, random)
    places = list(_places(tree))
    if not places:
        return mutate_bytes(data, target.words, random)
    _change(random.choice(places), places, random)
    try:
        return target.structure.render(tree)
    except (ValueError, TypeError, OverflowError, RecursionError):
        # TOML has no null, msgpack no large integers, frames hold bytes only.
        return mutate_bytes(data, target.words, random)


def _places(tree: Any) -> Iterator[Place]:
    if isinstance(tree, dict):
        items: Sequence[Any] = list(tree.items())
    elif isinstance(tree, list):
        items = list(enumerate(tree))
    else:
        return
    for key, value in items:
        yield tree, key
        yield from _places(value)


def _change(place: Place, places: Sequence[Place], random: random.Random) -> None:
    container, key = place
    other, other_key = random.choice(places)
    match random.randrange(6):
        case 0:
            del container[key]
        case 1 if isinstance(container, list):
            container.insert(random.randrange(len(container) + 1), container[key])
        case 1:
            container[f"{key}{random.choice(('', '_', 's', '0'))}"] = container.pop(key)
        case 2 if not isinstance(other[other_key], dict | list):
            container[key] = other[other_key]
        case 3 if isinstance(container[key], int | float):
            container[key] = _near(container[key], random)
        case 4 if isinstance(container[key], str | bytes):
            container[key] = _respell(container[key], random)
        case _:
            container[key] = random.choice(ODD_VALUES)


def _near(number: float, random: random.Random) -> float:
    return random.choice((number + 1, number - 1, -number, number * 2, number * 0.5, number * 1e9))


def _respell(text: str | bytes, random: random.Random) -> str | bytes:
    at = random.randrange(len(text) + 1)
    if isinstance(text, bytes):
        return text[:at] + random.randbytes(random.randrange(4)) + text[at + 1 :]
    return text[:at] + random.choice(("", "\0", "\n", "é", "-", "9", text)) + text[at + 1 :]


def mutate_bytes(data: bytes, words: Sequence[bytes], random: random.Random) -> bytes:
    """`data` with some bytes changed, removed, doubled, or a word put in."""
    at = random.randrange(len(data) + 1)
    length = random.choice((1, 1, 2, 4, 8, 32))
    match random.randrange(6):
        case 0:
            return data[:at] + data[at + length :]
        case 1:
            return data[: at + length] + data[at:]
        case 2 if words:
            return data[:at] + random.choice(words) + data[at:]
        case 3 if words:
            word = random.choice(words)
            return data[:at] + word + data[at + len(word) :]
        case 4 if at < len(data):
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case _:
            return data[:at] + random.randbytes(length) + data[at + length :]
