"""Bundles that clients push, in a thread of their own, so that no request waits for a disk."""

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from devices.agent.bundles import LoadableBundle
from devices.agent.reload import Reload
from devices.agent.replies import Replies
from devices.agent.store import BundleStore
from mdp.errors import AgentError, MDPError
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.formats.device_part import path_in_bundle, version_of
from mdp.formats.signing import SIGNATURE
from mdp.logs import BackgroundWriter
from mdp.protocol.messages import Buffer, State, as_line
from mdp.protocol.transfer import (
    PIECE_BYTES,
    BundleContent,
    BundlePiece,
    BundleRead,
    BundleRefusal,
    BundleRequest,
    BundleState,
)
from mdp.transport import Audit, Peer

BundleMessage = BundleRequest | BundlePiece | BundleRead
#: Messages that may wait; clients have one in flight.
MOST_WAITING = 4
#: Of the thread, which yields to computing (setpriority(2)).
NICENESS = 10
NOT_HERE = "this agent takes no bundles (--allow-push)"
FORBIDDEN = "this client's key may not push or fetch bundles (`push = true` in its .limits file)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PushAccess:
    """The keys that may push, the folder that it goes to, and who is told."""

    store: BundleStore
    may_push: Callable[[str], bool]
    #: Reads the bundle in a folder; raises MDPError.
    loadable: Callable[[Path], LoadableBundle]
    audit: Audit = lambda *_: None


class Serving(Protocol):
    """An agent, as far as pushes see it."""

    @property
    def device(self) -> str:
        """This device's name in the plan."""

    @property
    def state(self) -> State:
        """State of the agent's life."""

    @property
    def sources(self) -> list[LoadableBundle]:
        """The bundles that it serves or loads, the current one first; none before the first."""


