"""Picture -> one device's uint8 crop, in training and in serving.

A picture is turned upright (EXIF), composited on white, converted to RGB and cropped to its centred
square; a device's region is a box inside that square, resized to its image size.
"""

import io
import math
import os
import struct
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from mdp.errors import PictureError
from mdp.formats.plan import Region
from mdp.pictures.complete import check_complete
from mdp.pictures.decoders import memory_for
from mdp.pictures.headers import HeaderReader, check_crop, check_header
from mdp.pictures.jpeg import decode_quickly
from mdp.pictures.sources import EXPECTED, TensorLike, array_of, name_of, reader_of
from mdp.pictures.sources import MAX_PIXELS as MAX_PIXELS
from mdp.pictures.sources import Picture as Picture
from mdp.pictures.sources import Pixels as Pixels

#: Decoding a JPEG at a reduced scale keeps at least this many times the pixels asked for.
_OVERSAMPLING = 2
_JPEG_QUALITY = 92
#: Formats whose header has the number of pixels: without containers (an ICO is decoded as it is
#: opened, however large), and formats that Pillow renders by another program.
COMMON_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM")
#: The same; available in some versions of Pillow, whose `Image.init` is slow.
OTHER_FORMATS = (
    "AVIF", "DDS", "DIB", "JPEG2000", "PCX", "QOI", "SGI", "TGA", "TIFF", "WEBP"
)  # fmt: skip
#: Scans of a JPEG: a dozen bytes make one, which passes over all pixels. Progressive ones have ten;
#: those of a preview count too.
MAX_SCANS = 100
_START_OF_SCAN = b"\xff\xda"
#: Large pictures have fewer scans: at most so many pixels in all, but so many scans.
MAX_SCANNED_PIXELS = 2_000_000_000
MAX_SCANS_OF_LARGE = 20
_CHUNK_BYTES = 1 << 20
#: By which Pillow's readers recognise a format.
_MAGIC_BYTES = 16
#: Larger pictures are reduced by whole factors before they are resized.
LARGE_PIXELS = 16_000_000
_REDUCED_OVERSAMPLING = 3
_BAND_PIXELS = 1_000_000
#: Bytes a pixel during decoding, by default 4; more for readers that make copies.
_PIXEL_BYTES = {"AVIF": 10, "JPEG2000": 20, "WEBP": 16}
#: The most memory of a picture: 42 to 85 MP in these formats.
MAX_DECODED_BYTES = 850_000_000
#: By Exif orientation, as `ImageOps.exif_transpose` turns, which copies what needs no turning.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# Pillow warns of every broken tag, on a standard error that may block. The application's filters
# come first, and Pillow's limit of pixels still warns.
warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.", append=True)


def load_picture(source: Picture, *, smallest_side: int = 0) -> Image.Image | Pixels:
    """An upright RGB picture: Pillow's, or for an array or tensor of three channels an array.

    `smallest_side` lets a JPEG be decoded at a reduced scale that still has at least twice that
    many pixels on its shorter side, and a picture above 16 MP be reduced to at least three times
    as many; 0 keeps it whole. Raises PictureError.
    """
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, Image.Image):
        return _usable(source, "the given picture", smallest_side)
    if isinstance(source, TensorLike):
        return _from_array(array_of(source))
    encoded = isinstance(source, str | os.PathLike | bytes | bytearray | memoryview)
    if not encoded and not hasattr(source, "read"):
        raise PictureError(f"{EXPECTED}, got {type(source).__name__}")
    name = name_of(source)
    try:
        with reader_of(source) as file, _open(file, name) as picture:
            file.release()
            passes_bytes = 0
            if picture.format in ("JPEG", "MPO"):
                _check_scans(file, name, picture.width * picture.height)
                passes_bytes = _draft(picture, smallest_side)
            return _usable(picture, name, smallest_side, passes_bytes, file)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PictureError(f"{name}: {getattr(error, 'strerror', None) or error}") from error


def _open(file: HeaderReader, name: str) -> Image.Image:
    """The picture in `file`, its header read only."""
    try:
        check_header(file)
        return _of_known_format(file)
    except PictureError as error:
        raise PictureError(f"{name}: {error}") from error
    except UnidentifiedImageError as error:
        raise PictureError(f"{name}: expected a picture, found no format that is read") from error
    except Exception as error:  # Pillow's readers raise any type on broken files
        raise _decoding_error(name, error) from error


