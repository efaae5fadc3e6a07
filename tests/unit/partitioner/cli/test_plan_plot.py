"""The picture of a plan: what its axes say."""

import re

import pytest

from mdp.formats.plan import Plan, PredictedAccuracy
from mdp.testing.bundles import colour_plan
from partitioner.cli.plan_plot import draw_plan
from partitioner.planner.pareto import ParetoPoint


@pytest.fixture
def plan() -> Plan:
    return colour_plan()


def test_latencies_are_plain_numbers_that_do_not_overlap(plan: Plan) -> None:
    accuracy = PredictedAccuracy(all_in=0.8, expected=0.79, typical_error=0.02)
    points = [
        ParetoPoint(latency_ms=ms, accuracy=accuracy, members=1, replicas=0, energy_j=None)
        for ms in (1.3, 8.0, 60.0)
    ]
    svg = draw_plan(plan, points, "svg").decode()
    left = svg[svg.index('id="axes_1"') : svg.index('id="axes_2"')]
    ticks = re.findall(r">([0-9.]+)</text>", left[: left.index('id="matplotlib.axis_2"')])
    assert {"2", "5", "10", "20", "50"} <= set(ticks)
    assert not {"3", "4", "30", "40"} & set(ticks)
    assert "times" not in left
