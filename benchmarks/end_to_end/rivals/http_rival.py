"""One HTTP model server for each device, asked at the same time, averaged by the client."""

import http.client
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.end_to_end.rivals.rivals import PATIENCE_MS, content
from benchmarks.end_to_end.setup import HttpMember
from mdp.errors import MDPError
from mdp.testing.processes import until

PATH = "/predict"
#: How long a server may take to load its model: it starts several processes.
START_S = 90.0


class HttpRival:
    """Keeps connections open: as many to each server as there are pictures under way."""

    def __init__(self, name: str, members: Sequence[HttpMember], in_flight: int) -> None:
        self.name = name
        self._members = members
        # A thread has one connection of its own.
        self._open = threading.local()
        self._posters = {m.address: ThreadPoolExecutor(in_flight) for m in members}
        self._askers = ThreadPoolExecutor(in_flight)
        for member in members:
            until(partial(loaded, member), f"{member.address} has loaded", START_S)

    def ask(self, picture: Path) -> float:
        """The moment at which it was answered."""
        waiting = []
        for member in self._members:
            body = content(picture, member.image_size, member.encoding)
            waiting.append(self._posters[member.address].submit(self._post, member, body))
        int(np.mean([future.result() for future in waiting], axis=0).argmax())
        return time.perf_counter()

    def _post(self, member: HttpMember, body: bytes) -> NDArray[np.float32]:
        if not hasattr(self._open, "connection"):
            self._open.connection = connection_to(member)
        connection = self._open.connection
        connection.request("POST", PATH, body, {"Content-Type": "application/octet-stream"})
        reply = connection.getresponse()
        answer = reply.read()
        if reply.status != http.client.OK:
            raise MDPError(f"{member.address}: HTTP {reply.status}: {answer[:200]!r}")
        return np.frombuffer(answer, dtype=np.float32)

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        """As many at once as there are threads that ask."""
        return sorted(self._askers.map(self.ask, pictures))

    def close(self) -> None:
        for pool in (self._askers, *self._posters.values()):
            pool.shutdown()


def connection_to(member: HttpMember) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(member.address, member.port, timeout=PATIENCE_MS / 1e3)


def loaded(member: HttpMember) -> bool:
    """Whether a server says that its model is loaded."""
    connection = connection_to(member)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        time.sleep(0.2)
        return False
    finally:
        connection.close()