def _of_known_format(file: HeaderReader) -> Image.Image:
    """As `Image.open`, without the check of its process-wide limit, which warns below ours."""
    start = file.peek(_MAGIC_BYTES)[:_MAGIC_BYTES]
    Image.preinit()
    for name in (*COMMON_FORMATS, None, *OTHER_FORMATS):
        if name is None:
            Image.init()
        elif name in Image.OPEN:
            factory, accepts = Image.OPEN[name]
            # These errors of a reader mean another format.
            with suppress(SyntaxError, IndexError, TypeError, struct.error):
                if accepts is None or accepts(start) is True:
                    file.seek(0)
                    return factory(file, "")
    raise UnidentifiedImageError


def _draft(picture: Image.Image, smallest_side: int) -> int:
    """Decode a JPEG at a reduced scale; returns the bytes of a progressive one's coefficients."""
    width, height = picture.size
    if smallest_side and width * height <= MAX_PIXELS:
        side = smallest_side * _OVERSAMPLING
        picture.draft(None, (side, side))
    return width * height * len(picture.getbands()) * 2 if "progressive" in picture.info else 0


def _usable(
    picture: Image.Image,
    name: str,
    smallest_side: int,
    passes_bytes: int = 0,
    file: BinaryIO | None = None,
) -> Image.Image:
    """`picture`, of `file` if that is known, decoded, upright and RGB."""
    _check_size(picture, name)
    needed_bytes = passes_bytes
    needed_bytes += picture.width * picture.height * _PIXEL_BYTES.get(picture.format or "", 4)
    if needed_bytes > MAX_DECODED_BYTES:
        raise PictureError(
            f"{name}: expected at most {MAX_DECODED_BYTES // 10**6} MB while it is decoded, got "
            f"{needed_bytes // 10**6} MB for {picture.width}x{picture.height} {picture.format}"
        )
    try:
        with memory_for(needed_bytes):
            decoded = decode_quickly(picture, file)
            if decoded is None:
                picture.load()
                if file is not None:
                    check_complete(picture, file)
            # Some formats have it behind the pixels.
            turn = _TURNS.get(picture.getexif().get(ExifTags.Base.Orientation, 1))
            return _upright_rgb(decoded or picture, turn, smallest_side)
    except Exception as error:  # as above; files are decoded here
        raise _decoding_error(name, error) from error


def _decoding_error(name: str, error: Exception) -> PictureError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return PictureError(f"{name}: cannot be decoded: {reason}")


def _check_size(picture: Image.Image, name: str) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise PictureError(f"{name}: expected at least 1x1 pixels, got {width}x{height}")
    if width * height > MAX_PIXELS:
        raise PictureError(f"{name}: expected at most {MAX_PIXELS:,} pixels, got {width}x{height}")


