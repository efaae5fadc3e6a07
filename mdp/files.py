"""Strict typed reading and atomic writing of MDP's files."""

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from mdp.errors import ConfigError, InputError

T = TypeVar("T", bound=msgspec.Struct | dict[str, Any])

#: MDP's largest files have 130 kB and 600 kB.
MAX_TOML_BYTES = 2**20
MAX_JSON_BYTES = 2**26
#: Characters of a text that a message shows.
_SHOWN = 40
#: Parts of a dotted key, four in MDP's files. Python's parser keeps a table for each prefix of each
#: key: 40 kB of dots would take 1.6 GB.
_KEY_PARTS = 8
#: Texts and comments, which contain dots too, in TOML's order. An unclosed one ends with the
#: content, so that none is scanned twice.
_TOML_TEXT = re.compile(
    rb'"""(?:[^\\"]|\\.|"(?!""))*+(?:"""|\Z)?'
    rb"|'''(?:[^']|'(?!''))*+(?:'''|\Z)?"
    rb'|"(?:[^"\\\n]|\\[^\n])*+"?'
    rb"|'[^'\n]*+'?"
    rb"|\#[^\n]*+",
    re.DOTALL,
)
_BETWEEN_KEYS = re.compile(rb"[\n=,\[\]{}]")


#: A name of a device or key, and its form in messages.
NAME = r"^[a-z0-9][a-z0-9._-]{0,63}\Z"
NAME_FORM = "1 to 64 of a-z, 0-9, `.`, `_` and `-`, beginning with a letter or digit"
#: msgspec's message about a pattern -> its replacement.
_PATTERNS: dict[str, str] = {}


def pattern(regex: str, expected: str) -> msgspec.Meta:
    """Text that matches `regex`; `expected` names it in messages, which show no regex."""
    _PATTERNS[f"Expected `str` matching regex {regex!r}"] = f"expected {expected}"
    return msgspec.Meta(pattern=regex)


def explain(error: Exception) -> str:
    """msgspec's message, without regular expressions."""
    text = str(error)
    for message, replacement in _PATTERNS.items():
        text = text.replace(message, replacement)
    return text


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of all that is read from a file: immutable, without unknown keys."""


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> tuple[bytes, os.stat_result]:
    """Content and status of the same regular file; raises ConfigError.

    A pipe, a device or a file of more than `most_bytes` is refused.
    """
    path = Path(path)
    try:
        # O_NONBLOCK: opening a pipe would wait for its writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if stat.S_ISDIR(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{path}: expected a regular file, found a pipe or a device")
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise ConfigError(f"{path}: {error}") from error
    if len(content) > most_bytes:
        raise ConfigError(f"{path}: expected at most {most_bytes:,} bytes, found more")
    return content, found


def is_private(path: Path, mode: int) -> bool:
    """Tell whether the mode of a secret file lets nobody read it but its owner.

    In $CREDENTIALS_DIRECTORY it may be 0440: of systemd's credentials an access list, which the
    group's bits show, names the service's user; of Kubernetes' secrets the group is the pod's.
    """
    is_credential = path.parent == Path(os.environ.get("CREDENTIALS_DIRECTORY") or "/")
    return not mode & (0o037 if is_credential else 0o077)


def read_secret(path: Path, most_bytes: int) -> bytes:
    """The content of a regular file that only its owner can read; raises ConfigError."""
    content, found = read_regular(path, most_bytes)
    if not is_private(path, found.st_mode) or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{path}: expected a file that only its owner can read (chmod 600)")
    return content


def decode_content(
    path: str | os.PathLike[str], content: bytes, kind: type[T], decode: Callable[..., T]
) -> T:
    """The content of `path` as a `kind`; raises ConfigError naming file, key and expectation.

    Every text in it is printable, so that none can control a terminal.
    """
    try:
        record = decode(content, type=kind)
    except ValueError as error:  # malformed, not UTF-8, a number of thousands of digits
        more = _list_keys(error, kind) or _number_at(error, content, decode)
        raise ConfigError(f"{path}: {explain(error)}{more}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: lists or tables nested too deeply") from error
    for where, text in _texts(msgspec.to_builtins(record), "$"):
        if not text.isprintable():
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
            raise ConfigError(f"{path}: expected printable text, got {shown!r} - at `{where}`")
    return record


def _list_keys(error: Exception, kind: type[Any]) -> str:
    """The keys that a `kind` has at the place of an unknown one."""
    unknown = re.fullmatch(r"Object contains unknown field `[^`]*`(?: - at `\$(.*)`)?", str(error))
    if unknown is None:
        return ""
    here = list(_alternatives(inspect.type_info(kind)))
    for key in re.findall(r"\.\w+|\[[^]]*\]", unknown[1] or ""):
        here = [each for one in here for each in _inside(one, key.removeprefix("."))]
    keys = {
        f.encode_name: None
        for one in here
        if isinstance(one, inspect.StructType)
        for f in one.fields
    }
    return f": expected some of {', '.join(keys)}" if keys else ""


def _inside(described: inspect.Type, key: str) -> Iterator[inspect.Type]:
    """The types that a table has at `key`, a list or table of any keys at each of its places."""
    if isinstance(described, inspect.StructType):
        for item in described.fields:
            if item.encode_name == key:
                yield from _alternatives(item.type)
    elif isinstance(described, inspect.DictType):
        yield from _alternatives(described.value_type)
    elif isinstance(described, inspect.ListType | inspect.VarTupleType):
        yield from _alternatives(described.item_type)


def _alternatives(described: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(described, inspect.UnionType):
        for one in described.types:
            yield from _alternatives(one)
    elif isinstance(described, inspect.Metadata):
        yield from _alternatives(described.type)
    else:
        yield described


def _number_at(error: Exception, content: bytes, decode: Callable[..., Any]) -> str:
    """The number at the place that msgspec names; no texts, which may be long or secret."""
    _, at, place = str(error).rpartition(" - at `$")
    if not at:
        return ""
    try:
        value = decode(content)
        for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", place):
            value = value[key or int(index)]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return f", found {value:g}" if number else ""


def _texts(value: object, where: str) -> Iterator[tuple[str, str]]:
    """Every text in `value` with the path to it, the keys of tables included."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield where, str(key)
            yield from _texts(item, f"{where}.{key}")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            yield from _texts(item, f"{where}[{position}]")


