"""Whose connections these are, and which one has to go. No sockets."""

from mdp.transport.admission.connections import Connections
from mdp.transport.admission.pending import Visitor


def anybody(visitor: Visitor) -> bool:
    return True


def opened(*hosts: str) -> Connections:
    """Connections with descriptors from 1."""
    connections = Connections()
    for number, host in enumerate(hosts, 1):
        connections.opened(Visitor(number, host, 1000 + number))
    return connections


def descriptors(connections: Connections, key: str) -> list[int]:
    return [visitor.descriptor for visitor in connections.of(key)]


def test_a_key_is_put_down_to_the_oldest_connection_from_its_host() -> None:
    connections = opened("a", "b", "b")
    assert connections.let_in("office", "b", lambda visitor: visitor.descriptor == 3)
    assert connections.let_in("phone", "b", anybody)
    assert connections.let_in("phone", "b", anybody) is None
    assert (descriptors(connections, "office"), descriptors(connections, "phone")) == ([3], [2])
    connections.closed(3)
    assert (connections.count("office"), list(connections.keys)) == (0, ["phone"])
    # The descriptor is used again, by somebody who has shown nothing yet.
    connections.opened(Visitor(2, "c", 9))
    assert (len(connections), list(connections.keys)) == (2, [])


def test_the_first_message_corrects_what_was_assumed() -> None:
    connections = opened("a", "a")
    for key in ("office", "phone"):
        connections.let_in(key, "a", anybody)
    connections.heard(1, "phone")
    assert (descriptors(connections, "office"), descriptors(connections, "phone")) == ([2], [1])
    # Of a connection that nobody has told of, nothing is assumed.
    connections.heard(7, "phone")
    assert connections.count("phone") == 1


def test_the_oldest_of_whoever_has_most_has_to_go_first() -> None:
    connections = opened("a", "b", "b", "c", "d")
    for host in ("c", "d"):
        connections.let_in("office", host, anybody)
    connections.opened(Visitor(6, "e", 1))
    connections.let_in("office", "e", anybody)
    crowd = connections.crowd()
    assert crowd is not None
    assert (crowd.descriptor, connections.key_of(crowd)) == (4, "office")
    assert Connections().crowd() is None
