"""Part of a deadline that is kept back, and deadlines that leave enough."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.requests.deadline import MAX_DEADLINE_MS, deadline_ms_for, reserve_s


@pytest.mark.parametrize(
    ("deadline_ms", "reserve_ms"), [(2, 1), (4, 2), (100, 2), (200, 4), (500, 10), (10_000, 10)]
)
def test_the_reserve_is_two_percent_within_bounds(deadline_ms: float, reserve_ms: float) -> None:
    assert reserve_s(deadline_ms) * 1e3 == pytest.approx(reserve_ms)


@given(st.floats(2, MAX_DEADLINE_MS / 2))
def test_a_deadline_leaves_what_is_needed(needed_ms: float) -> None:
    deadline_ms = deadline_ms_for(needed_ms)
    # The deadline is rounded to 0.1 ms.
    assert deadline_ms - reserve_s(deadline_ms) * 1e3 == pytest.approx(needed_ms, abs=0.051)
