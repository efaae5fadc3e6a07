"""A picture -> every member's crop of it, as it travels."""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from mdp.formats.plan import Assignment, Encoding, Region
from mdp.pictures.crop import Picture, crop, encode_jpeg, load_picture, side_for
from mdp.protocol.messages import Buffer

#: An array up to this many pixels is cut faster than a thread is started to do it.
QUICK_PIXELS = 1_000_000


def is_quick(picture: Picture) -> bool:
    """Whether a picture's views are cut in the calling thread."""
    return isinstance(picture, np.ndarray) and picture.size <= 3 * QUICK_PIXELS


class View(Struct, frozen=True):
    """One member's crop as it travels."""

    image_size: int
    encoding: Encoding
    pixels: Buffer


class Cutter:
    """Cuts pictures for the members of `assignments` (by k), of whom many may want the same view.

    Who wants which is worked out once: for 64 that want the same, asking anew for every picture
    took 74 us.
    """

    def __init__(self, assignments: Mapping[int, Assignment]) -> None:
        self._wanted: dict[tuple[Region, int, Encoding], list[int]] = {}
        for k, assignment in assignments.items():
            view = assignment.region, assignment.spec.image_size, assignment.encoding
            self._wanted.setdefault(view, []).append(k)
        self._finest = max(side_for(region, size) for region, size, _ in self._wanted)

    def views(self, picture: Picture) -> dict[int, View]:
        """Every member's view of `picture`, equal ones cut once; raises PictureError."""
        loaded = load_picture(picture, smallest_side=self._finest)
        views: dict[int, View] = {}
        for (region, size, encoding), members in self._wanted.items():
            pixels = crop(loaded, region, size)
            buffer = encode_jpeg(pixels) if encoding == "jpeg" else pixels.data.cast("B")
            views.update(dict.fromkeys(members, View(size, encoding, buffer)))
        return views
