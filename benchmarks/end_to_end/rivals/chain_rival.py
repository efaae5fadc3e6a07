"""The teacher on one device, or as a pipeline over several: one chain of stages."""

import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from benchmarks.end_to_end.rivals.rivals import content
from benchmarks.end_to_end.rivals.stage import FP16, FP32
from mdp.formats.plan import Encoding


class Chain:
    """The client's two connections: to the first stage, and from the last."""

    def __init__(self, first: str, reply: str) -> None:
        self._context = zmq.Context()
        self.first, self.last = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self.first.connect(first)
        self.last.bind(reply)

    def close(self) -> None:
        self._context.destroy(linger=0)


class ChainRival:
    def __init__(
        self, name: str, chain: Chain, image_size: int, encoding: Encoding, *, half: bool = False
    ) -> None:
        self.name = name
        self._chain, self._size, self._encoding = chain, image_size, encoding
        self._head = [encoding.encode(), FP16 if half else FP32]

    def logits(self, picture: Path) -> NDArray[np.float32]:
        self._send(picture)
        return np.frombuffer(self._receive(), dtype=np.float32)

    def ask(self, picture: Path) -> None:
        int(self.logits(picture).argmax())

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        waiting, moments = iter(pictures), list[float]()
        for picture in islice(waiting, in_flight):
            self._send(picture)
        for _ in pictures:
            self._receive()
            moments.append(time.perf_counter())
            for picture in islice(waiting, 1):
                self._send(picture)
        return moments

    def _send(self, picture: Path) -> None:
        view = content(picture, self._size, self._encoding)
        self._chain.first.send_multipart([*self._head, view])

    def _receive(self) -> bytes:
        return self._chain.last.recv_multipart()[-1]
