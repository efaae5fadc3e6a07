"""The client's connections as they come and go."""

import gc
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path

import pytest

from mdp.errors import ConfigError
from mdp.testing.agents import ANY_PORT
from mdp.testing.processes import PATIENCE_S, until
from mdp.testing.raw_agent import raw_agent
from mdp.transport import Connected, Dealers, Disconnected, Received, Router, TransportEvent
from mdp.transport import dealer as dealer_settings

pytestmark = pytest.mark.usefixtures("no_leaks")
#: Nobody listens there.
NOBODY = "tcp://127.0.0.1:1"


@contextmanager
def dealing(**addresses: str) -> Iterator[Dealers]:
    made = Dealers(addresses)
    try:
        yield made
    finally:
        made.close()


def events_until(made: Dealers, wanted: TransportEvent) -> list[TransportEvent]:
    events: list[TransportEvent] = []

    def came() -> bool:
        events.extend(made.poll(0.1))
        return wanted in events

    until(came, f"{wanted}")
    return events


def closes_in_time(made: Dealers) -> bool:
    closing = threading.Thread(target=made.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S / 2)
    return not closing.is_alive()


def test_a_failed_send_notices_the_lost_connection() -> None:
    agent = Router(ANY_PORT)
    with dealing(alpha=agent.address) as made:
        events_until(made, Connected("alpha"))
        agent.close()
        # Nobody polls meanwhile.
        until(lambda: not made.send("alpha", [b"hello"]), "it cannot be sent to")
        assert made.connected == set()
        assert made.poll(0.0) == [Disconnected("alpha")]
        assert Disconnected("alpha") not in made.poll(0.0)


def test_replies_that_were_not_read_yet_outlive_their_connection() -> None:
    go_on, gone = threading.Event(), threading.Event()

    def answer(peer: socket.socket) -> None:
        assert go_on.wait(PATIENCE_S)
        peer.sendall(b"".join(b"\x00\x01" + bytes([number]) for number in range(20)))
        peer.shutdown(socket.SHUT_WR)
        # libzmq closes its side when it has taken in all that came before the end.
        while peer.recv(4096):
            pass
        gone.set()
        go_on.clear()

    with raw_agent(answer) as address, dealing(alpha=address) as made:
        events_until(made, Connected("alpha"))
        go_on.set()
        assert gone.wait(PATIENCE_S)
        events = events_until(made, Disconnected("alpha"))
        received = [event.frames[0] for event in events if isinstance(event, Received)]
        assert received == [bytes([number]) for number in range(20)]
        go_on.set()


def test_an_unpolled_flapping_device_blocks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, enough = 0, threading.Event()

    def hang_up(_: socket.socket) -> None:
        nonlocal rounds
        rounds += 1
        # Beyond what libzmq's queue of 2,000 events would hold.
        if rounds > 1_050:
            enough.set()

    monkeypatch.setattr(dealer_settings, "RECONNECT_MS", 1)
    with raw_agent(hang_up) as address, Router(ANY_PORT) as well:
        made = Dealers({"alpha": address, "beta": well.address})
        assert enough.wait(PATIENCE_S), rounds
        events_until(made, Connected("beta"))
        assert made.send("beta", [b"hello"])
        assert any(list(well.poll(0.1)) for _ in range(100))
        assert closes_in_time(made)


def test_a_connection_that_ends_at_once_is_not_made_again_at_once() -> None:
    with raw_agent(lambda _: None) as address, dealing(alpha=address) as made:
        for _ in range(2):
            events_until(made, Disconnected("alpha"))
        # The third attempt is due a second after the second loss.
        (absence,) = made._outages.values()
        assert made._dealers == {}
        assert absence.redial_s < float("inf")


def test_a_silent_name_server_delays_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, asked = threading.Event(), []

    def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        answered.wait(PATIENCE_S)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    with Router(ANY_PORT) as well, Router(ANY_PORT) as late:
        port = late.address.rpartition(":")[2]
        with dealing(alpha=f"tcp://pi.fleet.example:{port}", beta=well.address) as made:
            events_until(made, Connected("beta"))
            assert made.connected == {"beta"}
            answered.set()
            events_until(made, Connected("alpha"))
        assert asked == ["pi.fleet.example"]


def test_a_client_that_is_dropped_in_a_cycle_is_closed() -> None:
    class Owner:
        def __init__(self) -> None:
            self.dealers = Dealers({"alpha": NOBODY})
            self.callback = self.use

        def use(self) -> None:
            self.dealers.poll(0.0)

    gc.collect()
    Owner()
    # pyzmq's own destructor of a context would wait here for ever.
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(PATIENCE_S / 2)
    assert not collecting.is_alive()


def test_too_few_descriptors_are_an_error_and_leak_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with dealing(alpha=NOBODY) as before:
        taken = {int(file.name) for file in Path("/proc/self/fd").iterdir()}
        # The limit is on a descriptor's number: five are free below it, whatever is open above.
        *_, limit = islice((number for number in count() if number not in taken), 6)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
            with pytest.raises(ConfigError, match=r"expected 15 free file descriptors, found \d"):
                Dealers({"alpha": NOBODY, "beta": "tcp://127.0.0.1:2"})
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert before.poll(0.0) == []


def test_another_thread_wakes_the_one_that_polls() -> None:
    agent = Router(ANY_PORT)
    with dealing(alpha=agent.address) as made:
        events_until(made, Connected("alpha"))
        found: list[list[TransportEvent]] = []
        # Without an end of its own.
        polling = threading.Thread(target=lambda: found.append(made.poll(None)), daemon=True)
        polling.start()
        made.wake()
        polling.join(PATIENCE_S)
        assert found == [[]]
        # One before a poll is not lost, and several are one.
        made.wake()
        made.wake()
        assert made.poll(None) == []
        assert made.poll(0.0) == []
    made.wake()
    agent.close()


def test_an_agent_that_sends_without_being_asked_is_cut_off() -> None:
    def flood(peer: socket.socket) -> None:
        while True:
            peer.sendall(b"\x00\x01x" * 1_000)

    with raw_agent(flood) as address, dealing(alpha=address) as made:
        events = events_until(made, Disconnected("alpha"))
        assert sum(isinstance(event, Received) for event in events) < 1_000
        assert made.refused == {"alpha": "the agent sends messages without requests"}
