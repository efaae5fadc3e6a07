"""Decisions at an agent's door, and what a greeting tells. No sockets."""

import os
from collections.abc import Callable, Sequence

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from mdp.transport import zap
from mdp.transport.admission.pending import PendingConnections, TcpPeer
from mdp.transport.admission.tcp_peers import peer_of
from mdp.transport.greeting import GREETING_BYTES, NOT_ZMTP, PROBE, mechanism_of

KEY = bytes(range(32))
TEXT = z85.encode(KEY).decode()
REQUEST = [b"1.0", b"1", b"mdp", b"10.0.0.9", b"", b"CURVE", KEY]


def change(place: int, frame: bytes) -> list[bytes]:
    return [*REQUEST[:place], frame, *REQUEST[place + 1 :]]


def test_a_key_that_is_allowed() -> None:
    reply, allowed = zap.answer(REQUEST, frozenset([TEXT]))
    assert allowed
    assert reply == [b"1.0", b"1", b"200", b"OK", TEXT.encode(), b""]


def test_a_key_that_is_allowed_and_full_is_told_apart_from_one_that_is_not() -> None:
    for allowed, status in ((frozenset([TEXT]), b"500"), (frozenset[str](), b"400")):
        reply, let_in = zap.answer(REQUEST, allowed, full=True)
        assert not let_in
        assert (reply[2], reply[4]) == (status, b"")


@pytest.mark.parametrize(
    ("request_", "allowed"),
    [
        (REQUEST, frozenset()),
        (REQUEST, frozenset([z85.encode(bytes(32)).decode()])),
        (change(0, b"2.0"), frozenset([TEXT])),
        (change(5, b"NULL"), frozenset([TEXT])),
        (change(5, b"PLAIN"), frozenset([TEXT])),
        (change(6, KEY[:-1]), frozenset([TEXT])),
        (change(6, b""), frozenset(["", TEXT])),
        (REQUEST[:6], frozenset([TEXT])),
        ([*REQUEST, b"more"], frozenset([TEXT])),
        ([], frozenset([TEXT])),
        ([b"1.0"], frozenset([TEXT])),
    ],
)
def test_everybody_else_stays_out(request_: Sequence[bytes], allowed: frozenset[str]) -> None:
    reply, let_in = zap.answer(request_, allowed)
    assert not let_in
    assert len(reply) == 6
    assert reply[2] == b"400"
    assert reply[4] == b""


def nobody(peer: TcpPeer) -> bool:
    return False


def test_the_oldest_of_the_largest_crowd_goes_first() -> None:
    door = PendingConnections(limit=4)
    for number, host in enumerate(["a", "b", "b", "b"]):
        assert door.on_open(TcpPeer(number, host, number), nobody) is None
    assert door.on_open(TcpPeer(4, "c", 4), nobody) == TcpPeer(1, "b", 1)
    assert door.on_open(TcpPeer(5, "c", 5), nobody) == TcpPeer(2, "b", 2)
    assert len(door) == 4


def older_than(newest: int) -> Callable[[TcpPeer], bool]:
    return lambda peer: peer.descriptor < newest


def always(proves: bool) -> Callable[[TcpPeer], bool]:
    return lambda peer: proves


def test_whoever_has_proved_who_it_is_stays() -> None:
    door = PendingConnections(limit=2)
    for number in range(10):
        # Everybody but the newest has.
        gone = door.on_open(TcpPeer(number, "a", number), older_than(number))
        assert gone is None
    assert len(door) == 2


def test_who_has_proved_who_it_is_is_asked_no_more() -> None:
    door, asked = PendingConnections(limit=2), []

    def proved(peer: TcpPeer) -> bool:
        asked.append(peer.descriptor)
        return peer.descriptor != 2

    for number in range(5):
        gone = door.on_open(TcpPeer(number, "a", number), proved)
        assert (gone is None) == (number != 4)
    assert asked == [0, 1, 2]


def test_a_descriptor_that_is_used_again_is_a_new_visitor() -> None:
    door = PendingConnections(limit=2)
    door.on_open(TcpPeer(1, "a", 1), nobody)
    door.on_open(TcpPeer(2, "b", 1), nobody)
    door.on_open(TcpPeer(1, "b", 2), nobody)
    assert door.on_open(TcpPeer(3, "c", 1), nobody) == TcpPeer(2, "b", 1)


EVENTS = st.lists(
    st.tuples(st.booleans(), st.integers(0, 20), st.sampled_from("abc"), st.booleans())
)


@given(EVENTS, st.integers(1, 5))
def test_pending_is_always_bounded(events: list[tuple[bool, int, str, bool]], limit: int) -> None:
    door = PendingConnections(limit)
    there: set[int] = set()
    for opens, number, host, proves in events:
        if not opens:
            door.on_close(number)
            there.discard(number)
            continue
        there.add(number)
        gone = door.on_open(TcpPeer(number, host, 0), always(proves))
        assert gone is None or gone.descriptor in there
        assert gone is None or not proves
        assert len(door) <= limit


def greeting(mechanism: bytes) -> bytes:
    return PROBE + b"\x01" + mechanism.ljust(20, b"\0") + bytes(32)


@pytest.mark.parametrize("mechanism", ["NULL", "CURVE", "PLAIN"])
def test_a_greeting_says_how_its_sender_speaks(mechanism: str) -> None:
    data = greeting(mechanism.encode())
    assert len(data) == GREETING_BYTES
    for end in range(GREETING_BYTES):
        assert mechanism_of(data[:end]) is None
    assert mechanism_of(data) == mechanism
    assert mechanism_of(data + b"more") == mechanism


@pytest.mark.parametrize(
    "data", [b"SSH-2.0-x\r\n", b"HTTP/1.1 400\r\n", bytes(64), b"\xff" + bytes(9)]
)
def test_other_programs(data: bytes) -> None:
    assert mechanism_of(data) == NOT_ZMTP


def test_a_descriptor_that_is_no_connection_is_nobody() -> None:
    before = psutil.Process().num_fds()
    read, write = os.pipe()
    try:
        assert peer_of(read) is None
    finally:
        os.close(read)
        os.close(write)
    assert peer_of(read) is None
    assert psutil.Process().num_fds() == before
