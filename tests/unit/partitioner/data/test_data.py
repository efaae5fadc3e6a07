"""Which pictures a data set has, how they are split, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from mdp.errors import InputError
from partitioner.data.datasets import SPLITS, Dataset, open_dataset
from tests.support.models.trees import CLASSES, write_tree


def names(data: Dataset) -> dict[str, set[str]]:
    return {split: set(data.split(split).names) for split in SPLITS}


def test_digits_are_split_without_overlap_and_with_every_class() -> None:
    data = open_dataset("digits")
    assert data.labels == tuple("0123456789")
    assert sum(len(data.split(split)) for split in SPLITS) == 1797
    assert len(data.test) == 359
    assert len(data.calibration) == 143
    for split in SPLITS:
        assert set(data.split(split).targets) == set(range(10))
    pictures = [np.asarray(source) for source in data.train.sources]
    assert pictures[0].shape == (8, 8, 3)
    assert pictures[0].dtype == np.uint8
    assert max(int(picture.max()) for picture in pictures) == 255


def test_splits_share_no_picture_and_are_the_same_every_time() -> None:
    first, second = names(open_dataset("digits")), names(open_dataset("digits"))
    assert first == second
    assert not first["train"] & first["calibration"]
    assert not first["train"] & first["test"]
    assert not first["calibration"] & first["test"]


def test_one_tree_is_split(tmp_path: Path) -> None:
    data = open_dataset(str(write_tree(tmp_path / "tree", each=20)))
    assert data.labels == CLASSES
    assert [len(data.split(split)) for split in SPLITS] == [3 * 14, 3 * 2, 3 * 4]


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_train_and_a_held_out_folder(tmp_path: Path, held_out: str) -> None:
    write_tree(tmp_path / "train", each=10)
    write_tree(tmp_path / held_out, each=4, seed=1)
    data = open_dataset(str(tmp_path))
    assert [len(data.split(split)) for split in SPLITS] == [27, 3, 12]
    assert all(held_out in Path(str(source)).parts for source in data.test.sources)


def test_test_wins_over_val(tmp_path: Path) -> None:
    for part, each in (("train", 4), ("val", 2), ("test", 1)):
        write_tree(tmp_path / part, each=each)
    assert len(open_dataset(str(tmp_path)).test) == 3


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    data = open_dataset(str(write_tree(tmp_path, each=5, classes=("cross", "ring"))))
    assert data.labels == ("cross", "ring")
    (tmp_path / "ring").rename(tmp_path / "train")
    assert open_dataset(str(tmp_path)).labels == ("cross", "train")


def test_hidden_files_and_nested_folders(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", each=5)
    (tree / "ring" / ".DS_Store").write_bytes(b"not a picture")
    (tree / ".cache").mkdir()
    nested = tree / "ring" / "images"
    nested.mkdir()
    (tree / "ring" / "000.png").rename(nested / "000.png")
    data = open_dataset(str(tree))
    assert data.labels == CLASSES
    every = set().union(*names(data).values())
    assert len(every) == 15
    assert "ring/images/000.png" in every


def test_links_that_lead_back_are_followed_once(tmp_path: Path) -> None:
    """Two of them make 2^40 paths, which is how many links a system follows."""
    root = write_tree(tmp_path / "tree", each=20)
    before = names(open_dataset(str(root)))
    for link in ("one", "two"):
        (root / CLASSES[0] / link).symlink_to(".")
    assert names(open_dataset(str(root))) == before


def test_a_class_s_name_is_printable(tmp_path: Path) -> None:
    root = write_tree(tmp_path / "tree", each=20)
    (root / CLASSES[0]).rename(root / "cl\x1b]0;ass")
    with pytest.raises(InputError, match=r"tree: class folder 'cl\\x1b\]0;ass': expected a print"):
        open_dataset(str(root))


def test_limits_take_the_same_share_of_every_class(tmp_path: Path) -> None:
    data = open_dataset("digits", limit_train=200, limit_test=30)
    assert len(data.train) + len(data.calibration) == 200
    assert len(data.test) == 30
    counts = np.bincount(data.train.targets)
    assert counts.max() - counts.min() <= 2
    assert set(data.test.names) < set(open_dataset("digits").test.names)


def test_limits_larger_than_the_data_change_nothing() -> None:
    assert open_dataset("digits", limit_train=10**6).train.digest == (
        open_dataset("digits").train.digest
    )


def test_too_small_limits_are_refused() -> None:
    with pytest.raises(InputError, match=r"--limit-train: expected at least 20, .* got 19"):
        open_dataset("digits", limit_train=19)
    with pytest.raises(InputError, match=r"--limit-test: expected at least 10, .* got 3"):
        open_dataset("digits", limit_test=3)


def test_the_digest_follows_names_sizes_and_labels(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", each=5)
    before = open_dataset(str(tree))
    tree.rename(tmp_path / "moved")
    moved = open_dataset(str(tmp_path / "moved"))
    assert [moved.split(s).digest for s in SPLITS] == [before.split(s).digest for s in SPLITS]
    changed = moved.train.sources[0]
    assert isinstance(changed, Path)
    changed.write_bytes(changed.read_bytes() + b"\0")
    assert open_dataset(str(tmp_path / "moved")).train.digest != before.train.digest


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere: expected a folder of pictures.*No such file"):
        open_dataset(str(tmp_path / "nowhere"))


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file: expected a folder of pictures.*Not a directory"):
        open_dataset(str(tmp_path / "file"))


def test_no_class_folders(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(InputError, match="expected at least 2 class folders, found none"):
        open_dataset(str(tmp_path))


def test_one_class_folder(tmp_path: Path) -> None:
    write_tree(tmp_path, each=5, classes=("ring",))
    with pytest.raises(InputError, match="expected at least 2 class folders, found only 'ring'"):
        open_dataset(str(tmp_path))


def test_an_empty_class(tmp_path: Path) -> None:
    write_tree(tmp_path, each=5)
    (tmp_path / "void").mkdir()
    with pytest.raises(InputError, match=r"void: expected pictures of class 'void', found no file"):
        open_dataset(str(tmp_path))


def test_a_class_with_a_single_picture(tmp_path: Path) -> None:
    write_tree(tmp_path / "one", each=5, classes=("cross", "ring"))
    write_tree(tmp_path / "one", each=1, classes=("stripes",))
    with pytest.raises(InputError, match="class 'stripes' has 1 picture, expected at least 3"):
        open_dataset(str(tmp_path / "one"))


def test_a_train_class_with_a_single_picture(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", each=1)
    write_tree(tmp_path / "test", each=3)
    with pytest.raises(
        InputError, match=r"train: class 'cross' has 1 picture, expected at least 2"
    ):
        open_dataset(str(tmp_path))


def test_classes_that_differ(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", each=3)
    write_tree(tmp_path / "test", each=3, classes=("cross", "ring"))
    with pytest.raises(InputError, match=r"same classes in train/ and test/, .* stripes"):
        open_dataset(str(tmp_path))


def test_train_alone(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", each=3)
    with pytest.raises(InputError, match="expected val/ or test/ beside train/, found neither"):
        open_dataset(str(tmp_path))
