"""ZMTP's greeting (rfc.zeromq.org/spec/23), which names a peer's mechanism.

Of two peers with different mechanisms, the first to notice disconnects, often without a reason. In
reply to half a greeting, a peer sends its own before it can disagree.
"""

#: Signature and major version, to which a peer replies with its whole greeting.
PROBE = b"\xff" + (1).to_bytes(8, "big") + b"\x7f" + b"\x03"
_MECHANISM = slice(12, 32)
GREETING_BYTES = 64
NOT_ZMTP = ""


def mechanism_of(data: bytes) -> str | None:
    """`CURVE`, `NULL` or another mechanism; NOT_ZMTP for other bytes; None if bytes are missing."""
    if data[:1] not in (b"", b"\xff") or (len(data) > 9 and not data[9] & 1):
        return NOT_ZMTP
    if len(data) < GREETING_BYTES:
        return None
    return data[_MECHANISM].rstrip(b"\0").decode("ascii", "replace")
