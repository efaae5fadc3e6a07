"""Shares of pictures for the pilot and the truth, and intervals that hold."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.pilot.pools import CAMERAS, PicturePool, PoolPictures
from benchmarks.pilot.predictions import holds, part_of

pytestmark = pytest.mark.torch


def scenes(counts: tuple[int, ...]) -> PoolPictures:
    """So many scenes of each class, of four cameras."""
    targets = np.repeat(np.repeat(np.arange(len(counts)), counts), len(CAMERAS))
    groups = np.arange(len(targets)) // len(CAMERAS)
    labels = tuple(f"class-{place}" for place in range(len(counts)))
    return PoolPictures(
        labels, tuple(Path(str(row)) for row in range(len(targets))), targets, groups
    )


def test_the_pilot_and_the_test_share_no_scene_and_classes_are_equally_many() -> None:
    pool = scenes((9, 6, 8))
    parts = [
        part_of(pool, [2, 0, 1], np.random.default_rng(3), ("left", "back"), part)
        for part in (slice(4), slice(4, None))
    ]
    assert [np.bincount(part.targets).tolist() for part in parts] == [[8] * 3, [4] * 3]
    assert not set(pool.groups[parts[0].rows]) & set(pool.groups[parts[1].rows])
    for part in parts:
        assert (np.array([2, 0, 1])[part.targets] == pool.targets[part.rows]).all()
        seen = part.rows[part.rows_of_camera("left")]
        assert (seen % len(CAMERAS) == CAMERAS.index("left")).all()
        assert (
            part.groups[part.rows_of_camera("left")] == part.groups[part.rows_of_camera("back")]
        ).all()


def test_a_pool_reads_the_pictures_of_each_class_and_scenes_whole(tmp_path: Path) -> None:
    for label in ("a", "b"):
        for scene in ("s0", "s1", "s2"):
            folder = tmp_path / "parts" / label / scene
            folder.mkdir(parents=True)
            for camera in CAMERAS:
                (folder / f"{camera}.jpg").touch()
    found = PicturePool("parts", 2, {"b": 3}).read(tmp_path)
    assert found.labels == ("a", "b")
    assert np.bincount(found.targets).tolist() == [8, 12]
    for group in np.unique(found.groups):
        views = [found.sources[row] for row in np.flatnonzero(found.groups == group)]
        assert [path.stem for path in views] == list(CAMERAS)
        assert len({path.parent for path in views}) == 1


def test_an_interval_holds_what_the_pilots_and_the_tests_sampling_explain() -> None:
    assert holds({"together": [0.8, 0.74], "pictures": 100, "tested": 1000})
    assert not holds({"together": [0.8, 0.66], "pictures": 100, "tested": 1000})
    assert holds({"together": [0.8, 0.66], "pictures": 100, "tested": 20})
