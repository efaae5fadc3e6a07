"""Pictures of a data set, how they are split, and what is refused."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mdp.errors import InputError
from partitioner.data.datasets import SPLITS, Dataset, open_dataset
from tests.support.models.trees import CLASSES, write_tree


def write_unknown(root: Path, each: int) -> None:
    write_tree(root / "elsewhere", each=each, classes=("ring",), seed=2)
    (root / "elsewhere" / "ring").rename(root / "unknown")
    (root / "elsewhere").rmdir()


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


@pytest.mark.parametrize("held_out", ["test", "val"])
def test_train_and_a_held_out_folder(tmp_path: Path, held_out: str) -> None:
    write_tree(tmp_path / "train", each=10)
    write_tree(tmp_path / held_out, each=4, seed=1)
    data = open_dataset(str(tmp_path))
    assert [len(data.split(split)) for split in SPLITS] == [27, 3, 12]
    assert all(held_out in Path(str(source)).parts for source in data.test.sources)


@pytest.mark.parametrize(
    ("places", "halves"),
    [
        # Beside the classes of a tree, in train/ or beside it: half of them measure.
        ({"tree": 5}, (2, 3)),
        ({"train": 5}, (2, 3)),
        ({"": 5}, (2, 3)),
        ({"train": 1}, (0, 1)),
        # A test folder's own measure.
        ({"train": 5, "val": 4}, (5, 4)),
        ({"val": 4}, (0, 4)),
    ],
)
def test_unknown_is_no_class(
    tmp_path: Path, places: dict[str, int], halves: tuple[int, int]
) -> None:
    if "tree" in places:
        write_tree(tmp_path, each=10)
        places = {"": places["tree"]}
    else:
        write_tree(tmp_path / "train", each=10)
        write_tree(tmp_path / "val", each=4, seed=1)
    before = open_dataset(str(tmp_path))
    for place, each in places.items():
        write_unknown(tmp_path / place, each)
    data = open_dataset(str(tmp_path))
    # The classes and their splits stay as they were.
    assert (data.labels, names(data)) == (CLASSES, names(before))
    assert [data.split(split).digest for split in SPLITS] == [
        before.split(split).digest for split in SPLITS
    ]
    assert (before.unknown, before.unknown_test) == (None, None)
    found = [data.unknown, data.unknown_test]
    assert tuple(0 if half is None else len(half) for half in found) == halves
    for half in filter(None, found):
        assert set(half.targets) == {-1}
        assert all(name.startswith("unknown/") for name in half.names)
    again = open_dataset(str(tmp_path))
    for one, other in zip(found, [again.unknown, again.unknown_test], strict=True):
        assert (one and one.digest) == (other and other.digest)


def test_unknown_alone_is_refused(tmp_path: Path) -> None:
    write_unknown(tmp_path, 5)
    with pytest.raises(InputError, match="2 class folders, found none beside 'unknown', whose"):
        open_dataset(str(tmp_path))
    write_tree(tmp_path, each=5, classes=("ring",))
    with pytest.raises(InputError, match="found only 'ring' beside 'unknown', whose pictures are"):
        open_dataset(str(tmp_path))
    write_tree(tmp_path, each=5, classes=("cross", "stripes"))
    for picture in (tmp_path / "unknown").iterdir():
        picture.unlink()
    with pytest.raises(InputError, match=r"unknown: expected pictures of no class, found no file"):
        open_dataset(str(tmp_path))


def test_test_wins_over_val(tmp_path: Path) -> None:
    for part, each in (("train", 4), ("val", 2), ("test", 1)):
        write_tree(tmp_path / part, each=each)
    assert len(open_dataset(str(tmp_path)).test) == 3


def test_an_empty_stray_folder_is_not_counted(tmp_path: Path) -> None:
    write_tree(tmp_path, each=4)
    (tmp_path / "__MACOSX" / "ring").mkdir(parents=True)
    assert open_dataset(str(tmp_path)).remark == ""
    (tmp_path / "ring" / "notes.txt").write_text("not a picture")
    expected = f"{tmp_path}: left out 1 file that is no picture: 1 .txt"
    assert open_dataset(str(tmp_path)).remark == expected


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


def test_limits_take_the_same_share_of_every_class(tmp_path: Path) -> None:
    data = open_dataset("digits", limit_train=200, limit_test=30)
    assert len(data.train) + len(data.calibration) == 200
    assert len(data.test) == 30
    counts = np.bincount(data.train.targets)
    assert counts.max() - counts.min() <= 2
    whole = open_dataset("digits")
    assert set(data.test.names) < set(whole.test.names)
    assert open_dataset("digits", limit_train=10**6).train.digest == whole.train.digest


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


def test_a_picture_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", each=5)
    first = next(tree.rglob("*.png"))
    os.rename(first, os.fsencode(first.parent) + b"/gr\xfcn.png")  # noqa: PTH104
    with pytest.raises(InputError, match=r"gr\\xfcn.png': expected a name in UTF-8: rename it"):
        open_dataset(str(tree))


def test_another_picture_of_the_same_size_has_another_digest(tmp_path: Path) -> None:
    """A camera writes each bitmap with as many bytes."""
    random = np.random.default_rng(0)

    def take(label: str, number: int) -> Path:
        path = tmp_path / label / f"{number}.bmp"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (80, 60, 3), dtype=np.uint8)).save(path)
        return path

    paths = [take(label, number) for label in ("nut", "ring") for number in range(5)]
    before = [open_dataset(str(tmp_path)).split(split).digest for split in SPLITS]
    assert [open_dataset(str(tmp_path)).split(split).digest for split in SPLITS] == before
    size = paths[0].stat().st_size
    for number in range(5):
        assert take("nut", number).stat().st_size == size
    after = [open_dataset(str(tmp_path)).split(split).digest for split in SPLITS]
    assert all(one != other for one, other in zip(before, after, strict=True))


#: What a folder holds, by the path below it: so many pictures, or another file; and the refusal.
REFUSED: list[tuple[dict[str, int], str]] = [
    ({}, "tree: expected a folder of pictures.*No such file"),
    ({"": -1}, "tree: expected a folder of pictures.*Not a directory"),
    ({"a.png": -1}, "expected at least 2 class folders, found none"),
    ({"ring": 5}, "expected at least 2 class folders, found only 'ring'"),
    ({"ring": 5, "void": 0}, "void: expected pictures of class 'void', found no file"),
    ({"ring": 5, "stripes": 1}, "class 'stripes' has 1 picture, expected at least 3"),
    (
        {"train/cross": 1, "train/ring": 1, "test/cross": 3, "test/ring": 3},
        "train: class 'cross' has 1 picture, expected at least 2",
    ),
    (
        {"train/cross": 3, "train/ring": 3, "train/stripes": 3, "test/cross": 3, "test/ring": 3},
        "same classes in train/ and test/, .* stripes",
    ),
    ({"train/cross": 3, "train/ring": 3}, "expected val/ or test/ beside train/, found neither"),
    ({"ring": 5, "cl\x1b]0;ass": 5}, r"tree: class folder 'cl\\x1b\]0;ass': expected a print"),
]


@pytest.mark.parametrize(("held", "expected"), REFUSED)
def test_folders_without_data(tmp_path: Path, held: dict[str, int], expected: str) -> None:
    for name, count in held.items():
        path = tmp_path / "tree" / name
        if count < 0:
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"")
            continue
        path.mkdir(parents=True)
        for number in range(count):
            (path / f"{number}.png").write_bytes(b"")
    with pytest.raises(InputError, match=expected):
        open_dataset(str(tmp_path / "tree"))
