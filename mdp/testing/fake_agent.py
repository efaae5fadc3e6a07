"""An agent in this process: a real socket on loopback, answers that are set, and no model."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from mdp.errors import WireError
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import (
    Buffer,
    Failure,
    FailureCode,
    FrameRequest,
    Infer,
    Result,
    Status,
    StatusRequest,
    as_line,
    decode,
    encode,
    failure,
    logits_buffer,
    pixels_of,
)
from mdp.testing.agents import ANY_PORT
from mdp.transport import Router

#: A label, or a logit for each label.
Answer = str | Sequence[float]
#: The logit of a label that is answered; the others have 0.
SURE = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """The behaviour of an agent at each request for inference."""

    #: The answer to a crop.
    answer: Callable[[Pixels], Answer]
    delay_s: float = 0.0
    #: Code and text of the failure that is sent instead of an answer.
    failure: tuple[FailureCode, str] | None = None
    silent: bool = False


def logits_of(answer: Answer, labels: Sequence[str]) -> NDArray[np.float32]:
    """Logits `[num_classes]` for an answer; raises ValueError for one that is not of `labels`."""
    if isinstance(answer, str):
        if answer not in labels:
            raise ValueError(f"expected one of {', '.join(labels)}, got {answer!r}")
        return np.array([SURE * (label == answer) for label in labels], dtype=np.float32)
    logits = np.asarray(answer, dtype=np.float32)
    if logits.shape != (len(labels),):
        raise ValueError(f"expected a logit for each of {len(labels)} labels, got {answer!r}")
    return logits


class FakeAgent:
    """Plays the agent of one sub-model of a bundle, in a thread, on a port of loopback.

    `answer`, `delay`, `fail` and `silence` hold for the requests that come after; `recover` takes
    back all but the answer.
    """

    def __init__(self, bundle: Bundle, k: int, answer: Answer) -> None:
        """Listen on a free port and serve sub-model `k` of `bundle`."""
        self.device = bundle.manifest.plan.assignments[k].device
        self.k = k
        #: Requests for inference so far.
        self.requests = 0
        #: What the last of them showed, uint8 `[H, W, 3]`.
        self.last_crop: Pixels | None = None
        self._bundle = bundle
        self._answered = 0
        self._behaviour = Behaviour(answer=lambda crop: answer)
        #: Where it listens, also after `stop`.
        self.address = ANY_PORT
        self._thread: threading.Thread | None = None
        self.start()

    def answer(self, answer: Answer | Callable[[Pixels], Answer]) -> None:
        """Answer with a label, with logits, or with what a function makes of each crop.

        Raises ValueError for a label or a number of logits that the bundle does not have.
        """
        if not callable(answer):
            logits_of(answer, self._bundle.manifest.labels)
        given = answer if callable(answer) else lambda crop: answer
        self._behaviour = replace(self._behaviour, answer=given)

    def delay(self, milliseconds: float) -> None:
        """Send every reply so much later."""
        self._behaviour = replace(self._behaviour, delay_s=milliseconds / 1e3)

    def fail(self, code: FailureCode = "failed", text: str = "told to fail") -> None:
        """Reply with a failure; raises ValueError for a code that the protocol does not have."""
        if code not in (known := get_args(FailureCode)):
            raise ValueError(f"expected one of {', '.join(known)}, got {code!r}")
        self._behaviour = replace(self._behaviour, failure=(code, text))

    def silence(self) -> None:
        """Take every message and reply to none, like a program that hangs."""
        self._behaviour = replace(self._behaviour, silent=True)

    def recover(self) -> None:
        """Answer at once again."""
        self._behaviour = Behaviour(answer=self._behaviour.answer)

    def stop(self) -> None:
        """End connections and stop listening, like a device that is switched off."""
        if self._thread is not None:
            self._over = True
            self._router.wake()
            self._thread.join()
            self._router.close()
            self._thread = None

    def start(self) -> None:
        """Listen again where it did before `stop`."""
        if self._thread is None:
            self._over = False
            self._router = Router(self.address)
            self.address = self._router.address
            self._thread = threading.Thread(target=self._serve, name=f"fake {self.device}")
            self._thread.start()

    def _serve(self) -> None:
        order, waiting = count(), list[tuple[float, int, bytes, list[Buffer]]]()
        while not self._over:
            left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            for peer, frames in self._router.poll(left_s):
                behaviour = self._behaviour
                reply = self._reply(frames, behaviour)
                if reply is not None:
                    due_s = time.monotonic() + behaviour.delay_s
                    heappush(waiting, (due_s, next(order), peer.route, reply))
            while waiting and waiting[0][0] <= time.monotonic():
                _, _, route, reply = heappop(waiting)
                self._router.send(route, reply)

    def _reply(self, frames: Sequence[Buffer], behaviour: Behaviour) -> list[Buffer] | None:
        """Frames of the reply to one message; None for none."""
        try:
            envelope = decode(frames)
        except WireError as error:
            return encode(Failure(request_id=0, code="bad_message", text=as_line(str(error))))
        message = envelope.message
        self.requests += isinstance(message, Infer)
        if behaviour.silent:
            return None
        if isinstance(message, StatusRequest):
            return encode(self._status(message.request_id))
        if isinstance(message, FrameRequest):
            text = "a fake agent has no camera"
            return encode(Failure(request_id=message.request_id, code="no_frame", text=text))
        if not isinstance(message, Infer):
            return None
        if behaviour.failure is not None:
            code, text = behaviour.failure
            return encode(failure(message.request_id, code, text))
        return self._result(message, envelope.buffers[0], behaviour)

    def _result(self, infer: Infer, buffer: Buffer, behaviour: Behaviour) -> list[Buffer]:
        began_s = time.monotonic()
        labels = self._bundle.manifest.labels
        try:
            crop = pixels_of(infer, buffer).copy()
            self.last_crop = crop
            logits = logits_of(behaviour.answer(crop), labels)
        except Exception as error:  # of the function that was given: as a model that raises
            text = as_line(f"{type(error).__name__}: {error}")
            return encode(Failure(request_id=infer.request_id, code="failed", text=text))
        self._answered += 1
        # A client excludes a device whose logits are the same for different crops; a shift of all
        # logits changes no probability.
        logits = logits + np.float32(1e-3 * (self._answered % 8))
        result = Result(
            request_id=infer.request_id,
            num_classes=len(labels),
            queue_ms=0.0,
            compute_ms=(time.monotonic() - began_s) * 1e3,
        )
        return encode(result, logits_buffer(Contribution(logits, logits)))

    def _status(self, request_id: int) -> Status:
        return Status(
            request_id=request_id,
            device=self.device,
            state="READY",
            bundle=self._bundle.manifest.name,
            digest=self._bundle.digest,
            k=self.k,
            provider="FakeExecutionProvider",
            fallback=False,
            reason="",
            queued=0,
            counts={"answered": self._answered},
        )
