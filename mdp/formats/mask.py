"""mask.toml: what of a camera's picture may leave its device."""

from pathlib import Path
from typing import Annotated

from msgspec import Meta, field

from mdp.files import Record, read_toml, write_toml
from mdp.formats.profile import Fraction

#: Smallest share of the picture's side that a region may have.
LEAST_REGION = 0.05
MAX_HIDDEN = 32
#: Of a picture, in pixels.
PictureSide = Annotated[int, Meta(ge=1, le=65_535)]


class PictureBox(Record, frozen=True):
    """A box inside a picture, as fractions of its width and height."""

    left: Fraction = 0.0
    top: Fraction = 0.0
    right: Fraction = 1.0
    bottom: Fraction = 1.0

    def __post_init__(self) -> None:
        if not (self.left < self.right and self.top < self.bottom):
            raise ValueError("a box needs `left` < `right` and `top` < `bottom`")


class CameraMask(Record, frozen=True):
    """The part of a camera's picture that is used, and boxes in it that nobody may see."""

    #: Of the picture that the mask was drawn on, in pixels. It fits pictures of this shape.
    width: PictureSide
    height: PictureSide
    #: The rest is cut off.
    region: PictureBox = PictureBox()
    #: Black from the moment that the camera gave the picture.
    hidden: Annotated[list[PictureBox], Meta(max_length=MAX_HIDDEN)] = field(default_factory=list)

    def __post_init__(self) -> None:
        region = self.region
        if min(region.right - region.left, region.bottom - region.top) < LEAST_REGION:
            raise ValueError(f"`region`: expected at least {LEAST_REGION:g} of each side")

    def fits(self, width: int, height: int) -> bool:
        """Tell whether a picture has the shape of the one that the mask was drawn on.

        Cameras' pictures are decoded at several sizes; sides may be rounded by a pixel each.
        """
        return abs(width * self.height - height * self.width) <= self.width + self.height


def read_mask(path: Path) -> CameraMask:
    """The mask in a file; raises ConfigError."""
    return read_toml(path, CameraMask)


def write_mask(path: Path, mask: CameraMask) -> None:
    """Write a mask's file atomically; raises InputError."""
    write_toml(path, mask)
