"""Peers that speak ZeroMQ, or bytes, but not as an agent or a client would."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import zmq

from mdp.closing import Closing
from mdp.fusion.fuse import Contribution
from mdp.protocol.messages import Buffer, Envelope, Infer, Result, decode, encode, logits_buffer

Handler = Callable[[Infer], Sequence[Sequence[Buffer]]]


class FakeAgent(Closing):
    """A ROUTER that answers every Infer with whatever messages `handler` makes of it."""

    def __init__(self, handler: Handler, address: str = "tcp://127.0.0.1:0") -> None:
        self.asked = 0
        self._handler = handler
        self._over = threading.Event()
        self._context = zmq.Context()
        self._router: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.bind(address)
        self.address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._over.is_set():
            if not self._router.poll(10):
                continue
            peer, *frames = self._router.recv_multipart()
            message = decode(frames).message
            if isinstance(message, Infer):
                self.asked += 1
                for reply in self._handler(message):
                    self._router.send_multipart([peer, *reply])

    def close(self) -> None:
        """End the thread and free the port."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        self._router.close()
        self._context.term()


def red_result(request_id: int) -> list[Buffer]:
    """A right answer for a red picture, by the colour bundle's labels."""
    logits = np.array([0.0, 0.0, 3.0], dtype=np.float32)
    result = Result(request_id=request_id, num_classes=3, queue_ms=0.0, compute_ms=1.0)
    return encode(result, logits_buffer(Contribution(logits, logits)))


@contextmanager
def other_program(port: int, greeting: bytes) -> Iterator[int]:
    """Something else listens on `port`, or any free one for 0: it greets and hangs up.

    Yields the port.
    """
    over = threading.Event()
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(0.02)

    def serve() -> None:
        while not over.is_set():
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                continue
            with peer:
                try:
                    peer.sendall(greeting)
                    peer.settimeout(0.2)
                    peer.recv(1024)
                except OSError:
                    pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        over.set()
        thread.join()
        listener.close()


class StrangePeer(Closing):
    """A DEALER that sends an agent any frames, and reads what comes back.

    `keys` are its own public and secret one, and the agent's public one.
    """

    def __init__(self, address: str, keys: tuple[str, str, str] | None = None) -> None:
        self._context = zmq.Context()
        self.dealer: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        self.dealer.linger = 0
        if keys is not None:
            public, secret, server = (key.encode() for key in keys)
            self.dealer.curve_publickey, self.dealer.curve_secretkey = public, secret
            self.dealer.curve_serverkey = server
        self.dealer.connect(address)

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send one message."""
        self.dealer.send_multipart(frames)

    def receive(self, timeout_s: float = 30.0) -> Envelope:
        """The next reply."""
        assert self.dealer.poll(int(timeout_s * 1000)), "no reply"
        return decode(self.dealer.recv_multipart())

    def close(self) -> None:
        self.dealer.close()
        self._context.term()
