"""How late a client is woken, from how its calls ended."""

import numpy as np
import pytest

from benchmarks.simulator.late import End, woken_late_s
from partitioner.estimates.latency_quantiles import CLIENT_FUSE_MS

#: It is decided 2 ms before, and fused after that.
DEADLINE_MS, DECIDED_MS = 10.0, 8.0 + CLIENT_FUSE_MS


def cut(late_ms: float) -> End:
    return End(DECIDED_MS + late_ms, cut=True)


def test_of_calls_that_were_cut_it_is_what_their_latency_tells() -> None:
    late_s = woken_late_s([cut(0.5), cut(1.0), cut(3.0), cut(1.0)], DEADLINE_MS)
    assert np.percentile(late_s, [10, 40, 60, 90]) == pytest.approx([5e-4, 1e-3, 1e-3, 3e-3])
    assert sum(value > 2e-3 for value in late_s) == pytest.approx(len(late_s) / 4, abs=1)


def test_calls_that_ended_before_tell_nothing() -> None:
    ended = [End(3.0, cut=False), End(DECIDED_MS - 0.01, cut=False)]
    assert woken_late_s([cut(1.0), *ended], DEADLINE_MS) == woken_late_s([cut(1.0)], DEADLINE_MS)
    assert woken_late_s(ended, DEADLINE_MS) == ()
    # Fusing that was quicker than taken to be does not make a client early.
    assert set(woken_late_s([cut(-0.05)], DEADLINE_MS)) == {0.0}


def test_an_end_between_tells_that_the_wake_up_was_later() -> None:
    """Of two that outlasted 1 ms one ended by itself: the other stands for both."""
    ends = [cut(0.5), End(DECIDED_MS + 1.0, cut=False), cut(2.0)]
    late_s = woken_late_s(ends, DEADLINE_MS)
    assert sum(value > 1e-3 for value in late_s) == pytest.approx(len(late_s) * 2 / 3, abs=1)


def test_what_replies_hide_of_wake_ups_is_found_again() -> None:
    draw = np.random.default_rng(0)
    woken_ms, replied_ms = draw.exponential(1.0, 20_000), draw.exponential(0.7, 20_000)
    ends = [
        cut(woken) if woken < replied else End(DECIDED_MS + replied, cut=False)
        for woken, replied in zip(woken_ms, replied_ms, strict=True)
    ]
    found_ms = np.array(woken_late_s(ends, DEADLINE_MS)) * 1e3
    expected = np.percentile(woken_ms, [50, 90])
    assert np.percentile(found_ms, [50, 90]) == pytest.approx(expected, rel=0.05)
    seen = [end.latency_ms - DECIDED_MS for end in ends if end.cut]
    assert np.percentile(seen, 90) < 0.5 * expected[1]
