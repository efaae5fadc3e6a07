"""The picture of a schedule."""

from xml.etree import ElementTree

import pytest

from partitioner.crew.planning.costs import Span
from partitioner.crew.planning.picture import schedule_svg

SPANS = [
    Span("coordinator", 0, 200, "member-0"),
    Span("tower", 0, 150, "member-0"),
    Span("tower", 150, 151, "answers"),
    Span("coordinator", 200, 400, "member-1"),
]


def texts(svg: str) -> list[str]:
    return [e.text or "" for e in ElementTree.fromstring(svg).iter() if e.tag.endswith("}text")]


def test_a_schedule_names_trainers_and_what_they_do() -> None:
    svg = schedule_svg(SPANS)
    found = texts(svg)
    assert {"coordinator", "tower", "member-0", "member-1", "time in min"} <= set(found)
    assert found.count("member-0") == 2
    assert "answers" not in found  # a bar too narrow for its name
    assert schedule_svg(SPANS) == svg


@pytest.mark.parametrize(("factor", "unit"), [(0.1, "s"), (1, "min"), (100, "h")])
def test_the_unit_follows_the_length(factor: float, unit: str) -> None:
    spans = [Span(s.trainer, factor * s.start_s, factor * s.end_s, s.what) for s in SPANS]
    assert f"time in {unit}" in texts(schedule_svg(spans))


def test_an_empty_schedule_is_drawn() -> None:
    assert "time in s" in texts(schedule_svg([]))
