"""What the simulator's benchmark reckons by itself: arrivals, waiting agents, late wake-ups."""

from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.harness.stub_agent import durations
from benchmarks.simulator.reality import (
    MEDIANS_MS,
    SIGMA,
    SIMULATED,
    WAITING,
    End,
    gaps,
    loads,
    played,
    woken_late_s,
)
from partitioner.estimates.latency_quantiles import CLIENT_FUSE_MS
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import DeviceModel, Jittered, Load, LogNormal, Scenario

PROMPT = DeviceModel(
    name="prompt", k=0, compute=LogNormal(median_s=0.001), delay=Jittered(round_trip_s=0.001)
)
AT_RANDOM = Scenario(devices=(PROMPT,), load=Load(requests=40, rate_per_s=50.0), deadline_ms=1000.0)


def test_requests_at_random_come_as_in_a_simulation_of_that_seed() -> None:
    """So seldom that none waits, the end tells when the last came."""
    load = replace(AT_RANDOM.load, rate_per_s=0.1)
    trace = simulate(replace(AT_RANDOM, seed=2, load=load))
    last_s = sum(gap.next() for gap in [gaps(2)] for _ in range(load.requests)) / 0.1
    assert trace.span_s == pytest.approx(last_s + 0.002)


def test_blocks_are_simulated_as_they_were_run_and_calls_without_an_answer_told_apart() -> None:
    whole, halves = played(AT_RANDOM, 1)[0], played(AT_RANDOM, 2)[0]
    # The first block begins alike; the second is another Poisson process from its beginning on.
    assert list(whole[:20]) == list(halves[:20])
    assert list(whole[20:]) != list(halves[20:])
    waiting = played(replace(AT_RANDOM, load=Load(requests=40)), 2)[0]
    assert waiting == pytest.approx(np.full(SIMULATED, 2.0))
    silent = replace(PROMPT, name="silent", k=1, compute=LogNormal(median_s=5.0))
    _, answered, complete = played(
        replace(AT_RANDOM, devices=(PROMPT, silent), deadline_ms=20.0), 1
    )
    assert answered.all()
    assert not complete.any()


def test_the_slowest_agent_that_waits_is_as_busy_as_is_said() -> None:
    mean_s = max(MEDIANS_MS) / 1e3 * np.exp(SIGMA**2 / 2)
    rates = [load.rate_per_s for load in loads(WAITING, 10).values() if load.rate_per_s]
    assert [rate * mean_s for rate in rates] == pytest.approx([0.40, 0.81], abs=0.005)


def test_a_stub_waits_for_log_normal_times_and_is_late_as_often_as_told() -> None:
    told = Namespace(compute_ms=12.0, sigma=SIGMA, late_ms=80.0, late_share=0.0)
    take_s, other_s = durations(told, "device-0"), durations(told, "other")
    logs = np.log([take_s() for _ in range(4000)])
    assert np.exp(np.median(logs)) == pytest.approx(0.012, rel=0.01)
    assert np.std(logs) == pytest.approx(SIGMA, rel=0.05)
    assert np.log(other_s()) != pytest.approx(logs[0])
    take_s = durations(Namespace(**vars(told) | {"late_share": 0.25, "sigma": 0.0}), "device-0")
    times_s = [take_s() for _ in range(2000)]
    assert set(times_s) == {0.012, 0.08}
    assert np.mean([time_s == 0.08 for time_s in times_s]) == pytest.approx(0.25, abs=0.03)


def test_what_replies_hide_of_wake_ups_is_found_again() -> None:
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
    seen = [end.latency_ms - decided_ms for end in ends if end.cut]
    assert np.percentile(seen, 90) < 0.5 * expected[1]
    assert woken_late_s([End(3.0, cut=False)], 10.0) == ()
    # Fusing that was quicker than taken to be does not make a client early.
    assert set(woken_late_s([End(decided_ms - 0.05, cut=True)], 10.0)) == {0.0}
