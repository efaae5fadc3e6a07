"""Addresses that a coordinator may listen on: loopback or private ones, as all is plain text."""

import ipaddress
import socket
from collections.abc import Callable

from mdp.errors import InputError
from partitioner.crew.coordinator.addresses import is_private

EXPOSED = (
    "training is plain text: anyone on the network of {host} can read and stop it, and change "
    "gradients between trainers; pictures can be guessed from it; a WireGuard address keeps others "
    "out"
)

Resolve = Callable[[str], list[str]]


def addresses_of(host: str) -> list[str]:
    """The addresses of a name."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


def parse_address(text: str, resolve: Resolve = addresses_of) -> tuple[str, int]:
    """Address and port of `HOST:PORT`; raises InputError for another form or a public address."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 2**16):
        raise InputError(f"{text!r}: expected HOST:PORT")
    try:
        found = resolve(host)
    except OSError as error:
        raise InputError(f"{host}: no address is known: {error.strerror}") from error
    for address in found:
        if not is_private(address):
            raise InputError(
                f"{host}: expected a loopback or private address (10/8, 172.16/12, 192.168/16, "
                f"100.64/10, fc00::/7), got {address}: training is plain text"
            )
    return found[0], int(port)


def text_of(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def exposure(host: str) -> str:
    """The warning to give once of a coordinator that listens on `host`; empty for loopback."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    return "" if ip.is_loopback else EXPOSED.format(host=host)


def own_address(host: str, port: int) -> str:
    """The own address on the way to a coordinator."""
    with socket.create_connection((host, port), timeout=5.0) as connection:
        address: str = connection.getsockname()[0]
    return address
