"""The published score of groups, and the table of links."""

import numpy as np
import pytest

from benchmarks.crew.assignment import published_score
from benchmarks.crew.links import row
from benchmarks.harness.results import read_result
from partitioner.crew.planning.assign import search


def test_the_published_score_of_two_sites() -> None:
    same = np.equal.outer([0, 0, 1, 1], [0, 0, 1, 1])
    late, rate = np.where(same, 0.001, 0.020), np.where(same, 1e9, 20e6) / 8
    score = published_score(late, rate, gradients=23e6, activations=2e6)
    assert score((0, 0, 1, 1)) == pytest.approx((1.826,))
    assert score((0, 1, 0, 1)) == pytest.approx((9.274,), rel=1e-3)
    assert search([(0, 1, 0, 1)], score, seed=0) in ((0, 0, 1, 1), (1, 1, 0, 0))


def test_the_table_of_links_is_that_of_the_planner() -> None:
    known = {(one["network"], one["gflops"]): one for one in read_result("crew-links")["rows"]}
    assert row("96 x 3 at 32 px", 110.0) == known["96 x 3 at 32 px", 110.0]
