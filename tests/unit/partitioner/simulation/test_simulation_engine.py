"""Requests in virtual time: nothing lost, nothing late, and what queueing theory says."""

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.errors import InputError
from mdp.requests.deadline import reserve_s
from partitioner.simulation.device import QueuedRequest, SimulatedDevice
from partitioner.simulation.engine import Simulation, simulate
from partitioner.simulation.models import (
    RETRANSMIT_S,
    DeviceModel,
    Jittered,
    Load,
    LogNormal,
    MeasuredSeconds,
    RandomStreams,
    Rotated,
    Scenario,
)
from partitioner.simulation.trace import Trace

PLENTY_MS = 3_600_000.0


def device(name: str, k: int = 0, compute_s: float = 0.01, **more: Any) -> DeviceModel:
    """A device whose computations all take the same time, over a link that takes none."""
    return replace(
        DeviceModel(
            name=name, k=k, compute=LogNormal(median_s=compute_s), delay=Jittered(round_trip_s=0.0)
        ),
        **more,
    )


def scenario(*devices: DeviceModel, deadline_ms: float = PLENTY_MS, **more: Any) -> Scenario:
    load = Load(**{name: more.pop(name) for name in ("requests", "clients", "rate_per_s", "think_s")
                   if name in more})  # fmt: skip
    return Scenario(devices=devices, load=load, deadline_ms=deadline_ms, **more)


def shares(trace: Trace) -> dict[tuple[int, ...], float]:
    """Share of the requests that ended with each arrival subset."""
    return {m: len(places) / len(trace.numbers) for m, places in trace.by_subset().items()}


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    devices = []
    for k in range(draw(st.integers(1, 3))):
        for number in range(draw(st.integers(1, 2))):
            devices.append(
                DeviceModel(
                    name=f"d{k}/{number}",
                    k=k,
                    compute=LogNormal(
                        median_s=draw(st.sampled_from([0.001, 0.02])),
                        sigma=draw(st.sampled_from([0.0, 0.5])),
                    ),
                    delay=Jittered(round_trip_s=0.002, jitter_s=draw(st.sampled_from([0, 0.002]))),
                    request_bytes=1000.0,
                    bandwidth_bps=draw(st.sampled_from([1e6, math.inf])),
                    turnaround_s=draw(st.sampled_from([0.0, 0.003])),
                    mean_up_s=draw(st.sampled_from([math.inf, 0.3])),
                    mean_down_s=0.2,
                    loss=draw(st.sampled_from([0.0, 0.2])),
                )
            )
    rate_per_s = draw(st.sampled_from([None, 20.0, 300.0]))
    lost = draw(st.sets(st.sampled_from([d.name for d in devices]), max_size=1))
    return scenario(
        *devices,
        deadline_ms=draw(st.sampled_from([1.0, 15.0, 60.0, 300.0])),
        requests=draw(st.integers(1, 60)),
        clients=draw(st.integers(1, 4)),
        rate_per_s=rate_per_s,
        seed=draw(st.integers(0, 1000)),
        hedge_after_s=draw(st.sampled_from([None, 0.005])),
        lost=frozenset(lost),
        first=frozenset(draw(st.sampled_from([(), (0,)]))),
        escalated=0.5,
        before=LogNormal(median_s=draw(st.sampled_from([0.0, 0.0003]))),
        after_s=0.0002,
        detect_s=draw(st.sampled_from([0.0, 0.05])),
        reconnect_s=0.01,
    )


@settings(max_examples=150)
@given(scenarios())
def test_every_request_ends_once_by_its_deadline_and_the_same_way_again(asked: Scenario) -> None:
    trace = simulate(asked)
    assert sorted(trace.numbers) == list(range(asked.load.requests))
    assert max(trace.latencies_s) <= asked.deadline_ms / 1e3 + 1e-9
    assert min(trace.latencies_s) >= 0
    members = asked.members()
    for subset in trace.subsets:
        assert list(subset) == sorted(set(subset))
        assert set(subset) <= set(members)
    for counts in trace.counts.values():
        # Some may still be under way, or have gone down with their device.
        ended = counts["used"] + counts["late"] + counts["too_late"] + counts["overloaded"]
        assert ended <= counts["asked"]
        assert min(counts.values()) >= 0
    used = sum(counts["used"] for counts in trace.counts.values())
    arrived = sum(len(subset) * len(p) for subset, p in trace.by_subset().items())
    assert used >= arrived  # and a contribution to a request still under way at the end
    assert trace.asks <= asked.load.requests * len(asked.devices)
    assert all(trace.counts[name]["asked"] == 0 for name in asked.lost)
    assert all(0 <= busy_s <= trace.span_s + 1e-9 for busy_s in trace.busy_s.values())
    again = simulate(asked)
    assert again == trace


