"""Picture -> one device's uint8 crop. The same code cuts the views for training and for serving.

A picture is turned upright (EXIF), laid on white where it is transparent, made RGB, and cut to
its centred square; a device's region is a box inside that square, resized to its image size.
"""

import io
import math
import os
import threading
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from mdp.errors import PictureError
from mdp.plan import Region

Pixels = NDArray[np.uint8]
Picture = str | os.PathLike[str] | Image.Image | Pixels

#: A larger picture is refused before its pixels are decoded.
MAX_PIXELS = 100_000_000
#: A pipe is read whole before it is decoded; so much holds MAX_PIXELS uncompressed.
MAX_PIPE_BYTES = 4 * MAX_PIXELS
#: Decoding a JPEG at a reduced scale keeps at least this many times the pixels asked for.
_OVERSAMPLING = 2
_JPEG_QUALITY = 92
#: Formats whose header says how many pixels will be decoded. Not among them: those that hold other
#: pictures (an ICO decodes them as it is opened, however large), and those that Pillow draws by
#: running another program.
COMMON_FORMATS = ("JPEG", "PNG", "GIF", "BMP", "PPM")
#: The same; which of them there are depends on Pillow's version, and asking costs it a moment.
OTHER_FORMATS = (
    "AVIF", "DDS", "DIB", "JPEG2000", "PCX", "QOI", "SGI", "TGA", "TIFF", "WEBP"
)  # fmt: skip
#: A JPEG may pass over all its pixels again with a dozen bytes. Progressive ones do so ten times;
#: a preview in its header counts as well.
MAX_SCANS = 100
_START_OF_SCAN = b"\xff\xda"
_CHUNK_BYTES = 1 << 20
#: Held while Pillow's process-wide limit is lifted; pictures are opened in several threads at once.
_LIMIT_LIFTED = threading.Lock()


def load_picture(source: Picture, *, smallest_side: int = 0) -> Image.Image | Pixels:
    """An upright RGB picture: Pillow's for files and Pillow images, the array itself for arrays.

    `smallest_side` lets a JPEG be decoded at a reduced scale that still has at least twice that
    many pixels on its shorter side; 0 decodes it whole. Raises PictureError.
    """
    if isinstance(source, np.ndarray):
        return _checked_array(source)
    if isinstance(source, Image.Image):
        return _usable(source, "the given picture", 0)
    if not isinstance(source, str | os.PathLike):
        kind = type(source).__name__
        raise PictureError(f"expected a path, a Pillow image or a uint8 array, got {kind}")
    try:
        with Path(source).open("rb") as opened:
            # Waiting for slow storage is done here, not under the lock that follows.
            opened.peek(1)
            file = opened if opened.seekable() else _read_whole(opened, str(source))
            with _open(file, str(source)) as picture:
                if picture.format in ("JPEG", "MPO"):
                    _check_scans(file, str(source))
                return _usable(picture, str(source), smallest_side)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise PictureError(f"{source}: {getattr(error, 'strerror', None) or error}") from error


def _read_whole(pipe: BinaryIO, name: str) -> BinaryIO:
    """The content of a pipe, which readers of pictures may go back in."""
    content = pipe.read(MAX_PIPE_BYTES + 1)
    if len(content) > MAX_PIPE_BYTES:
        raise PictureError(f"{name}: expected at most {MAX_PIPE_BYTES:,} bytes from a pipe")
    return io.BytesIO(content)


def _open(file: BinaryIO, name: str) -> Image.Image:
    """The picture in `file`, its header read only."""
    with _LIMIT_LIFTED:
        # Pillow's own limit warns below ours, which is checked next.
        limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
        try:
            return _of_known_format(file)
        except UnidentifiedImageError as error:
            raise PictureError(
                f"{name}: expected a picture, found no format that is read"
            ) from error
        except Exception as error:  # Pillow's readers raise what they like on broken files
            raise _broken(name, error) from error
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def _of_known_format(file: BinaryIO) -> Image.Image:
    try:
        return Image.open(file, formats=COMMON_FORMATS)
    except UnidentifiedImageError:
        Image.init()
        file.seek(0)
        return Image.open(file, formats=[name for name in OTHER_FORMATS if name in Image.OPEN])


