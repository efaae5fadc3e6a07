"""A device that runs one stage of a teacher: the whole of it, or some of its blocks.

    python -m benchmarks.end_to_end.rivals.stage --model stage.onnx --listen 10.77.0.2:7600 \\
        --next 10.77.0.3:7600

Receiving, computing and sending have a thread each, so that a stage computes while its results of
before are still on their way.
"""

import argparse
import queue
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.end_to_end.rivals import frames
from mdp.pictures.crop import decode_jpeg
from mdp.runtimes.onnxruntime import open_session

#: Frames that may wait between two threads.
WAITING = 4

Frame = tuple[bytes, NDArray[np.generic]]


def decoded(frame: bytes, shape: list[int]) -> Frame:
    """What to compress with between stages, and the stage's input of `shape`."""
    encoding, between, content = frame[:1], frame[1:2], memoryview(frame)[2:]
    if encoding == frames.JPEG:
        return between, decode_jpeg(content, shape[1])[None]
    if encoding == frames.RAW:
        return between, np.frombuffer(content, dtype=np.uint8).reshape(shape)
    half = encoding == frames.FP16
    tokens = np.frombuffer(content, dtype=np.float16 if half else np.float32)
    return between, tokens.astype(np.float32, copy=False).reshape(shape)


def encoded(between: bytes, output: NDArray[np.float32], *, last: bool) -> list[bytes]:
    """The frame's parts for the next stage, or logits in fp32 for the client."""
    if last:
        return [output.tobytes()]
    values = output.astype(np.float16) if between == frames.FP16 else output
    return [between, between, values.tobytes()]


class Stage:
    """Serves one connection after another: frames in order in, frames in order out."""

    def __init__(self, model: Path, following: tuple[str, int], *, last: bool) -> None:
        self._session = open_session(model)
        (self._input,) = self._session.get_inputs()
        # The whole teacher takes any number of pictures, its pieces one.
        self._shape = [1, *self._input.shape[1:]]
        self._following, self._last = following, last

    def warm_up(self) -> None:
        kind = np.uint8 if "uint8" in self._input.type else np.float32
        for _ in range(3):
            self._run(np.zeros(self._shape, dtype=kind))

    def _run(self, values: NDArray[np.generic]) -> NDArray[np.float32]:
        output: NDArray[np.float32] = self._session.run(None, {self._input.name: values})[0]
        return output

    def serve(self, listener: socket.socket) -> None:
        while True:
            source, _ = listener.accept()
            with frames.tuned(source), frames.connect(*self._following) as sink:
                self._serve(source, sink)

    def _serve(self, source: socket.socket, sink: socket.socket) -> None:
        received: queue.Queue[bytes | None] = queue.Queue(WAITING)
        results: queue.Queue[list[bytes] | None] = queue.Queue(WAITING)

        def receive() -> None:
            with suppress(OSError):
                while True:
                    received.put(frames.receive(source))
            received.put(None)

        def send() -> None:
            with suppress(OSError):
                while (parts := results.get()) is not None:
                    frames.send(sink, *parts)

        threads = [start(receive), start(send)]
        while (frame := received.get()) is not None:
            between, values = decoded(frame, self._shape)
            results.put(encoded(between, self._run(values), last=self._last))
        results.put(None)
        for thread in threads:
            thread.join()


def start(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def host_and_port(text: str) -> tuple[str, int]:
    """`10.77.0.2:7600` in its parts."""
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    parser = argparse.ArgumentParser(description="One stage of a teacher.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--listen", type=host_and_port, required=True)
    parser.add_argument("--next", type=host_and_port, required=True)
    parser.add_argument("--last", action="store_true", help="what comes out are logits")
    options = parser.parse_args()
    stage = Stage(options.model, options.next, last=options.last)
    stage.warm_up()
    with frames.listen(*options.listen) as listener:
        print("READY", flush=True)
        stage.serve(listener)


if __name__ == "__main__":
    main()
