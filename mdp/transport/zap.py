"""ZAP 1.0 (rfc.zeromq.org/spec/27): which client keys an agent lets in. No sockets."""

from collections.abc import Sequence

from zmq.utils import z85

#: Where libzmq asks; fixed by the RFC.
ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"mdp"
_FRAMES = 7


def answer(request: Sequence[bytes], allowed: frozenset[str]) -> tuple[list[bytes], bool]:
    """The reply to libzmq's `request`, and whether it lets the client in.

    The client's public key becomes the user id of its connection.
    """
    version, request_id = (*request, b"", b"")[:2]
    key = b""
    if len(request) == _FRAMES and request[5] == b"CURVE" and len(request[6]) == 32:
        key = z85.encode(request[6])
    if version == b"1.0" and key and key.decode() in allowed:
        return [b"1.0", request_id, b"200", b"OK", key, b""], True
    return [b"1.0", request_id, b"400", b"key not allowed", b"", b""], False
