"""Pictures, statuses, masks and rests of a fleet's cameras, beside its answers."""

import time
from collections.abc import Callable, Collection, Iterator
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from mdp.client.base import Options, client_keys
from mdp.client.dispatcher import Clock
from mdp.client.scenes import LEAST_CAMERAS, Scene, SceneFolder, Tally
from mdp.client.status import DeviceStatus, device_status
from mdp.closing import Closing
from mdp.errors import ConfigError, MDPError, PictureError, WireError
from mdp.formats.fleet import Fleet
from mdp.formats.mask import CameraMask
from mdp.pictures.crop import load_picture
from mdp.protocol.masking import MaskReply, MaskRequest
from mdp.protocol.messages import MAX_BUFFER_BYTES, Failure, Status, StatusRequest, decode, encode
from mdp.protocol.recording import PictureReply, PictureRequest
from mdp.protocol.rest import RestReply, RestRequest
from mdp.transport import Dealers, Disconnected, Received

#: Longest side of the pictures in pixels: quarters of them are finer than common networks' 224.
SIDE = 1280
#: Largest age of a picture at its device, and how long its reply may take.
WITHIN_MS, REPLY_S = 1000.0, 2.0
T = TypeVar("T")
#: Of rests: both are short, as they are asked for many times a second.
REST_WITHIN_MS, REST_REPLY_S = 1000.0, 0.25
#: Between two looks at whether a recording is over.
OVER_S = 0.1
#: Time for the first of all connections, where none is there.
DIAL_S = 0.2
CameraRequest = PictureRequest | StatusRequest | RestRequest | MaskRequest
NO_KEY = "no `key` in the fleet file: pictures are sent with keys only"


class _AgentConnections(Closing):
    """Connections to agents of a fleet, and requests to all of them at once; for one thread."""

    def __init__(self, fleet: Fleet, options: Options, *, clock: Clock = time.monotonic) -> None:
        """Connect to the devices of `fleet`; raises ConfigError."""
        self._clock = clock
        self._request_id = 0
        self._sent_s = 0.0
        self._dealers = Dealers(
            {entry.device: entry.address for entry in fleet.devices},
            keys=client_keys(fleet, options),
            max_frame_bytes=MAX_BUFFER_BYTES,
        )
        self.devices = [entry.device for entry in fleet.devices]
        until_s = clock() + options.timeout_s
        while clock() < until_s and len(self._dealers.connected) < len(self.devices):
            if self._dealers.connected | self._dealers.refused.keys() >= set(self.devices):
                break
            self._dealers.poll(until_s - clock())

    def _collect(
        self,
        request: CameraRequest,
        read: Callable[[Received], T | None],
        reply_s: float,
        devices: Collection[str] | None = None,
    ) -> tuple[dict[str, T], dict[str, str]]:
        """The outcomes of `read` for every device's reply to `request`, and why others have none.

        `read` returns None for a reply to an earlier request, and raises MDPError. Only `devices`
        are asked, by default all.
        """
        if len(self._dealers.connected) < len(self.devices):
            # An agent that has let this client in, or that has an address now, is dialled here.
            self._dealers.poll(0.0 if self._dealers.connected else DIAL_S)
        self._sent_s = self._clock()
        until_s = self._sent_s + reply_s
        frames = encode(request)
        found: dict[str, T] = {}
        missing: dict[str, str] = {}
        awaited = set()
        for device in self.devices if devices is None else devices:
            if self._dealers.send(device, frames):
                awaited.add(device)
            else:
                missing[device] = self._dealers.refused.get(device, "no connection")
        while awaited and (left_s := until_s - self._clock()) > 0:
            for event in self._dealers.poll(left_s):
                if event.device not in awaited:
                    continue
                if isinstance(event, Disconnected):
                    missing[event.device] = "the connection was lost"
                elif not isinstance(event, Received):
                    continue
                else:
                    try:
                        content = read(event)
                    except MDPError as error:
                        missing[event.device] = str(error)
                    else:
                        if content is None:
                            continue
                        found[event.device] = content
                awaited.discard(event.device)
        missing |= dict.fromkeys(awaited, f"no answer within {reply_s:g} s")
        return found, missing

    def wait(self, until_s: float) -> None:
        """Keep the connections until then, by this object's clock."""
        while (left_s := until_s - self._clock()) > 0:
            self._dealers.poll(left_s)

    def close(self) -> None:
        """Close every connection."""
        self._dealers.close()


