"""Connections by their clients, and the one that has to go. No sockets."""

from mdp.transport.admission.connections import Connections
from mdp.transport.admission.pending import TcpPeer


def anybody(peer: TcpPeer) -> bool:
    return True


def open_connections(*hosts: str) -> Connections:
    """Connections with descriptors from 1."""
    connections = Connections()
    for number, host in enumerate(hosts, 1):
        connections.on_open(TcpPeer(number, host, 1000 + number))
    return connections


def descriptors(connections: Connections, key: str) -> list[int]:
    return [peer.descriptor for peer in connections.of(key)]


def test_a_key_is_put_down_to_the_oldest_connection_from_its_host() -> None:
    connections = open_connections("a", "b", "b")
    assert connections.assign("office", "b", lambda peer: peer.descriptor == 3)
    assert connections.assign("phone", "b", anybody)
    assert connections.assign("phone", "b", anybody) is None
    assert (descriptors(connections, "office"), descriptors(connections, "phone")) == ([3], [2])
    connections.on_close(3)
    assert (connections.count("office"), list(connections.keys)) == (0, ["phone"])
    # The descriptor is used again, by somebody who has shown nothing yet.
    connections.on_open(TcpPeer(2, "c", 9))
    assert (len(connections), list(connections.keys)) == (2, [])


def test_the_first_message_corrects_what_was_assumed() -> None:
    connections = open_connections("a", "a")
    for key in ("office", "phone"):
        connections.assign(key, "a", anybody)
    connections.correct(1, "phone")
    assert (descriptors(connections, "office"), descriptors(connections, "phone")) == ([2], [1])
    # Of a connection that nobody has told of, nothing is assumed.
    connections.correct(7, "phone")
    assert connections.count("phone") == 1


def test_the_oldest_of_whoever_has_most_has_to_go_first() -> None:
    connections = open_connections("a", "b", "b", "c", "d")
    for host in ("c", "d"):
        connections.assign("office", host, anybody)
    connections.on_open(TcpPeer(6, "e", 1))
    connections.assign("office", "e", anybody)
    crowd = connections.oldest_of_most()
    assert crowd is not None
    assert (crowd.descriptor, connections.key_of(crowd)) == (4, "office")
    assert Connections().oldest_of_most() is None
