"""The end-to-end benchmark's tables and picture: ratios to MDP, and what is said beside them."""

from typing import Any

import pytest

from benchmarks.end_to_end.outcomes import (
    OURS,
    Answers,
    DeviceRow,
    Found,
    LinkFound,
    LinkResult,
    Results,
    SplitFound,
)
from benchmarks.end_to_end.page import draw, figures
from mdp.testing.bundles import colour_plan


def answers(name: str, factor: float, *, calculated: bool = False) -> Answers:
    return Answers(
        name=name,
        latency_ms=[100.0 * factor, 110.0 * factor, 120.0 * factor],
        per_s=[9.0 / factor, 11.0 / factor],
        sent_bytes=[50_000.0 * factor],
        calculated=calculated,
    )


def device(name: str, share: float, teacher_ms: float) -> DeviceRow:
    return DeviceRow(
        name=name, core=0, share=share, teacher_ms=teacher_ms, blocks=6, heads=3, hidden=688
    )


def results(**changed: Any) -> Results:
    found = Found(
        link=LinkFound(bandwidth_bps=19e6, round_trip_s=0.0001),
        answers=[answers(OURS, 1.0), answers("other", 2.0, calculated=True)],
        split={"other": SplitFound(compute_ms=5.0, exchange_ms=6.0, ends_ms=7.0)},
        pipeline_error=0.0,
        largest_logit=1.5,
    )
    known: dict[str, Any] = {
        "machine": {"load_before": 0.1},
        "teacher": "vit",
        "quick": False,
        "period_us": 10_000,
        "devices": [device("fast", 0.6, 90.0), device("slow", 0.3, 180.0)],
        "client_share": 0.5,
        "in_flight": 6,
        "without_http": "",
        "split_error": 1e-6,
        "picture_bytes": 80_000,
        "links": [LinkResult(bandwidth_bps=20e6, plans={OURS: colour_plan()}, found=found)],
    }
    return Results(**{**known, **changed})


def test_everybody_is_shown_beside_mdp() -> None:
    text = figures(results())
    link = text[text.index("### 20 Mbit/s") :].splitlines()
    assert link[4:6] == [
        "| MDP | **110** | **120** | 1.00 | **10.0** | 1.00 | **50.0** |",
        "| other (calculated) | 220 | 240 | 2.00 | 5.0 | 0.50 | 100.0 |",
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quick": True}, "A quick run"),
        ({"machine": {"load_before": 3.0}}, "load 3.0 before the run"),
        ({"devices": [device("fast", 0.6, 90.0), device("slow", 0.3, 90.0)]}, "Not usable"),
        ({"without_http": "no interpreter"}, "Without HTTP servers: no interpreter"),
    ],
)
def test_what_makes_figures_worth_less_stands_before_them(
    changed: dict[str, Any], said: str
) -> None:
    assert said in figures(results(**changed))
    assert said not in figures(results())


def test_the_picture_is_the_same_every_time() -> None:
    pytest.importorskip("matplotlib")
    first = draw(results())
    assert first == draw(results())
    assert b"other" in first
    assert "(drawn.svg)" in figures(results(), "drawn.svg")
