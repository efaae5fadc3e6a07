"""The simulator's benchmark draws the simulator's arrivals, and late wake-ups from cut calls."""

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.simulator.reality import End, gaps, played, woken_late_s
from partitioner.estimates.latency_quantiles import CLIENT_FUSE_MS
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import DeviceModel, Jittered, Load, LogNormal, Scenario

PROMPT = DeviceModel(
    name="prompt", k=0, compute=LogNormal(median_s=0.001), delay=Jittered(round_trip_s=0.001)
)
AT_RANDOM = Scenario(devices=(PROMPT,), load=Load(requests=40, rate_per_s=50.0), deadline_ms=1000.0)


def test_random_requests_arrive_as_in_the_simulation_of_their_block() -> None:
    """At a rate at which none waits, the end shows when the last one came."""
    load = replace(AT_RANDOM.load, rate_per_s=0.1)
    trace = simulate(replace(AT_RANDOM, seed=2, load=load))
    last_s = sum(gap.next() for gap in [gaps(2)] for _ in range(load.requests)) / 0.1
    assert trace.span_s == pytest.approx(last_s + 0.002)
    whole, halves = played(AT_RANDOM, 1)[0], played(AT_RANDOM, 2)[0]
    # The first block begins alike; the second is another Poisson process from its beginning on.
    assert list(whole[:20]) == list(halves[:20])
    assert list(whole[20:]) != list(halves[20:])


def test_wake_ups_that_replies_censored_are_estimated() -> None:
    """A client of 10 ms decides 2 ms before; a reply that comes after that ends the call."""
    decided_ms = 8.0 + CLIENT_FUSE_MS
    draw = np.random.default_rng(0)
    woken_ms, replied_ms = draw.exponential(1.0, 20_000), draw.exponential(0.7, 20_000)
    ends = [
        End(decided_ms + min(woken, replied), cut=woken < replied)
        for woken, replied in zip(woken_ms, replied_ms, strict=True)
    ]
    found_ms = np.array(woken_late_s(ends, 10.0)) * 1e3
    expected = np.percentile(woken_ms, [50, 90])
    assert np.percentile(found_ms, [50, 90]) == pytest.approx(expected, rel=0.05)
    assert woken_late_s([End(3.0, cut=False)], 10.0) == ()
