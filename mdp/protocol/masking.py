"""Messages that tell an agent's mask, and change it."""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from mdp.files import Record
from mdp.formats.mask import CameraMask
from mdp.protocol.fields import RequestId


class MaskRequest(Record, frozen=True, omit_defaults=True):
    """Client -> agent: tell the mask of the camera, or set it. No buffer."""

    kind: ClassVar[int] = 18
    buffers: ClassVar[int] = 0

    request_id: RequestId
    action: Literal["tell", "set"]
    #: The mask to set; left out: none.
    mask: CameraMask | None = None


class MaskReply(Record, frozen=True, omit_defaults=True):
    """Agent -> client: the reply to a MaskRequest. No buffer."""

    kind: ClassVar[int] = 19
    buffers: ClassVar[int] = 0

    request_id: RequestId
    #: The mask that holds now; left out where there is none.
    mask: CameraMask | None = None
    #: Of the newest picture as the camera gives it, in pixels; 0 before a first one.
    width: Annotated[int, Meta(ge=0, le=65_535)] = 0
    height: Annotated[int, Meta(ge=0, le=65_535)] = 0
    #: Whether this client may set it.
    settable: bool = False
