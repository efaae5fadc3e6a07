"""Messages that only who has the crew's key can make."""

import pytest

from partitioner.crew.bus.authentication import (
    TAG_BYTES,
    NotAuthentic,
    is_signed_name,
    session_key,
    sign,
    sign_name,
    verify,
)

NONCE = bytes(range(16))
KEY = session_key("token", NONCE)
NAME = "event/1/7"


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 40])
def test_what_is_signed_is_read(data: bytes) -> None:
    message = sign(KEY, NAME, data, 7)
    assert len(message) == TAG_BYTES + len(data)
    assert verify(KEY, NAME, message, 7) == data
    assert b"token" not in message


@pytest.mark.parametrize(
    ("key", "name", "number"),
    [
        (session_key("another", NONCE), NAME, 7),
        (session_key("token", NONCE[::-1]), NAME, 7),  # of another training
        (KEY, "event/1/8", 7),
        (KEY, "event/2/7", 7),
        (KEY, NAME, 8),  # repeated as the next one
        (KEY, "", 7),
    ],
)
def test_another_key_name_or_number_is_not_authentic(key: bytes, name: str, number: int) -> None:
    message = sign(KEY, NAME, b"data", 7)
    with pytest.raises(NotAuthentic, match="expected a message that is signed with the crew's key"):
        verify(key, name, message, number)


def test_no_bit_can_be_changed_and_nothing_cut_off_or_added() -> None:
    message = sign(KEY, NAME, b"data")
    odd = [message[:length] for length in range(len(message))]
    odd += [message + b"\0", b"\0" + message]
    for bit in range(8 * len(message)):
        changed = bytearray(message)
        changed[bit // 8] ^= 1 << bit % 8
        odd.append(bytes(changed))
    for one in odd:
        with pytest.raises(NotAuthentic):
            verify(KEY, NAME, one)


def test_where_a_name_ends_and_data_begins_is_signed_too() -> None:
    message = sign(KEY, "ab", b"cd")
    for name, data in (("a", b"bcd"), ("abc", b"d")):
        with pytest.raises(NotAuthentic):
            verify(KEY, name, message[:TAG_BYTES] + data)


@pytest.mark.parametrize("name", ["file/member-0", "g/teacher/1/0~1", "café", ""])
def test_names_are_signed(name: str) -> None:
    signed = sign_name(KEY, name)
    assert signed.startswith(f"{name}~")
    assert is_signed_name(KEY, signed)
    other = session_key("token", b"")
    strange = (name, name + "~", signed[:-1], signed + "0", "x" + signed, sign_name(other, name))
    assert not any(is_signed_name(KEY, text) for text in strange)
    # A name's tag is none of a message.
    tag = sign(KEY, name, b"")[:TAG_BYTES].hex()
    assert not is_signed_name(KEY, f"{name}~{tag[:32]}")