def test_as_many_requests_wait_as_their_deadline_allows() -> None:
    crowd = scenario(device("a"), requests=50, clients=50, deadline_ms=600.0)
    assert shares(simulate(crowd)) == {(0,): 1.0}
    # By the deadline of the last ones, thirty are answered.
    hasty = simulate(replace(crowd, deadline_ms=300.0))
    assert hasty.counts["a"]["overloaded"] == 0
    assert hasty.counts["a"]["too_late"] > 0
    large = simulate(replace(crowd, devices=(device("a", waiting_bytes=2**22),)))
    # One is computed, and 16 of 4 MiB wait; the others are refused, and asked again until they fit.
    assert large.counts["a"]["overloaded"] >= 50 - 17
    assert shares(large) == {(0,): 1.0}


@settings(max_examples=100)
@given(
    st.integers(0, 10_000),
    st.lists(st.sampled_from([5.0, 12.0, 20.0, 35.0, 80.0]), min_size=2, max_size=4, unique=True),
)
def test_more_time_never_answers_less(seed: int, deadlines: list[float]) -> None:
    """Holds one by one where requests neither meet nor teach an agent to refuse."""
    base = scenario(by_delay("alpha", 0, 0.020, sigma=0.7), requests=40, rate_per_s=0.01, seed=seed)
    answered = []
    for deadline_ms in sorted(deadlines):
        trace = simulate(replace(base, deadline_ms=deadline_ms))
        answered.append({trace.numbers[place] for place in trace.by_subset().get((0,), ())})
    assert all(less <= more for less, more in pairwise(answered))


def by_delay(name: str, k: int, median_s: float, sigma: float) -> DeviceModel:
    """A device whose time is all on the way, so that its agent accepts everything."""
    normal = np.random.default_rng(0).standard_normal(20_000)
    delay = MeasuredSeconds(values_s=tuple((median_s * np.exp(sigma * normal)).tolist()))
    return DeviceModel(name=name, k=k, compute=LogNormal(median_s=1e-6), delay=delay)


def test_one_device_is_a_queue_with_one_server() -> None:
    """M/D/1: the mean wait is rho * D / (2 (1 - rho)), by Pollaczek and Khinchine."""
    service_s, rho = 0.010, 0.6
    trace = simulate(
        scenario(device("alpha", compute_s=service_s), requests=25_000, rate_per_s=rho / service_s)
    )
    wait_s = np.mean(trace.latencies_s) - service_s
    assert wait_s == pytest.approx(rho * service_s / (2 * (1 - rho)), rel=0.06)
    assert trace.busy_s["alpha"] / trace.span_s == pytest.approx(rho, rel=0.03)


def test_two_devices_arrive_as_independent_ones_do() -> None:
    """P(in time) of a log-normal time is the normal distribution's at its logarithm."""
    deadline_ms, sigma = 40.0, 0.4
    decide_s = deadline_ms / 1e3 - reserve_s(deadline_ms)
    medians = {0: 0.030, 1: 0.040}
    devices = [by_delay(f"d{k}", k, median_s, sigma) for k, median_s in medians.items()]
    requests = 20_000
    trace = simulate(
        # No health in the way, nor lateness: of its few requests no client learns whom not to ask.
        scenario(
            *devices, deadline_ms=deadline_ms, requests=requests, rate_per_s=0.01, clients=requests
        )
    )
    p = {
        k: 0.5 * (1 + math.erf(math.log(decide_s / m) / sigma / 2**0.5)) for k, m in medians.items()
    }
    expected = {
        (0, 1): p[0] * p[1],
        (0,): p[0] * (1 - p[1]),
        (1,): (1 - p[0]) * p[1],
        (): (1 - p[0]) * (1 - p[1]),
    }
    found = shares(trace)
    for subset, share in expected.items():
        assert found[subset] == pytest.approx(share, abs=4 * (share / requests) ** 0.5 + 1e-3)


