"""The compared sub-models are in no probe, and the kept rows are of them."""

import pytest

pytest.importorskip("torch")

from benchmarks.latency import page, shapes
from benchmarks.latency.rows import ROWS, Rows
from mdp.files import read_json

pytestmark = pytest.mark.torch


def test_kept_rows_are_of_shapes_that_no_fit_sees_and_errors_are_relative_to_them() -> None:
    rows = read_json(ROWS, Rows)
    for found, drawn in ((rows.unseen, shapes.unseen()), (rows.plannable, shapes.plannable())):
        assert list(dict.fromkeys(row.case for row in found)) == drawn
        assert not {case.spec for case in drawn} & shapes.probed()
    one = page.compare(rows.unseen[:1])[0]
    assert one.row.latency_ms * (1 + one.error) == pytest.approx(one.estimate.ms)
