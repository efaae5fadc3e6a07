"""Benchmarks with real agents run; their figures are not judged."""

from benchmarks.serving import overhead


def test_a_call_is_compared_with_bare_exchanges_under_keys() -> None:
    row = overhead.measure(overhead.STUB_KEYS, 2, calls=2)
    assert row["requests"] == 2 * overhead.ROUNDS
    assert min(ms for of in row["ms"].values() for ms in of.values()) > 0
