"""Views are what the client would cut, kept on disk, and never half-written."""

import io
from pathlib import Path

import numpy as np
import pytest

from mdp.errors import InputError, PictureError
from mdp.formats.plan import Region
from mdp.pictures.crop import crop, load_picture
from partitioner.data.crops import View, load_views, picture_of, write_tree
from partitioner.data.datasets import open_dataset
from partitioner.run.progress import Progress
from tests.support.models import trees

QUIET = Progress(io.StringIO())


def test_views_are_the_crops_that_are_served(tmp_path: Path) -> None:
    data = open_dataset(str(trees.write_tree(tmp_path / "tree", each=5)))
    views = [View(8), View(12, Region(left=0.25, right=0.75, top=0.25, bottom=0.75))]
    arrays = load_views(data.train, views, tmp_path / "cache", QUIET, "")
    assert [array.shape for array in arrays] == [(9, 8, 8, 3), (9, 12, 12, 3)]
    (lossy,) = load_views(data.train, [View(8, encoding="jpeg")], tmp_path / "cache", QUIET, "")
    assert 0 < np.abs(arrays[0].astype(int) - lossy).mean() < 20
    for index, source in enumerate(data.train.sources):
        picture = load_picture(picture_of(source, None), smallest_side=24)
        for view, array in zip(views, arrays, strict=True):
            assert np.array_equal(array[index], crop(picture, view.region, view.image_size))


def test_views_are_cut_once(tmp_path: Path) -> None:
    tree = trees.write_tree(tmp_path / "tree", each=5)
    data = open_dataset(str(tree))
    first = np.array(load_views(data.train, [View(8)], tmp_path / "cache", QUIET, "")[0])
    for source in data.train.sources:
        Path(str(source)).unlink()
    again = load_views(data.train, [View(8)], tmp_path / "cache", QUIET, "")[0]
    assert np.array_equal(first, again)
    assert isinstance(again, np.memmap)


@pytest.mark.parametrize("content", [b"text, not pixels", None], ids=["no picture", "truncated"])
def test_a_bad_file_is_named_and_leaves_nothing(tmp_path: Path, content: bytes | None) -> None:
    tree = trees.write_tree(tmp_path / "tree", each=5)
    bad = tree / "ring" / "002.png"
    bad.write_bytes(bad.read_bytes()[:120] if content is None else content)
    data = open_dataset(str(tree))
    split = next(s for s in (data.train, data.calibration, data.test) if bad in s.sources)
    with pytest.raises(PictureError, match=r"ring/002\.png: "):
        load_views(split, [View(8)], tmp_path / "cache", QUIET, "")
    assert not list((tmp_path / "cache").glob(".*"))


def test_a_split_becomes_a_tree_and_reads_back(tmp_path: Path) -> None:
    data = open_dataset("digits", limit_test=50)
    write_tree(data.test, data.labels, tmp_path / "out", QUIET)
    files = sorted((tmp_path / "out").glob("*/*.png"))
    assert [f.relative_to(tmp_path / "out").as_posix() for f in files] == sorted(data.test.names)
    index = data.test.names.index(files[7].relative_to(tmp_path / "out").as_posix())
    source = np.asarray(data.test.sources[index])
    assert np.array_equal(np.asarray(load_picture(files[7])), source)


def test_files_are_copied_as_they_are(tmp_path: Path) -> None:
    data = open_dataset(str(trees.write_tree(tmp_path / "tree", each=5, suffix="jpg")))
    write_tree(data.test, data.labels, tmp_path / "out", QUIET)
    name = data.test.names[0]
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "tree" / name).read_bytes()


def test_a_tree_replaces_nothing(tmp_path: Path) -> None:
    data = open_dataset("digits", limit_test=10)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("keep")
    with pytest.raises(InputError, match="expected a new or empty folder"):
        write_tree(data.test, data.labels, tmp_path / "out", QUIET)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
