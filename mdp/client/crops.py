"""A picture -> every member's crop of it, as it travels."""

from collections.abc import Mapping

import numpy as np
from msgspec import Struct

from mdp.errors import InputError
from mdp.formats.plan import Assignment, Encoding, Region
from mdp.pictures.crop import Picture, crop, encode_jpeg, load_picture, side_for
from mdp.protocol.messages import Buffer

#: Pictures that the cameras of one scene took, by the cameras' names.
Scene = Mapping[str, Picture]
PictureOrScene = Picture | Scene
#: An array up to this many pixels is cut faster than a thread is started to do it.
QUICK_PIXELS = 1_000_000


def is_quick(picture: PictureOrScene) -> bool:
    """Tell whether a picture's views are cut in the calling thread."""
    return isinstance(picture, np.ndarray) and picture.size <= 3 * QUICK_PIXELS


class SentCrop(Struct, frozen=True):
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
        #: By camera, None where all members see one picture.
        self._wanted: dict[str | None, dict[tuple[Region, int, Encoding], list[int]]] = {}
        for k, assignment in assignments.items():
            view = assignment.region, assignment.spec.image_size, assignment.encoding
            self._wanted.setdefault(assignment.camera, {}).setdefault(view, []).append(k)
        self._finest = {
            camera: max(side_for(region, size) for region, size, _ in wanted)
            for camera, wanted in self._wanted.items()
        }

    def views(self, picture: PictureOrScene) -> dict[int, SentCrop]:
        """Every member's view of `picture`, equal ones cut once; raises PictureError.

        Raises InputError for one picture where members have cameras, a scene where they have none,
        and a scene that lacks a camera.
        """
        views: dict[int, SentCrop] = {}
        for camera, picture_of_camera in self._by_camera(picture).items():
            loaded = load_picture(picture_of_camera, smallest_side=self._finest[camera])
            for (region, size, encoding), members in self._wanted[camera].items():
                pixels = crop(loaded, region, size)
                if isinstance(loaded, np.ndarray) and np.may_share_memory(pixels, loaded):
                    # The caller may fill its array anew before this is sent, or sent again.
                    pixels = pixels.copy()
                buffer = encode_jpeg(pixels) if encoding == "jpeg" else pixels.data.cast("B")
                views.update(dict.fromkeys(members, SentCrop(size, encoding, buffer)))
        return views

    def _by_camera(self, picture: PictureOrScene) -> dict[str | None, Picture]:
        if not isinstance(picture, Mapping):
            if None in self._wanted:
                return {None: picture}
            raise InputError(
                f"expected a picture of each camera ({', '.join(map(str, self._wanted))}), got one "
                "picture; `look` asks the devices' own cameras"
            )
        if None in self._wanted:
            raise InputError("expected one picture, got one of each camera: the bundle names none")
        absent = [camera for camera in self._wanted if camera not in picture]
        if absent:
            raise InputError(f"expected a picture of each camera, got none of {absent[0]}")
        return {camera: picture[str(camera)] for camera in self._wanted}
