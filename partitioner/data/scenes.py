"""The pictures of scenes one by one, and a teacher's answers to all that show one scene."""

import hashlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from partitioner.data.datasets import Dataset, PictureSet, Source
from partitioner.run.settings import TeacherViews

if TYPE_CHECKING:
    # The command line asks this module about a data set without torch.
    from partitioner.data.memmaps import Array, Index

#: Cameras, at most, that single pictures are taken to be of.
_LIKELY = 16
#: Share of the views that are dropped when a scene's answers are fused.
DROPPED = 0.5


@dataclass(frozen=True, slots=True)
class Places:
    """Camera and scene of each of the single pictures `[P]` of a split."""

    cameras: tuple[str, ...]
    #: Index of each picture's camera, ascending.
    camera: "Index"
    #: Index of each picture's scene in the split.
    scene: "Index"

    def of(self, camera: str | None) -> slice:
        """The pictures of one camera; all for None."""
        if camera is None:
            return slice(None)
        begin, end = np.searchsorted(self.camera, self.cameras.index(camera) + np.arange(2))
        return slice(int(begin), int(end))


def places(scenes: PictureSet, cameras: Sequence[str]) -> Places:
    """Places that `single_pictures` gives each picture of `scenes`."""
    found = [
        (number, row)
        for number, camera in enumerate(cameras)
        for row, source in enumerate(scenes.sources)
        if isinstance(source, Mapping) and camera in source
    ]
    columns = np.array(found, dtype=np.int64).reshape(-1, 2)
    return Places(tuple(cameras), columns[:, 0], columns[:, 1])


def single_pictures(data: Dataset) -> Dataset:
    """`data` with every picture of a scene by itself, a camera's after those of the one before.

    Splits stay: no two of them have pictures of one scene; pictures of no class are left out.
    Without scenes `data` itself.
    """
    if not data.cameras:
        return data
    return replace(
        data,
        train=_singles(data.train, data.cameras),
        calibration=_singles(data.calibration, data.cameras),
        test=_singles(data.test, data.cameras),
        cameras=(),
        unknown=None,
        unknown_test=None,
    )


def _singles(scenes: PictureSet, cameras: Sequence[str]) -> PictureSet:
    where = places(scenes, cameras)
    sources: list[Source] = []
    names = []
    for number, row in zip(where.camera.tolist(), where.scene.tolist(), strict=True):
        scene = scenes.sources[row]
        assert isinstance(scene, Mapping)
        sources.append(scene[cameras[number]])
        names.append(f"{scenes.names[row]}/{cameras[number]}")
    return PictureSet(
        sources=sources,
        names=tuple(names),
        targets=scenes.targets[where.scene],
        digest=hashlib.sha256(f"{scenes.digest} one by one".encode()).hexdigest(),
    )


def fuse_answers(
    answers: "Array", where: Places, random: np.random.Generator | None = None
) -> NDArray[np.float32]:
    """Mean of the logits `[P, C]` of each scene's pictures, `[N, C]`.

    Up to a constant of each scene it is that of log-probabilities. `random` drops a share
    `DROPPED` of the pictures from them, at most all but one of a scene.
    """
    count = int(where.scene.max()) + 1
    drawn = np.ones(len(answers)) if random is None else random.random(len(answers))
    highest = np.zeros(count)
    np.maximum.at(highest, where.scene, drawn)
    total = np.zeros((count, answers.shape[1]), dtype=np.float32)
    counted = np.zeros((count, 1), dtype=np.float32)
    for camera in where.cameras:
        # A camera has at most one picture of a scene.
        rows = where.of(camera)
        scene, draw = where.scene[rows], drawn[rows]
        kept = (draw >= DROPPED) | (draw == highest[scene])
        total[scene[kept]] += answers[rows][kept]
        counted[scene[kept]] += 1
    # A scene without any picture has no row that is asked for.
    fused: NDArray[np.float32] = np.divide(total, np.maximum(counted, 1), dtype=np.float32)
    return fused


def taught(
    answers: "Array", where: Places, part: slice, wanted: TeacherViews, random: np.random.Generator
) -> "Array":
    """Targets of a sub-model `[B, C]`, of a teacher's centred logits `[P, C]`.

    `part` are the pictures that it is trained on. The views of a scene are fused without a part of
    them, which `random` draws.
    """
    own = answers[part]
    if wanted == "own":
        return own
    fused = fuse_answers(answers, where, random)[where.scene[part]]
    return fused if wanted == "fused" else (fused + own) / 2


def remark_on(data: Dataset) -> str:
    """One line about what was left out, or was not read as scenes; empty where that is nothing."""
    names = ", ".join(likely_cameras(data))
    unnamed = (
        f"{data.source}: looks like scenes of {names}, but pictures of one scene may fall into "
        "different splits: name the cameras (build --camera, or `camera` in models.toml)"
    )
    return "; ".join(filter(None, (data.remark, unnamed if names else "")))


def likely_cameras(data: Dataset) -> list[str]:
    """Names under which single pictures look like those of cameras in a folder for each scene."""
    folders = _stems_by_folder(data)
    names = set[str]().union(*folders.values())
    several = sum(len(found) > 1 for found in folders.values())
    likely = len(names) <= _LIKELY < len(folders) < 2 * several
    return sorted(names) if likely and not data.cameras else []


def are_cameras(names: Collection[str], data: Dataset) -> bool:
    """Tell whether single pictures are called so, and most folders have those of several names."""
    folders = _stems_by_folder(data)
    found = [stems & set(names) for stems in folders.values()]
    several = sum(len(some) > 1 for some in found)
    return set(names) <= set[str]().union(*found) and len(folders) < 2 * several


def _stems_by_folder(data: Dataset) -> dict[str, set[str]]:
    """Names of the pictures in each folder below a class; none where some class has none."""
    folders = defaultdict[str, set[str]](set)
    for name in (*data.train.names, *data.calibration.names, *data.test.names):
        path = PurePosixPath(name)
        if len(path.parts) < 3:
            return {}
        folders[str(path.parent)].add(path.stem)
    return folders