def _check_scans(file: BinaryIO, name: str, pixels: int) -> None:
    """Raise PictureError for a JPEG with too many scans; keeps the file's position."""
    most = min(MAX_SCANS, max(MAX_SCANS_OF_LARGE, MAX_SCANNED_PIXELS // max(1, pixels)))
    place = file.tell()
    file.seek(0)
    scans, last = 0, b""
    while scans <= most and (chunk := file.read(_CHUNK_BYTES)):
        scans += (last + chunk).count(_START_OF_SCAN)
        last = chunk[-1:] if chunk[-1:] == b"\xff" else b""
    file.seek(place)
    if scans > most:
        raise PictureError(f"{name}: expected a JPEG of at most {most} scans")


def _upright_rgb(
    picture: Image.Image, turn: Image.Transpose | None, smallest_side: int
) -> Image.Image:
    factor = 1
    if smallest_side and picture.width * picture.height > LARGE_PIXELS:
        factor = max(1, min(picture.size) // (smallest_side * _REDUCED_OVERSAMPLING))
    picture = _reduce_rgb(picture, factor) if factor > 1 else _rgb(picture, _top(picture))
    if turn is not None:
        picture = picture.transpose(turn)
        # Not to be turned again.
        picture.info = {}
    return picture


def _reduce_rgb(picture: Image.Image, factor: int) -> Image.Image:
    """`picture` in RGB, a `factor`-th as wide and high; converted band by band to save memory."""
    width, height = picture.size
    top = _top(picture)
    reduced = Image.new("RGB", (-(-width // factor), -(-height // factor)))
    for band, place in _bands(picture, factor):
        reduced.paste(_rgb(band, top).reduce(factor), (0, place // factor))
    return reduced


def _bands(picture: Image.Image, factor: int) -> Iterator[tuple[Image.Image, int]]:
    """Bands of `picture`, each a multiple of `factor` high, and where they begin."""
    width, height = picture.size
    rows = max(1, _BAND_PIXELS // (width * factor)) * factor
    for place in range(0, height, rows):
        yield picture.crop((0, place, width, min(height, place + rows))), place


def _top(picture: Image.Image) -> float:
    """The value of white in 16-bit or float greyscale."""
    if not picture.mode.startswith("F"):
        return 65535.0
    return max(
        1.0, *(float(np.nan_to_num(np.asarray(band)).max()) for band, _ in _bands(picture, 1))
    )


def _rgb(picture: Image.Image, top: float) -> Image.Image:
    if picture.mode == "RGB":
        return picture
    if picture.mode.startswith(("I", "F")):
        # 16-bit and float greyscale would be clipped, not scaled, by convert().
        return Image.fromarray(_to_8_bit(np.asarray(picture), top)).convert("RGB")
    if picture.has_transparency_data:
        upper = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", upper.size, "white"), upper).convert("RGB")
    return picture.convert("RGB")


def _to_8_bit(values: NDArray[np.generic], top: float) -> Pixels:
    """Greyscale `[H, W]` of up to `top` as uint8."""
    wide = np.nan_to_num(values.astype(np.float64))
    return np.asarray(np.clip(wide / top, 0, 1) * 255, dtype=np.uint8)


def _from_array(pixels: Pixels) -> Image.Image | Pixels:
    """RGB pixels `[H, W, 3]` unchanged; grey and RGBA pixels converted to RGB."""
    grey_or_colour = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[2] in (1, 3, 4))
    if pixels.dtype != np.uint8 or not grey_or_colour:
        raise PictureError(
            "expected a uint8 array [H, W], [H, W, 1], [H, W, 3] or [H, W, 4], got "
            f"{pixels.dtype} {list(pixels.shape)}"
        )
    height, width = pixels.shape[:2]
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise PictureError(f"expected 1 to {MAX_PIXELS:,} pixels, got {width}x{height}")
    if pixels.ndim == 3 and pixels.shape[2] == 3:
        return pixels
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2:] == (1,) else pixels)
    return _rgb(picture, _top(picture))


def region_box(width: int, height: int, region: Region) -> tuple[float, float, float, float]:
    """The box (left, top, right, bottom), in pixels, that `region` cuts from a picture."""
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return (
        left + region.left * side,
        top + region.top * side,
        left + region.right * side,
        top + region.bottom * side,
    )


def side_for(region: Region, image_size: int) -> int:
    """Side of the centred square, in pixels, in which `region` has `image_size` pixels."""
    share = min(region.right - region.left, region.bottom - region.top)
    return max(image_size, math.ceil(image_size / share))


def crop(picture: Image.Image | Pixels, region: Region, image_size: int) -> Pixels:
    """One device's view `[image_size, image_size, 3]` of a picture from `load_picture`."""
    width, height = (
        picture.size if isinstance(picture, Image.Image) else (picture.shape[1], picture.shape[0])
    )
    box = region_box(width, height, region)
    if box == (0, 0, image_size, image_size) and isinstance(picture, np.ndarray):
        return np.ascontiguousarray(picture[:image_size, :image_size])
    if not isinstance(picture, Image.Image):
        picture = Image.fromarray(picture)
    view = picture.resize(
        (image_size, image_size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0
    )
    return np.asarray(view, dtype=np.uint8)


def encode_jpeg(view: Pixels) -> bytes:
    """A view `[H, W, 3]` as JPEG, for devices on a slow link."""
    stream = io.BytesIO()
    Image.fromarray(view).save(stream, "JPEG", quality=_JPEG_QUALITY)
    return stream.getvalue()


def decode_jpeg(data: bytes | memoryview, image_size: int) -> Pixels:
    """A view `[image_size, image_size, 3]` from a JPEG of one scan; raises PictureError.

    Segments that a crop does not need are refused, as Pillow parses them slowly.
    """
    data = bytes(data)
    scans = data.count(_START_OF_SCAN)
    if scans > 1:
        raise PictureError(f"expected a JPEG of one scan, got {scans}")
    check_crop(data, image_size)
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as picture:
            return np.asarray(picture.convert("RGB"), dtype=np.uint8)
    except Exception as error:  # Pillow's readers raise any type on broken files
        raise PictureError(f"not a complete JPEG: {error}") from error
