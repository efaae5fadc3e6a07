"""Picture files that a camera, a scanner or a broken disk may hand over."""

import io
import struct
import zlib

import numpy as np
from PIL import Image

from mdp.pictures.crop import Pixels

#: One colour per corner: upper left, upper right, lower left, lower right.
CORNERS = ((200, 30, 30), (30, 200, 30), (30, 30, 200), (200, 200, 30))
ORIENTATION = 0x0112


def four_corners(height: int = 64, width: int = 96) -> Pixels:
    """A picture `[H, W, 3]` whose four quarters tell which way is up."""
    pixels = np.empty((height, width, 3), dtype=np.uint8)
    top, left = height // 2, width // 2
    for number, colour in enumerate(CORNERS):
        rows = slice(0, top) if number < 2 else slice(top, None)
        columns = slice(0, left) if number % 2 == 0 else slice(left, None)
        pixels[rows, columns] = colour
    return pixels


def encode_picture(picture: Image.Image | Pixels, format_: str, **options: object) -> bytes:
    """`picture` as the bytes of a file."""
    if not isinstance(picture, Image.Image):
        picture = Image.fromarray(picture)
    stream = io.BytesIO()
    picture.save(stream, format_, **options)
    return stream.getvalue()


def with_orientation(orientation: int) -> bytes:
    """A lossless picture that looks like `four_corners` once its orientation is obeyed."""
    turned = {
        1: None,
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }[orientation]
    picture = Image.fromarray(four_corners())
    stored = picture if turned is None else picture.transpose(turned)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encode_picture(stored, "PNG", exif=exif)


def chunk(kind: bytes, data: bytes = b"") -> bytes:
    """A chunk of a PNG."""
    checksum = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + checksum


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a hundred bytes whose header promises `width` x `height` pixels."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND")
    return b"\x89PNG\r\n\x1a\n" + body


def segment(marker: int, data: bytes) -> bytes:
    """A segment of a JPEG, 0xFF`marker`."""
    return struct.pack(">BBH", 0xFF, marker, 2 + len(data)) + data


def exif_segment(data: bytes) -> bytes:
    """A piece of a JPEG's Exif data; all pieces together are one."""
    return segment(0xE1, b"Exif\0\0" + data)


def with_segments(jpeg: bytes, *segments: bytes) -> bytes:
    """A JPEG with more segments before its pixels."""
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def exif_that_warns(tags: int) -> bytes:
    """Exif data of which Pillow warns once for each of `tags`, whose sizes are impossible."""
    entries = b"".join(struct.pack("<HHII", 256 + tag, 5, 99 + tag, 0xFFFF) for tag in range(tags))
    return exif_segment(b"II*\0\x08\0\0\0" + struct.pack("<H", tags) + entries + b"\0" * 4)


def jpeg_that_claims(width: int, height: int) -> bytes:
    """A small JPEG whose header promises `width` x `height` pixels."""
    data = bytearray(encode_picture(four_corners(), "JPEG"))
    frame_header = data.index(b"\xff\xc0")
    data[frame_header + 5 : frame_header + 9] = struct.pack(">HH", height, width)
    return bytes(data)


def icon_with(picture: bytes, side: int) -> bytes:
    """A Windows icon that claims to be `side` pixels wide and holds the PNG file `picture`."""
    entry = struct.pack("<BBBBHHII", side, side, 0, 0, 1, 32, len(picture), 22)
    return struct.pack("<HHH", 0, 1, 1) + entry + picture


def with_more_scans(jpeg: bytes, count: int) -> bytes:
    """A progressive JPEG with `count` empty scans more, of eleven bytes each."""
    scan = b"\xff\xda\x00\x08\x01\x01\x00\x01\x05\x02\x00"
    end = jpeg.rindex(b"\xff\xd9")
    return jpeg[:end] + scan * count + jpeg[end:]