def read_toml(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read `path` as a `kind`; raises ConfigError naming file, key and expectation."""
    content, _ = read_regular(path, MAX_TOML_BYTES)
    keys = _BETWEEN_KEYS.split(_TOML_TEXT.sub(b"_", content))
    if max(key.count(b".") for key in keys) >= _KEY_PARTS:
        raise ConfigError(f"{path}: expected keys of at most {_KEY_PARTS} parts, found one of more")
    return decode_content(path, content, kind, msgspec.toml.decode)


def read_json(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Read `path` as a `kind`; raises ConfigError naming file, key and expectation."""
    content, _ = read_regular(path, MAX_JSON_BYTES)
    return decode_content(path, content, kind, msgspec.json.decode)


def write_toml(path: str | os.PathLike[str], record: msgspec.Struct) -> None:
    """Write `record` atomically; keys without a value are left out (TOML has no null)."""
    write_bytes(path, toml_bytes(record))


def toml_bytes(record: msgspec.Struct, *, empty: bool = True) -> bytes:
    """`record` as TOML, without the keys that have no value, or with `empty` unset an empty one."""
    return msgspec.toml.encode(_with_values(msgspec.to_builtins(record), empty=empty))


def write_json(path: str | os.PathLike[str], record: object) -> None:
    """Write `record` as indented JSON, atomically."""
    write_bytes(path, msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def _with_values(value: object, *, empty: bool) -> object:
    if isinstance(value, dict):
        found = {key: _with_values(item, empty=empty) for key, item in value.items()}
        return {k: v for k, v in found.items() if v is not None and (empty or v not in ([], {}))}
    if isinstance(value, list | tuple):
        return [_with_values(item, empty=empty) for item in value]
    return value


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed on success and removed otherwise."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_bytes(
    path: str | os.PathLike[str], data: bytes, like: os.stat_result | None = None
) -> None:
    """Write `data` to `path` atomically; raises InputError if that fails.

    With the mode of `like`, and its owner where that is allowed.
    """
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
            if like is not None:
                with suppress(OSError):
                    os.chown(temporary, like.st_uid, like.st_gid)
                temporary.chmod(stat.S_IMODE(like.st_mode))
    except OSError as error:
        raise _unwritable(path, error) from error


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a new file atomically, with permissions `mode`; raises InputError if it exists.

    Folders made for a file that is its owner's alone are too.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o777 if mode & 0o077 else 0o700)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise _unwritable(path, error) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(handle)
        # Unlike a rename, a link does not replace a file created meanwhile.
        os.link(temporary, path)
        sync(path.parent)
    except FileExistsError as error:
        raise InputError(
            f"{path}: exists already: expected another name, or remove it first"
        ) from error
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_pair(secret: tuple[Path, bytes], public: tuple[Path, bytes]) -> None:
    """Write new secret and public key files, both or none; raises InputError if one exists."""
    write_new(*secret, 0o600)
    try:
        write_new(*public, 0o644)
    except InputError:
        secret[0].unlink()
        raise


def _unwritable(path: str | os.PathLike[str], error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"{path}: cannot be written: {reason}")


@contextmanager
def replacing_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield an empty folder beside `path`, which it replaces on success.

    The old folder is moved aside before, and removed after. For a link to a folder, its target is
    replaced. Raises InputError for a file, and on a full disk.
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
            sync(file)
        if path.exists():
            path.replace(aside)
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        # Other errors may be about reading.
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _unwritable(path, error) from error
        raise
    finally:
        if aside.exists() and not path.exists():
            aside.replace(path)
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(aside, ignore_errors=True)


def sync(path: Path) -> None:
    """Make `path`, a file or a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
