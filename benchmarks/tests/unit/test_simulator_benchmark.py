"""What the simulator's benchmark reckons by itself: arrivals, kept parts, tables."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.stub_agent import durations
from benchmarks.simulator.__main__ import SPEED, merged
from benchmarks.simulator.fleets import COMPUTING, MEDIANS_MS, SIGMA, WAITING, loads
from benchmarks.simulator.page import draw, markdown
from benchmarks.simulator.reality import SIMULATED, gaps, played
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import DeviceModel, Jittered, Load, LogNormal, Scenario

PROMPT = DeviceModel(
    name="prompt", k=0, compute=LogNormal(median_s=0.001), delay=Jittered(round_trip_s=0.001)
)
RATE_PER_S = 50.0
AT_RANDOM = Scenario(
    devices=(PROMPT,), load=Load(requests=40, rate_per_s=RATE_PER_S), deadline_ms=1000.0
)


def test_requests_at_random_come_as_in_a_simulation_of_that_seed() -> None:
    """So seldom that none waits, the end tells when the last came."""
    load = replace(AT_RANDOM.load, rate_per_s=0.1)
    for seed in (1, 2):
        trace = simulate(replace(AT_RANDOM, seed=seed, load=load))
        last_s = sum(gap.next() for gap in [gaps(seed)] for _ in range(load.requests)) / 0.1
        assert trace.span_s == pytest.approx(last_s + 0.002)


def test_blocks_are_simulated_as_they_were_run() -> None:
    whole, halves = played(AT_RANDOM, 1), played(AT_RANDOM, 2)
    assert len(whole.latencies_ms) == len(halves.latencies_ms) == 40
    # The first block begins alike; the second is another Poisson process from its beginning on.
    assert list(whole.latencies_ms[:20]) == list(halves.latencies_ms[:20])
    assert list(whole.latencies_ms[20:]) != list(halves.latencies_ms[20:])
    assert halves.answered.all()
    assert halves.complete.all()


def test_callers_that_wait_are_simulated_longer_than_they_were_run() -> None:
    said = played(replace(AT_RANDOM, load=Load(requests=40)), 2)
    assert len(said.latencies_ms) == SIMULATED
    assert said.latencies_ms == pytest.approx(2.0)


def test_calls_without_an_answer_are_told_apart() -> None:
    silent = replace(PROMPT, name="silent", compute=LogNormal(median_s=5.0))
    said = played(replace(AT_RANDOM, devices=(silent,), deadline_ms=20.0), 1)
    assert not said.answered.any()
    assert not said.complete.any()
    half = played(replace(AT_RANDOM, devices=(PROMPT, replace(silent, k=1)), deadline_ms=20.0), 1)
    assert half.answered.all()
    assert not half.complete.any()


def test_the_slowest_agent_that_waits_is_as_busy_as_is_said() -> None:
    mean_s = max(MEDIANS_MS) / 1e3 * np.exp(SIGMA**2 / 2)
    rates = [load.rate_per_s for load in loads(WAITING, 10).values() if load.rate_per_s]
    assert [rate * mean_s for rate in rates] == pytest.approx([0.40, 0.81], abs=0.005)


def stub(**options: Any) -> Namespace:
    return Namespace(
        **{"compute_ms": 12.0, "sigma": 0.0, "late": [], "late_ms": 80.0, "late_share": 0.0}
        | options
    )


def test_a_stub_waits_for_log_normal_times() -> None:
    take_s = durations(stub(sigma=SIGMA), "device-0")
    logs = np.log([take_s() for _ in range(4000)])
    assert np.exp(np.median(logs)) == pytest.approx(0.012, rel=0.01)
    assert np.std(logs) == pytest.approx(SIGMA, rel=0.05)
    again, other = durations(stub(sigma=SIGMA), "device-0"), durations(stub(sigma=SIGMA), "other")
    drawn = [np.exp(value) for value in logs[:5]]
    assert [again() for _ in range(5)] == pytest.approx(drawn)
    assert [other() for _ in range(5)] != pytest.approx(drawn)


def test_a_stub_without_a_spread_takes_what_it_is_told_and_is_late_as_often() -> None:
    assert {durations(stub(), "device-0")() for _ in range(5)} == {0.012}
    take_s = durations(stub(late=["device-0"], late_share=0.25), "device-0")
    late = [take_s() == 0.08 for _ in range(2000)]
    assert np.mean(late) == pytest.approx(0.25, abs=0.03)


def row(agents: str, error: float = 0.05) -> dict[str, Any]:
    value = {"measured": 20.0, "simulated": 20.0 * (1 + error), "error": error}
    share = {"measured": 0.9, "simulated": 0.9, "error": 0.0}
    return {
        "agents": agents, "load": "one caller", "drawn": "apart", "deadline_ms": 30.0,
        "requests": 10, "p50": value, "p90": value, "p99": value, "complete": share,
    }  # fmt: skip


def late(agents: str) -> dict[str, Any]:
    return {"agents": agents, "load": "one caller", "deadline_ms": 30.0, "cut": 7,
            "p50": 0.4, "p90": 0.8, "p99": 1.0}  # fmt: skip


def machine(date: str) -> dict[str, Any]:
    return {"cores": 2, "processor": "one", "load_before": 0.1, "date": date}


def fleet_part(agents: str, date: str) -> dict[str, Any]:
    return {"machine": machine(date), "reality": [row(agents)], "woken_late": [late(agents)]}


def test_what_was_not_run_is_kept() -> None:
    found = merged({}, WAITING, fleet_part(WAITING, "yesterday"))
    found = merged(found, COMPUTING, fleet_part(COMPUTING, "yesterday"))
    found = merged(found, SPEED, {"machine": machine("yesterday"), SPEED: [{"per_s": 1}]})
    again = fleet_part(WAITING, "today")
    again["reality"] = [row(WAITING, error=0.01)]
    found = merged(found, WAITING, again)
    assert found["reality"] == [row(COMPUTING), row(WAITING, error=0.01)]
    assert [r["agents"] for r in found["woken_late"]] == [COMPUTING, WAITING]
    dates = {part: said["date"] for part, said in found["machines"].items()}
    assert dates == {WAITING: "today", COMPUTING: "yesterday", SPEED: "yesterday"}
    assert found[SPEED] == [{"per_s": 1}]


def test_the_page_and_the_picture_show_both_kinds_of_agents() -> None:
    found = merged({}, WAITING, fleet_part(WAITING, "today"))
    text = markdown(found)
    assert "**Agents that wait** (2 virtual cores, one, load 0.1" in text
    assert "Agents that compute" not in text
    found = merged(found, COMPUTING, fleet_part(COMPUTING, "today"))
    text = markdown(found)
    assert text.index("**Agents that compute**") < text.index("**Agents that wait**")
    assert text.count("| one caller | 30 | apart | 20.00 | 21.00 (+5%) |") == 2
    assert text.count("| one caller | 30 | 7 | 0.40 | 0.80 | 1.00 |") == 2
    picture = draw(found["reality"]).decode()
    assert "Agents that wait: latency" in picture
    assert "Agents that compute: complete answers" in picture


def test_the_page_shows_the_speed() -> None:
    fleet = {"fleet": "one device", "member_requests": 3000, "per_s": 1000}
    found = merged({}, WAITING, fleet_part(WAITING, "today"))
    found = merged(found, SPEED, {"machine": machine("today"), SPEED: [fleet]})
    text = markdown(found)
    assert "before the run, today)\n\n| fleet |" in text
    assert "| one device | 3,000 | 1,000 |" in text.splitlines()