def test_closed_loop_clients_wait_for_their_answers() -> None:
    trace = simulate(scenario(device("alpha"), requests=50, think_s=0.005))
    assert trace.span_s == pytest.approx(50 * 0.010 + 49 * 0.005)
    assert list(trace.latencies_s) == pytest.approx([0.010] * 50)
    two = simulate(scenario(device("alpha"), requests=50, clients=2))
    assert two.span_s == pytest.approx(50 * 0.010), "one computation at a time"
    assert list(two.latencies_s)[1:] == pytest.approx([0.020] * 49)


def test_a_transfer_takes_the_link() -> None:
    """Two clients' requests of 10 ms each way in bytes: the second one's waits for the first's."""
    one = device("alpha", compute_s=0.001, request_bytes=1250.0, bandwidth_bps=1e6)
    trace = simulate(scenario(one, requests=2, clients=2))
    assert list(trace.latencies_s) == pytest.approx([0.011, 0.021])


def test_an_agent_sends_before_it_goes_on() -> None:
    trace = simulate(scenario(device("alpha", turnaround_s=0.004), requests=3, clients=3))
    assert list(trace.latencies_s) == pytest.approx([0.010, 0.024, 0.038])
    spaced = simulate(scenario(device("alpha", turnaround_s=0.004), requests=3, think_s=0.005))
    assert list(spaced.latencies_s) == pytest.approx([0.010] * 3)
    pressed = simulate(scenario(device("alpha", turnaround_s=0.004), requests=3, think_s=0.001))
    assert list(pressed.latencies_s) == pytest.approx([0.010, 0.013, 0.013])


def test_a_reply_counts_that_comes_before_the_client_notices_the_deadline() -> None:
    # 20 ms less the reserve of 2 ms; the reply is there after 18.5 ms.
    alpha = device("alpha", compute_s=0.001, delay=Jittered(round_trip_s=0.0175))
    base = scenario(alpha, deadline_ms=20.0, requests=5, think_s=1.0)
    assert (0,) not in shares(simulate(base))
    assert shares(simulate(replace(base, late_s=0.001))) == {(0,): 1.0}


@pytest.mark.parametrize(
    "load",
    [{"think_s": 1.0}, {"rate_per_s": 500.0, "clients": 40}],
    ids=["one after another", "many at once, later ones woken before earlier ones"],
)
def test_every_call_is_woken_as_late_as_is_drawn(load: dict[str, float]) -> None:
    # Every other time in time, so that its client goes on asking it.
    moody = device("moody", compute_s=1e-6, delay=MeasuredSeconds(values_s=(0.001, 600.0)))
    woken_s = (0.0002, 0.001, 0.005)
    base = scenario(moody, deadline_ms=20.0, requests=300, after_s=0.0001, **load)

    def beyond_s(late_s: float | MeasuredSeconds | LogNormal) -> set[float]:
        took_s = np.array(simulate(replace(base, late_s=late_s)).latencies_s)
        return set((took_s[took_s > 0.017] - 0.018 - 0.0001).round(9))

    assert beyond_s(0.001) == {0.001}
    assert beyond_s(MeasuredSeconds(values_s=woken_s)) == set(woken_s)
    drawn = beyond_s(LogNormal(median_s=0.001, sigma=0.5))
    assert len(drawn) > 20
    assert np.median(list(drawn)) == pytest.approx(0.001, rel=0.4)


@pytest.mark.parametrize("offset", [0, 2, 7])
def test_a_client_s_own_order_of_replicas_goes_round(offset: int) -> None:
    names = [f"r{number}" for number in range(5)]
    own = Rotated(names, offset)
    begin = offset % 5
    expected = names[begin:] + names[:begin]
    assert [*own] == [own[place] for place in range(len(own))] == own[:] == expected
    assert own[1:3] == expected[1:3]
    with pytest.raises(IndexError):
        own[5]


def test_a_lost_packet_comes_later() -> None:
    trace = simulate(scenario(device("alpha", loss=0.3), requests=400))
    beyond = np.array(trace.latencies_s) - 0.010
    steps = np.round(beyond / RETRANSMIT_S)
    assert np.allclose(beyond, steps * RETRANSMIT_S)
    assert (steps > 0).mean() == pytest.approx(1 - 0.7**2, abs=0.08)


def test_a_lost_device_is_missed_and_a_replica_takes_its_place() -> None:
    pair = (device("alpha"), device("beta", k=1))
    trace = simulate(scenario(*pair, requests=20, lost=frozenset({"beta"})))
    assert shares(trace) == {(0,): 1.0}
    assert sum(trace.partial) == 20
    three = (*pair, device("beta/attic", k=1))
    trace = simulate(scenario(*three, requests=20, lost=frozenset({"beta"})))
    assert shares(trace) == {(0, 1): 1.0}
    assert sum(trace.partial) == 0


