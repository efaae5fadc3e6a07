"""Bounds on a picture's header, checked before Pillow parses it.

Pillow parses every JPEG segment and PNG chunk while it opens a file, in Python, and joins Exif
segments in time quadratic in their number: 6 MB took 20 s of processor time.
"""

import io
from typing import BinaryIO

from mdp.errors import PictureError

#: Segments of a JPEG before its first scan; chunks of a PNG without pixels. Ordinary files have
#: fewer than 40; depth maps, colour profiles and captions are segments of 64 KB.
MAX_PARTS = 256
#: Bytes in these parts, and in the header of any other format.
MAX_HEADER_BYTES = 16 << 20
#: A JPEG's Exif segments, which are joined one by one. One is usual.
MAX_EXIF_SEGMENTS = 16
#: A PNG's colour profiles, each of which is inflated to as much as 1 MB. One is allowed.
MAX_PROFILES = 1
#: Bytes between a JPEG's segments, each of which costs a call.
MAX_FILL_BYTES = 1 << 20
#: Chunks of pixels in a PNG: with the usual 8 KB, more than the largest picture has.
MAX_DATA_CHUNKS = 200_000
#: Calls by which the header of another format is read.
MAX_READS = 8192
#: Formats that are decoded from memory are read in one call while they are opened.
MAX_WHOLE_BYTES = 256 << 20
#: Segments of a crop's JPEG: Pillow writes 9, other encoders up to 12.
MAX_CROP_SEGMENTS = 16

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_START_OF_SCAN, _APP0, _APP1 = 0xDA, 0xE0, 0xE1
#: Baseline and extended, Huffman coded.
_FRAMES = (0xC0, 0xC1)
_TABLES = (0xC4, 0xDB, 0xDD)
#: Markers without a length: restarts, start and end of image, and those that Pillow reads so.
_BARE = frozenset((*range(0xD0, 0xDA), *range(0xF0, 0xFE)))
_DATA_CHUNKS = frozenset((b"IDAT", b"fdAT", b"fcTL"))
_TOO_LARGE = f"expected at most {MAX_HEADER_BYTES >> 20} MiB besides the pixels"


class HeaderReader(io.BufferedReader):
    """A file whose reads are bounded until `release` is called."""

    def __init__(self, raw: io.FileIO | io.BytesIO) -> None:
        super().__init__(raw)
        self._bounded = True
        self._reads_left, self._bytes_left = MAX_READS, MAX_HEADER_BYTES

    def read(self, size: int | None = -1, /) -> bytes:
        """As `io.BufferedReader.read`; raises PictureError beyond the header's bounds."""
        if not self._bounded:
            return super().read(size)
        if size is None or size < 0:
            data = super().read(MAX_WHOLE_BYTES + 1)
            if len(data) > MAX_WHOLE_BYTES:
                raise PictureError(f"expected a file of at most {MAX_WHOLE_BYTES >> 20} MiB")
            return data
        data = super().read(min(size, self._bytes_left + 1))
        self._reads_left -= 1
        self._bytes_left -= len(data)
        if self._bytes_left < 0:
            raise PictureError(_TOO_LARGE)
        if self._reads_left < 0:
            raise PictureError(f"expected a header of at most {MAX_READS:,} parts")
        return data

    def release(self) -> None:
        """Remove the bounds."""
        self._bounded = False


def check_header(file: HeaderReader) -> None:
    """Raise PictureError if opening the file's picture would take too long or too much memory.

    JPEG and PNG are parsed here; of other formats, the reads are counted while Pillow opens them.
    """
    start = file.peek(len(_PNG))[: len(_PNG)]
    if not start.startswith((_JPEG, _PNG)):
        return
    file.release()
    file.seek(0)
    check = _check_jpeg if start.startswith(_JPEG) else _check_png
    check(file)
    file.seek(0)


def _check_jpeg(file: BinaryIO) -> None:
    file.seek(2)
    parts = exif = fill = 0
    marker_begins = False
    while byte := file.read(1):
        if byte == b"\xff" or not marker_begins:
            fill += marker_begins or byte != b"\xff"
            marker_begins = byte == b"\xff"
            if fill > MAX_FILL_BYTES:
                raise PictureError("expected a JPEG of at most 1 MiB between its segments")
            continue
        marker_begins = False
        if byte[0] == _START_OF_SCAN:
            return
        parts += 1
        if byte[0] and byte[0] not in _BARE:
            length = max(2, int.from_bytes(file.read(2), "big"))
            following = file.read(min(6, length - 2))
            exif += byte[0] == _APP1 and following == b"Exif\0\0"
            file.seek(length - 2 - len(following), io.SEEK_CUR)
        if parts > MAX_PARTS:
            raise PictureError(f"expected a JPEG of at most {MAX_PARTS} segments before its pixels")
        if exif > MAX_EXIF_SEGMENTS:
            raise PictureError(f"expected a JPEG of at most {MAX_EXIF_SEGMENTS} Exif segments")


def _check_png(file: BinaryIO) -> None:
    file.seek(len(_PNG))
    parts = profiles = data_chunks = total = 0
    while len(head := file.read(8)) == 8:
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        if kind == b"IEND":
            return
        if kind in _DATA_CHUNKS:
            data_chunks += 1
        else:
            parts, total = parts + 1, total + length
            profiles += kind == b"iCCP"
        if parts > MAX_PARTS:
            raise PictureError(f"expected a PNG of at most {MAX_PARTS} chunks besides its pixels")
        if profiles > MAX_PROFILES:
            raise PictureError(f"expected a PNG of at most {MAX_PROFILES} colour profile")
        if total > MAX_HEADER_BYTES:
            raise PictureError(_TOO_LARGE)
        if data_chunks > MAX_DATA_CHUNKS:
            raise PictureError(f"expected a PNG of at most {MAX_DATA_CHUNKS:,} chunks of pixels")
        file.seek(length + 4, io.SEEK_CUR)


def check_crop(data: bytes, image_size: int) -> None:
    """Raise PictureError unless `data` begins with a crop's JPEG header: size and segments."""
    if not data.startswith(_JPEG):
        raise PictureError("not a complete JPEG: cannot identify it as one")
    place, size = 2, None
    for _ in range(MAX_CROP_SEGMENTS):
        if len(data) < place + 4 or data[place] != 0xFF:
            raise PictureError("not a complete JPEG: its header is truncated or has gaps")
        marker, length = data[place + 1], int.from_bytes(data[place + 2 : place + 4], "big")
        if marker == _START_OF_SCAN:
            if size is None:
                raise PictureError("not a complete JPEG: a scan before its frame")
            return
        if marker in _FRAMES and size is None:
            height, width = (
                int.from_bytes(data[place + at : place + at + 2], "big") for at in (5, 7)
            )
            size = width, height
            if size != (image_size, image_size):
                raise PictureError(f"expected a JPEG of {image_size}x{image_size}, got {size}")
        elif marker != _APP0 and marker not in _TABLES:
            raise PictureError(
                "expected a JPEG of APP0, DQT, SOF, DHT, DRI and SOS segments only, "
                f"got one of 0xFF{marker:02X}"
            )
        place += 2 + length
    raise PictureError(f"expected a JPEG of at most {MAX_CROP_SEGMENTS} segments before its pixels")
