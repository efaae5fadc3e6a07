"""Picture -> one device's uint8 crop. The same code cuts the views for training and for serving.

A picture is turned upright (EXIF), laid on white where it is transparent, made RGB, and cut to
its centred square; a device's region is a box inside that square, resized to its image size.
"""

import io
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from mdp.errors import PictureError
from mdp.plan import Region

Pixels = NDArray[np.uint8]
Picture = str | os.PathLike[str] | Image.Image | Pixels

#: A larger picture is refused before its pixels are decoded.
MAX_PIXELS = 100_000_000
#: Decoding a JPEG at a reduced scale keeps at least this many times the pixels asked for.
_OVERSAMPLING = 2
_JPEG_QUALITY = 92


def load_picture(source: Picture, *, smallest_side: int = 0) -> Image.Image | Pixels:
    """An upright RGB picture: Pillow's for files and Pillow images, the array itself for arrays.

    `smallest_side` lets a JPEG be decoded at a reduced scale that still has at least twice that
    many pixels on its shorter side; 0 decodes it whole. Raises PictureError.
    """
    if isinstance(source, np.ndarray):
        return _checked_array(source)
    if isinstance(source, Image.Image):
        _check_size(source, "the given picture")
        return _upright_rgb(source)
    path = Path(source)
    try:
        with path.open("rb") as file:
            return _decode(file, path, smallest_side)
    except OSError as error:
        if isinstance(error, UnidentifiedImageError):
            raise PictureError(
                f"{path}: expected a picture, found no format Pillow knows"
            ) from error
        raise PictureError(f"{path}: {error.strerror or error}") from error


def _decode(file: object, path: Path, smallest_side: int) -> Image.Image:
    # Pillow's own limit is process-wide and warns below ours, which is checked right here.
    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None
    try:
        with Image.open(file) as picture:  # type: ignore[arg-type]
            _check_size(picture, str(path))
            if smallest_side:
                side = smallest_side * _OVERSAMPLING
                picture.draft(None, (side, side))
            return _upright_rgb(picture)
    except (SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise PictureError(f"{path}: not a complete picture: {error}") from error
    finally:
        Image.MAX_IMAGE_PIXELS = limit


def _check_size(picture: Image.Image, name: str) -> None:
    width, height = picture.size
    if width < 1 or height < 1:
        raise PictureError(f"{name}: expected at least 1x1 pixels, got {width}x{height}")
    if width * height > MAX_PIXELS:
        raise PictureError(f"{name}: expected at most {MAX_PIXELS:,} pixels, got {width}x{height}")


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


def crop(picture: Image.Image | Pixels, region: Region, image_size: int) -> Pixels:
    """One device's view `[image_size, image_size, 3]` of a picture from `load_picture`."""
    width, height = (
        picture.size if isinstance(picture, Image.Image) else (picture.shape[1], picture.shape[0])
    )
    box = region_box(width, height, region)
    if box == (0, 0, image_size, image_size) and isinstance(picture, np.ndarray):
        return np.ascontiguousarray(picture)
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
    """A view `[image_size, image_size, 3]` from JPEG bytes; raises PictureError."""
    try:
        with Image.open(io.BytesIO(data), formats=["JPEG"]) as picture:
            if picture.size != (image_size, image_size):
                raise PictureError(
                    f"expected a JPEG of {image_size}x{image_size}, got {picture.size}"
                )
            return np.asarray(picture.convert("RGB"), dtype=np.uint8)
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise PictureError(f"not a complete JPEG: {error}") from error
