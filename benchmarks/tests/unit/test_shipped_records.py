"""What ships with the partitioner is what the benchmarks have measured."""

from benchmarks.accuracy import predictor
from partitioner.estimates.accuracy_records import shipped_records


def test_the_records_that_ship_are_made_of_what_is_in_the_results() -> None:
    assert shipped_records() == predictor.gather()
