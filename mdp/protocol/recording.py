"""Messages that fetch a picture of an agent's camera, to make data of or to compute elsewhere."""

from typing import Annotated, ClassVar

from msgspec import Meta

from mdp.files import Record
from mdp.protocol.fields import Milliseconds, RequestId

#: Bounds of a picture's longest side in pixels.
LEAST_SIDE, MOST_SIDE = 16, 1920
#: Pictures a second that an agent sends, to all clients together.
PICTURES_PER_S = 2.0
#: The same of pictures that are sent with at most so many pixels a side, as common networks see:
#: each counts as so many less.
SMALL_SIDE, SMALL_PER_S = 512, 20.0


class PictureRequest(Record, frozen=True):
    """Client -> agent: request the newest whole frame as a JPEG. No buffer."""

    kind: ClassVar[int] = 14
    buffers: ClassVar[int] = 0

    request_id: RequestId
    #: Largest age of the frame when this arrives. Clocks are never compared.
    within_ms: Milliseconds
    #: The picture's longest side in pixels, unless the frame has fewer.
    side: Annotated[int, Meta(ge=LEAST_SIDE, le=MOST_SIDE)]


class PictureReply(Record, frozen=True):
    """Agent -> client: the reply to a PictureRequest, with a JPEG."""

    kind: ClassVar[int] = 15
    buffers: ClassVar[int] = 1

    request_id: RequestId
    #: The frame's number since the agent's start, from 1.
    frame: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    #: Age of the frame when the request arrived.
    age_ms: Milliseconds
