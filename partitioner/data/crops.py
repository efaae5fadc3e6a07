"""Pictures -> arrays of one device's crops, cut by the code that serves and kept on disk."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdp.errors import InputError, PictureError
from mdp.files import replacing_folder
from mdp.formats.plan import Assignment, Encoding, Region
from mdp.pictures.crop import Pixels, crop, decode_jpeg, encode_jpeg, load_picture, side_for
from partitioner.data.datasets import PictureSet, Source
from partitioner.data.memmaps import new_array
from partitioner.regions import WHOLE
from partitioner.run.progress import Progress

#: Pictures handed to the threads at a time; Ctrl-C is noticed in between.
_CHUNK = 256
#: So many broken pictures an error names; `UnreadablePictures.reasons` has them all.
NAMED = 20


class UnreadablePictures(PictureError):
    """Pictures of a data set that cannot be decoded: `reasons` names each, and why."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        more = "" if len(reasons) <= NAMED else f"; and {len(reasons) - NAMED:,} more"
        listed = "; ".join(self.reasons[:NAMED]) + more
        count = f"{len(reasons):,} pictures cannot be read: " if len(reasons) > 1 else ""
        super().__init__(f"{count}{listed}")


@dataclass(frozen=True, slots=True)
class View:
    """The part of a picture that one device sees."""

    image_size: int
    region: Region = WHOLE
    encoding: Encoding = "raw"
    #: Whose picture of a scene; None for pictures without scenes.
    camera: str | None = None

    @property
    def name(self) -> str:
        """The view in a file's name."""
        box = self.region
        region = "-".join(f"{edge:g}" for edge in (box.left, box.top, box.right, box.bottom))
        camera = f"-{self.camera}" if self.camera else ""
        return f"{self.image_size}px-{region}-{self.encoding}{camera}"


def view_of(assignment: Assignment) -> View:
    """The view that a plan gives to one device."""
    return View(
        assignment.spec.image_size, assignment.region, assignment.encoding, assignment.camera
    )


def single_view_of(assignment: Assignment) -> View:
    """The same for pictures that are no longer in scenes."""
    return replace(view_of(assignment), camera=None)


def picture_of(source: Source, camera: str | None) -> Path | Pixels:
    """The picture that `camera` took of a scene; without scenes the picture itself.

    Raises InputError where one is given without the other.
    """
    if not isinstance(source, Mapping):
        if camera is None:
            return source
        raise InputError(f"expected scenes with pictures of camera {camera!r}, got single pictures")
    if camera is None:
        raise InputError("expected the name of a camera for each sub-model: the data has scenes")
    return source[camera]


def cut(picture: Image.Image | Pixels, view: View) -> Pixels:
    """One view `[S, S, 3]` of a loaded picture, as the device will get it."""
    pixels = crop(picture, view.region, view.image_size)
    if view.encoding == "jpeg":
        return decode_jpeg(encode_jpeg(pixels), view.image_size)
    return pixels


def load_views(
    pictures: PictureSet, views: Sequence[View], folder: Path, progress: Progress, what: str
) -> list[NDArray[np.uint8]]:
    """Arrays `[N, S, S, 3]`, memory-mapped, one per view; missing ones are cut first.

    Views that one client cuts from one decoded picture are given together: a JPEG is decoded as
    coarsely as the finest of them allows. Raises UnreadablePictures naming every file that is none.
    """
    smallest_side = max(side_for(view.region, view.image_size) for view in views)
    paths = {view: folder / _file_name(pictures, view, smallest_side) for view in views}
    missing = {view: path for view, path in paths.items() if not path.exists()}
    if missing:
        _cut_all(pictures, missing, smallest_side, progress, what)
    return [np.load(paths[view], mmap_mode="r") for view in views]


def views_file(pictures: PictureSet, views: Sequence[View], folder: Path, view: View) -> Path:
    """The file of one of some `views` that are loaded together."""
    smallest_side = max(side_for(one.region, one.image_size) for one in views)
    return folder / _file_name(pictures, view, smallest_side)


def _file_name(pictures: PictureSet, view: View, smallest_side: int) -> str:
    return f"views-{pictures.digest[:16]}-{view.name}-{smallest_side}.npy"


def _cut_all(
    pictures: PictureSet, paths: dict[View, Path], smallest_side: int, progress: Progress, what: str
) -> None:
    """Decode every picture once and write every view of it; files appear when all is done."""
    count = len(pictures)
    broken: dict[int, str] = {}
    with ExitStack() as stack:
        arrays = {}
        for view, path in paths.items():
            shape = (count, view.image_size, view.image_size, 3)
            arrays[view] = stack.enter_context(new_array(path, np.uint8, shape))
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=os.cpu_count()))
        advance = stack.enter_context(progress.task(f"cutting {count:,} pictures, {what}", count))

        by_camera = {
            camera: {view: array for view, array in arrays.items() if view.camera == camera}
            for camera in {view.camera for view in arrays}
        }

        def work(index: int) -> None:
            for camera, some in by_camera.items():
                source = picture_of(pictures.sources[index], camera)
                try:
                    picture = load_picture(source, smallest_side=smallest_side)
                except PictureError as error:
                    broken[index] = str(error)
                    return
                for view, array in some.items():
                    array[index] = cut(picture, view)

        for chunk in _chunks(count):
            for _ in pool.map(work, chunk):
                pass
            advance(len(chunk), "")
        if broken:
            raise UnreadablePictures([broken[index] for index in sorted(broken)])


def _chunks(count: int) -> Iterator[range]:
    for start in range(0, count, _CHUNK):
        yield range(start, min(start + _CHUNK, count))


def write_tree(
    pictures: PictureSet, labels: Sequence[str], folder: Path, progress: Progress
) -> None:
    """Write a split as a class-per-folder tree: files are copied, arrays become PNGs.

    Raises InputError when `folder` exists and is not empty.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: expected a new or empty folder, found something there")
    with (
        replacing_folder(folder) as temporary,
        progress.task(f"writing {len(pictures):,} pictures", len(pictures)) as advance,
    ):
        for name, source in zip(pictures.names, pictures.sources, strict=True):
            target = temporary / name
            target.parent.mkdir(parents=True, exist_ok=True)
            picture = picture_of(source, None)
            if isinstance(picture, Path):
                target.write_bytes(picture.read_bytes())
            else:
                Image.fromarray(picture).save(target, format="PNG")
            advance(1, "")
