"""By when the members of a second stage have to be asked."""

import math
from collections.abc import Sequence

import pytest

from mdp.requests.choice import Choice, others_by_s
from mdp.requests.reason import UNREACHABLE

SLOW_S = {"alpha": 0.010, "beta": 0.030, "gamma": 0.020, "gamma/attic": 0.050}
MEMBERS = {0: ["alpha"], 1: ["beta"], 2: ["gamma", "gamma/attic"]}


@pytest.mark.parametrize(
    ("first", "gone", "unknown", "decide_s", "by_s"),
    [
        pytest.param([0], [], "", 0.1, 0.070, id="the slowest of the others decides"),
        pytest.param([0, 1], [], "", 0.1, 0.080, id="two first"),
        pytest.param([0], ["beta"], "", 0.1, 0.080, id="one that cannot be asked needs nothing"),
        pytest.param([0], ["gamma"], "", 0.1, 0.050, id="a replica in its place"),
        pytest.param([0], ["beta", "gamma", "gamma/attic"], "", 0.1, 0.1, id="nobody is left"),
        pytest.param([0], [], "beta", 0.1, 0.050, id="not known: half"),
        pytest.param([0], [], "", 0.040, 0.010, id="just time enough"),
        pytest.param([0], [], "", 0.039, -math.inf, id="no time for two stages"),
        pytest.param([1], [], "", 0.049, -math.inf, id="nor after a slow first one"),
    ],
)
def test_the_others_have_the_time_that_they_need(
    first: Sequence[int], gone: Sequence[str], unknown: str, decide_s: float, by_s: float
) -> None:
    slow_s = SLOW_S | {unknown: math.inf}
    # Who is on probation is not waited for, so it needs no time either.
    for choice in (
        Choice(MEMBERS, dict.fromkeys(gone, UNREACHABLE), {}),
        Choice(MEMBERS, {}, dict.fromkeys(gone, 0)),
    ):
        at_s = others_by_s(choice, first, slow_s.__getitem__, 0.0, decide_s)
        assert at_s == pytest.approx(by_s)


@pytest.mark.parametrize("now_s", [0.0, 0.1, 1234.567, 98765.4321])
def test_two_halves_are_always_enough(now_s: float) -> None:
    choice = Choice(MEMBERS, {}, {})
    at_s = others_by_s(choice, [0], lambda _: math.inf, now_s, now_s + 0.0973)
    assert at_s == pytest.approx(now_s + 0.0973 / 2)
