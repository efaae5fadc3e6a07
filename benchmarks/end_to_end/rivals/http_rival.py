"""One HTTP model server for each device, asked at the same time, averaged by the client."""

import http.client
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
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
        self._posters = ThreadPoolExecutor(in_flight * len(members))
        self._askers = ThreadPoolExecutor(in_flight)
        self._idle: list[queue.SimpleQueue[http.client.HTTPConnection]] = []
        for member in members:
            idle: queue.SimpleQueue[http.client.HTTPConnection] = queue.SimpleQueue()
            for _ in range(in_flight):
                idle.put(connection_to(member))
            self._idle.append(idle)
        for member in members:
            until(partial(loaded, member), f"{member.address} has loaded", START_S)

    def ask(self, picture: Path) -> None:
        waiting = []
        for number, member in enumerate(self._members):
            body = content(picture, member.image_size, member.encoding)
            waiting.append(self._posters.submit(self._post, number, member, body))
        int(np.mean([future.result() for future in waiting], axis=0).argmax())

    def _post(self, number: int, member: HttpMember, body: bytes) -> NDArray[np.float32]:
        connection = self._idle[number].get()
        try:
            headers = {"Content-Type": "application/octet-stream"}
            connection.request("POST", PATH, body, headers)
            reply = connection.getresponse()
            answer = reply.read()
            if reply.status != http.client.OK:
                raise MDPError(f"{member.address}: HTTP {reply.status}: {answer[:200]!r}")
            return np.frombuffer(answer, dtype=np.float32)
        finally:
            self._idle[number].put(connection)

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        places, moments = threading.Semaphore(in_flight), list[float]()

        def one(picture: Path) -> None:
            try:
                self.ask(picture)
                moments.append(time.perf_counter())
            finally:
                places.release()

        futures = []
        for picture in pictures:
            places.acquire()
            futures.append(self._askers.submit(partial(one, picture)))
        for future in futures:
            future.result()
        return sorted(moments)

    def close(self) -> None:
        self._askers.shutdown()
        self._posters.shutdown()
        for idle in self._idle:
            while not idle.empty():
                idle.get().close()


def connection_to(member: HttpMember) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(member.address, member.port, timeout=PATIENCE_MS / 1e3)


def loaded(member: HttpMember) -> bool:
    """Whether a server says that its model is loaded."""
    with closing(connection_to(member)) as connection:
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        except OSError:
            time.sleep(0.2)
            return False