def _usable(picture: Image.Image, name: str, smallest_side: int) -> Image.Image:
    """`picture` decoded, upright and RGB."""
    _check_size(picture, name)
    try:
        if smallest_side:
            side = smallest_side * _OVERSAMPLING
            picture.draft(None, (side, side))
        return _upright_rgb(picture)
    except Exception as error:  # as above; files are decoded here
        raise _broken(name, error) from error


def _broken(name: str, error: Exception) -> PictureError:
    reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return PictureError(f"{name}: cannot be decoded: {reason}")


def _check_size(picture: Image.Image, name: str) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise PictureError(f"{name}: expected at least 1x1 pixels, got {width}x{height}")
    if width * height > MAX_PIXELS:
        raise PictureError(f"{name}: expected at most {MAX_PIXELS:,} pixels, got {width}x{height}")


def _check_scans(file: BinaryIO, name: str) -> None:
    """Raise PictureError for a JPEG with more than MAX_SCANS passes; the file stays where it is."""
    place = file.tell()
    file.seek(0)
    scans, last = 0, b""
    while scans <= MAX_SCANS and (chunk := file.read(_CHUNK_BYTES)):
        scans += (last + chunk).count(_START_OF_SCAN)
        last = chunk[-1:] if chunk[-1:] == b"\xff" else b""
    file.seek(place)
    if scans > MAX_SCANS:
        raise PictureError(f"{name}: expected a JPEG of at most {MAX_SCANS} scans")


def _upright_rgb(picture: Image.Image) -> Image.Image:
    picture = ImageOps.exif_transpose(picture)
    if picture.mode == "RGB":
        picture.load()
        return picture
    if picture.mode.startswith(("I", "F")):
        # 16-bit and float greyscale would be clipped, not scaled, by convert().
        return Image.fromarray(_to_8_bit(np.asarray(picture))).convert("RGB")
    if picture.has_transparency_data:
        upper = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", upper.size, "white"), upper).convert("RGB")
    return picture.convert("RGB")


def _to_8_bit(values: NDArray[np.generic]) -> Pixels:
    """Scale 16-bit or float greyscale `[H, W]` to uint8 by its own type's or data's range."""
    wide = np.nan_to_num(values.astype(np.float64))
    top = 65535.0 if np.issubdtype(values.dtype, np.integer) else max(float(wide.max()), 1.0)
    return np.asarray(np.clip(wide / top, 0, 1) * 255, dtype=np.uint8)


def _checked_array(pixels: Pixels) -> Pixels:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise PictureError(
            f"expected a uint8 array [H, W, 3], got {pixels.dtype} {list(pixels.shape)}"
        )
    height, width = pixels.shape[:2]
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise PictureError(f"expected 1 to {MAX_PIXELS:,} pixels, got {width}x{height}")
    return pixels


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
    """Pixels that the whole centred square needs so that `region` is not enlarged to `image_size`.

    What is asked of `load_picture`, by training and serving alike.
    """
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
    """A view `[image_size, image_size, 3]` from a JPEG of one scan; raises PictureError."""
    data = bytes(data)
    scans = data.count(_START_OF_SCAN)
    if scans > 1:
        raise PictureError(f"expected a JPEG of one scan, got {scans}")
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as picture:
            if picture.size != (image_size, image_size):
                raise PictureError(
                    f"expected a JPEG of {image_size}x{image_size}, got {picture.size}"
                )
            return np.asarray(picture.convert("RGB"), dtype=np.uint8)
    except PictureError:
        raise
    except Exception as error:  # Pillow's readers raise what they like on broken files
        raise PictureError(f"not a complete JPEG: {error}") from error
