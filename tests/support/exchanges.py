"""A dispatcher without sockets: a transport that keeps what was sent, and a clock that is set."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mdp.client.crops import Cutter
from mdp.client.dispatcher import Answer, Call, Dispatcher
from mdp.client.questions import PictureQuestion, Question
from mdp.errors import InferenceError
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import MAX_SPREAD_MS, Fleet, FleetEntry
from mdp.fusion.fuse import Contribution, Fusion
from mdp.protocol.messages import (
    Buffer,
    Failure,
    FailureCode,
    Infer,
    Message,
    Result,
    State,
    Status,
    StatusRequest,
    decode,
    encode,
    logits_buffer,
)
from mdp.requests.deadline import Deadline
from mdp.requests.prediction import Prediction
from mdp.testing.bundles import LABELS, colour_picture
from mdp.transport import Connected, Disconnected, Received
from tests.support.clock import Clock


@dataclass
class FakeTransport:
    """Everybody is connected; a device in `full` takes nothing."""

    connected: set[str]
    full: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    sent: list[tuple[str, list[Buffer]]] = field(default_factory=list)
    log: list[tuple[str, list[Buffer]]] = field(default_factory=list)

    def send(self, device: str, frames: list[Buffer]) -> bool:
        if device in self.full or device not in self.connected:
            return False
        self.sent.append((device, frames))
        self.log.append((device, frames))
        return True


class Desk:
    """A client's desk: submits pictures, plays the devices, keeps the answers."""

    def __init__(
        self,
        folder: Path,
        entries: Sequence[tuple[str, int]],
        fusion: Fusion = "stacked",
        hedge_after_s: float | None = None,
        hedge_share: float = 0.05,
        cascade: bool = False,
        max_spread_ms: float = MAX_SPREAD_MS,
    ) -> None:
        """`folder` holds a colour bundle; `entries` are (device, k) of the fleet."""
        self.bundle = Bundle.open(folder)
        fleet = Fleet(
            bundle=str(folder),
            max_spread_ms=max_spread_ms,
            devices=[
                FleetEntry(device=device, address=f"tcp://127.0.0.1:{7500 + number}", k=k)
                for number, (device, k) in enumerate(entries)
            ],
        )
        self.ks = dict(entries)
        self.clock = Clock()
        self.transport = FakeTransport({device for device, _ in entries})
        self.dispatcher = Dispatcher(
            fleet,
            self.bundle,
            self.transport,
            clock=self.clock,
            fusion=fusion,
            hedge_after_s=hedge_after_s,
            hedge_share=hedge_share,
            cascade=cascade,
            chance=random.Random(0).random,
        )
        self.answers: list[Answer] = []

    def submit(self, deadline_ms: float = 100.0, label: str = "red") -> None:
        views = Cutter(self.dispatcher.assignments).views(colour_picture(label))
        self.ask(PictureQuestion(views), deadline_ms)

    def ask(self, question: Question, deadline_ms: float = 100.0) -> Call:
        """Begin a call; its answer will be one of `answers`."""
        deadline = Deadline(self.clock(), deadline_ms)
        return self.dispatcher.submit(question, deadline, lambda call: self._keep(call.answer))

    def _keep(self, answer: Answer | None) -> None:
        assert answer is not None
        self.answers.append(answer)

    @property
    def last_id(self) -> int:
        """The number of the request sent last."""
        return max(
            message.request_id
            for _, frames in self.transport.log
            if isinstance(message := decode(frames).message, Infer)
        )

    def tell(
        self,
        device: str,
        state: State = "READY",
        digest: str | None = None,
        *,
        k: int | None = None,
        counts: dict[str, int] | None = None,
    ) -> None:
        """`device` says how it is."""
        status = Status(
            request_id=0,
            device=device,
            state=state,
            bundle="colours",
            digest=self.bundle.digest if digest is None else digest,
            k=self.ks[device] if k is None else k,
            provider="CPUExecutionProvider",
            fallback=False,
            reason="",
            queued=0,
            counts=counts or {},
        )
        self.receive(device, status)

    def take_asked(self) -> list[tuple[str, Infer]]:
        """Requests to the devices since the last call of this."""
        sent, self.transport.sent = self.transport.sent, []
        decoded = [(device, decode(frames).message) for device, frames in sent]
        return [(device, infer) for device, infer in decoded if isinstance(infer, Infer)]

    def infers(self) -> list[tuple[str, Infer]]:
        """Requests to infer; they are still there for `take_asked` and `asks`."""
        decoded = [(device, decode(frames).message) for device, frames in self.transport.sent]
        return [(device, infer) for device, infer in decoded if isinstance(infer, Infer)]

    def asks(self) -> list[str]:
        """Devices that were asked for their status since the last call of this."""
        sent, self.transport.sent = self.transport.sent, []
        return [
            device for device, frames in sent if isinstance(decode(frames).message, StatusRequest)
        ]

    def receive(self, device: str, message: Message, *buffers: Buffer) -> None:
        self.frames(device, encode(message, *buffers))

    def frames(self, device: str, frames: Sequence[Buffer]) -> None:
        self.dispatcher.handle([Received(device, frames)])

    def reply(self, device: str, request_id: int = 1, favourite: int = 2) -> None:
        logits = np.zeros(len(LABELS), dtype=np.float32)
        logits[favourite] = 4.0
        result = Result(
            request_id=request_id, num_classes=len(LABELS), queue_ms=0.5, compute_ms=1.5
        )
        self.receive(device, result, logits_buffer(Contribution(logits, logits)))

    def fail(
        self, device: str, request_id: int = 1, text: str = "full", code: FailureCode = "overloaded"
    ) -> None:
        self.receive(device, Failure(request_id=request_id, code=code, text=text))

    def disconnect(self, device: str) -> None:
        self.transport.connected.discard(device)
        self.dispatcher.handle([Disconnected(device)])

    def connect(self, device: str) -> None:
        self.transport.connected.add(device)
        self.dispatcher.handle([Connected(device)])

    def pass_s(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.dispatcher.tick()

    def prediction(self) -> Prediction:
        """The one answer since the last call of this, which has to be a prediction."""
        (answer,) = self.answers
        self.answers.clear()
        assert isinstance(answer, Prediction), answer
        return answer

    def error(self) -> InferenceError:
        """The one answer since the last call of this, which has to be an error."""
        (answer,) = self.answers
        self.answers.clear()
        assert isinstance(answer, InferenceError), answer
        return answer
