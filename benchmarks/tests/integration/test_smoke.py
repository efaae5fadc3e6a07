"""Benchmarks with real agents run; their figures are not judged."""

import psutil
import pytest

from benchmarks.serving import load, overhead
from benchmarks.serving.__main__ import main


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


def test_a_scenario_is_also_played_beside_busy_processes() -> None:
    rows = list(load.run(quick=True, only=("loop 32",), beside=2))
    assert [row["side"] for row in rows] == ["now", "now, beside 2"]
    # Of what fits beside them, too.
    assert [row["of_capacity"] for row in rows] == [1.0, 1.0]
    assert psutil.Process().children() == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ("--only", "push", "load", "--beside", "6"),
            "expected --only of servers and load, got push",
        ),
        (("--only", "load", "--beside", "-1"), "expected a number of busy processes, got -1"),
    ],
)
def test_what_cannot_be_played_beside_others_is_one_line(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["serving", *options])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == f"--beside: {said}"
