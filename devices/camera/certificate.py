"""The certificate that an agent makes for itself, so that phones give it their cameras.

Browsers open cameras only for pages over TLS. Nobody vouches for the certificate: whoever holds the
phone has to accept it once. It is made at the first start and kept in the user's state folder, with
a token that pages have to know, readable by nobody else.
"""

import datetime
import ipaddress
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mdp.errors import AgentError, InputError
from mdp.extras import install
from mdp.files import read_secret, write_new

#: How long it holds: what Apple's systems accept at most.
_DAYS = 824
_MAX_FILE_BYTES = 8192
_TOKEN_BYTES = 16
#: A documentation address (RFC 5737): nothing is sent by connecting a datagram socket to it.
_ELSEWHERE = ("192.0.2.1", 9)


@dataclass(frozen=True, slots=True)
class PhoneFiles:
    """Certificate with its key as one PEM file, and the token."""

    certificate: Path
    token: str


def own_address() -> str:
    """This machine's address in the network that its other hosts are reached by, else loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(_ELSEWHERE)
        except OSError:
            return "127.0.0.1"
        return str(asked.getsockname()[0])


def phone_files(
    address: str, now: datetime.datetime | None = None, folder: Path | None = None
) -> PhoneFiles:
    """The files in `folder`, made where there are none, or anew for another address or out of date.

    Raises AgentError where `cryptography` is not installed, InputError where they cannot be
    written, ConfigError where others may read them.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    folder = folder or state / "mdp" / "phone"
    token, certificate = folder / "token", folder / f"{address}.pem"
    if not token.exists():
        write_new(token, secrets.token_urlsafe(_TOKEN_BYTES).encode(), 0o600)
    if certificate.exists() and not _holds(certificate, now):
        certificate.unlink()
    if not certificate.exists():
        write_new(certificate, _make(address, now), 0o600)
    read_secret(certificate, _MAX_FILE_BYTES)
    return PhoneFiles(certificate, read_secret(token, _MAX_FILE_BYTES).decode().strip())


def check_phone() -> None:
    """Raise AgentError where `cryptography` is not installed."""
    _x509()


def _holds(path: Path, now: datetime.datetime) -> bool:
    x509 = _x509()
    try:
        found = x509.load_pem_x509_certificate(read_secret(path, _MAX_FILE_BYTES))
    except ValueError as error:
        raise InputError(f"{path}: expected a certificate, found none: remove it") from error
    return bool(found.not_valid_before_utc <= now < found.not_valid_after_utc)


def _make(address: str, now: datetime.datetime) -> bytes:
    x509 = _x509()
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "MDP agent, made by itself")])
    alternatives = [x509.IPAddress(ipaddress.ip_address(address)), x509.DNSName("localhost")]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # Clocks of phones differ.
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    return bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(pem)
    )


def _x509() -> Any:
    try:
        from cryptography import x509
    except ImportError as error:
        raise AgentError(
            f"cryptography is not installed; a phone's camera needs it: {install('sign')}"
        ) from error
    return x509