class FleetCameras(_AgentConnections):
    """The cameras of all agents of a fleet that have a key; for one thread."""

    def __init__(self, fleet: Fleet, options: Options, *, clock: Clock = time.monotonic) -> None:
        """Connect to the agents; raises ConfigError, also where no agent has a key."""
        keyed = [entry for entry in fleet.devices if entry.key is not None]
        if not keyed:
            raise ConfigError(f"{options.fleet}: {NO_KEY}")
        self._entries = fleet.devices
        without_key = [entry.device for entry in fleet.devices if entry.key is None]
        self._without_key = dict.fromkeys(without_key, NO_KEY)
        self._taken_s: dict[str, float] = {}
        super().__init__(msgspec.structs.replace(fleet, devices=keyed), options, clock=clock)

    def take(self, side: int = SIDE) -> Scene:
        """A picture of every camera, as far as they are given within `REPLY_S`.

        Of at most `side` pixels on the longest side.
        """
        self._request_id += 1
        request = PictureRequest(request_id=self._request_id, within_ms=WITHIN_MS, side=side)
        self._taken_s = {}
        pictures, missing = self._collect(request, self._picture, REPLY_S)
        missing = {**self._without_key, **missing}
        return Scene(pictures=pictures, missing=missing, taken_s=self._taken_s)

    def record(
        self,
        folder: SceneFolder,
        tally: Tally,
        moment: Callable[[], datetime],
        *,
        every_s: float,
        count: int | None,
        due_s: float,
        over: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[Path | None, Scene]]:
        """Write a scene each `every_s` into `folder`, the first at `due_s` by this object's clock.

        Yields each moment's path and scene; None for one of too few cameras, which is not kept.
        Ends after `count` moments of `tally`, which counts them, with None never, and soon after
        `over` becomes true. Raises InputError on a full disk.
        """
        while count is None or tally.moments < count:
            while not over():
                self.wait(min(due_s, self._clock() + OVER_S))
                if self._clock() >= due_s:
                    break
            else:
                return
            # Missed moments are not caught up, and two are never closer than `every_s`: an agent
            # refuses pictures above its rate.
            due_s = max(due_s, self._clock()) + every_s
            begun_s, at, scene = self._clock(), moment(), self.take()
            if self._clock() - begun_s > every_s / 2:
                # There would be no time to turn the item.
                due_s = self._clock() + every_s
            path = None
            if len(scene.pictures) >= LEAST_CAMERAS:
                path = folder.write(at, scene.pictures)
            tally.add(scene)
            yield path, scene

    def masks(self) -> tuple[dict[str, MaskReply], dict[str, str]]:
        """The mask of every camera, and why others tell none, within `REPLY_S`."""
        self._request_id += 1
        request = MaskRequest(request_id=self._request_id, action="tell")
        found, missing = self._collect(request, self._mask, REPLY_S)
        return found, {**self._without_key, **missing}

    def set_mask(self, device: str, mask: CameraMask | None) -> MaskReply:
        """Have an agent use another mask; raises WireError with the agent's reason if it does not.

        From its reply on, no picture leaves the device that it does not hold for.
        """
        if device in self._without_key:
            raise WireError(f"{device}: {NO_KEY}")
        self._request_id += 1
        request = MaskRequest(request_id=self._request_id, action="set", mask=mask)
        told, missing = self._collect(request, self._mask, REPLY_S, [device])
        if device not in told:
            raise WireError(f"{device}: {missing[device]}")
        return told[device]

    def status(self) -> list[DeviceStatus]:
        """The status of every device, as far as they tell within `REPLY_S`."""
        self._request_id += 1
        told, _ = self._collect(StatusRequest(request_id=self._request_id), self._status, REPLY_S)
        refused = {**self._dealers.refused, **self._without_key}
        return [
            device_status(
                entry,
                told.get(entry.device),
                None,
                silent=entry.device in self._dealers.connected,
                refused=refused.get(entry.device),
            )
            for entry in self._entries
        ]

    def _status(self, event: Received) -> Status | None:
        message = decode(event.frames).message
        if isinstance(message, Status) and message.request_id == self._request_id:
            return message
        return None

    def _mask(self, event: Received) -> MaskReply | None:
        """The mask in a reply, None for one of an earlier request; raises MDPError."""
        message = decode(event.frames).message
        match message:
            case Failure(request_id=0, text=text):
                raise WireError(f"its mdp-agent knows no masks: expected a newer one ({text})")
            case Failure(request_id=request_id, text=text) if request_id == self._request_id:
                raise WireError(text)
            case MaskReply(request_id=request_id) if request_id == self._request_id:
                return message
        return None

    def _picture(self, event: Received) -> bytes | None:
        """The picture in a reply, None for one of an earlier moment; raises MDPError."""
        envelope = decode(event.frames)
        match envelope.message:
            case Failure(request_id=0, text=text):
                raise WireError(f"its mdp-agent cannot be recorded: expected a newer one ({text})")
            case Failure(request_id=request_id, code=code, text=text) if (
                request_id == self._request_id
            ):
                raise WireError(f"{code}: {text}")
            case PictureReply(request_id=request_id, age_ms=age_ms) if (
                request_id == self._request_id
            ):
                content = bytes(envelope.buffers[0])
                if not content.startswith(b"\xff\xd8"):
                    raise PictureError("expected a JPEG")
                load_picture(content)
                self._taken_s[event.device] = self._sent_s - age_ms / 1e3
                return content
        return None


class FleetRests(_AgentConnections):
    """Times for which the pictures of all cameras of a fleet have stood still; for one thread."""

    def __init__(self, fleet: Fleet, options: Options, *, clock: Clock = time.monotonic) -> None:
        """Connect to the agents of `fleet`; raises ConfigError."""
        super().__init__(fleet, options, clock=clock)
        #: Devices whose agents are too old to be asked.
        self.outdated: set[str] = set()

    def ask(self) -> tuple[dict[str, RestReply], dict[str, str]]:
        """Each device's rest, and why others tell none; an agent too old for it is one of those."""
        self._request_id += 1
        request = RestRequest(request_id=self._request_id, within_ms=REST_WITHIN_MS)
        return self._collect(request, self._rest, REST_REPLY_S)

    def _rest(self, event: Received) -> RestReply | None:
        """The rest in a reply, None for one to an earlier request; raises MDPError."""
        match decode(event.frames).message:
            case Failure(request_id=0, text=text):
                self.outdated.add(event.device)
                raise WireError(
                    f"its mdp-agent cannot tell whether its picture rests: expected a newer one "
                    f"({text})"
                )
            case Failure(request_id=request_id, code=code, text=text) if (
                request_id == self._request_id
            ):
                raise WireError(f"{code}: {text}")
            case RestReply(request_id=request_id) as reply if request_id == self._request_id:
                self.outdated.discard(event.device)
                return reply
        return None