def test_hedging_asks_the_next_replica_too() -> None:
    slow, fast = device("slow", compute_s=1.0), device("fast", compute_s=0.010)
    base = scenario(slow, fast, requests=1)
    assert list(simulate(base).latencies_s) == pytest.approx([1.0])
    hedged = simulate(replace(base, hedge_after_s=0.030))
    assert list(hedged.latencies_s) == pytest.approx([0.040])
    assert hedged.asks == 2


def test_a_hedge_due_after_another_member_s_goes_out_too() -> None:
    full = device("full", k=1, delay=Jittered(round_trip_s=0.010))
    members = (
        *(device("alpha"), device("alpha/attic")),
        *(full, device("slow", k=1, compute_s=1.0), device("fast", k=1)),
    )
    took_s: list[float] = []
    for seed in range(20):
        simulation = Simulation(scenario(*members, requests=1, hedge_after_s=0.030, seed=seed))
        simulation._devices["full"]._queue.times.one_s = 1e9
        took_s += simulation.run().latencies_s
    # The first one asked says no after 10 ms, the second is given 30 ms, the third takes 10.
    assert pytest.approx(0.050) in took_s


def test_a_device_that_is_never_in_time_is_rested() -> None:
    late = DeviceModel(
        name="late", k=1, compute=LogNormal(median_s=0.001), delay=Jittered(round_trip_s=600.0)
    )
    trace = simulate(
        scenario(device("alpha"), late, deadline_ms=50.0, requests=200, rate_per_s=10.0)
    )
    assert trace.counts["alpha"]["asked"] == 200
    assert 3 <= trace.counts["late"]["asked"] < 30
    assert shares(trace) == {(0,): 1.0}


def test_clients_share_replicas_out() -> None:
    four = [device(f"r{number}") for number in range(4)]
    trace = simulate(scenario(*four, requests=400, clients=4))
    asked = [trace.counts[d.name]["asked"] for d in four]
    assert sum(asked) == 400
    assert min(asked) >= 90
    alone = simulate(scenario(*four, requests=400, clients=1))
    assert min(alone.counts[d.name]["asked"] for d in four) >= 90


def test_a_device_is_there_as_often_as_its_availability_says() -> None:
    unsure = device("alpha", compute_s=0.001, mean_up_s=4.0, mean_down_s=1.0)
    trace = simulate(
        scenario(
            unsure, deadline_ms=20.0, requests=20_000, rate_per_s=5.0, detect_s=0.0, reconnect_s=0.0
        )
    )
    assert shares(trace)[(0,)] == pytest.approx(0.8, abs=0.03)
    assert trace.falls["alpha"] == pytest.approx(4000 / 5, rel=0.15)
    # Whoever is known to be gone costs no time at all.
    unanswered = trace.by_subset()[()]
    assert np.median(np.array(trace.latencies_s)[unanswered]) == 0.0


def test_until_its_loss_is_noticed_a_device_costs_the_whole_deadline() -> None:
    unsure = device("alpha", compute_s=0.001, mean_up_s=10.0, mean_down_s=10.0)
    trace = simulate(
        scenario(unsure, deadline_ms=20.0, requests=20_000, rate_per_s=5.0, detect_s=5.0)
    )
    waited = np.count_nonzero(np.array(trace.latencies_s) > 0.015)
    # Of each time away the first five seconds, or all of it: the mean of min(5, exponential of 10).
    unnoticed_s = 10.0 * (1 - math.exp(-0.5))
    assert waited == pytest.approx(trace.falls["alpha"] * unnoticed_s * 5.0, rel=0.15)


def test_requests_leave_no_garbage_that_would_have_to_be_looked_for() -> None:
    pair = [
        device(f"r{k}/{n}", k=k, mean_up_s=5.0, mean_down_s=1.0) for k in (0, 1) for n in (0, 1)
    ]
    found = []
    for requests in (50, 50, 1000):
        gc.collect()
        assert gc.isenabled()
        simulate(
            scenario(*pair, deadline_ms=30.0, requests=requests, rate_per_s=20.0,
                     hedge_after_s=0.005, detect_s=0.1)
        )  # fmt: skip
        assert gc.isenabled()
        found.append(gc.collect())
    # What one simulation consists of, and nothing for each of its requests.
    assert abs(found[2] - found[1]) < 200


