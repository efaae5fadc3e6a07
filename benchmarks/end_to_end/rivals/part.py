"""A device that computes its part of every layer, and says how long that took.

    python -m benchmarks.end_to_end.rivals.part --folder parts/0 --listen 10.77.0.2:7610

Sums over devices are not made: what comes between two parts is the next one's input as it is, so
that each part computes on numbers of the usual size. Asked for 0 passes it only answers, with which
the client measures the link.
"""

import argparse
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.end_to_end.rivals import frames
from benchmarks.end_to_end.rivals.stage import host_and_port
from mdp.files import Record
from mdp.runtimes.onnxruntime import open_session


class Ask(Record, frozen=True):
    """How often to go through all layers."""

    passes: int
    #: Whatever the link is to be filled with.
    filling: bytes = b""


class Pass(Record, frozen=True):
    """Milliseconds of one device in one pass: means over all layers, and the two ends."""

    embedding_ms: float
    attention_ms: float
    mlp_ms: float
    head_ms: float


class Parts:
    def __init__(self, folder: Path) -> None:
        self._ends = [open_session(folder / f"{name}.onnx") for name in ("embedding", "head")]
        names = sorted(path for path in folder.glob("layer-*.onnx"))
        self._layers = [open_session(path) for path in names]

    def once(self, pixels: Any) -> Pass:
        embedding, head = self._ends
        tokens, embedding_ms = timed(embedding, pixels)
        times: list[float] = []
        for layer in self._layers:
            _, took_ms = timed(layer, tokens)
            times.append(took_ms)
        _, head_ms = timed(head, tokens)
        return Pass(
            embedding_ms=embedding_ms,
            attention_ms=float(np.mean(times[0::2])),
            mlp_ms=float(np.mean(times[1::2])),
            head_ms=head_ms,
        )

    def pixels(self) -> Any:
        (entry,) = self._ends[0].get_inputs()
        return np.full(entry.shape, 127, dtype=np.uint8)


def timed(session: Any, values: Any) -> tuple[Any, float]:
    """The only output for the only input, and milliseconds."""
    name = session.get_inputs()[0].name
    started_s = time.perf_counter()
    output = session.run(None, {name: values})[0]
    return output, (time.perf_counter() - started_s) * 1e3


def serve(listener: socket.socket, parts: Parts) -> None:
    pixels = parts.pixels()
    while True:
        source, _ = listener.accept()
        with frames.tuned(source):
            try:
                while True:
                    ask = msgspec.msgpack.decode(frames.receive(source), type=Ask)
                    passes = [parts.once(pixels) for _ in range(ask.passes)]
                    frames.send(source, msgspec.msgpack.encode(passes))
            except ConnectionError:
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description="One device's parts of all layers.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--listen", type=host_and_port, required=True)
    options = parser.parse_args()
    parts = Parts(options.folder)
    for _ in range(2):
        parts.once(parts.pixels())
    with frames.listen(*options.listen) as listener:
        print("READY", flush=True)
        serve(listener, parts)


if __name__ == "__main__":
    main()
