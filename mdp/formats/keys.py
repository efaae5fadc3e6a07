"""Key files: who a client or an agent is, and whom an agent lets in.

`NAME.secret` holds a whole CURVE key pair and stays where it was made; `NAME.public` is to be
copied. Both are TOML; a key is 32 bytes as 40 characters of Z85 (rfc.zeromq.org/spec/32).
"""

import datetime
import hashlib
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from mdp.errors import ConfigError, InputError
from mdp.files import NAME, NAME_FORM, Record, explained, pattern

KEY_CHARACTERS = 40
#: Of SHA-256: nobody finds a second key with the same beginning of so many hex digits.
FINGERPRINT_DIGITS = 32
MAX_FILE_BYTES = 4096
SECRET, PUBLIC, LIMITS = ".secret", ".public", ".limits"
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_ADDRESS = re.compile(r"tcp://(?P<host>\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")

R = TypeVar("R", bound=Record)
KeyName = Annotated[str, pattern(NAME, NAME_FORM)]


class KeyFile(Record, frozen=True):
    """The content of either file; `secret` is what a public one lacks."""

    name: KeyName
    public: str
    secret: str | None = None

    def __post_init__(self) -> None:
        check_key("public", self.public)
        if self.secret is not None:
            check_key("secret", self.secret)


class Limits(Record, frozen=True):
    """The content of NAME.limits: what a client may use of one agent, None for no limit."""

    #: The key is not let in from then on.
    expires: Annotated[datetime.datetime, Meta(tz=True)] | None = None
    #: Connections at a time; by default, 64.
    connections: Annotated[int, Meta(ge=1, le=4096)] | None = None
    #: Bytes of requests, and the share of the agent's computing time, in the long run.
    bytes_per_s: Annotated[float, Meta(ge=1, le=1e12)] | None = None
    computing_share: Annotated[float, Meta(gt=0, le=1)] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedClient:
    """A client that an agent lets in: the stem of its file's name, and its limits."""

    name: str
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """One party's keys."""

    public: str
    secret: str = field(repr=False)


def check_key(what: str, text: str) -> None:
    """Raises ValueError unless `text` is 32 bytes in Z85."""
    if len(text) != KEY_CHARACTERS:
        raise ValueError(f"`{what}`: expected a key of 40 characters, got {len(text)}")
    # Nothing of it is shown: it may be secret.
    groups = [text[start : start + 5] for start in range(0, KEY_CHARACTERS, 5)]
    if not set(text) <= set(_ALPHABET) or any(_value(group) >= 2**32 for group in groups):
        raise ValueError(f"`{what}`: expected a key in Z85, this is none")


def _value(group: str) -> int:
    value = 0
    for character in group:
        value = value * 85 + _ALPHABET.index(character)
    return value


def fingerprint(public: str) -> str:
    """What a public key is known by where the key itself is not given: 32 hex digits."""
    return hashlib.sha256(public.encode()).hexdigest()[:FINGERPRINT_DIGITS]


def is_loopback(address: str) -> bool:
    """Whether tcp://HOST:PORT can only be reached from this machine, going by its text alone."""
    match = _ADDRESS.fullmatch(address)
    if match is None:
        return False
    host = match["host"].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_bind_address(address: str) -> None:
    """Raises InputError unless `address` is tcp://HOST:PORT with a port that exists, or 0."""
    match = _ADDRESS.fullmatch(address)
    # ZeroMQ would take port 99999 for 34463.
    if match is None or int(match["port"]) > 65535:
        raise InputError(f"--bind: expected tcp://HOST:PORT, got {address!r}")


def new_keys(folder: Path, name: str, make_pair: Callable[[], tuple[str, str]]) -> KeyFile:
    """Write NAME.secret, for its owner's eyes only, and NAME.public; raises InputError.

    `make_pair` gives a public and a secret key. Nothing is ever overwritten.
    """
    public, secret = make_pair()
    try:
        whole = msgspec.convert({"name": name, "public": public, "secret": secret}, KeyFile)
    except msgspec.ValidationError as error:
        text = explained(error).partition(" - at ")[0]
        raise InputError(f"--name {name}: {text}") from error
    paths = [folder / f"{name}{ending}" for ending in (SECRET, PUBLIC)]
    for path in paths:
        if path.exists() or path.is_symlink():
            raise _exists(path)
    contents = [whole, msgspec.structs.replace(whole, secret=None)]
    written: list[Path] = []
    path = paths[0]
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, content, mode in zip(paths, contents, (0o600, 0o644), strict=True):
            _write(path, content, mode)
            written.append(path)
    except OSError as error:
        for half in written:
            half.unlink()
        # Somebody else wrote the same name meanwhile; the secret comes first, so theirs is whole.
        if isinstance(error, FileExistsError) and path.exists():
            raise _exists(path) from error
        reason = error.strerror or str(error)
        raise InputError(f"{path}: cannot be written: {reason}") from error
    return whole


def _exists(path: Path) -> InputError:
    return InputError(f"{path}: exists already: expected another name, or remove it first")


def _write(path: Path, content: KeyFile, mode: int) -> None:
    """Write a file that does not exist yet, whole or not at all; raises OSError."""
    known = {key: value for key, value in msgspec.structs.asdict(content).items() if value}
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        # From the first byte on, nobody else can read it.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.toml.encode(known))
            file.flush()
            os.fsync(handle)
        # Unlike a renaming, this fails where the name has been taken meanwhile.
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def load_pair(path: Path, public_of: Callable[[str], str]) -> KeyPair:
    """The keys in a secret file; raises ConfigError, also if others may read it.

    `public_of` computes a secret key's public one; raises ValueError if it is none.
    """
    content, found = _read(path, KeyFile)
    if content.secret is None:
        raise ConfigError(f"{path}: expected a secret key file, this is a public one")
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
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
    """Clients by public key, from one public file or every one in a folder, and what is wrong.

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
                _read(limits, Limits)[0] if limits.is_symlink() or limits.exists() else Limits()
            )
            clients[load_public(file)] = AllowedClient(name=file.stem, limits=content)
        except ConfigError as error:
            problems.append(str(error))
    return clients, problems


def load_allowed(path: Path) -> dict[str, AllowedClient]:
    """As `load_clients`, at least one and all of them right; raises ConfigError."""
    clients, problems = load_clients(path)
    if problems:
        raise ConfigError(problems[0])
    if not clients:
        raise ConfigError(f"{path}: expected at least one NAME.public in this folder")
    return clients


def _check_owner(path: Path, found: os.stat_result) -> None:
    """Raises ConfigError if another user may exchange what is at `path`."""
    if found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path}: expected owner {os.geteuid()} or root, got {found.st_uid}: "
            "another user may change it"
        )
    # In a sticky folder, as /tmp is, nobody can exchange what another one owns.
    if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"{path}: expected no right to write for others, got mode "
            f"{stat.S_IMODE(found.st_mode):04o}: everybody may change it"
        )


def _read(path: Path, kind: type[R]) -> tuple[R, os.stat_result]:
    """A small file, and what the system knows of that same file; raises ConfigError."""
    try:
        # Not waiting for a pipe's writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                raise ConfigError(f"{path}: expected a key file as `mdp keys new` writes it")
            content = msgspec.toml.decode(file.read(MAX_FILE_BYTES), type=kind)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path, and what is wrong with the content
        raise ConfigError(f"{path}: {explained(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: lists or tables nested too deeply") from error
    return content, found
