"""Parts by pace and shards by link."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from partitioner.crew.coordinator.shares import by_pace, link_shares


def seconds(bandwidths: list[float], shares: list[float]) -> float:
    """Of a two-phase mean of a vector of 1 byte."""
    n = len(bandwidths)
    return max((1 + (n - 2) * w) / b for b, w in zip(bandwidths, shares, strict=True))


@pytest.mark.parametrize(
    ("bandwidths", "shares", "equal_s", "by_link_s"),
    [
        ([100, 100, 100, 100], [1 / 4] * 4, 0.0150, 0.0150),
        ([100, 100, 100, 20], [1 / 3, 1 / 3, 1 / 3, 0], 0.0750, 0.0500),
        ([100, 50, 50, 25], [3 / 4, 1 / 8, 1 / 8, 0], 0.0600, 0.0400),
        ([1000, 100, 100, 100, 20], [1, 0, 0, 0, 0], 0.0800, 0.0500),
        ([5, 80], [1 / 2, 1 / 2], 0.2, 0.2),
        ([5], [1], 0.0, 0.0),
    ],
)
def test_shards_by_link(
    bandwidths: list[float], shares: list[float], equal_s: float, by_link_s: float
) -> None:
    assert link_shares(bandwidths) == pytest.approx(shares)
    if len(bandwidths) > 1:
        assert seconds(bandwidths, [1 / len(shares)] * len(shares)) == pytest.approx(equal_s)
        assert seconds(bandwidths, link_shares(bandwidths)) == pytest.approx(by_link_s)


@settings(max_examples=25)
@given(st.lists(st.floats(0.1, 1000), min_size=3, max_size=8))
def test_shards_by_link_solve_the_linear_program(bandwidths: list[float]) -> None:
    n = len(bandwidths)
    rows = [
        [(n - 2) / b if j == i else 0.0 for j in range(n)] + [-1.0]
        for i, b in enumerate(bandwidths)
    ]
    best = linprog(
        [0.0] * n + [1.0],
        A_ub=rows,
        b_ub=[-1 / b for b in bandwidths],
        A_eq=[[1.0] * n + [0.0]],
        b_eq=[1.0],
    )
    found = link_shares(bandwidths)
    assert sum(found) == pytest.approx(1)
    assert seconds(bandwidths, found) == pytest.approx(best.fun)


def test_parts_by_pace() -> None:
    assert by_pace([3, 3, 3, 1], 64) == [19, 19, 19, 7]
    assert by_pace([1, 1, 1], 64) == [22, 21, 21]
    assert by_pace([1, 0], 5) == [5, 0]


@settings(max_examples=50)
@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=9), st.integers(0, 5000))
def test_parts_are_within_one_of_the_exact_ones(rates: list[float], total: int) -> None:
    parts = by_pace(rates, total)
    assert sum(parts) == total
    assert all(
        abs(part - total * rate / sum(rates)) < 1 for part, rate in zip(parts, rates, strict=True)
    )
