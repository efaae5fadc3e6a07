"""Scenes: a folder per class, in it one per scene, in it a picture per camera."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdp.errors import InputError
from partitioner.cli.tables import print_data
from partitioner.data import datasets
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import SPLITS, open_dataset
from partitioner.data.scenes import (
    Places,
    fuse_answers,
    likely_cameras,
    places,
    remark_on,
    single_pictures,
    taught,
)
from partitioner.run.progress import Progress
from partitioner.run.settings import TeacherViews

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


def test_scenes_without_one_of_the_cameras_are_for_training_alone(scenes: Path) -> None:
    whole = open_dataset(str(scenes), cameras=CAMERAS)
    for n in (3, 4):
        (scenes / "a" / f"{n:02d}" / "side.png").unlink()
    data = open_dataset(str(scenes), cameras=CAMERAS)
    assert data.incomplete == {"side": 2}
    assert data.remark == f"{scenes}: scenes of which nothing is measured: 2 without 'side'"
    partial = [n for n, scene in zip(data.train.names, data.train.sources, strict=True)
               if isinstance(scene, Mapping) and len(scene) < 2]  # fmt: skip
    assert partial == ["a/03", "a/04"]
    assert sum(len(data.split(split)) for split in SPLITS) == 24
    # Other splits are as if the two were not there, and a limit leaves them out first.
    for n in (3, 4):
        (scenes / "a" / f"{n:02d}" / "front.png").rename(scenes / f"{n}.png")
    without = open_dataset(str(scenes), cameras=CAMERAS)
    assert [without.split(s).digest for s in SPLITS[1:]] == [
        data.split(s).digest for s in SPLITS[1:]
    ]
    for n in (3, 4):
        (scenes / f"{n}.png").rename(scenes / "a" / f"{n:02d}" / "front.png")
    limited = open_dataset(str(scenes), cameras=CAMERAS, limit_train=12)
    assert not {"a/03", "a/04"} & set(limited.train.names)
    # One camera alone has them all; other pictures make another digest.
    front = open_dataset(str(scenes), cameras=["front"])
    assert (front.incomplete, sum(len(front.split(split)) for split in SPLITS)) == ({}, 24)
    assert len({d.train.digest for d in (whole, data, front)}) == 3


def test_fewer_cameras_split_what_was_found_before_and_read_no_folder(
    scenes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (scenes / "a" / "03" / "side.png").unlink()
    expected = open_dataset(str(scenes), cameras=["front"], limit_train=14)
    both = open_dataset(str(scenes), cameras=CAMERAS, limit_train=14)
    monkeypatch.delattr(datasets, "_list_folder")
    assert both.for_cameras(["side", "front", "side"]) is both
    front = both.for_cameras(["front"])
    # Whole now, the scene without a side may be in any split.
    assert both.incomplete == {"side": 1}
    assert (front.incomplete, front.cameras) == ({}, ("front",))
    for split in SPLITS:
        assert front.split(split).digest == expected.split(split).digest
        assert front.split(split).sources == expected.split(split).sources


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


def test_two_scenes_of_a_class_are_too_few(scenes: Path) -> None:
    for n in range(2, 12):
        shutil.rmtree(scenes / "b" / f"{n:02d}")
    expected = (
        f"{scenes}: class 'b' has 2 scenes with a picture of every camera, expected at least 3 so "
        "that one can be held out"
    )
    for cameras in (CAMERAS, ("front",)):
        with pytest.raises(InputError) as error:
            open_dataset(str(scenes), cameras=cameras)
        assert str(error.value) == expected
    # As many single pictures would do.
    assert open_dataset(str(scenes)).labels == ("a", "b")


def test_a_class_with_one_camera_alone_is_refused(scenes: Path) -> None:
    for n in range(12):
        (scenes / "b" / f"{n:02d}" / "side.png").unlink()
    with pytest.raises(InputError) as error:
        open_dataset(str(scenes), cameras=CAMERAS)
    assert str(error.value) == (
        f"{scenes / 'b'}: expected scenes with a picture each of front, side, found none among 12 "
        "(cameras there: front)"
    )
    # That camera alone has both classes; whole scenes of it are few, others are many.
    assert open_dataset(str(scenes), cameras=["front"]).incomplete == {}
    grey(scenes / "b" / "03" / "side.png", 9)
    with pytest.raises(InputError, match="class 'b' has 1 scene with a picture of every camera, "):
        open_dataset(str(scenes), cameras=CAMERAS)


def test_a_folder_of_no_class_alone_is_refused(tmp_path: Path) -> None:
    for n in range(4):
        for camera in CAMERAS:
            grey(tmp_path / "unknown" / f"{n:02d}" / f"{camera}.png", n)
    with pytest.raises(InputError) as error:
        open_dataset(str(tmp_path), cameras=CAMERAS)
    assert str(error.value) == (
        f"{tmp_path}: expected at least 2 class folders, found none beside 'unknown', whose "
        "pictures are of no class"
    )


def test_scenes_of_no_class_need_every_camera(scenes: Path) -> None:
    for n in range(5):
        for camera in CAMERAS:
            grey(scenes / "unknown" / f"{n:02d}" / f"{camera}.png", n)
    (scenes / "unknown/03/side.png").unlink()
    data = open_dataset(str(scenes), cameras=CAMERAS)
    assert data.labels == ("a", "b")
    assert data.unknown is not None
    assert data.unknown_test is not None
    there = {*data.unknown.names, *data.unknown_test.names}
    assert there == {f"unknown/{n:02d}" for n in (0, 1, 2, 4)}
    assert set(data.incomplete) <= {"side"}
    single = single_pictures(data)
    assert (single.unknown, single.unknown_test) == (None, None)


def test_a_scene_s_pictures_may_have_unequal_sizes(scenes: Path, tmp_path: Path) -> None:
    wide = np.full((30, 50, 3), 200, np.uint8)
    for label in "ab":
        for n in range(12):
            Image.fromarray(wide).save(scenes / label / f"{n:02d}" / "side.png")
    data = open_dataset(str(scenes), cameras=CAMERAS)
    views = [View(8, camera=camera) for camera in CAMERAS]
    front, side = load_views(data.train, views, tmp_path / "cache", Progress(), "train")
    assert front.shape == side.shape == (len(data.train), 8, 8, 3)
    assert (side == 200).all()
    assert (front < 24).all()


def test_cameras_need_scenes_and_scenes_need_cameras(scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="digits: expected a folder of scenes"):
        open_dataset("digits", cameras=["front"])
    for data, view, expected in (
        (open_dataset(str(scenes), cameras=CAMERAS), View(8), "expected the name of a camera"),
        (open_dataset(str(scenes)), View(8, camera="front"), "expected scenes with pictures of"),
    ):
        with pytest.raises(InputError, match=expected):
            load_views(data.test, [view], tmp_path / "cache", Progress(), "test")


def test_partial_scenes_of_the_test_folder_are_not_trained_on(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for label in "ab":
            for n in range(3):
                for camera in CAMERAS:
                    grey(tmp_path / "two" / split / label / f"{split}{n}" / f"{camera}.png", n)
    (tmp_path / "two/test/a/test1/side.png").unlink()
    data = open_dataset(str(tmp_path / "two"), cameras=CAMERAS)
    names = {split: len(data.split(split)) for split in SPLITS}
    assert names == {"train": 4, "calibration": 2, "test": 5}


def test_single_pictures_are_in_the_order_of_cameras_and_scenes(scenes: Path) -> None:
    (scenes / "a/03/front.png").unlink()
    data = open_dataset(str(scenes), cameras=CAMERAS)
    single, where = single_pictures(data).train, places(data.train, data.cameras)
    side = where.of("side")
    assert where.of("front").stop == side.start == len(data.train) - 1
    assert len(single) == len(range(len(single))[side]) + side.start == 2 * len(data.train) - 1
    assert [data.train.names[row] for row in where.scene[side]] == list(data.train.names)
    for row, name in enumerate(single.names):
        assert name.startswith(data.train.names[where.scene[row]])
        assert str(single.sources[row]).endswith(f"{name}.png")
        assert single.targets[row] == data.train.targets[where.scene[row]]
    plain = open_dataset("digits", limit_train=20, limit_test=10)
    assert single_pictures(plain) is plain


#: Three scenes: the first with both cameras, then one of each.
WHERE = Places(CAMERAS, np.array([0, 0, 1, 1]), np.array([0, 1, 0, 2]))
ANSWERS = np.array([[1, -1], [2, -2], [3, -3], [4, -4]], dtype=np.float16)


def test_answers_are_fused_over_the_views_that_are_there() -> None:
    assert fuse_answers(ANSWERS, WHERE)[:, 0].tolist() == [2, 2, 4]
    random = np.random.default_rng(0)
    drawn = np.stack([fuse_answers(ANSWERS, WHERE, random)[:, 0] for _ in range(60)])
    # A scene of two views has either or both, one of one view has that one.
    assert {float(value) for value in drawn[:, 0]} == {1, 2, 3}
    assert np.unique(drawn[:, 1:], axis=0).tolist() == [[2, 4]]


def test_a_sub_model_learns_the_answers_that_were_asked_for() -> None:
    def learnt(wanted: TeacherViews, part: slice) -> list[float]:
        answers = taught(ANSWERS, WHERE, part, wanted, np.random.default_rng(3))
        return [float(value) for value in answers[:, 0]]

    front, side = WHERE.of("front"), WHERE.of("side")
    fused = fuse_answers(ANSWERS, WHERE, np.random.default_rng(3))[:, 0].tolist()
    assert learnt("own", front) == [1, 2]
    assert (learnt("fused", front), learnt("fused", side)) == (fused[:2], [fused[0], fused[2]])
    assert learnt("both", side) == [(3 + fused[0]) / 2, 4]
    # One shared network learns all pictures.
    assert learnt("fused", WHERE.of(None)) == [fused[0], fused[1], fused[0], fused[2]]


def test_single_pictures_that_look_like_scenes_are_noticed(
    scenes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = open_dataset(str(scenes))
    assert likely_cameras(data) == ["front", "side"]
    # Said by `mdp-partition data`, as by build, assemble and evaluate.
    print_data(data)
    assert capsys.readouterr().out.splitlines()[-1] == remark_on(data)
    assert remark_on(data).startswith(f"{scenes}: looks like scenes of front, side, but")
    assert likely_cameras(open_dataset(str(scenes), cameras=CAMERAS)) == []
    for folder in scenes.glob("*/*"):
        # Names of their own: pictures that are merely sorted into folders.
        for file in folder.glob("*.png"):
            file.rename(folder / f"{folder.parent.name}-{folder.name}-{file.name}")
    assert likely_cameras(open_dataset(str(scenes))) == []


def test_pictures_of_a_camera_that_no_device_has_are_counted(scenes: Path) -> None:
    data = open_dataset(str(scenes), cameras=["front"])
    assert data.remark == f"{scenes}: pictures that no device uses: 24 of camera 'side'"
