"""Authentication of a crew's messages by the key that all its trainers have. Pure.

Whoever reaches the coordinator's port reads messages, deletes them, and sends old ones again. None
of them can be made, changed or given another name or number without the key, which is never sent.
"""

import hashlib
import hmac

TAG_BYTES = 32
#: Hexadecimal digits of a tag in a name.
_NAME_TAG = 32
_SEPARATOR = "~"


class NotAuthentic(ValueError):
    """A message was not signed with this key, or under another name or number."""


def session_key(token: str, nonce: bytes) -> bytes:
    """Return the key of one training: messages of an earlier one with this token do not fit."""
    return hmac.digest(token.encode(), b"session" + nonce, "sha256")


def sign(key: bytes, name: str, data: bytes, number: int = 0) -> bytes:
    """Return `data` with its tag in front: the message `number` under this name."""
    return _tag(key, b"message", name, number, data) + data


def verify(key: bytes, name: str, message: bytes, number: int = 0) -> bytes:
    """Return the data of a message of `sign`; raises NotAuthentic."""
    tag, data = message[:TAG_BYTES], message[TAG_BYTES:]
    if not hmac.compare_digest(tag, _tag(key, b"message", name, number, data)):
        raise NotAuthentic(f"{name}: expected a message that is signed with the crew's key")
    return data


def sign_name(key: bytes, name: str) -> str:
    """Return a name that only who has the key can make."""
    tag = _tag(key, b"name", name, 0, b"").hex()[:_NAME_TAG]
    return f"{name}{_SEPARATOR}{tag}"


def is_signed_name(key: bytes, text: str) -> bool:
    """Check that `text` is of `sign_name`."""
    name = text.rpartition(_SEPARATOR)[0]
    return hmac.compare_digest(text.encode(), sign_name(key, name).encode())


def _tag(key: bytes, kind: bytes, name: str, number: int, data: bytes) -> bytes:
    """The HMAC of all parts, each with its length, so that none can pass for another."""
    label = name.encode()
    found = hmac.new(key, digestmod=hashlib.sha256)
    for part in (kind, label, number.to_bytes(8, "big")):
        found.update(len(part).to_bytes(4, "big") + part)
    found.update(data)
    return found.digest()
