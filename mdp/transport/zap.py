"""ZAP 1.0 (rfc.zeromq.org/spec/27): the check of a client's key. No sockets."""

from collections.abc import Sequence

from zmq.utils import z85

#: Where libzmq sends requests; fixed by the RFC.
ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"mdp"
#: Status for a key at its limit of connections. The client's monitor reports the status alone; the
#: RFC has no closer one, and 300 would not be sent to the client.
FULL = b"500"
_FRAMES = 7


def answer(
    request: Sequence[bytes], allowed: frozenset[str], *, full: bool = False
) -> tuple[list[bytes], bool]:
    """The reply to libzmq's `request`, and whether it accepts the client.

    The client's public key becomes the user id of its connection. `full` refuses an allowed key at
    its limit of connections.
    """
    version, request_id = (*request, b"", b"")[:2]
    key = key_of(request)
    if version == b"1.0" and key and key in allowed:
        if full:
            return [b"1.0", request_id, FULL, b"no more connections", b"", b""], False
        return [b"1.0", request_id, b"200", b"OK", key.encode(), b""], True
    return [b"1.0", request_id, b"400", b"key not allowed", b"", b""], False


def key_of(request: Sequence[bytes]) -> str:
    """The client's public key; empty if `request` has none."""
    if len(request) != _FRAMES or request[5] != b"CURVE" or len(request[6]) != 32:
        return ""
    return z85.encode(request[6]).decode()


def host_of(request: Sequence[bytes]) -> str:
    """The client's address, in libzmq's form."""
    return request[3].decode("ascii", "replace") if len(request) == _FRAMES else ""
