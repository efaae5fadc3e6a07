"""Targets: pictures, from a user's disk and from a client."""

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image

from mdp.errors import PictureError
from mdp.formats.plan import Region
from mdp.pictures import crop as cropping
from mdp.pictures.crop import COMMON_FORMATS, OTHER_FORMATS, crop, decode_jpeg, load_picture
from tests.fuzz.target import Target, refuse, scratch
from tests.support.pictures import (
    chunk,
    encode_picture,
    exif_segment,
    four_corners,
    png_that_claims,
    segment,
    with_orientation,
    with_segments,
)

#: Instead of the product's 100,000,000: a picture of that size takes a second and 800 MB, whoever
#: made it; here it is about those that take more than their size allows.
MAX_PIXELS = 1_000_000
_SIDES = (0, 8, 32, 224)


def read_picture(data: bytes) -> bool:
    """A picture file, and the crop of it that a device gets; the first byte says how large."""
    if not data:
        return False
    path = scratch("picture") / "picture"
    path.write_bytes(data[1:])
    kept, cropping.MAX_PIXELS = cropping.MAX_PIXELS, MAX_PIXELS
    try:
        picture = load_picture(path, smallest_side=_SIDES[data[0] % len(_SIDES)])
        view = crop(picture, Region(left=0.1, right=0.6), 16)
    except PictureError as error:
        return refuse(error, path)
    finally:
        cropping.MAX_PIXELS = kept
    assert isinstance(picture, Image.Image)
    assert picture.mode == "RGB"
    assert view.shape == (16, 16, 3)
    assert view.dtype == np.uint8
    return True


def _pictures() -> Mapping[str, bytes]:
    picture = Image.fromarray(four_corners(12, 16))
    clear = picture.convert("RGBA")
    clear.putalpha(128)
    seeds = {
        "turned": with_orientation(6),
        "clear": encode_picture(clear, "PNG"),
        "palette": encode_picture(picture.quantize(8), "PNG", transparency=1),
        "wide": encode_picture(Image.fromarray(np.full((4, 4), 70_000, dtype=np.int32)), "TIFF"),
        "float": encode_picture(Image.fromarray(np.full((4, 4), 0.5, dtype=np.float32)), "TIFF"),
        "cmyk": encode_picture(picture.convert("CMYK"), "JPEG"),
        "progressive": encode_picture(picture, "JPEG", progressive=True),
        "segments": with_segments(
            encode_picture(picture, "JPEG"),
            exif_segment(b"II*\0\x08" + bytes(9)),
            segment(0xE2, b"ICC_PROFILE\0\1\1"),
            b"\xff",
        ),
        "chunks": encode_picture(picture, "PNG")[:-12]
        + chunk(b"tEXt", b"k\0v") * 3
        + chunk(b"IEND"),
    }
    for name in (*COMMON_FORMATS, *OTHER_FORMATS):
        stream = io.BytesIO()
        try:
            picture.save(stream, name)
        except (KeyError, OSError):
            # Formats that this Pillow reads only, or has not at all.
            continue
        seeds[name.lower()] = stream.getvalue()
    return {name: b"\0" + data for name, data in seeds.items()}


def read_jpeg(data: bytes) -> bool:
    """A client's JPEG; the first byte is the image size that its message announces."""
    if not data:
        return False
    side = 1 + data[0] % 64
    try:
        view = decode_jpeg(data[1:], side)
    except PictureError as error:
        return refuse(error)
    assert view.shape == (side, side, 3)
    assert view.dtype == np.uint8
    return True


def _jpegs() -> Mapping[str, bytes]:
    view = Image.fromarray(four_corners(16, 16))
    seeds = {
        "colour": encode_picture(view, "JPEG"),
        "grey": encode_picture(view.convert("L"), "JPEG"),
        "optimised": encode_picture(view, "JPEG", optimize=True),
        "fine": encode_picture(view, "JPEG", quality=100, subsampling=0),
        "restarts": encode_picture(view, "JPEG", restart_marker_blocks=1),
    }
    return {name: bytes([15]) + data for name, data in seeds.items()}


_MARKERS = tuple(bytes([0xFF, 0xC0 + number]) for number in range(0x30))

TARGETS = (
    Target(
        name="jpeg",
        read=read_jpeg,
        seeds=_jpegs,
        share=0.02,
        words=(*_MARKERS, b"JFIF\0", b"Exif\0\0", b"Adobe"),
    ),
    Target(
        name="picture",
        read=read_picture,
        seeds=_pictures,
        share=0.01,
        words=(
            *(b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"IDAT", b"acTL", b"fcTL", b"NETSCAPE2.0"),
            *(b"RIFF", b"WEBPVP8L", b"ftypavif", b"II*\0", b"MM\0*", b"P6", b"P5 9 9 65535\n"),
            png_that_claims(30_000, 30_000)[8:33],
        ),
        growth_bytes=256 * 2**20,
    ),
)
