"""A camera's picture without what its mask hides. Pure."""

import math

import numpy as np
from PIL import Image

from mdp.errors import AgentError
from mdp.formats.mask import CameraMask, PictureBox
from mdp.pictures.sources import Pixels

_BLACK = (0, 0, 0)


class MaskError(AgentError):
    """A mask and a picture that do not belong together."""


def check_fits(mask: CameraMask, width: int, height: int) -> None:
    """Raise MaskError unless a picture of this size has the mask's shape."""
    if not mask.fits(width, height):
        raise MaskError(
            f"a picture of {width}x{height}: expected the shape of the mask's, "
            f"{mask.width}x{mask.height}: draw the mask anew"
        )


def size_of(picture: Image.Image | Pixels) -> tuple[int, int]:
    """Width and height in pixels."""
    if isinstance(picture, Image.Image):
        return picture.size
    return picture.shape[1], picture.shape[0]


def mask_picture(picture: Image.Image | Pixels, mask: CameraMask) -> Image.Image | Pixels:
    """A copy that is cut to the mask's region, black in its hidden boxes; raises MaskError.

    The picture is RGB: Pillow's, or uint8 [height, width, 3]. A pixel that a hidden box touches is
    black, and one that the region's border divides is kept.
    """
    width, height = size_of(picture)
    check_fits(mask, width, height)
    left, top, right, bottom = _pixels(mask.region, width, height)
    boxes = [_pixels(box, width, height) for box in mask.hidden]
    inside = [
        (max(a, left) - left, max(b, top) - top, min(c, right) - left, min(d, bottom) - top)
        for a, b, c, d in boxes
        if max(a, left) < min(c, right) and max(b, top) < min(d, bottom)
    ]
    if isinstance(picture, Image.Image):
        cut = picture.crop((left, top, right, bottom))
        for box in inside:
            cut.paste(_BLACK, box)
        return cut
    pixels: Pixels = np.array(picture[top:bottom, left:right])
    for a, b, c, d in inside:
        pixels[b:d, a:c] = 0
    return pixels


def side_before(side: int, mask: CameraMask) -> int:
    """The shorter side that a picture needs, so that `side` pixels are left of it in the region."""
    region = mask.region
    return math.ceil(side / min(region.right - region.left, region.bottom - region.top))


def _pixels(box: PictureBox, width: int, height: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom in pixels, rounded outwards; at least one pixel."""
    left = min(math.floor(box.left * width), width - 1)
    top = min(math.floor(box.top * height), height - 1)
    right = max(math.ceil(box.right * width), left + 1)
    bottom = max(math.ceil(box.bottom * height), top + 1)
    return left, top, min(right, width), min(bottom, height)
