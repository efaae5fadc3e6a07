"""Refuses a PNG or JPEG whose compressed pixels end before its last row.

Of these formats, Pillow takes such an end for that of the picture, and the rest is black in a PNG
and grey in a JPEG; of all others it says so. A picture is looked at more closely only where its
last row is of that colour.
"""

import io
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdp.errors import PictureError

#: Adam7's passes: first column, first row, steps from one column and row to the next.
_PASSES = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)
)  # fmt: skip
#: The pixels that libjpeg puts in the place of missing ones.
_FILLED = 128
_END_OF_IMAGE = b"\xff\xd9"
#: Behind the data, as the Huffman decoder reads some bytes ahead.
_LOOK_AHEAD = bytes(16)
_MOST_JPEG_BYTES = 256 << 20
#: Samples of a pixel by colour type.
_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_READ_BYTES = 1 << 16
#: Of the inflated pixels, which are only counted, so many are held at a time.
_HELD_BYTES = 1 << 20


def check_complete(picture: Image.Image, file: BinaryIO) -> None:
    """Raise PictureError if the loaded `picture` of `file` lacks rows; moves the position."""
    if picture.format == "PNG":
        _check_png(picture, file)
    elif picture.format in ("JPEG", "MPO"):
        _check_jpeg(picture, file)


def _check_png(picture: Image.Image, file: BinaryIO) -> None:
    """Inflate the data once more where the last row has zeros only, or is not decoded last."""
    interlaced = "interlace" in picture.info
    if not interlaced and _last_row(picture).any():
        return
    header = next(_contents(file, b"IHDR"))
    pixel_bits = header[8] * _SAMPLES[header[9]]
    expected = _data_bytes(*picture.size, pixel_bits, interlaced=interlaced)
    found = _count_inflated(_contents(file, b"IDAT"), expected)
    if found < expected:
        raise PictureError(f"its data end after {100 * found // expected} % of its pixels")


def _last_row(picture: Image.Image) -> NDArray[Any]:
    return np.asarray(picture.crop((0, picture.height - 1, *picture.size)))


def _check_jpeg(picture: Image.Image, file: BinaryIO) -> None:
    """Decode a grey end once more, up to the marker of its end alone.

    Without that marker libjpeg waits for more, and fills nothing. It would wait also for the one
    behind several scans, which are therefore not looked at.
    """
    if picture.mode not in ("L", "RGB") or (_last_row(picture) != _FILLED).any():
        return
    file.seek(0)
    content = file.read(_MOST_JPEG_BYTES)
    scan = _first_scan(content)
    end = content.find(_END_OF_IMAGE, scan)
    if scan < 0 or end < 0 or content[scan + 4] != len(picture.getbands()):
        return
    again = Image.open(io.BytesIO(content[:end] + _LOOK_AHEAD), formats=["JPEG"])
    again.draft(again.mode, (1, 1))
    with suppress(OSError):
        again.load()
    # What has been decoded by then.
    again.tile = []
    if not _last_row(again).any():
        raise PictureError("its data end before its last rows")


def _first_scan(jpeg: bytes) -> int:
    """The place where the first scan of a baseline JPEG begins; -1 for any other."""
    place, baseline = 2, False
    while jpeg[place : place + 1] == b"\xff" and len(jpeg) > place + 4:
        marker = jpeg[place + 1]
        if marker == 0xDA:
            return place if baseline else -1
        if not 0xC0 <= marker < 0xFF:
            return -1
        baseline |= marker in (0xC0, 0xC1)
        place += 2 + int.from_bytes(jpeg[place + 2 : place + 4], "big")
    return -1


def _data_bytes(width: int, height: int, pixel_bits: int, *, interlaced: bool) -> int:
    """Bytes of the pixels before compression: each row of each pass, and a byte for its filter."""
    total = 0
    for left, top, across, down in _PASSES if interlaced else ((0, 0, 1, 1),):
        columns, rows = -(-(width - left) // across), -(-(height - top) // down)
        if columns > 0 and rows > 0:
            total += rows * (1 + -(-columns * pixel_bits // 8))
    return total


def _count_inflated(compressed: Iterator[bytes], most: int) -> int:
    """Count the bytes that the pieces `compressed` inflate to, up to `most` or little more."""
    inflater = zlib.decompressobj()
    total = 0
    try:
        for given in compressed:
            piece = given
            while piece and total < most:
                total += len(inflater.decompress(piece, _HELD_BYTES))
                piece = inflater.unconsumed_tail
            if total >= most or inflater.eof:
                return total
        return total + len(inflater.flush())
    except zlib.error:
        # Pillow has read as much as it needs, and refuses data that are damaged before that.
        return most


def _contents(file: BinaryIO, wanted: bytes) -> Iterator[bytes]:
    """The content of the chunks of the kind `wanted`, piece by piece."""
    file.seek(8)
    while len(head := file.read(8)) == 8 and head[4:] != b"IEND":
        left = int.from_bytes(head[:4], "big")
        while head[4:] == wanted and left and (piece := file.read(min(left, _READ_BYTES))):
            left -= len(piece)
            yield piece
        file.seek(left + 4, io.SEEK_CUR)
