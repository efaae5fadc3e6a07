"""Questions of a call: about a picture, or about what the devices' own cameras see."""

from collections.abc import Collection, Mapping
from typing import Protocol

from mdp.client.crops import SentCrop
from mdp.errors import WireError
from mdp.protocol.messages import Buffer, FrameReply, FrameRequest, Infer, Result, encode
from mdp.requests.capture import FrameQuery, FrameSeen, FramesSeen, frames_of
from mdp.requests.request import Request
from mdp.requests.session import Arrival


class Question(Protocol):
    """The face of both."""

    def message(
        self, number: int, digest: str, request: Request, now_s: float, traceparent: str = ""
    ) -> list[Buffer]:
        """The frames of message `number` for `request`, which leaves now."""

    def accept(
        self, device: str, k: int, reply: Result | FrameReply, now_s: float
    ) -> Buffer | None:
        """The crop that the logits depend on, if the client knows it; raises WireError."""

    def frames(self, arrived: Mapping[int, Arrival], now_s: float) -> FramesSeen | None:
        """The frames in an answer given now; None: no camera was asked."""


class PictureQuestion:
    """Every member's crop of one picture, by k."""

    def __init__(self, views: Mapping[int, SentCrop]) -> None:
        self._views = views

    def message(
        self, number: int, digest: str, request: Request, now_s: float, traceparent: str = ""
    ) -> list[Buffer]:
        """An Infer and the member's crop."""
        view = self._views[request.k]
        infer = Infer(
            request_id=number,
            digest=digest,
            k=request.k,
            budget_ms=request.budget_ms,
            image_size=view.image_size,
            encoding=view.encoding,
            traceparent=traceparent,
        )
        return encode(infer, view.pixels)

    def accept(
        self, device: str, k: int, reply: Result | FrameReply, now_s: float
    ) -> Buffer | None:
        """The member's crop."""
        if not isinstance(reply, Result):
            raise WireError(f"expected a Result, got a {type(reply).__name__}")
        return self._views[k].pixels

    def frames(self, arrived: Mapping[int, Arrival], now_s: float) -> FramesSeen | None:
        """None."""
        return None


class CameraQuestion:
    """A frame of each device's own camera, whose logits may be the same for hours."""

    def __init__(
        self, query: FrameQuery, suspects: Collection[str] = (), *, maps: bool = False
    ) -> None:
        """`suspects` are devices that are told that this client's own looks suspect them.

        With `maps`, the map of each one's anomaly head is asked for.
        """
        self._query, self._suspects, self._maps = query, suspects, maps
        #: Device -> the frame that it has seen.
        self._seen: dict[str, FrameSeen] = {}

    def message(
        self, number: int, digest: str, request: Request, now_s: float, traceparent: str = ""
    ) -> list[Buffer]:
        """A FrameRequest."""
        look = FrameRequest(
            request_id=number,
            digest=digest,
            k=request.k,
            budget_ms=request.budget_ms,
            ago_ms=self._query.ago_ms(now_s),
            within_ms=self._query.within_ms,
            suspect=request.device in self._suspects,
            traceparent=traceparent,
            wants_map=self._maps,
        )
        return encode(look)

    def accept(
        self, device: str, k: int, reply: Result | FrameReply, now_s: float
    ) -> Buffer | None:
        """None; keeps which frame it was."""
        if not isinstance(reply, FrameReply):
            raise WireError(f"expected a FrameReply, got a {type(reply).__name__}")
        self._seen[device] = FrameSeen(
            number=reply.frame,
            age_ms=reply.age_ms,
            heard_s=now_s,
            frozen=reply.frozen,
            suspected=reply.suspected,
        )
        return None

    def frames(self, arrived: Mapping[int, Arrival], now_s: float) -> FramesSeen | None:
        """Number and age of every frame."""
        return frames_of(self._seen, arrived, now_s)
