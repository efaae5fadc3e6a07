"""Decodes JPEGs by libjpeg-turbo itself (simplejpeg), where that is installed.

Pillow has the same library inside, and the pixels are the same; it takes longer, which
docs/results/serving.md measures. Unusual files are decoded by Pillow, which says what is wrong.
"""

from typing import BinaryIO

from PIL import Image

try:
    import simplejpeg
except ImportError:
    simplejpeg = None

#: Larger files and pictures take their memory twice here, and gain little.
_MOST_BYTES = 8 << 20
_MOST_PIXELS = 4_000_000


def decode_quickly(picture: Image.Image, file: BinaryIO | None) -> Image.Image | None:
    """The pixels of `picture`, which `file` was opened as, at the scale it was set to, in RGB.

    Returns None for what Pillow has to decode: other formats and colours, large pictures, and
    files with anything to warn of, as they are where their pixels end early. Moves the position.
    """
    usual = picture.format in ("JPEG", "MPO") and picture.mode in ("RGB", "L")
    width, height = picture.size
    if simplejpeg is None or file is None or not usual or width * height > _MOST_PIXELS:
        return None
    place = file.tell()
    file.seek(0)
    content = file.read(_MOST_BYTES + 1)
    # Pillow goes on from here where this returns None.
    file.seek(place)
    if len(content) > _MOST_BYTES:
        return None
    try:
        # The smallest scale that has so many pixels is the one that Pillow has set.
        pixels = simplejpeg.decode_jpeg(content, "RGB", min_height=height, min_width=width)
    except ValueError:
        return None
    return Image.fromarray(pixels) if pixels.shape == (height, width, 3) else None
