"""Folders that name sets of labels: what they mean, and names and splits that cannot be used."""

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from mdp.errors import InputError
from partitioner.data.datasets import SPLITS, Dataset, open_dataset
from partitioner.data.label_sets import LabelSets, labels_of, remark_on_classes

EVERY = {"bent": 12, "dirty": 12, "bent+dirty": 12, "none": 12}


def write(root: Path, counts: Mapping[str, int]) -> Path:
    """Empty pictures by folder; nothing of them is decoded here."""
    for folder, count in counts.items():
        (root / folder).mkdir(parents=True)
        for number in range(count):
            (root / folder / f"{number:02d}.png").touch()
    return root


def opened(root: Path) -> Dataset:
    return open_dataset(str(root), several=True)


def test_a_folder_names_the_labels_of_its_items_in_any_order() -> None:
    sets = LabelSets.of(["dirty", "none", "dirty+bent", "bent + dirty", "bent"], "here")
    assert sets.labels == ("bent", "dirty")
    assert sets.names == ("none", "bent", "bent+dirty", "dirty")
    assert sets.place("dirty+bent", "here") == sets.place("bent+dirty", "here") == 2
    held = sets.flags(np.array([0, 1, 2, 3]))
    assert held.tolist() == [[False, False], [True, False], [True, True], [False, True]]


@pytest.mark.parametrize(
    ("folder", "told"),
    [
        ("bent+bent", "folder 'bent+bent': names 'bent' twice"),
        ("+", "folder '+': expected labels joined by '+', one is empty"),
        ("bent+", "folder 'bent+': expected labels joined by '+', one is empty"),
        ("none+bent", "'none' is for items without any label, so that no other goes with it"),
    ],
)
def test_a_folder_that_names_no_set_of_labels(folder: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        labels_of(folder, "here")
    with pytest.raises(InputError, match=re.escape(told)):
        opened(write(tmp_path / "data", {**EVERY, folder: 3}))


def test_every_split_has_its_share_of_every_set(tmp_path: Path) -> None:
    data = opened(write(tmp_path / "data", EVERY))
    assert data.labels == ("bent", "dirty")
    assert data.set_names == ("none", "bent", "bent+dirty", "dirty")
    for name in SPLITS:
        pictures = data.split(name)
        counts = np.bincount(pictures.targets)
        assert len(set(counts.tolist())) == 1, "each as often"
        assert (data.flags(pictures).mean(axis=0) == 0.5).all()
    assert data.remark == ""


def test_a_rare_set_is_learned_and_not_refused(tmp_path: Path) -> None:
    data = opened(write(tmp_path / "data", {**EVERY, "bent+dirty": 1}))
    rare = data.set_names.index("bent+dirty")
    counts = [int((data.split(name).targets == rare).sum()) for name in SPLITS]
    assert counts == [1, 0, 0]


def test_sets_may_differ_between_train_and_test(tmp_path: Path) -> None:
    root = tmp_path / "data"
    write(root / "train", {"bent": 9, "dirty": 9, "worn": 9, "bent+dirty": 9, "none": 9})
    write(root / "test", {"bent": 3, "dirty+worn": 3, "none": 3})
    data = opened(root)
    tested = {data.set_names[target] for target in data.test.targets.tolist()}
    assert tested == {"bent", "dirty+worn", "none"}
    assert data.flags(data.test).sum(axis=0).tolist() == [3, 3, 3]


@pytest.mark.parametrize(
    ("train", "test", "told"),
    [
        (
            {"bent": 4, "dirty": 4, "bent+dirty": 4},
            {"bent": 2, "dirty": 2, "bent+worn": 2},
            "test: expected labels of train/, found others: worn",
        ),
        (
            {"bent": 4, "dirty": 4, "bent+dirty": 4, "worn": 4},
            {"bent": 2, "dirty+bent": 2},
            "test: expected items of every label of train/, found none of worn",
        ),
        (
            {"bent": 4, "dirty": 4, "none": 4},
            {"bent": 2, "dirty": 2, "bent+dirty": 2},
            "train: its labels exclude each other, but test/ has items of several, as bent+dirty",
        ),
        (
            {"bent": 4, "dirty": 4, "bent+dirty": 4},
            {"bent": 2, "dirty": 2},
            "test: its labels exclude each other, but train/ has items of several, as bent+dirty",
        ),
    ],
)
def test_a_test_split_with_other_labels(
    train: Mapping[str, int], test: Mapping[str, int], told: str, tmp_path: Path
) -> None:
    write(tmp_path / "train", train)
    write(tmp_path / "test", test)
    with pytest.raises(InputError, match=re.escape(told)):
        opened(tmp_path)


@pytest.mark.parametrize(
    ("counts", "told"),
    [
        ({"bent": 9, "bent+dirty": 9}, "training split: label 'bent' holds of all of"),
        ({"bent": 9, "dirty": 1, "none": 9}, "calibration split: label 'dirty' holds of none of"),
        ({"bent": 9, "none": 9}, "expected at least 2 labels where several may hold, found bent"),
        # Of each set one is tested, and the other stays for training.
        (dict.fromkeys(EVERY, 2), "calibration split: has no items: expected more of some set"),
    ],
)
def test_a_label_of_all_items_or_of_none(
    counts: Mapping[str, int], told: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=re.escape(told)):
        opened(write(tmp_path / "data", counts))


def test_pictures_of_an_unknown_kind_have_no_place(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="items without any label are in a folder `none`"):
        opened(write(tmp_path / "data", {**EVERY, "unknown": 3}))


def test_the_digits_have_one_label_each() -> None:
    with pytest.raises(InputError, match="digits: expected a folder with several labels an item"):
        open_dataset("digits", several=True)


def test_data_of_the_other_kind_is_remarked_upon(tmp_path: Path) -> None:
    apart = opened(write(tmp_path / "apart", {"bent": 9, "dirty": 9, "none": 9}))
    assert "no folder joins labels by '+'" in apart.remark
    twice = opened(write(tmp_path / "twice", {**EVERY, "None": 9}))
    assert "names differ in case, `_` or `-` alone: None and none" in twice.remark
    whole = open_dataset(str(write(tmp_path / "whole", EVERY)))
    assert whole.labels == ("bent", "bent+dirty", "dirty", "none")
    assert "learned with --labels several" in whole.remark
    assert remark_on_classes(["a+b", "a"]) == ""


def test_scenes_of_cameras_have_several_labels_too(tmp_path: Path) -> None:
    for folder in EVERY:
        for number in range(10):
            for camera in ("left", "right"):
                path = tmp_path / folder / f"{number:02d}" / f"{camera}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()
    data = open_dataset(str(tmp_path), cameras=("left", "right"), several=True)
    assert data.cameras == ("left", "right")
    assert {name: len(data.split(name)) for name in SPLITS} == {
        "train": 28, "calibration": 4, "test": 8
    }  # fmt: skip
