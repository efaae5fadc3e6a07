"""A simulated client's crops leave through its one port, and a plan's answers end when it says."""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

from mdp.errors import InputError
from mdp.formats.plan import Plan
from mdp.formats.profile import DeviceProfile
from partitioner.planner.problem import make_problem
from partitioner.planner.search import plan_within
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import DeviceModel, Load, Scenario
from partitioner.simulation.setup import Assumptions, by_name, device_models
from tests.support.models.planning import BASE
from tests.unit.partitioner.estimates.test_spread import PROFILES
from tests.unit.partitioner.planner.test_client_port import MBIT
from tests.unit.partitioner.simulation.test_simulation_engine import (
    device,
    scenario,
    scenarios,
    shares,
)

#: 10 ms at 1 Mbit/s.
BYTES = 1250.0


def three(bandwidth_bps: float = math.inf) -> list[DeviceModel]:
    """Members of 10, 20 and 30 ms of bytes at 1 Mbit/s, which compute for 1 ms."""
    return [
        device(f"d{k}", k=k, compute_s=0.001, request_bytes=BYTES * (1 + k),
               bandwidth_bps=bandwidth_bps)
        for k in range(3)
    ]  # fmt: skip


def test_crops_of_a_picture_are_in_when_all_have_left() -> None:
    trace = simulate(scenario(*three(), requests=3, client_bps=MBIT))
    assert list(trace.latencies_s) == pytest.approx([0.061] * 3)
    # Also the smallest one: whose crop leaves first cannot be foretold.
    early = simulate(scenario(*three(), requests=1, client_bps=MBIT, deadline_ms=60.0))
    assert shares(early) == {(): 1.0}


def test_a_slow_link_takes_its_crop_after_the_others_have_left() -> None:
    """Of d0, 0.5 Mbit/s and 10 ms at the port: 50 ms for the others, and 20 ms for its own."""
    slow, *others = three()
    trace = simulate(scenario(replace(slow, bandwidth_bps=0.5e6), *others, client_bps=MBIT,
                              requests=1))  # fmt: skip
    assert list(trace.latencies_s) == pytest.approx([0.071])


def test_pictures_leave_one_after_another() -> None:
    one = device("alpha", compute_s=0.001, request_bytes=BYTES)
    load = Load(requests=4, rate_per_s=1e6)
    trace = simulate(replace(scenario(one, requests=1, client_bps=MBIT), load=load))
    assert list(trace.latencies_s) == pytest.approx([0.011, 0.021, 0.031, 0.041], abs=1e-4)


def test_every_client_has_a_port_of_its_own() -> None:
    """And a device's link of 4 Mbit/s has room for what trickles in from several."""
    one = device("alpha", compute_s=1e-9, request_bytes=BYTES, bandwidth_bps=4e6)
    trace = simulate(scenario(one, requests=2, clients=2, client_bps=MBIT))
    assert list(trace.latencies_s) == pytest.approx([0.010, 0.0125], abs=1e-6)


def test_a_reply_comes_no_faster_than_the_port() -> None:
    one = device("alpha", compute_s=0.001, reply_bytes=BYTES, bandwidth_bps=1e9)
    trace = simulate(scenario(one, requests=1, client_bps=MBIT))
    assert list(trace.latencies_s) == pytest.approx([0.011])


def test_a_hedge_waits_for_the_port_too() -> None:
    slow = device("slow", compute_s=1.0, request_bytes=BYTES)
    fast = device("fast", compute_s=0.001, request_bytes=BYTES)
    base = scenario(slow, fast, requests=1, client_bps=MBIT, hedge_after_s=0.004)
    # Asked after 4 ms, through the port from 10 to 20, and computed.
    assert list(simulate(base).latencies_s) == pytest.approx([0.021])


@settings(max_examples=50)
@given(scenarios())
def test_a_port_never_ends_a_call_late_and_a_wide_one_is_none(asked: Scenario) -> None:
    trace = simulate(replace(asked, client_bps=2e5))
    assert sorted(trace.numbers) == list(range(asked.load.requests))
    assert max(trace.latencies_s) <= asked.deadline_ms / 1e3 + 1e-9
    assert simulate(replace(asked, client_bps=2e5)) == trace
    if asked.load.rate_per_s is None and asked.load.clients == 1:
        free, wide = simulate(asked), simulate(replace(asked, client_bps=1e15))
        assert list(wide.latencies_s) == pytest.approx(list(free.latencies_s), abs=1e-6)


@pytest.mark.parametrize("bandwidth_bps", [0.0, -1.0, math.nan])
def test_a_port_carries_something(bandwidth_bps: float) -> None:
    with pytest.raises(InputError, match="expected a client's port above 0 bit/s, got "):
        scenario(device("alpha"), requests=1, client_bps=bandwidth_bps)


def make_port_plan(profiles: Mapping[str, DeviceProfile], mbit: float) -> Plan:
    problem = make_problem(BASE, list(profiles.values()), client_bps=mbit * MBIT)
    return plan_within(problem, 60.0).plan


@pytest.mark.parametrize("mbit", [20.0, 50.0, 100.0, 1000.0, math.inf])
def test_an_answer_ends_when_the_plan_says(mbit: float) -> None:
    """One request at a time, and nothing random: the slowest member's predicted milliseconds."""
    profiles = by_name(PROFILES)
    plan = make_port_plan(profiles, mbit)
    assert len(plan.assignments) > 1
    steady = Assumptions(sigma=0.0, jitter_ms=0.0)
    devices = tuple(
        replace(model, mean_up_s=math.inf) for model in device_models(plan, profiles, 1000, steady)
    )
    asked = Scenario(
        devices=devices, load=Load(requests=20, think_s=1.0), deadline_ms=1000.0,
        client_bps=plan.client_bps or math.inf,
    )  # fmt: skip
    ends_ms = max(part.predicted_ms.total for part in plan.assignments)
    trace = simulate(asked)
    assert np.array(trace.latencies_s) * 1e3 == pytest.approx([ends_ms] * 20, abs=0.002)
    if mbit <= 100:
        # The port is what makes it so long.
        free = simulate(replace(asked, client_bps=math.inf))
        assert max(free.latencies_s) * 1e3 < ends_ms - 1.0
