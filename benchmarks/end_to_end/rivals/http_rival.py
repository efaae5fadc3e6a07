"""One HTTP model server for each device, asked at the same time, averaged by the client."""

import http.client
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.end_to_end.rivals.rivals import PATIENCE_MS, content
from mdp.errors import MDPError
from mdp.testing.processes import until

PATH = "/predict"
#: How long a server may take to load its model: it starts several processes.
START_S = 90.0


class HttpRival:
    """Keeps connections open: as many to each server as there are pictures under way."""

    def __init__(self, name: str, members: Sequence[dict[str, Any]], in_flight: int) -> None:
        self.name = name
        self._members = members
        # A thread has one connection of its own.
        self._open = threading.local()
        self._posters = {m["address"]: ThreadPoolExecutor(in_flight) for m in members}
        self._askers = ThreadPoolExecutor(in_flight)
        for member in members:
            until(partial(loaded, member["address"]), f"{member['address']} has loaded", START_S)

    def ask(self, picture: Path) -> float:
        """The moment at which it was answered."""
        waiting = []
        for member in self._members:
            address, body = (
                member["address"],
                content(picture, member["image_size"], member["encoding"]),
            )
            waiting.append(self._posters[address].submit(self._post, address, body))
        int(np.mean([future.result() for future in waiting], axis=0).argmax())
        return time.perf_counter()

    def _post(self, address: str, body: bytes) -> NDArray[np.float32]:
        if not hasattr(self._open, "connection"):
            self._open.connection = connection_to(address)
        connection = self._open.connection
        connection.request("POST", PATH, body, {"Content-Type": "application/octet-stream"})
        reply = connection.getresponse()
        answer = reply.read()
        if reply.status != http.client.OK:
            raise MDPError(f"{address}: HTTP {reply.status}: {answer[:200]!r}")
        return np.frombuffer(answer, dtype=np.float32)

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        """As many at once as there are threads that ask."""
        return sorted(self._askers.map(self.ask, pictures))

    def close(self) -> None:
        for pool in (self._askers, *self._posters.values()):
            pool.shutdown()


def connection_to(address: str) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(address, timeout=PATIENCE_MS / 1e3)


def loaded(address: str) -> bool:
    """Whether a server says that its model is loaded."""
    connection = connection_to(address)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == http.client.OK
    except OSError:
        time.sleep(0.2)
        return False
    finally:
        connection.close()
