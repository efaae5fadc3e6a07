"""Accuracy by one to six cameras: subsets by size, and what the picture shows of kept results."""

from itertools import combinations
from statistics import mean

import pytest

from benchmarks.harness.results import read_result
from benchmarks.scenes.one_to_six import CAMERAS, RESULT, TRAINED, by_size, picture


def test_subsets_of_one_size_are_put_together_the_least_first() -> None:
    subsets = [
        {"cameras": list(cameras), "right": 0.1 * size + 0.01 * CAMERAS.index(cameras[0])}
        for size in range(1, len(CAMERAS) + 1)
        for cameras in combinations(CAMERAS, size)
    ]
    found = by_size(subsets[::-1])
    assert [len(values) for values in found] == [6, 15, 20, 15, 6, 1]
    assert [round(value) for value in found[0]] == [10, 11, 12, 13, 14, 15]
    assert found[5] == pytest.approx([60.0])


def test_the_picture_shows_the_means_of_all_numbers_of_cameras() -> None:
    kept = read_result(RESULT.stem)["subsets"]
    drawn = picture().decode()
    for state, subsets in kept.items():
        assert f">{state}<" in drawn
        for values in by_size(subsets):
            assert f">{mean(values):.1f}<" in drawn
    assert TRAINED in kept
