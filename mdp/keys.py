"""Key files: who a client or an agent is, and whom an agent lets in.

`NAME.secret` holds a whole CURVE key pair and stays where it was made; `NAME.public` is to be
copied. Both are TOML; a key is 32 bytes as 40 characters of Z85 (rfc.zeromq.org/spec/32).
"""

import hashlib
import ipaddress
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import msgspec

from mdp.errors import ConfigError, InputError
from mdp.files import NAME, NAME_FORM, Record, explained, pattern, replacing

KEY_CHARACTERS = 40
#: Of SHA-256: nobody finds a second key with the same beginning of so many hex digits.
FINGERPRINT_DIGITS = 32
MAX_FILE_BYTES = 4096
SECRET, PUBLIC = ".secret", ".public"
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_ADDRESS = re.compile(r"tcp://(?P<host>\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(?P<port>[0-9]{1,5})")

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
            raise InputError(f"{path}: exists already: expected another name, or remove it first")
    contents = [whole, msgspec.structs.replace(whole, secret=None)]
    written: list[Path] = []
    try:
        for path, content, mode in zip(paths, contents, (0o600, 0o644), strict=True):
            _write(path, content, mode)
            written.append(path)
    except OSError as error:
        for half in written:
            half.unlink()
        raise InputError(f"{path}: cannot be written: {error.strerror or error}") from error
    return whole


def _write(path: Path, content: KeyFile, mode: int) -> None:
    known = {key: value for key, value in msgspec.structs.asdict(content).items() if value}
    with replacing(path) as temporary:
        # From the first byte on, nobody else can read it.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.toml.encode(known))


def load_pair(path: Path, public_of: Callable[[str], str]) -> KeyPair:
    """The keys in a secret file; raises ConfigError, also if others may read it.

    `public_of` computes a secret key's public one; raises ValueError if it is none.
    """
    content, mode = _read(path)
    if content.secret is None:
        raise ConfigError(f"{path}: expected a secret key file, this is a public one")
    if mode & 0o077:
        raise ConfigError(
            f"{path}: expected mode 0600, got {mode:04o}: others may read this secret key"
        )
    try:
        belongs = public_of(content.secret) == content.public
    except ValueError as error:
        raise ConfigError(f"{path}: `secret`: {error}") from error
    if not belongs:
        raise ConfigError(f"{path}: `public` and `secret` do not belong together")
    return KeyPair(public=content.public, secret=content.secret)


def load_public(path: Path) -> str:
    """The key in a public file; raises ConfigError, also for a secret one."""
    content, _ = _read(path)
    if content.secret is not None:
        raise ConfigError(
            f"{path}: expected a public key file, this is a secret one: it stays with its owner"
        )
    return content.public


def load_allowed(path: Path) -> frozenset[str]:
    """The public keys in a public file, or in every one in a folder; raises ConfigError."""
    try:
        files = sorted(file for file in path.iterdir() if file.suffix == PUBLIC)
    except NotADirectoryError:
        return frozenset([load_public(path)])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not files:
        raise ConfigError(f"{path}: expected at least one NAME.public in this folder")
    return frozenset(load_public(file) for file in files)


def _read(path: Path) -> tuple[KeyFile, int]:
    """A key file and its permissions, of one and the same file."""
    try:
        # Not waiting for a pipe's writer.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:
                raise ConfigError(f"{path}: expected a key file as `mdp keys new` writes it")
            content = msgspec.toml.decode(file.read(MAX_FILE_BYTES), type=KeyFile)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path, and what is wrong with the content
        raise ConfigError(f"{path}: {explained(error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: lists or tables nested too deeply") from error
    return content, stat.S_IMODE(found.st_mode)
