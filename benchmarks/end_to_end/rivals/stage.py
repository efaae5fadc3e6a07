"""A device that runs one stage of a teacher: the whole of it, or some of its blocks.

    python -m benchmarks.end_to_end.rivals.stage --model stage.onnx --listen tcp://10.77.0.2:7600 \\
        --next tcp://10.77.0.3:7600

ZeroMQ's own threads receive and send, so that a stage computes while its results of before are
still on their way.
"""

import argparse
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray

from mdp.pictures.crop import decode_jpeg
from mdp.runtimes.onnxruntime import open_session

#: First frame of a message: how its content is encoded. Second frame: what follows between stages.
RAW, JPEG, FP32, FP16 = b"raw", b"jpeg", b"fp32", b"fp16"
#: Messages that may wait at either side of a stage.
WAITING = 4


def decoded(encoding: bytes, content: bytes, shape: list[int]) -> NDArray[np.generic]:
    """The stage's input of `shape`."""
    if encoding == JPEG:
        return decode_jpeg(memoryview(content), shape[1])[None]
    if encoding == RAW:
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)
    tokens = np.frombuffer(content, dtype=np.float16 if encoding == FP16 else np.float32)
    return tokens.astype(np.float32, copy=False).reshape(shape)


class Stage:
    def __init__(self, model: Path, *, last: bool) -> None:
        """What comes out of the `last` one are logits in fp32."""
        self._session, self._last = open_session(model), last
        (self._input,) = self._session.get_inputs()
        # The whole teacher takes any number of pictures, its pieces one.
        self._shape = [1, *self._input.shape[1:]]

    def warm_up(self) -> None:
        kind = RAW if "uint8" in self._input.type else FP32
        size = int(np.prod(self._shape)) * (1 if kind == RAW else 4)
        for _ in range(3):
            self.answer([kind, FP32, bytes(size)])

    def answer(self, frames: list[bytes]) -> list[bytes]:
        """The message for the next stage, or for the client."""
        encoding, between, content = frames
        feed = {self._input.name: decoded(encoding, content, self._shape)}
        output: NDArray[np.float32] = self._session.run(None, feed)[0]
        half = between == FP16 and not self._last
        return [between, between, (output.astype(np.float16) if half else output).tobytes()]


def main() -> None:
    parser = argparse.ArgumentParser(description="One stage of a teacher.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--next", required=True)
    parser.add_argument("--last", action="store_true", help="what comes out are logits")
    options = parser.parse_args()
    stage = Stage(options.model, last=options.last)
    stage.warm_up()
    with zmq.Context() as context, context.socket(zmq.PULL) as source:
        source.rcvhwm = WAITING
        source.bind(options.listen)
        with context.socket(zmq.PUSH) as sink:
            sink.sndhwm = WAITING
            sink.connect(options.next)
            print("READY", flush=True)
            while True:
                sink.send_multipart(stage.answer(source.recv_multipart()))


if __name__ == "__main__":
    main()
