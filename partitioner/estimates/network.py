"""Network time of a sub-model's messages: bytes by encoding, link, and the client's port.

All crops of a picture leave interleaved through the client's one network port (measured:
docs/lab-log.md). Only when all have left is predictable, so each counts as the last one.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from mdp.formats.plan import Encoding
from mdp.formats.profile import NetworkLink

_HEADS, _CHANNELS = 2, 3
#: Message header and ZeroMQ framing of one request or reply, estimated from the wire format.
FRAMING_BYTES = 400
#: Bytes of a JPEG crop of `mdp.pictures.crop.encode_jpeg` (quality 92): tables and headers, and per
#: pixel. Median over 24 photographs at 112 px; it was 0.54 at 32 px and 0.35 at 224 px.
JPEG_FIXED_BYTES, JPEG_BYTES_PER_PIXEL = 620.0, 0.40
#: Milliseconds to encode and decode one pixel of a JPEG crop: 2.4e-5 was measured with Pillow on
#: a Zen 4 server core at 112 px, doubled for small boards.
JPEG_MS_PER_PIXEL = 5e-5
#: Least saving of the lossy encoding.
JPEG_MIN_SAVING_MS = 2.0


def request_bytes(image_size: int, encoding: Encoding) -> float:
    """Bytes of one request: the crop as raw uint8 RGB, or estimated as JPEG, and its framing."""
    pixels = image_size * image_size
    if encoding == "raw":
        return _CHANNELS * pixels + FRAMING_BYTES
    return JPEG_FIXED_BYTES + JPEG_BYTES_PER_PIXEL * pixels + FRAMING_BYTES


def reply_bytes(num_classes: int) -> float:
    """Bytes of one reply: both heads' fp32 logits and the framing."""
    return _HEADS * num_classes * 4 + FRAMING_BYTES


def network_ms(link: NetworkLink, image_size: int, num_classes: int, encoding: Encoding) -> float:
    """Milliseconds to send one crop, receive its logits and, for JPEG, encode and decode it.

    Without other crops on the link: see `waits_ms`.
    """
    sent = request_bytes(image_size, encoding) + reply_bytes(num_classes)
    coding_ms = JPEG_MS_PER_PIXEL * image_size**2 if encoding == "jpeg" else 0.0
    return link.round_trip_s * 1e3 + sent * 8e3 / link.bandwidth_bps + coding_ms


def look_ms(link: NetworkLink, num_classes: int) -> float:
    """Milliseconds to ask a device what its camera sees, and receive the logits."""
    sent = FRAMING_BYTES + reply_bytes(num_classes)
    return link.round_trip_s * 1e3 + sent * 8e3 / link.bandwidth_bps


def fetch_ms(owner: NetworkLink, link: NetworkLink, image_size: int) -> float:
    """Milliseconds to fetch a picture from another device's camera.

    As JPEG, twice as wide as high at most; over both devices' links to the client, at most.
    """
    sent = 2 * request_bytes(image_size, "jpeg")
    trips_ms = (owner.round_trip_s + link.round_trip_s) * 1e3
    coding_ms = 2 * JPEG_MS_PER_PIXEL * image_size**2
    return trips_ms + sent * 8e3 / min(owner.bandwidth_bps, link.bandwidth_bps) + coding_ms


def choose_encoding(link: NetworkLink, image_size: int, num_classes: int) -> Encoding:
    """Raw pixels, unless JPEG saves `JPEG_MIN_SAVING_MS` on this link."""
    raw = network_ms(link, image_size, num_classes, "raw")
    jpeg = network_ms(link, image_size, num_classes, "jpeg")
    return "jpeg" if raw - jpeg >= JPEG_MIN_SAVING_MS else "raw"


def waits_ms(sizes_bytes: Sequence[float], bandwidth_bps: float) -> list[float]:
    """Milliseconds that each of the crops sent at once waits for all others.

    In whole microseconds; 0 for a port without limit.
    """
    sizes = np.array(sizes_bytes, dtype=np.float64)
    return [float(wait) for wait in wait_ms(sizes.sum() - sizes, bandwidth_bps)]


def wait_ms(others_bytes: NDArray[np.float64], bandwidth_bps: float) -> NDArray[np.float64]:
    """Milliseconds `[n]` that crops wait for others of these bytes, in whole microseconds."""
    waits: NDArray[np.float64] = np.round(np.maximum(others_bytes, 0.0) * 8e3 / bandwidth_bps, 3)
    return waits


def through_port(link: NetworkLink, bandwidth_bps: float) -> NetworkLink:
    """A device's link, no faster than the client's port."""
    return msgspec.structs.replace(link, bandwidth_bps=min(link.bandwidth_bps, bandwidth_bps))
