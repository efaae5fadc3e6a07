"""Strangers at an agent's door: keys on disk, silent crowds, and somebody on the way."""

import contextlib
import selectors
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, repeat
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from mdp.closing import Closing
from mdp.formats.keys import KeyPair, load_pair, new_keys
from mdp.transport import new_pair, public_key_of
from mdp.transport.admission import connection_rate as arrivals


@dataclass(frozen=True)
class Keys:
    """Key files by name in a folder, made when they are asked for first."""

    folder: Path

    def pair(self, name: str) -> KeyPair:
        """The keys of `name`."""
        path = self.secret(name)
        if not path.exists():
            new_keys(self.folder, name, new_pair)
        return load_pair(path, public_key_of)

    def secret(self, name: str) -> Path:
        """Path of the secret file of `name`, which may not be there yet."""
        return self.folder / f"{name}.secret"

    def allow(self, clients: Path, *names: str) -> Path:
        """Let `clients`, a folder, hold the public files of exactly `names`."""
        clients.mkdir(exist_ok=True)
        for old in clients.iterdir():
            old.unlink()
        for name in names:
            self.pair(name)
            public = self.folder / f"{name}.public"
            (clients / public.name).write_bytes(public.read_bytes())
        return clients


def host_and_port(address: str) -> tuple[str, int]:
    """Both parts of tcp://HOST:PORT."""
    parts = urlsplit(address)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


def strange_hosts() -> Iterator[str]:
    """Addresses of loopback that nobody has used, each so often as a host may connect at once."""
    for number in count(2):
        yield from repeat(f"127.0.{number // 250}.{number % 250 + 2}", arrivals.AT_ONCE // 2)


#: Shared by all crowds: nobody comes again from where others have come.
_HOSTS = strange_hosts()


@contextmanager
def crowd(
    address: str, size: int, words: bytes = b"", host: str = ""
) -> Iterator[list[socket.socket]]:
    """`size` connections that say `words` and nothing more, from `host`, or as many as it takes."""
    visitors: list[socket.socket] = []
    try:
        for _ in range(size):
            where = host_and_port(address)
            visitors.append(socket.create_connection(where, 30.0, (host or next(_HOSTS), 0)))
            with contextlib.suppress(OSError):
                visitors[-1].sendall(words)
        yield visitors
    finally:
        for visitor in visitors:
            visitor.close()


def hung_up(visitor: socket.socket) -> bool:
    """Tell whether the other side has ended a connection, whatever it said before."""
    visitor.setblocking(False)
    try:
        while visitor.recv(65536):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@dataclass
class Relay(Closing):
    """Somebody on the way to `address`: passes bytes on, keeps them, and may change them."""

    address: str
    #: The next byte of this number, counted over what clients send, is turned over; then None.
    flip: int | None = None
    sent: bytearray = field(default_factory=bytearray)
    connections: int = 0

    def __enter__(self) -> Self:
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.05)
        self.front = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()
        return self

    def _accept(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self.connections += 1
                thread = threading.Thread(target=self._pass_on, args=(client,))
                self._threads.append(thread)
                thread.start()

    def _pass_on(self, client: socket.socket) -> None:
        with (
            client,
            socket.create_connection(host_and_port(self.address)) as agent,
            selectors.DefaultSelector() as both,
            contextlib.suppress(OSError),
        ):
            both.register(client, selectors.EVENT_READ, agent)
            both.register(agent, selectors.EVENT_READ, client)
            while not self._over.is_set():
                for key, _ in both.select(0.05):
                    assert isinstance(key.fileobj, socket.socket)
                    data = key.fileobj.recv(65536)
                    if not data:
                        return
                    key.data.sendall(self._inspect(data) if key.fileobj is client else data)

    def _inspect(self, data: bytes) -> bytes:
        place = -1 if self.flip is None else self.flip - len(self.sent)
        self.sent += data
        if 0 <= place < len(data):
            self.flip = None
            return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
        return data

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._listener.close()
