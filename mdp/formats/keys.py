"""Key files of clients and agents, and the clients that an agent allows.

`NAME.secret` contains a CURVE key pair and stays where it was made; `NAME.public` is copied. Both
are TOML; a key is 32 bytes as 40 characters of Z85 (rfc.zeromq.org/spec/32).
"""

import datetime
import hashlib
import ipaddress
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from mdp.errors import ConfigError, InputError
from mdp.files import (
    NAME,
    NAME_FORM,
    Record,
    decode_content,
    explain,
    is_private,
    pattern,
    read_regular,
    toml_bytes,
    write_bytes,
    write_pair,
)

KEY_CHARACTERS = 40
#: Hex digits of SHA-256, enough against a second key with the same ones.
FINGERPRINT_DIGITS = 32
MAX_FILE_BYTES = 4096
SECRET, PUBLIC, LIMITS, REVOKED = ".secret", ".public", ".limits", ".revoked"
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_ADDRESS = re.compile(r"tcp://(?P<host>\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")

R = TypeVar("R", bound=Record)
KeyName = Annotated[str, pattern(NAME, NAME_FORM)]


class KeyFile(Record, frozen=True):
    """The content of either file; a public one has no `secret`."""

    name: KeyName
    public: str
    secret: str | None = None

    def __post_init__(self) -> None:
        check_key("public", self.public)
        if self.secret is not None:
            check_key("secret", self.secret)


class ClientLimits(Record, frozen=True):
    """The content of NAME.limits: a client's limits and rights at one agent; None: no limit."""

    #: When the key expires.
    expires: Annotated[datetime.datetime, Meta(tz=True)] | None = None
    #: Connections at a time; by default, 64.
    connections: Annotated[int, Meta(ge=1, le=4096)] | None = None
    #: Bytes of requests, and the share of the agent's computing time, in the long run.
    bytes_per_s: Annotated[float, Meta(ge=1, le=1e12)] | None = None
    computing_share: Annotated[float, Meta(gt=0, le=1)] | None = None
    #: Whether it may push bundles, and fetch them.
    push: bool = False
    #: Whether it may fetch pictures of the agent's camera.
    record: bool = False
    #: Whether it may change what of the camera's pictures leaves the device.
    mask: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedClient:
    """An allowed client: the stem of its file's name, and its limits."""

    name: str
    limits: ClientLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """One party's keys."""

    public: str
    secret: str = field(repr=False)


def check_key(what: str, text: str) -> None:
    """Raises ValueError unless `text` is 32 bytes in Z85."""
    if len(text) != KEY_CHARACTERS:
        raise ValueError(f"`{what}`: expected a key of 40 characters, got {len(text)}")
    # Not shown: it may be secret.
    groups = [text[start : start + 5] for start in range(0, KEY_CHARACTERS, 5)]
    if not set(text) <= set(_ALPHABET) or any(_value(group) >= 2**32 for group in groups):
        raise ValueError(f"`{what}`: expected a key in Z85, this is none")


def _value(group: str) -> int:
    value = 0
    for character in group:
        value = value * 85 + _ALPHABET.index(character)
    return value


def fingerprint(public: str) -> str:
    """The fingerprint of a public key: 32 hex digits."""
    return hashlib.sha256(public.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def is_loopback(address: str) -> bool:
    """Tell whether only this machine reaches tcp://HOST:PORT, without a lookup of names."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return False
    host = match["host"].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_and_port(bind: str) -> tuple[str, int]:
    """`HOST:PORT` or `[IPV6]:PORT` in two; raises InputError."""
    host, separator, port = bind.rpartition(":")
    numeric = port.isascii() and port.isdigit() and int(port) < 65536
    bracketed = host.startswith("[") and host.endswith("]")
    if not separator or not host or not numeric or (":" in host and not bracketed):
        raise InputError(f"--bind {bind}: expected HOST:PORT or [IPV6]:PORT")
    return host.strip("[]"), int(port)


def is_local(host: str) -> bool:
    """Tell whether only this machine can connect to `host`."""
    return is_loopback(f"tcp://[{host}]:1" if ":" in host else f"tcp://{host}:1")


def check_bind_address(address: str) -> None:
    """Raises InputError unless `address` is tcp://HOST:PORT with a port that exists, or 0."""
    match = _ADDRESS.fullmatch(address)
    # ZeroMQ would listen on 34463 for port 99999.
    if match is None or int(match["port"]) > 65535:
        raise InputError(f"--bind: expected tcp://HOST:PORT, got {address!r}")


def new_keys(folder: Path, name: str, make_pair: Callable[[], tuple[str, str]]) -> KeyFile:
    """Write NAME.secret, readable by its owner only, and NAME.public; raises InputError.

    `make_pair` makes a public and a secret key. No file is overwritten.
    """
    public, secret = make_pair()
    try:
        whole = msgspec.convert({"name": name, "public": public, "secret": secret}, KeyFile)
    except msgspec.ValidationError as error:
        text = explain(error).partition(" - at ")[0]
        raise InputError(f"--name {name}: {text}") from error
    write_pair(
        (folder / f"{name}{SECRET}", toml_bytes(whole)),
        (folder / f"{name}{PUBLIC}", toml_bytes(msgspec.structs.replace(whole, secret=None))),
    )
    return whole


def load_pair(path: Path, public_of: Callable[[str], str]) -> KeyPair:
    """The keys in a secret file; raises ConfigError, also if others may read it.

    `public_of` computes a secret key's public one, and raises ValueError for an invalid key.
    """
    content, found = _read(path, KeyFile)
    if content.secret is None:
        raise ConfigError(f"{path}: expected a secret key file, this is a public one")
    if not is_private(path, found.st_mode):
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"{path}: expected mode 0600, got {mode:04o}: others may read this secret key"
        )
    _check_owner(path, found)
    _check_owner(path.parent, path.parent.stat())
    try:
        belongs = public_of(content.secret) == content.public
    except ValueError as error:
        raise ConfigError(f"{path}: `secret`: {error}") from error
    if not belongs:
        raise ConfigError(f"{path}: `public` and `secret` do not belong together")
    return KeyPair(public=content.public, secret=content.secret)


