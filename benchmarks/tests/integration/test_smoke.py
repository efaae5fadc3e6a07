"""Benchmarks with real agents run; their figures are not judged."""

from benchmarks.serving import load, overhead


def test_a_call_is_compared_with_bare_exchanges_under_keys() -> None:
    row = overhead.measure(overhead.STUB_KEYS, 2, calls=2)
    assert row["requests"] == 2 * overhead.ROUNDS
    assert min(ms for of in row["ms"].values() for ms in of.values()) > 0


def test_whole_answers_are_counted_under_load_and_as_a_device_dies() -> None:
    names = ("twice", "dies")
    rows = {row["scenario"]: row for row in load.run(quick=True, only=names)}
    assert rows.keys() == {"loop 32", *names}
    assert all(row["calls"] > 0 for row in rows.values())
    assert rows["loop 32"]["of_capacity"] == 1.0
    # The one that died is missing from what came after.
    assert rows["dies"]["partial"] > 0
