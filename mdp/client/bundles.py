"""Sends a bundle to one agent, fetches its bundle, and has it go back to the previous one.

All messages may be repeated: after a break or a restart of either side everything is asked again,
and what has arrived is not sent again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from mdp.client.base import Options, client_keys
from mdp.client.dispatcher import Clock
from mdp.errors import ConfigError, InputError, TransferError, WireError
from mdp.files import MAX_JSON_BYTES, decode_content, replacing_folder, write_bytes
from mdp.formats.bundle import MANIFEST, Bundle, FileEntry, Manifest
from mdp.formats.device_part import PartFile, Version, entry_of, part_files, part_of, path_in_bundle
from mdp.formats.fleet import Fleet, FleetEntry
from mdp.formats.signing import MAX_FILE_BYTES, SIGNATURE
from mdp.protocol.messages import Buffer, Envelope, Failure, Message, decode, encode
from mdp.protocol.transfer import (
    PIECE_BYTES,
    BundleContent,
    BundlePiece,
    BundleRead,
    BundleRefusal,
    BundleRequest,
    BundleState,
)
from mdp.transport import Dealers, Disconnected, Received, TransportEvent

#: How long one reply may take; without any for `PATIENCE_S`, the device is given up.
REPLY_S, PATIENCE_S = 10.0, 30.0
#: How long an agent may load a bundle (building engines of TensorRT takes minutes), and how often
#: it is asked whether it has.
SWITCH_S, SWITCH_CHECK_S = 900.0, 0.1
#: Before a message that the agent had no room for is sent again.
BUSY_S = 0.1
MOST_RESTARTS = 3
#: Of the connection, in one exchange: an agent may break it whenever it has answered.
MOST_BREAKS = 100
#: Of one file; protobuf's limit.
MAX_PULLED_BYTES = 2**31

T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """A push that has succeeded."""

    device: str
    version: Version
    #: Bytes of the device's part, and those of them that were sent this time.
    total_bytes: int
    sent_bytes: int


def check_keyed(entry: FleetEntry) -> None:
    """Raise ConfigError for a device in plain text."""
    if entry.key is None:
        raise ConfigError(
            f"device {entry.device!r}: expected a `key` in the fleet file: agents exchange "
            "bundles with keys only"
        )


class _BrokenError(Exception):
    """The connection was lost, or no reply came: to be tried again."""


class DeviceBundles:
    """The bundles of one agent; for one thread."""

    def __init__(
        self,
        fleet: Fleet,
        entry: FleetEntry,
        options: Options,
        *,
        patience_s: float = PATIENCE_S,
        clock: Clock = time.monotonic,
    ) -> None:
        """Connect to `entry` of `fleet`, whose file `options` names; raises ConfigError."""
        check_keyed(entry)
        self.device, self._plan_device = entry.device, entry.plan_device
        self._patience_s, self._clock = patience_s, clock
        alone = msgspec.structs.replace(fleet, devices=[entry])
        self._dealers = Dealers(
            {entry.device: entry.address},
            keys=client_keys(alone, options),
            max_frame_bytes=PIECE_BYTES,
        )
        self._request_id = 0
        self._heard_s = clock()
        self._sent_bytes = 0
        #: How often the agent was restarted instead of switching.
        self._restarts = 0

    def state(self) -> BundleState:
        """Bundles that the agent serves, keeps and has received; raises TransferError."""
        return self._persistently(self._state)

    def push(self, bundle: Bundle, progress: Progress = lambda done, total: None) -> Pushed:
        """Have the agent serve its part of `bundle`; sends what it lacks.

        `progress` is called with the bytes that are there, and all. Raises TransferError, and
        ConfigError if `bundle` has no part for the agent.
        """
        # Not as the agent says: it would get another device's model.
        name = self._plan_device
        part = part_of(bundle, bundle.assignment(name).k)
        if (told := self.state().device) != name:
            raise TransferError(f"{self.device}: the agent there is that of {told}")
        self._sent_bytes = 0
        files = {file: entry_of(content) for file, content in part.items()}
        wanted = files[MANIFEST].sha256
        version = self._persistently(lambda: self._push(bundle, part, files, wanted, progress))
        return Pushed(
            device=self.device,
            version=version,
            total_bytes=sum(map(len, part.values())),
            sent_bytes=self._sent_bytes,
        )

    def rollback(self) -> Version:
        """Have the agent serve the version before; raises TransferError."""
        previous = self.state().previous
        if previous is None:
            raise TransferError(f"{self.device}: keeps no previous version")
        return self._persistently(lambda: self._switch(previous.manifest))

    def pull(self, out: Path) -> Version:
        """Write the served part to the new folder `out`; raises TransferError or InputError."""
        if out.exists():
            raise InputError(f"{out}: exists already: expected a new folder")
        served, content = self._persistently(self._fetch)
        with replacing_folder(out) as folder:
            for name, data in content.items():
                write_bytes(folder / name, data)
            Bundle.open(folder)
        return served

    # One try each.

    def _state(self) -> BundleState:
        return self._bundle_state(self._ask(BundleRequest, action="state"))

    def _push(
        self,
        bundle: Bundle,
        part: dict[PartFile, bytes],
        files: dict[PartFile, FileEntry],
        wanted: str,
        progress: Progress,
    ) -> Version:
        state = self._state()
        total = sum(map(len, part.values()))
        if not state.switching:
            current = state.current
            is_served = state.serves is not None and state.serves.digest == bundle.digest
            if current is not None and current.manifest == wanted and is_served:
                progress(total, total)
                return current
            offer = self._ask(BundleRequest, action="offer", manifest=wanted, files=files)
            received = self._bundle_state(offer).received
            for file, content in part.items():
                while (offset := received.get(file, 0)) < len(content):
                    progress(sum(received.values()), total)
                    piece = memoryview(content)[offset:][:PIECE_BYTES]
                    self._sent_bytes += len(piece)
                    reply = self._ask(BundlePiece, piece, manifest=wanted, file=file, offset=offset)
                    received = self._bundle_state(reply).received
                    if received.get(file, 0) <= offset:
                        raise TransferError(f"{self.device}: {file}: a piece was not kept")
            progress(total, total)
        return self._switch(wanted)

    def _switch(self, wanted: str) -> Version:
        until_s = self._clock() + SWITCH_S
        state = self._bundle_state(self._ask(BundleRequest, action="switch", manifest=wanted))
        # An agent with its first bundle opens its socket anew, and serves nothing until then.
        while state.switching or (state.serves is None and not state.error):
            if self._clock() > until_s:
                raise TransferError(f"{self.device}: still loads after {SWITCH_S:g} s")
            time.sleep(SWITCH_CHECK_S)
            state = self._state()
        if state.error:
            kept = "what it did before" if state.serves else "no bundle yet"
            raise TransferError(f"{self.device}: serves {kept}: {state.error}")
        if state.current is None or state.current.manifest != wanted:
            self._restarts += 1
            if self._restarts > MOST_RESTARTS:
                raise TransferError(f"{self.device}: was restarted whenever it had to switch")
            raise _BrokenError("no switch")
        return state.current

    def _fetch(self) -> tuple[Version, dict[str, bytes]]:
        state = self._state()
        served = state.serves
        if served is None:
            raise TransferError(f"{self.device}: serves no bundle yet")
        manifest_content = self._file(served, MANIFEST, MAX_JSON_BYTES)
        if entry_of(manifest_content).sha256 != served.manifest:
            raise TransferError(f"{self.device}: {MANIFEST}: not what it says that it serves")
        try:
            manifest = decode_content(
                f"{self.device}: {MANIFEST}", manifest_content, Manifest, msgspec.json.decode
            )
            bundle = Bundle(Path(), manifest, manifest_content)
            k = bundle.assignment(state.device).k
        except ConfigError as error:
            raise TransferError(str(error)) from error
        content = {MANIFEST: manifest_content}
        if signature := self._file(served, SIGNATURE, MAX_FILE_BYTES):
            content[SIGNATURE] = signature
        for file, entry in part_files(bundle, k).items():
            data = self._file(served, file, min(entry.size_bytes, MAX_PULLED_BYTES))
            if entry_of(data) != entry:
                raise TransferError(f"{self.device}: {file}: not as {MANIFEST} lists it")
            content[path_in_bundle(file, k)] = data
        return served, content

    def _file(self, served: Version, file: PartFile, most_bytes: int) -> bytes:
        content = bytearray()
        while True:
            envelope = self._ask(
                BundleRead, manifest=served.manifest, file=file, offset=len(content)
            )
            reply = envelope.message
            if not isinstance(reply, BundleContent) or reply.size_bytes > most_bytes:
                raise TransferError(f"{self.device}: {file}: expected at most {most_bytes:,} bytes")
            piece = envelope.buffers[0]
            expected = min(PIECE_BYTES, reply.size_bytes - len(content))
            if len(piece) != expected:
                # Whole pieces: an agent cannot make a fetch last as long as it likes.
                raise TransferError(
                    f"{self.device}: {file}: expected a piece of {expected:,} bytes, "
                    f"got {len(piece):,}"
                )
            content += piece
            if len(content) == reply.size_bytes:
                return bytes(content)

    # Messages.

    def _persistently(self, step: Callable[[], T]) -> T:
        """The outcome of `step`, repeated while connections break; raises TransferError."""
        self._heard_s = self._clock()
        for _ in range(MOST_BREAKS):
            try:
                return step()
            except _BrokenError as error:
                if self._is_over():
                    raise TransferError(
                        f"{self.device}: {error} for {self._patience_s:g} s"
                    ) from error
        raise TransferError(f"{self.device}: the connection broke {MOST_BREAKS} times")

    def _ask(self, kind: Callable[..., Message], *buffers: Buffer, **header: Any) -> Envelope:
        """The reply to a message; raises TransferError for a refusal."""
        while True:
            self._request_id += 1
            self._connect()
            frames = encode(kind(request_id=self._request_id, **header), *buffers)
            if not self._dealers.send(self.device, frames):
                raise _BrokenError("no connection")
            reply = self._reply(self._request_id)
            match reply.message:
                case Failure(code="overloaded") if not self._is_over():
                    time.sleep(BUSY_S)
                case Failure(code=code, text=text):
                    raise TransferError(f"{self.device}: {code}: {text}")
                case BundleRefusal() if self._is_lost(self._dealers.poll(0)):
                    # Of an agent that was restarted meanwhile, and knows no offer.
                    raise _BrokenError("no connection")
                case BundleRefusal(text=text):
                    raise TransferError(f"{self.device}: {text}")
                case _:
                    self._heard_s = self._clock()
                    return reply

    def _is_over(self) -> bool:
        return self._clock() - self._heard_s >= self._patience_s

    def _connect(self) -> None:
        """Wait for the connection; raises TransferError if the agent refuses it."""
        until_s = self._heard_s + self._patience_s
        while self.device not in self._dealers.connected:
            if refused := self._dealers.refused.get(self.device):
                raise TransferError(f"{self.device}: {refused}")
            if self._clock() >= until_s:
                raise _BrokenError("no connection")
            self._dealers.poll(max(0.0, until_s - self._clock()))

    @staticmethod
    def _is_lost(events: Sequence[TransportEvent]) -> bool:
        return any(isinstance(event, Disconnected) for event in events)

    def _reply(self, request_id: int) -> Envelope:
        until_s = self._clock() + min(REPLY_S, self._patience_s)
        while self._clock() < until_s:
            events = self._dealers.poll(max(0.0, until_s - self._clock()))
            if self._is_lost(events):
                raise _BrokenError("no connection")
            for event in events:
                if not isinstance(event, Received):
                    continue
                try:
                    envelope = decode(event.frames)
                except WireError as error:
                    raise TransferError(f"{self.device}: bad_message: {error}") from error
                message = envelope.message
                if isinstance(message, Failure) and message.request_id == 0:
                    raise TransferError(
                        f"{self.device}: its mdp-agent does not know this message: expected a "
                        f"newer one ({message.text})"
                    )
                if message.request_id == request_id:
                    return envelope
        raise _BrokenError("no answer")

    def _bundle_state(self, envelope: Envelope) -> BundleState:
        if not isinstance(envelope.message, BundleState):
            raise TransferError(f"{self.device}: expected a BundleState")
        return envelope.message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._dealers.close()
