"""Scenes: a folder per class, in it one per scene, in it a picture per camera."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdp.errors import InputError
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import SPLITS, open_dataset
from partitioner.run.progress import Progress

CAMERAS = ("front", "side")


def grey(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), level, np.uint8)).save(path)


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """Twelve scenes of each of two classes: the front is N, the side 100 + N grey."""
    for c, label in enumerate(("a", "b")):
        for n in range(12):
            grey(tmp_path / label / f"{n:02d}" / "front.png", 12 * c + n)
            grey(tmp_path / label / f"{n:02d}" / "side.png", 100 + 12 * c + n)
    return tmp_path


def test_a_scene_falls_into_one_split_and_each_member_sees_its_camera(
    scenes: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = open_dataset(str(scenes), cameras=CAMERAS)
    assert sorted(name for split in SPLITS for name in data.split(split).names) == [
        f"{label}/{n:02d}" for label in "ab" for n in range(12)
    ]
    views = [View(8, camera=camera) for camera in ("side", "front")]
    cache = tmp_path_factory.mktemp("cache")
    side, front = load_views(data.train, views, cache, Progress(), "train")
    expected = [12 * "ab".index(name[0]) + int(name[2:]) for name in data.train.names]
    assert front[:, 0, 0, 0].tolist() == expected
    assert side[:, 0, 0, 0].tolist() == [100 + level for level in expected]


def test_scenes_without_one_of_the_cameras_are_left_out_and_counted(scenes: Path) -> None:
    whole = open_dataset(str(scenes), cameras=CAMERAS)
    for n in (3, 4):
        (scenes / "a" / f"{n:02d}" / "side.png").unlink()
    data = open_dataset(str(scenes), cameras=CAMERAS)
    assert data.incomplete == {"side": 2}
    assert data.remark == f"{scenes}: scenes for training alone: 2 without 'side'"
    assert sum(len(data.split(split)) for split in SPLITS) == 22
    # One camera alone has them all; other pictures make another digest.
    front = open_dataset(str(scenes), cameras=["front"])
    assert (front.incomplete, sum(len(front.split(split)) for split in SPLITS)) == ({}, 24)
    assert len({d.train.digest for d in (whole, data, front)}) == 3


@pytest.mark.parametrize(
    ("odd", "cameras", "expected"),
    [
        ("a/99.png", CAMERAS, "a/99.png: expected a folder for each scene, found a picture"),
        ("a/03/front.jpg", CAMERAS, "front.png: camera 'front' has another picture there: front"),
        (None, ("front", "top"), r"expected scenes with a picture each of front, top, found none "
         r"among 12 \(cameras there: front, side\)"),
    ],
)  # fmt: skip
def test_what_is_no_scene_is_named(
    scenes: Path, odd: str | None, cameras: tuple[str, ...], expected: str
) -> None:
    if odd is not None:
        grey(scenes / odd, 0)
    with pytest.raises(InputError, match=expected):
        open_dataset(str(scenes), cameras=cameras)


def test_cameras_need_scenes_and_scenes_need_cameras(scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="digits: expected a folder of scenes"):
        open_dataset("digits", cameras=["front"])
    for data, view, expected in (
        (open_dataset(str(scenes), cameras=CAMERAS), View(8), "expected the name of a camera"),
        (open_dataset(str(scenes)), View(8, camera="front"), "expected scenes with pictures of"),
    ):
        with pytest.raises(InputError, match=expected):
            load_views(data.test, [view], tmp_path / "cache", Progress(), "test")
