"""Target: a whole agent, but for its socket and its model, and whatever a client may send it."""

import functools
import threading
import time
from collections.abc import Mapping, Sequence
from queue import Empty, SimpleQueue
from typing import cast

import msgspec
import numpy as np

from devices.agent.bundles import LoadableBundle
from devices.agent.push import PushAccess
from devices.agent.reload import Reloader
from devices.agent.server import Agent
from devices.agent.store import BundleStore
from mdp.formats.bundle import Bundle
from mdp.formats.device_part import entry_of, part_of
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.protocol.messages import (
    Buffer,
    Failure,
    Infer,
    Message,
    Result,
    Status,
    StatusRequest,
    decode,
    encode,
)
from mdp.protocol.transfer import BundleContent, BundlePiece, BundleRead, BundleRequest, BundleState
from mdp.testing.bundles import DEVICES, LABELS, SIZES, write_bundle
from mdp.transport import Peer, Router
from tests.fuzz.messages import frames_of, join_frames, parse_frames, render_frames
from tests.fuzz.target import Structure, Target, scratch
from tests.support.pictures import encode_picture, four_corners

PEER = Peer(b"peer", "peer")
#: The request id of the question that follows every input.
LAST = 2**62
#: An agent that has not answered by then has hung.
PATIENCE_S = 60.0
SIDE = SIZES[0]


class Desk:
    """Takes the ROUTER's place: hands in messages, and keeps what the agent sends."""

    def __init__(self) -> None:
        self._come: SimpleQueue[list[tuple[Peer, Sequence[Buffer]]]] = SimpleQueue()
        self.sent: SimpleQueue[Message] = SimpleQueue()
        self._woken = False

    def hand_in(self, *messages: Sequence[Buffer]) -> None:
        """Let the agent find `messages` at its next look."""
        self._come.put([(PEER, frames) for frames in messages])

    def poll(self, timeout_s: float | None) -> list[tuple[Peer, Sequence[Buffer]]]:
        """Messages that have come, waiting at most so long."""
        try:
            came = self._come.get(timeout=timeout_s)
        except Empty:
            came = []
        self._woken |= not came
        return came

    def was_woken(self) -> bool:
        """Tell whether `wake` was called since the last call."""
        woken, self._woken = self._woken, False
        return woken

    def send(self, route: bytes, frames: Sequence[Buffer]) -> bool:
        """Keep a reply, which a client has to be able to read."""
        self.sent.put(decode(frames).message)
        return True

    def wake(self) -> None:
        """End a `poll`."""
        self._come.put([])

    def has_delivered(self) -> bool:
        """Everything."""
        return True

    def take_rejections(self) -> dict[str, int]:
        """Nobody."""
        return {}


class Brightness:
    """A runtime whose logits are the crop's mean."""

    provider, fallback = "FakeExecutionProvider", False

    def warm_up(self) -> None:
        """Nothing to warm up."""

    def run(self, pixels: Pixels) -> Contribution:
        """Logits `[N, num_classes]`."""
        assert pixels.shape[1:] == (SIDE, SIDE, 3)
        logits = np.repeat(pixels.mean(axis=(1, 2, 3))[:, None], len(LABELS), axis=1)
        return Contribution(logits.astype(np.float32), logits.astype(np.float32))


class Served:
    """An agent that serves at a desk, in a thread, until it is closed."""

    def __init__(self) -> None:
        folder = scratch("agent") / "bundle"
        self.bundle = Bundle.open(folder if folder.exists() else write_bundle(folder))
        self.desk = Desk()
        # Where raw pixels are planned, no JPEG is decoded.
        planned = self.bundle.assignment(DEVICES[0])
        assignment = msgspec.structs.replace(planned, encoding="jpeg")
        source = LoadableBundle(bundle=self.bundle, assignment=assignment, load=Brightness)
        part = part_of(self.bundle, 0)
        self.offer = {file: entry_of(content) for file, content in part.items()}
        store = BundleStore(
            scratch("agent") / "kept",
            folder,
            max_bytes=2**20,
            read=lambda where: (Bundle.open(where), 0),
        )
        access = PushAccess(
            store=store, may_push=lambda client: True, loadable=lambda where: source
        )
        self._agent = Agent(
            source,
            cast(Router, self.desk),
            reloader=Reloader(lambda: source, clock=time.monotonic),
            push=access,
        )
        self._thread = threading.Thread(target=self._agent.serve, name="agent", daemon=True)
        self._thread.start()
        while self.ask([]).state != "READY":
            pass

    def ask(self, replies: list[Message]) -> Status:
        """Status of the agent; messages before that are added to `replies`."""
        self.desk.hand_in(encode(StatusRequest(request_id=LAST)))
        return self.until_status(replies)

    def until_status(self, replies: list[Message]) -> Status:
        """The answer to the last question; everything before it is added to `replies`."""
        while True:
            reply = self.desk.sent.get(timeout=PATIENCE_S)
            if isinstance(reply, Status) and reply.request_id == LAST:
                return reply
            replies.append(reply)

    def close(self) -> None:
        """Stop the agent."""
        self._agent.stop()
        self._thread.join(PATIENCE_S)
        serve_once.cache_clear()


@functools.cache
def serve_once() -> Served:
    """The agent of this process, started when it is first asked for."""
    return Served()


def read_request(data: bytes) -> bool:
    """One message to an agent: it says one thing to it, and goes on."""
    agent = serve_once()
    replies: list[Message] = []
    agent.desk.hand_in(frames_of(data), encode(StatusRequest(request_id=LAST)))
    status = agent.until_status(replies)
    if not replies:
        # A picture may be computed beside the socket.
        replies.append(agent.desk.sent.get(timeout=PATIENCE_S))
    (reply,) = replies
    assert status.state == "READY"
    assert not isinstance(reply, Failure) or reply.code != "failed", reply.text
    return isinstance(reply, Result | Status | BundleState | BundleContent)


def _requests() -> Mapping[str, bytes]:
    infer = Infer(
        request_id=7, digest=serve_once().bundle.digest, k=0, budget_ms=1e6, image_size=SIDE,
        encoding="raw",
    )  # fmt: skip
    jpeg = msgspec.structs.replace(infer, encoding="jpeg")
    manifest = serve_once().offer["manifest.json"].sha256
    offer = BundleRequest(request_id=5, action="offer", manifest=manifest, files=serve_once().offer)
    piece = BundlePiece(request_id=6, manifest=manifest, file="manifest.json", offset=0)
    read = BundleRead(request_id=8, manifest=manifest, file="model.onnx", offset=100)
    return {
        "raw": join_frames(encode(infer, bytes(SIDE * SIDE * 3))),
        "jpeg": join_frames(encode(jpeg, encode_picture(four_corners(SIDE, SIDE), "JPEG"))),
        "ask": join_frames(encode(StatusRequest(request_id=3))),
        "bundle-state": join_frames(encode(BundleRequest(request_id=4, action="state"))),
        "bundle-offer": join_frames(encode(offer)),
        "bundle-piece": join_frames(encode(piece, b"{")),
        "bundle-read": join_frames(encode(read)),
    }


TARGETS = (
    Target(
        name="agent",
        read=read_request,
        seeds=_requests,
        share=0.005,
        structure=Structure(parse=parse_frames, render=render_frames),
        words=(b"MDP\x01\x01", b"MDP\x01\x02", b"\xff\xd8\xff\xda"),
    ),
)
