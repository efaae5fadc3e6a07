"""ZMTP's greeting (rfc.zeromq.org/spec/23): does a peer speak ZeroMQ, and encrypted or plain?

Of two peers that disagree, the one that notices first hangs up, and the other is often told
nothing. Asked by half a greeting, a peer says what it wants before it can disagree.
"""

#: Signature and major version, to which a peer answers with its whole greeting.
QUESTION = b"\xff" + (1).to_bytes(8, "big") + b"\x7f" + b"\x03"
_MECHANISM = slice(12, 32)
GREETING_BYTES = 64
NOT_ZMTP = ""


def mechanism_of(data: bytes) -> str | None:
    """`CURVE`, `NULL` or another mechanism; NOT_ZMTP for other bytes; None if more have to come."""
    if data[:1] not in (b"", b"\xff") or (len(data) > 9 and not data[9] & 1):
        return NOT_ZMTP
    if len(data) < GREETING_BYTES:
        return None
    return data[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
