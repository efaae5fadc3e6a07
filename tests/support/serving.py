"""An agent in this process, whose model waits for the test's permission."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from devices.agent.bundles import LoadableBundle
from devices.agent.server import Agent
from mdp.formats.bundle import Bundle
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import Buffer, Failure, Infer, Result, Status, StatusRequest, encode
from mdp.testing.agents import ANY_PORT
from mdp.testing.bundles import SIZES
from mdp.testing.processes import PATIENCE_S, until
from mdp.transport import AgentKeys, Router
from tests.support.fakes import StrangePeer
from tests.support.fleet import PLENTY_MS


class Held:
    """A runtime that waits for permission while it is held; answers with each picture's mean."""

    provider = "HeldExecutionProvider"
    fallback = False

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.waiting = threading.Event()
        self.batches: list[list[int]] = []
        #: What it raises instead of answering.
        self.error: Exception | None = None

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        self.batches.append([int(picture[0, 0, 0]) for picture in pixels])
        self.waiting.set()
        assert self.free.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        means = pixels.mean(axis=(1, 2, 3), dtype=np.float32)[:, None].repeat(3, axis=1)
        return Contribution(means, means)

    def hold(self) -> None:
        """From now on whatever is run waits."""
        self.batches.clear()
        self.waiting.clear()
        self.free.clear()


class Paying:
    """A clock by which computing takes a second, however many pictures; others take no time."""

    def __init__(self, runtime: Held) -> None:
        self.runtime = runtime

    def __call__(self) -> float:
        return float(len(self.runtime.batches))


@contextmanager
def serving(
    bundle: Bundle, runtime: Held, *, keys: AgentKeys | None = None, batch: int = 1, **options: Any
) -> Iterator[tuple[Agent, str]]:
    """An agent in this process, and its address."""
    with Router(ANY_PORT, keys=keys) as router:
        source = LoadableBundle(
            bundle=bundle, assignment=bundle.assignment("alpha"), load=lambda: runtime, batch=batch
        )
        agent = Agent(source, router, **options)
        thread = threading.Thread(target=agent.serve)
        thread.start()
        until(lambda: agent.state == "READY", "the agent is ready")
        try:
            yield agent, router.address
        finally:
            runtime.free.set()
            agent.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def request(
    bundle: Bundle, number: int, budget_ms: float = PLENTY_MS, *, request_id: int | None = None
) -> list[Buffer]:
    """A request whose picture is all `number`, by default its id too."""
    infer = Infer(
        request_id=number if request_id is None else request_id,
        digest=bundle.digest,
        k=0,
        budget_ms=budget_ms,
        image_size=SIZES[0],
        encoding="raw",
    )
    return encode(infer, bytes([number]) * SIZES[0] ** 2 * 3)


def ask_status(peer: StrangePeer) -> Status:
    """Status of the agent, once everything that `peer` has sent is taken in."""
    peer.send(encode(StatusRequest(request_id=1000)))
    message = peer.receive().message
    assert isinstance(message, Status)
    return message


def count_queued(peer: StrangePeer) -> int:
    """Number of waiting requests, once everything that `peer` has sent is taken in."""
    return ask_status(peer).queued


def replies(peer: StrangePeer, count: int) -> dict[int, str]:
    """Request -> `answered` or a failure's code."""
    came: dict[int, str] = {}
    for _ in range(count):
        message = peer.receive().message
        assert isinstance(message, Result | Failure)
        assert message.request_id not in came
        came[message.request_id] = message.code if isinstance(message, Failure) else "answered"
    return came
