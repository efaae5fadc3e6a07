"""Pairs of classes that answers take for each other."""

import numpy as np

from mdp.formats.bundle import Confusion
from partitioner.export.confusions import MOST, confusions


def logits(taken: list[int], classes: int) -> np.ndarray:
    found: np.ndarray = np.eye(classes)[taken]
    return found


def test_both_directions_count_and_the_most_frequent_pair_is_first() -> None:
    # Of 10 items a class: a is taken for b twice, b for a three times, c for d four times.
    targets = np.repeat(np.arange(4), 10)
    taken = [*[0] * 8, 1, 1, *[1] * 7, 0, 0, 0, *[2] * 6, 3, 3, 3, 3, *[3] * 10]
    assert confusions(logits(taken, 4), targets, "abcd") == (
        Confusion(("a", "b"), 20, 5),
        Confusion(("c", "d"), 20, 4),
    )


def test_what_may_be_chance_is_no_confusion() -> None:
    targets = np.repeat(np.arange(2), 50)
    few = [*[0] * 48, 1, 1, *[1] * 50]
    assert confusions(logits(few, 2), targets, "ab") == ()
    # Nine of a hundred, and a tenth.
    rare, enough = ([*[0] * (50 - n), *[1] * (50 + n)] for n in (9, 10))
    assert confusions(logits(rare, 2), targets, "ab") == ()
    assert confusions(logits(enough, 2), targets, "ab") == (Confusion(("a", "b"), 100, 10),)


def test_at_most_so_many_pairs_are_kept() -> None:
    # Every item is taken for the next class.
    targets = np.repeat(np.arange(12), 5)
    found = confusions(logits(((targets + 1) % 12).tolist(), 12), targets, "abcdefghijkl")
    assert len(found) == MOST
    assert {(one.pictures, one.confused) for one in found} == {(10, 5)}