def test_the_same_luck_in_every_what_if() -> None:
    """Draws of one device do not depend on which others there are."""
    noisy = replace(device("alpha"), compute=LogNormal(median_s=0.01, sigma=0.5))
    alone = simulate(scenario(noisy, requests=50))
    quick = device("beta", k=1, compute_s=1e-6)
    both = simulate(scenario(noisy, quick, requests=50))
    assert list(both.latencies_s) == pytest.approx(list(alone.latencies_s))
    other = simulate(scenario(noisy, requests=50, seed=1))
    assert list(other.latencies_s) != list(alone.latencies_s)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"requests": 0}, "requests: expected at least 1, got 0"),
        ({"lost": frozenset({"gamma"})}, "'gamma' cannot be lost: expected one of alpha, beta"),
        ({"deadline_ms": 0.0}, "deadline_ms: expected more than 0 and at most 3,600,000, got 0"),
        ({"deadline_ms": math.nan}, "deadline_ms: expected more than 0 .*, got nan"),
    ],
)
def test_what_cannot_be_simulated(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        simulate(scenario(device("alpha"), device("beta", k=1), **{"requests": 1, **wrong}))


def test_a_name_that_is_taken_twice() -> None:
    with pytest.raises(InputError, match="devices: one is named twice: alpha, alpha"):
        scenario(device("alpha"), device("alpha"), requests=1)


@pytest.mark.parametrize("escalated", [0.0, 0.25, 1.0])
def test_a_cascade_asks_the_others_of_as_many_requests_as_escalate(escalated: float) -> None:
    three = [device("a", 0, 0.01), device("b", 1, 0.02), device("c", 2, 0.04)]
    trace = simulate(scenario(*three, requests=400, first=frozenset([0]), escalated=escalated))
    asked = {name: counts["asked"] for name, counts in trace.counts.items()}
    assert asked["a"] == 400
    assert asked["b"] == asked["c"] == 400 - sum(trace.sure)
    assert asked["b"] / 400 == pytest.approx(escalated, abs=0.05)
    by_subset = shares(trace)
    assert by_subset.get((0, 1, 2), 0.0) == asked["b"] / 400
    slowest_s = 0.05 if escalated else 0.01
    assert max(trace.latencies_s) == pytest.approx(slowest_s)


def test_a_cascade_whose_first_member_is_lost_or_late_asks_the_others() -> None:
    slow, quick = device("a", 0, 10.0), device("b", 1, 0.01)
    for lost in (frozenset(["a"]), frozenset[str]()):
        one = scenario(slow, quick, deadline_ms=1020.0, requests=1, first=frozenset([0]), lost=lost)
        trace = simulate(one)
        assert shares(trace) == {(1,): 1.0}
        assert trace.counts["b"]["used"] == 1
        assert trace.latencies_s[0] == pytest.approx(0.01 if lost else 1.01)


def test_a_device_that_is_back_has_forgotten_what_it_was_asked() -> None:
    """Its queue, what it computed and how long that takes."""
    pushed: list[tuple[float, Callable[[float, Any], None], Any]] = []
    replied: list[QueuedRequest] = []
    one = SimulatedDevice(
        device("alpha", compute_s=0.5, delay=Jittered(round_trip_s=0.0)),
        RandomStreams(0),
        lambda at_s, callback, argument: pushed.append((at_s, callback, argument)),
        lambda now_s, job: replied.append(job),
    )

    def play(until_s: float) -> None:
        while due := [event for event in pushed if event[0] <= until_s]:
            event = min(due, key=lambda each: each[0])
            pushed.remove(event)
            event[1](event[0], event[2])

    for call, now_s in enumerate((0.0, 0.6, 0.7)):
        one.send(now_s, call, 10.0)
        play(now_s)
    play(0.8)
    assert [job.call for job in replied] == [0]
    one.fall(0.8)
    statuses: list[Any] = []
    for up in (False, True):
        one.up = up
        one.ask(0.9, lambda _, told: statuses.append(told), "client")
        play(0.9)
        assert statuses == [("client", "alpha")] * up
    # Half a second would not suffice, if that was still known, nor a second, behind another.
    one.send(1.0, 3, 0.1)
    play(9.0)
    assert [(job.call, job.refusal) for job in replied] == [(0, None), (3, None)]
    assert one.busy_s == pytest.approx(1.0)
