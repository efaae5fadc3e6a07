"""What a sub-model's messages cost on a link: bytes of each encoding, and milliseconds. Pure."""

from mdp.plan import Encoding
from mdp.profile import Link

_HEADS, _CHANNELS = 2, 3
#: Message header and ZeroMQ framing of one request or reply, estimated from the wire format.
FRAMING_BYTES = 400
#: Bytes of a JPEG crop of `mdp.crop.encode_jpeg` (quality 92): tables and headers, and per pixel.
#: Median over 24 photographs at 112 px; it was 0.54 at 32 px and 0.35 at 224 px.
JPEG_FIXED_BYTES, JPEG_BYTES_PER_PIXEL = 620.0, 0.40
#: Milliseconds to encode and decode one pixel of a JPEG crop: 2.4e-5 was measured with Pillow on
#: a Zen 4 server core at 112 px, doubled for small boards.
JPEG_MS_PER_PIXEL = 5e-5
#: A lossy encoding has to save at least this much to be worth what it costs in accuracy.
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


def network_ms(link: Link, image_size: int, num_classes: int, encoding: Encoding) -> float:
    """Milliseconds to send one crop, get its logits back and, for JPEG, code and decode it.

    Both directions count. Every device is taken to have its link to itself.
    """
    sent = request_bytes(image_size, encoding) + reply_bytes(num_classes)
    coding_ms = JPEG_MS_PER_PIXEL * image_size**2 if encoding == "jpeg" else 0.0
    return link.round_trip_s * 1e3 + sent * 8e3 / link.bandwidth_bps + coding_ms


def choose_encoding(link: Link, image_size: int, num_classes: int) -> Encoding:
    """Raw pixels, unless JPEG saves enough time on this link to be worth its loss."""
    raw = network_ms(link, image_size, num_classes, "raw")
    jpeg = network_ms(link, image_size, num_classes, "jpeg")
    return "jpeg" if raw - jpeg >= JPEG_MIN_SAVING_MS else "raw"
