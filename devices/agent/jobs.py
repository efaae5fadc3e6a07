"""Admitted requests: where the reply goes, which bundle computes it, where its pixels come from."""

import numpy as np
from msgspec import Struct

from devices.agent.bundles import ServedBundle
from devices.camera.frames import FrameMatch
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels, decode_jpeg
from mdp.protocol.messages import Buffer, FrameReply, Infer, Result, pixels_of


class _Admitted(Struct, frozen=True, kw_only=True, eq=False):
    """Fields of every job; times are on the agent's clock."""

    #: Where the reply goes.
    route: bytes
    #: The client that fair queueing and quotas charge.
    client: str
    request_id: int
    #: The bundle that admitted it, and computes it.
    served: ServedBundle
    arrived_s: float
    deadline_s: float
    #: The caller's trace context; empty without one.
    traceparent: str = ""

    @property
    def digest(self) -> str:
        """Identity of the bundle."""
        return self.served.digest


class PictureJob(_Admitted, frozen=True, kw_only=True, eq=False):
    """A request for a crop that the client has sent."""

    infer: Infer
    buffer: Buffer

    @property
    def size_bytes(self) -> int:
        """Memory that it holds while it waits."""
        return len(self.buffer)

    @property
    def is_encoded(self) -> bool:
        """Tell whether `pixels` decodes a JPEG."""
        return self.infer.encoding == "jpeg"

    def pixels(self) -> Pixels:
        """The crop `[image_size, image_size, 3]`; raises PictureError."""
        if self.is_encoded:
            return decode_jpeg(bytes(self.buffer), self.infer.image_size)
        return pixels_of(self.infer, self.buffer)

    def reply(self, row: Contribution, *, queue_ms: float, compute_ms: float, rung: int) -> Result:
        """The header of the reply with `row`, which is of one picture."""
        return Result(
            request_id=self.request_id,
            num_classes=self.served.num_classes,
            queue_ms=queue_ms,
            compute_ms=compute_ms,
            rung=rung,
            anomaly=_score(row),
        )


class FrameJob(_Admitted, frozen=True, kw_only=True, eq=False):
    """A request for a frame of the agent's own camera, chosen when the request arrived."""

    frame: FrameMatch
    #: Whether the reply has the map of an anomaly head.
    wants_map: bool = False
    is_encoded = False

    @property
    def size_bytes(self) -> int:
        """Memory that it may hold while it waits: others may hold the same frame."""
        return self.frame.crop.nbytes

    def pixels(self) -> Pixels:
        """The crop `[image_size, image_size, 3]`."""
        return self.frame.crop

    def reply(
        self, row: Contribution, *, queue_ms: float, compute_ms: float, rung: int
    ) -> FrameReply:
        """The header of the reply with `row`, which is of one picture."""
        cells = row.anomaly_map if self.wants_map else None
        return FrameReply(
            request_id=self.request_id,
            num_classes=self.served.num_classes,
            queue_ms=queue_ms,
            compute_ms=compute_ms,
            frame=self.frame.number,
            age_ms=self.frame.age_ms,
            frozen=self.frame.frozen,
            suspected=self.frame.suspected,
            rung=rung,
            anomaly=_score(row),
            anomaly_map=b"" if cells is None else cells.tobytes(),
        )


Job = PictureJob | FrameJob


def _score(row: Contribution) -> float | None:
    """The anomaly score of one picture, None of a model without that head."""
    return None if row.anomaly is None else float(np.asarray(row.anomaly).item())
