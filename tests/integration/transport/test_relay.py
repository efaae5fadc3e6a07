"""The relay that plays a bad link does what its name says."""

import select
import socket
import time
from collections.abc import Iterator

import pytest

from mdp.testing.processes import PATIENCE_S, until
from mdp.testing.relay import WELL, Relay
from mdp.testing.relay_process import Link
from tests.support.faults.strangers import host_and_port

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def agent() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture
def relay(agent: socket.socket) -> Iterator[Relay]:
    with Relay(f"tcp://127.0.0.1:{agent.getsockname()[1]}") as relay:
        yield relay


@pytest.fixture
def ends(relay: Relay, agent: socket.socket) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection through the relay."""
    with socket.create_connection(host_and_port(relay.address), PATIENCE_S) as near:
        far, _ = agent.accept()
        with far:
            far.settimeout(PATIENCE_S)
            yield near, far


def read(reader: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = reader.recv(size - len(data))
        assert piece, "the connection has ended"
        data += piece
    return data


def quiet(reader: socket.socket, seconds: float) -> bool:
    return select.select([reader], [], [], seconds)[0] == []


def test_a_link_that_is_well(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    data = bytes(range(256)) * 1000
    near.sendall(data)
    assert read(far, len(data)) == data
    far.sendall(b"back")
    assert read(near, 4) == b"back"
    near.shutdown(socket.SHUT_RDWR)
    assert far.recv(1) == b""


@pytest.mark.parametrize("link", [Link(rate_bps=80_000.0), Link(delay_s=0.3), Link(loss=0.3)])
def test_a_link_that_is_slow_or_lossy_delivers_everything_later_and_in_order(
    relay: Relay, ends: tuple[socket.socket, socket.socket], link: Link
) -> None:
    near, far = ends
    relay.link = link
    data = bytes(range(256)) * (40 if link.loss else 12)
    started_s = time.monotonic()
    near.sendall(data)
    assert read(far, len(data)) == data
    # Not sooner; how much later is the machine's business.
    assert time.monotonic() - started_s >= (0.2 if link.loss else 0.3)
    assert (relay.troubles > 0) is (link.loss > 0)


def test_a_partition_loses_nothing(relay: Relay, ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    relay.link = Link(silent=True)
    near.sendall(b"there")
    far.sendall(b"back")
    assert quiet(far, 0.2)
    assert quiet(near, 0.0)
    relay.link = WELL
    assert read(far, 5) == b"there"
    assert read(near, 4) == b"back"


def test_a_link_that_flaps_resets(relay: Relay, ends: tuple[socket.socket, socket.socket]) -> None:
    near, _ = ends
    relay.link = Link(flap_s=0.2)
    with pytest.raises(ConnectionResetError):
        near.recv(1)
    relay.link = WELL

    def passes() -> bool:
        try:
            with socket.create_connection(host_and_port(relay.address), PATIENCE_S) as again:
                return quiet(again, 0.3)
        except ConnectionResetError:
            return False

    until(passes, "connections are let be again")