def load_public(path: Path) -> str:
    """The key in a public file; raises ConfigError, also for a secret one."""
    content, _ = _read(path, KeyFile)
    if content.secret is not None:
        raise ConfigError(
            f"{path}: expected a public key file, this is a secret one: it stays with its owner"
        )
    return content.public


def load_clients(path: Path) -> tuple[dict[str, AllowedClient], list[str]]:
    """Clients by public key, from a public file or a folder of them, and errors.

    A client whose files are wrong is left out. `NAME.limits` beside `NAME.public` is optional.
    """
    try:
        _check_owner(path, path.stat())
        files = sorted(file for file in path.iterdir() if file.suffix == PUBLIC)
    except NotADirectoryError:
        files = [path]
    except OSError as error:
        return {}, [f"{path}: cannot be read: {error.strerror or error}"]
    except ConfigError as error:
        return {}, [str(error)]
    clients: dict[str, AllowedClient] = {}
    problems: list[str] = []
    for file in files:
        try:
            limits = file.with_suffix(LIMITS)
            content = (
                _read(limits, ClientLimits)[0]
                if limits.is_symlink() or limits.exists()
                else ClientLimits()
            )
            clients[load_public(file)] = AllowedClient(name=file.stem, limits=content)
        except ConfigError as error:
            problems.append(str(error))
    return clients, problems


def allow(folder: Path, public: Path, rights: Mapping[str, bool]) -> ClientLimits:
    """Let a client in: copy its public key file into a folder of clients, made where there is none.

    `rights` (`push`, `record`, `mask`) and the limits that are there already go into NAME.limits.
    Returns them. Raises ConfigError for what is no public key, InputError for another key of that
    name.
    """
    key, name = load_public(public), public.stem
    there, limits = folder / f"{name}{PUBLIC}", folder / f"{name}{LIMITS}"
    if there.exists() and not _is_key(there, key):
        raise InputError(f"{there}: expected no other key of this name (`mdp keys revoke`)")
    before = _read(limits, ClientLimits)[0] if limits.exists() else ClientLimits()
    after = msgspec.structs.replace(before, **rights)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be made: {error.strerror or error}") from error
    # Limits first: the agent may read the folder in between.
    if after != before:
        told = {k: v for k, v in msgspec.structs.asdict(after).items() if v not in (None, False)}
        write_bytes(limits, msgspec.toml.encode(told))
    if not there.exists():
        write_bytes(there, read_regular(public, MAX_FILE_BYTES)[0])
    return after


def revoke(folder: Path, name: str) -> list[Path]:
    """Rename NAME.public in a folder of clients to NAME.revoked; returns the renamed files.

    NAME.limits becomes NAME.limits.revoked: a later key of that name has no rights by it. Also
    those of other names with the same key. An older NAME.revoked stays: the new one is
    NAME.revoked-2 then. Raises InputError for a name that is not there, ConfigError for a file
    that is no public key.
    """
    here = sorted(file for file in folder.glob(f"*{PUBLIC}"))
    if folder / f"{name}{PUBLIC}" not in here:
        known = ", ".join(file.stem for file in here) or "none"
        raise InputError(f"--name {name}: expected a client of {folder} (there are: {known})")
    key = load_public(folder / f"{name}{PUBLIC}")
    clients = [file for file in here if file.stem == name or _is_key(file, key)]
    try:
        revoked = [file.rename(_free_path(file.with_suffix(REVOKED))) for file in clients]
        for file in clients:
            limits = file.with_suffix(LIMITS)
            if limits.exists():
                limits.rename(_free_path(limits.with_name(f"{limits.name}{REVOKED}")))
        return revoked
    except OSError as error:
        raise InputError(f"{folder}: cannot be changed: {error.strerror}") from error


def _free_path(path: Path) -> Path:
    """`path`, or the first of `path`-2, `path`-3 and so on that is not there."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())


def _is_key(file: Path, key: str) -> bool:
    try:
        return load_public(file) == key
    except ConfigError:
        return False


def next_name(secret: Path) -> str:
    """The name of the key after `secret`'s: `client-2` after `client`, `client-3` after that."""
    name, separator, number = secret.stem.rpartition("-")
    if separator and number.isdigit():
        return f"{name}-{int(number) + 1}"
    return f"{secret.stem}-2"


def load_allowed(path: Path) -> dict[str, AllowedClient]:
    """As `load_clients`; raises ConfigError for an error, and without any client."""
    clients, problems = load_clients(path)
    if problems:
        raise ConfigError(problems[0])
    if not clients:
        raise ConfigError(f"{path}: expected at least one NAME.public in this folder")
    return clients


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Raises ConfigError if another user may replace the file at `path`."""
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path}: expected owner {os.geteuid()} or root, got {found.st_uid}: "
            "another user may change it"
        )
    # In a sticky folder, as /tmp, only a file's owner can replace it.
    if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{path}: expected no right to write for others, got mode "
            f"{stat.S_IMODE(found.st_mode):04o}: everybody may change it"
        )


def _read(path: Path, kind: type[R]) -> tuple[R, os.stat_result]:
    """A small file and its status; raises ConfigError."""
    content, found = read_regular(path, MAX_FILE_BYTES)
    return decode_content(path, content, kind, msgspec.toml.decode), found
