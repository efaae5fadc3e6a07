"""Messages that tell how long the picture of an agent's camera has stood still."""

from typing import Annotated, ClassVar

from msgspec import Meta

from mdp.files import Record
from mdp.protocol.fields import Milliseconds, RequestId

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class RestRequest(Record, frozen=True):
    """Client -> agent: ask how long the camera's picture has stood still. No buffer."""

    kind: ClassVar[int] = 16
    buffers: ClassVar[int] = 0

    request_id: RequestId
    #: Largest age of the newest frame when this arrives. Clocks are never compared.
    within_ms: Milliseconds


class RestReply(Record, frozen=True):
    """Agent -> client: the reply to a RestRequest. No buffer."""

    kind: ClassVar[int] = 17
    buffers: ClassVar[int] = 0

    request_id: RequestId
    #: The newest frame's number since the agent's start, from 1.
    frame: Annotated[int, Meta(ge=1, le=2**63 - 1)]
    #: Age of that frame when the request arrived.
    age_ms: Milliseconds
    #: From the first frame that looks like it to that frame.
    still_ms: Milliseconds
    #: How many frames since the agent's start were unlike those before.
    changes: Count
