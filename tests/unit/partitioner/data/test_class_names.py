"""Rows of classifiers by the names of their classes, and names that are alike."""

from pathlib import Path

import pytest

from mdp.errors import InputError
from partitioner.assembly.members import rows_of
from partitioner.data.class_names import ClassNames, alike, fold
from partitioner.data.datasets import open_dataset
from tests.support.models.trees import write_tree

NAMES = ["tench", "great white shark", "Black-and-tan coonhound", "Crane", "crane"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("Tench", 0),
        ("great_white_shark", 1),
        ("great-white  Shark", 1),
        ("black_and_tan_coonhound", 2),
        ("Crane", 3),
        ("crane", 4),
    ],
)
def test_a_folder_s_name_finds_its_row(name: str, row: int) -> None:
    assert rows_of(NAMES, [name, "tench"] if row else [name], {}, "labels.txt")[0] == row


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (["CRANE"], "labels.txt: has several classes named CRANE: expected one of each"),
        (["great_white_shark", "Great White Shark"], "mapped to one of its classes: great_white_s"),
        (["tenches", "tench"], r"has no class named tenches of the data \(1 of 2 classes missing"),
    ],
)
def test_names_without_one_row_each_are_named(wanted: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        rows_of(NAMES, wanted, {}, "labels.txt")


def test_any_word_for_a_class_finds_it_unless_it_is_another_s_too() -> None:
    classes = ClassNames([["crane", "wading bird"], ["tench", "Tinca tinca"], ["crane"]])
    assert classes.rows_named("tinca_tinca") == classes.rows_named("Tench") == [1]
    assert classes.rows_named("crane") == [0, 2]
    assert classes.rows_named("perch") == []


def test_words_of_one_class_that_fold_alike_are_one_name() -> None:
    assert ClassNames([["T-shirt", "t shirt"], ["dog", "dog"]]).rows_named("t_shirt") == [0]
    assert ClassNames([["dog", "dog"]]).rows_named("dog") == [0]


def test_folding_keeps_what_names_mean() -> None:
    assert fold(" Ice_Cream-cone ") == "ice cream cone"
    assert fold("a1") != fold("a 1")
    composed, decomposed = "Schl\N{LATIN SMALL LETTER U WITH DIAERESIS}ssel", "Schlu\u0308ssel"
    assert fold(composed) == fold(decomposed)
    assert alike(["a", "A", "b", "c_d", "c-d"]) == [["a", "A"], ["c_d", "c-d"]]


def test_a_class_that_is_nearly_called_as_the_folder_of_no_class_is_said(tmp_path: Path) -> None:
    write_tree(tmp_path / "tree", each=4)
    (tmp_path / "tree" / "stripes").rename(tmp_path / "tree" / "Unknown")
    data = open_dataset(str(tmp_path / "tree"))
    assert data.labels == ("Unknown", "cross", "ring")
    assert data.remark == (
        f"{tmp_path / 'tree'}: 'Unknown' is taken for a class: items of none are in 'unknown'"
    )


def test_classes_that_differ_in_case_or_underscore_alone_stay_two_and_are_said(
    tmp_path: Path,
) -> None:
    write_tree(tmp_path / "tree", each=4)
    for name in ("Ring", "cross_"):
        (tmp_path / "tree" / "stripes").rename(tmp_path / "tree" / name)
        write_tree(tmp_path / "tree", each=4, classes=("stripes",))
    data = open_dataset(str(tmp_path / "tree"))
    assert data.labels == ("Ring", "cross", "cross_", "ring", "stripes")
    assert data.remark == (
        f"{tmp_path / 'tree'}: classes whose names differ in case, `_` or `-` alone: "
        "Ring and ring, cross and cross_"
    )
