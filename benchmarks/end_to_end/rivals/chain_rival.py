"""The teacher on one device, or as a pipeline over several: one chain of stages."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.end_to_end.rivals import frames
from benchmarks.end_to_end.rivals.rivals import content, in_order
from mdp.formats.plan import Encoding


class Chain:
    """The client's two connections: to the first stage, and from the last."""

    def __init__(self, first: tuple[str, int], reply: tuple[str, int]) -> None:
        with frames.listen(*reply) as listener:
            self.first = frames.connect(*first)
            self.last = frames.tuned(listener.accept()[0])

    def close(self) -> None:
        self.first.close()
        self.last.close()


class ChainRival:
    def __init__(
        self, name: str, chain: Chain, image_size: int, encoding: Encoding, *, half: bool = False
    ) -> None:
        self.name = name
        self._chain, self._size, self._encoding = chain, image_size, encoding
        first = frames.JPEG if encoding == "jpeg" else frames.RAW
        self._head = first + (frames.FP16 if half else frames.FP32)

    def logits(self, picture: Path) -> NDArray[np.float32]:
        self._send(picture)
        return np.frombuffer(frames.receive(self._chain.last), dtype=np.float32)

    def ask(self, picture: Path) -> None:
        int(self.logits(picture).argmax())

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        last = self._chain.last
        return in_order(pictures, in_flight, self._send, lambda: frames.receive(last))

    def _send(self, picture: Path) -> None:
        view = content(picture, self._size, self._encoding)
        frames.send(self._chain.first, self._head, view)
