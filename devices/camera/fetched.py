"""The camera of another agent, whose device is too weak to compute.

Fetched as `mdp record` does, encrypted and only where that device's owner allows it, but no larger
than this device's sub-models need.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from mdp.cameras import Source, SourceError
from mdp.errors import InputError, MDPError, PictureError
from mdp.formats.keys import load_pair, load_public
from mdp.pictures.crop import Pixels, load_picture
from mdp.protocol.messages import Failure, decode, encode
from mdp.protocol.recording import (
    LEAST_SIDE,
    MOST_SIDE,
    PICTURES_PER_S,
    SMALL_PER_S,
    SMALL_SIDE,
    PictureReply,
    PictureRequest,
)
from mdp.transport import ClientKeys, Dealers, Disconnected, Received, public_key_of

#: How long connecting and one picture may take, and the largest age of a picture at its device.
CONNECT_S, REPLY_S, WITHIN_MS = 5.0, 2.0, 1000.0
#: Longer over shorter side of a camera's picture, until one has come.
_WIDE = 16 / 9
_OWNER = "camera"


def owner_keys(key: Path | None, owner_key: Path | None) -> ClientKeys:
    """This agent's keys and the public one of the camera's, from their files.

    Raises InputError or ConfigError.
    """
    if key is None or owner_key is None:
        raise InputError(
            "--source mdp://HOST:PORT: expected --key, and --source-key with the public key file "
            "of the agent there"
        )
    own, agents = load_pair(key, public_key_of), {_OWNER: load_public(owner_key)}
    return ClientKeys(public=own.public, secret=own.secret, agents=agents)


class FetchedCamera:
    """Pictures of an agent's camera; for one thread."""

    def __init__(
        self, source: Source, keys: ClientKeys, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Connect to the agent that `source` names; raises SourceError."""
        self._source, self._clock = source, clock
        #: Age of the last picture as it was asked for.
        self.age_s = 0.0
        self._request_id = 0
        self._longer = _WIDE
        #: Longest side of the last picture, and when it was asked for.
        self._side, self._asked_s = 0, -math.inf
        self._dealers = Dealers({_OWNER: f"tcp:{source.place}"}, keys=keys)
        until_s = clock() + CONNECT_S
        while not self._dealers.connected:
            why = self._dealers.refused.get(_OWNER, "no agent answers there")
            if clock() >= until_s or self._dealers.refused:
                self.close()
                raise SourceError(f"{source}: {why}")
            self._dealers.poll(until_s - clock())

    def grab(self) -> None:
        """Wait until the next picture may be fetched: two thirds as often as that agent allows.

        Its rate is for all clients together, and somebody may record.
        """
        rate = SMALL_PER_S if self._side <= SMALL_SIDE else PICTURES_PER_S
        time.sleep(max(0.0, self._asked_s + 1.5 / rate - self._clock()))

    def picture(self, *, smallest_side: int) -> Image.Image | Pixels:
        """The newest picture, its shorter side at least `smallest_side` pixels if it has so many.

        Raises SourceError, or PictureError for one that is broken, or one too many.
        """
        self._request_id += 1
        side = min(max(math.ceil(smallest_side * self._longer), LEAST_SIDE), MOST_SIDE)
        self._side, self._asked_s = side, self._clock()
        request = PictureRequest(request_id=self._request_id, within_ms=WITHIN_MS, side=side)
        if not self._dealers.send(_OWNER, encode(request)):
            raise SourceError(f"{self._source}: the connection was lost")
        content = self._reply()
        if not content.startswith(b"\xff\xd8"):
            raise PictureError(f"{self._source}: expected a JPEG")
        picture = load_picture(content)
        height, width = picture.shape[:2] if isinstance(picture, np.ndarray) else picture.size[::-1]
        self._longer = max(height, width) / min(height, width)
        self._side = min(side, max(height, width))
        return picture

    def _reply(self) -> bytes:
        until_s = self._clock() + REPLY_S
        while (left_s := until_s - self._clock()) > 0:
            for event in self._dealers.poll(left_s):
                if isinstance(event, Disconnected):
                    raise SourceError(f"{self._source}: the connection was lost")
                if not isinstance(event, Received):
                    continue
                try:
                    envelope = decode(event.frames)
                except MDPError as error:
                    raise SourceError(f"{self._source}: {error}") from error
                message = envelope.message
                if isinstance(message, Failure):
                    kind = PictureError if message.code == "overloaded" else SourceError
                    raise kind(f"{self._source}: {message.code}: {message.text}")
                # Or one of an earlier request.
                if isinstance(message, PictureReply) and message.request_id == self._request_id:
                    self.age_s = message.age_ms / 1e3
                    return bytes(envelope.buffers[0])
        raise SourceError(f"{self._source}: no answer within {REPLY_S:g} s")

    def close(self) -> None:
        """Close the connection."""
        self._dealers.close()
