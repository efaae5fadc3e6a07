"""Strict typed reading and all-or-nothing writing of the files MDP keeps."""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from mdp.errors import ConfigError, InputError

T = TypeVar("T", bound=msgspec.Struct)


#: A name of a device or key, and what it is called in messages.
NAME = r"^[a-z0-9][a-z0-9._-]{0,63}\Z"
NAME_FORM = "1 to 64 of a-z, 0-9, `.`, `_` and `-`, beginning with a letter or digit"
#: What msgspec says of text that does not match a pattern -> what is said instead.
_PATTERNS: dict[str, str] = {}


def pattern(regex: str, expected: str) -> msgspec.Meta:
    """Text that matches `regex`; `expected` names it in messages, which show no regex."""
    _PATTERNS[f"Expected `str` matching regex {regex!r}"] = f"expected {expected}"
    return msgspec.Meta(pattern=regex)


def explained(error: Exception) -> str:
    """What msgspec found wrong, without regular expressions."""
    text = str(error)
    for said, instead in _PATTERNS.items():
        text = text.replace(said, instead)
    return text


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of everything read from a file: immutable, and an unknown key is an error."""


def _read(path: Path, kind: type[T], decode: Callable[..., T]) -> T:
    try:
        return decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # malformed, not UTF-8, a number of thousands of digits
        raise ConfigError(f"{path}: {explained(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: lists or tables nested too deeply") from error


def read_toml(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read `path` as a `kind`; raises ConfigError naming file, key and expectation."""
    return _read(Path(path), kind, msgspec.toml.decode)


def read_json(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read `path` as a `kind`; raises ConfigError naming file, key and expectation."""
    return _read(Path(path), kind, msgspec.json.decode)


def write_toml(path: str | os.PathLike[str], record: msgspec.Struct) -> None:
    """Write `record` whole or not at all; keys without a value are left out (TOML has no null)."""
    write_bytes(path, toml_bytes(record))


def toml_bytes(record: msgspec.Struct) -> bytes:
    """`record` as TOML, without the keys that have no value."""
    return msgspec.toml.encode(_without_none(msgspec.to_builtins(record)))


def write_json(path: str | os.PathLike[str], record: object) -> None:
    """Write `record` as indented JSON, whole or not at all."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def _without_none(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; on success it takes the name, else it vanishes."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write `data` to `path` whole or not at all; raises InputError if that cannot be done."""
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: str | os.PathLike[str], error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written: {error.strerror or error}")


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder beside `path`; on success it takes the place of what stood there.

    The old folder is moved aside before the new one gets its name, and removed only after. A link
    to a folder stays a link: what it leads to is replaced. Raises InputError for a file, and
    where there is no room.
    """
    path = Path(path)
    if path.is_symlink():
        path = path.resolve()
    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: expected a folder or nothing, found a file")
    token = secrets.token_hex(4)
    temporary = path.with_name(f".{path.name}.{token}.partial")
    aside = path.with_name(f".{path.name}.{token}.old")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
    except OSError as error:
        raise _unwritable(path, error) from error
    try:
        yield temporary
        for file in temporary.rglob("*"):
            _sync(file)
        if path.exists():
            path.replace(aside)
        temporary.replace(path)
        _sync(path.parent)
    except OSError as error:
        # Others may be about something that was read.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _unwritable(path, error) from error
        raise
    finally:
        if aside.exists() and not path.exists():
            aside.replace(path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def _sync(path: Path) -> None:
    """Make `path`, a file or a folder, durable before it is renamed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
