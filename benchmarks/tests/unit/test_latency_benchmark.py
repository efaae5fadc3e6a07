"""Errors of predicted latencies are relative to what was measured."""

import pytest

from benchmarks.latency import page
from benchmarks.latency.rows import ROWS, Rows
from mdp.files import read_json


def test_errors_are_relative_to_the_kept_rows() -> None:
    one = page.compare(read_json(ROWS, Rows).unseen[:1])[0]
    assert one.row.latency_ms * (1 + one.error) == pytest.approx(one.estimate.ms)