class BundlePush:
    """Answers messages about bundles, one at a time."""

    def __init__(
        self,
        access: PushAccess,
        serving: Serving,
        replies: Replies,
        switch: Callable[[Reload], None],
    ) -> None:
        """`switch` has a version loaded and installed, or rejected."""
        self._access, self._store = access, access.store
        self._serving, self._replies, self._switch = serving, replies, switch
        self._nice = False
        #: The version of the switch that is under way; empty if none is.
        self._switching = ""
        self._error = ""
        #: Whether a version before the previous one may be left.
        self._replaced = False
        #: Closed with its `with` block, if anybody waits for it.
        self.worker: BackgroundWriter[tuple[Peer, BundleMessage, Sequence[Buffer]]]
        self.worker = BackgroundWriter(self._handle, "bundles", MOST_WAITING)

    def receive(self, peer: Peer, message: BundleMessage, buffers: Sequence[Buffer]) -> None:
        """Answer soon, or refuse now. For the thread at the socket; never waits."""
        if not self._access.may_push(peer.client):
            self._refuse(peer, message, FORBIDDEN)
        elif self.worker.is_full:
            self._replies.fail(
                peer.route, message.request_id, "overloaded", "messages about bundles wait already"
            )
        else:
            self.worker.put((peer, message, buffers))

    def _refuse(self, peer: Peer, message: BundleMessage, text: str) -> None:
        self._access.audit("refuse", peer.client, peer.address, f"bundle: {text}")
        refusal = BundleRefusal(request_id=message.request_id, text=as_line(text))
        self._replies.send(peer.route, refusal)

    def _handle(self, item: tuple[Peer, BundleMessage, Sequence[Buffer]]) -> None:
        peer, message, buffers = item
        if not self._nice:
            self._nice = True
            _lower_priority()
        try:
            if self._replaced and not self._switching:
                self._replaced = False
                self._store.tidy()
            if isinstance(message, BundleRead):
                size_bytes, content = self._read(message)
                reply = BundleContent(request_id=message.request_id, size_bytes=size_bytes)
                self._replies.send(peer.route, reply, content)
                return
            received = self._carry_out(peer, message, buffers)
        except MDPError as error:
            self._refuse(peer, message, str(error))
        except Exception as error:  # a disk's, a runtime's: the thread serves the next message
            self._refuse(peer, message, f"{type(error).__name__}: {error}")
        else:
            self._replies.send(peer.route, self._state(message.request_id, received))

    def _carry_out(
        self, peer: Peer, message: BundleRequest | BundlePiece, buffers: Sequence[Buffer]
    ) -> dict[Any, int]:
        """Do what a message asks for; returns how much of each offered file is there."""
        if isinstance(message, BundleRequest) and message.action == "state":
            return self._store.count_received()
        if message.manifest is None:
            raise AgentError("expected `manifest`")
        if self._switching:
            if message.manifest == self._switching:
                return self._store.count_received()
            raise AgentError("another switch is under way")
        if isinstance(message, BundlePiece):
            return self._store.append(message.manifest, message.file, message.offset, buffers[0])
        if message.action == "offer":
            received = self._store.offer(message.manifest, message.files)
            total = sum(entry.size_bytes for entry in message.files.values())
            self._audit(peer, "push", f"begin {message.manifest[:12]}, {total} bytes")
            return received
        self._start_switch(peer, message.manifest)
        return self._store.count_received()

    def _start_switch(self, peer: Peer, manifest: str) -> None:
        if self._serving.state == "DRAINING":
            raise AgentError("this agent is about to stop")
        self._store.check_there(manifest)
        before = [version.manifest for version in self._store.versions[1:]]
        event = "rollback" if manifest in before else "push"
        self._error, self._switching = "", manifest
        self._audit(peer, event, f"switch to {manifest[:12]}")

        def commit(source: LoadableBundle) -> None:
            self._store.commit(source.bundle, self._current_bundle())

        def on_outcome(error: str) -> None:
            self._error = as_line(error)
            self._audit(peer, event, f"failed: {self._error}" if error else "switched")
            self._replaced = not error
            self._switching = ""

        def read() -> LoadableBundle:
            # Takes as long as the disk does.
            source = self._access.loadable(self._store.complete(manifest))
            if version_of(source.bundle).manifest != manifest:
                # Its folder was removed, or another bundle is at `--bundle` since.
                raise AgentError(f"the files of version {manifest[:12]} are gone")
            return source

        self._switch(Reload(read, commit, on_outcome))

    def _audit(self, peer: Peer, event: str, text: str) -> None:
        self._access.audit(event, peer.client, peer.address, as_line(text))

    def _current_bundle(self) -> Bundle | None:
        sources = self._serving.sources
        return sources[0].bundle if sources else None

    def _state(self, request_id: int, received: dict[Any, int]) -> BundleState:
        # In this order: a switch may end meanwhile.
        switching = bool(self._switching)
        bundle, versions = self._current_bundle(), self._store.versions
        served = None if bundle is None else version_of(bundle)
        return BundleState(
            request_id=request_id,
            device=self._serving.device,
            current=versions[0] if versions else served,
            previous=versions[1] if len(versions) > 1 else None,
            serves=served,
            received=received,
            switching=switching,
            error=self._error,
        )

    def _read(self, message: BundleRead) -> tuple[int, bytes]:
        """Size of a file of the served bundle, and its bytes from the offset."""
        sources = self._serving.sources
        if not sources:
            raise AgentError("no bundle is served yet")
        source, bundle = sources[0], sources[0].bundle
        if version_of(bundle).manifest != message.manifest:
            raise AgentError("another version is served by now")
        if message.file == MANIFEST:
            content = bundle.manifest_content
            return len(content), content[message.offset :][:PIECE_BYTES]
        path = bundle.path / path_in_bundle(message.file, source.assignment.k)
        if message.file == SIGNATURE and not path.exists():
            return 0, b""
        inside = path.resolve().is_relative_to(bundle.path.resolve())
        if not inside or not path.is_file():
            raise AgentError(f"{message.file}: expected a regular file inside the bundle")
        with path.open("rb") as file:
            file.seek(message.offset)
            return os.fstat(file.fileno()).st_size, file.read(PIECE_BYTES)


def _lower_priority() -> None:
    """Let other threads go first (on Linux, priorities are those of threads)."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
    except OSError:
        # Not allowed here: the work is little beside computing.
        return
