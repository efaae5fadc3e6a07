"""Signatures of bundles: Ed25519 over the bytes of the manifest.

The manifest has the hash of each file, so its signature covers models, fusion weights, plan and
measurements. It is checked before the manifest is parsed. Ed25519 (RFC 8032) is from the package
`cryptography`, which is imported only where a key is used.
"""

import hashlib
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from mdp.errors import ConfigError, InputError
from mdp.files import Record, decode_content, read_regular, write_json, write_pair

SIGNATURE: Final = "signature.json"
SECRET, PUBLIC = ".secret", ".public"
#: Domain separation from other signatures of the same key.
_PURPOSE = b"mdp bundle manifest, signature version 1\0"
MAX_FILE_BYTES = 4096

HexKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
HexSignature = Annotated[str, Meta(pattern=r"^[0-9a-f]{128}\Z")]


class BundleKeyFile(Record, frozen=True):
    """The content of NAME.secret or NAME.public, which has no `secret`."""

    name: Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}\Z")]
    algorithm: Literal["ed25519"]
    public: HexKey
    secret: HexKey | None = None


class SignatureFile(Record, frozen=True):
    """The content of `signature.json`."""

    algorithm: Literal["ed25519"]
    #: The signer's public key, for messages; only the verifier's key is trusted.
    public: HexKey
    signature: HexSignature
    format_version: Literal[1] = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleKey:
    """A key whose signatures are accepted."""

    name: str
    public: str

    def __str__(self) -> str:
        return f"{self.name} ({fingerprint(self.public)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SigningKey:
    """A key that signs."""

    key: BundleKey
    secret: str = field(repr=False)


def fingerprint(public: str) -> str:
    """The fingerprint of a public key: 32 hex digits."""
    return hashlib.sha256(bytes.fromhex(public)).hexdigest()[:32]


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InputError(
            "signatures need the package cryptography: pip install 'mdp-edge[sign]'"
        ) from error
    return ed25519


def new_bundle_key(folder: Path, name: str) -> BundleKeyFile:
    """Write NAME.secret, readable by its owner only, and NAME.public; raises InputError.

    An existing file is never replaced.
    """
    made = _ed25519().Ed25519PrivateKey.generate()
    content = {
        "name": name,
        "algorithm": "ed25519",
        "public": made.public_key().public_bytes_raw().hex(),
        "secret": made.private_bytes_raw().hex(),
    }
    try:
        whole = msgspec.convert(content, BundleKeyFile)
    except msgspec.ValidationError as error:
        raise InputError(
            f"--name {name}: expected lower-case letters, digits, '.', '_' and '-', "
            "at most 64, the first one a letter or a digit"
        ) from error
    secret = msgspec.toml.encode(content)
    del content["secret"]
    write_pair(
        (folder / f"{name}{SECRET}", secret),
        (folder / f"{name}{PUBLIC}", msgspec.toml.encode(content)),
    )
    return whole


def _read_key(path: Path) -> tuple[BundleKeyFile, int]:
    content, found = read_regular(path, MAX_FILE_BYTES)
    try:
        key = decode_content(path, content, BundleKeyFile, msgspec.toml.decode)
    except ConfigError as error:
        # Without the content, which may be secret.
        raise ConfigError(
            f"{path}: expected a key file as `mdp bundle key` writes it, this is another file"
        ) from error
    return key, stat.S_IMODE(found.st_mode)


def load_bundle_key(path: Path) -> BundleKey:
    """The key in a public file; raises ConfigError, also for a secret one."""
    content, _ = _read_key(path)
    if content.secret is not None:
        raise ConfigError(
            f"{path}: expected a public key file, this is a secret one: it stays with its owner"
        )
    return BundleKey(name=content.name, public=content.public)


def load_signing_key(path: Path) -> SigningKey:
    """The key in a secret file; raises ConfigError, also if others may read it."""
    content, mode = _read_key(path)
    if content.secret is None:
        raise ConfigError(f"{path}: expected a secret key file, this is a public one")
    if mode & 0o077:
        raise ConfigError(
            f"{path}: expected mode 0600, got {mode:04o}: others may read this secret key"
        )
    secret = _ed25519().Ed25519PrivateKey.from_private_bytes(bytes.fromhex(content.secret))
    if secret.public_key().public_bytes_raw().hex() != content.public:
        raise ConfigError(f"{path}: `public` and `secret` do not belong together")
    return SigningKey(
        key=BundleKey(name=content.name, public=content.public), secret=content.secret
    )


def sign(manifest: Path, content: bytes, key: SigningKey) -> Path:
    """Write the signature of a manifest beside it; returns its path."""
    secret = _ed25519().Ed25519PrivateKey.from_private_bytes(bytes.fromhex(key.secret))
    signature = secret.sign(_PURPOSE + content).hex()
    path = manifest.with_name(SIGNATURE)
    record = SignatureFile(algorithm="ed25519", public=key.key.public, signature=signature)
    write_json(path, record)
    return path


def check_signature(manifest: Path, content: bytes, key: BundleKey) -> None:
    """Raise ConfigError unless `content`, of the file `manifest`, was signed with `key`."""
    path = manifest.with_name(SIGNATURE)
    if not path.exists():
        raise ConfigError(
            f"{manifest.parent}: not signed: expected {SIGNATURE} beside {manifest.name}, signed "
            f"with key {key} (`mdp bundle sign`)"
        )
    found, _ = read_regular(path, MAX_FILE_BYTES)
    given = decode_content(path, found, SignatureFile, msgspec.json.decode)
    if given.public != key.public:
        raise ConfigError(
            f"{path}: expected a signature with key {key}, got one with key "
            f"{fingerprint(given.public)}"
        )
    ed25519 = _ed25519()
    try:
        from cryptography.exceptions import InvalidSignature

        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.public))
        public.verify(bytes.fromhex(given.signature), _PURPOSE + content)
    except (InvalidSignature, ValueError) as error:
        raise ConfigError(
            f"{manifest}: altered since it was signed with key {key}: this file or {SIGNATURE} "
            "was changed; if the change is intended, sign the bundle again"
        ) from error
