"""Lateness of answers, in quantiles and shares; and plans that promise a share, simulated."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from mdp.formats.plan import Plan, read_plan
from mdp.formats.profile import DeviceProfile, NetworkLink, read_profile
from partitioner.cli.plan_tables import print_planned
from partitioner.estimates.latency_quantiles import (
    ASSUMED_JITTER_MS,
    ASSUMED_SIGMA,
    CLIENT_FUSE_MS,
    CLIENT_SEND_MS,
    MEDIAN,
    TWO_MEDIAN,
    Jitter,
    client_ms,
    jitter_of,
    quantile_for,
    share_in_time,
    sigma_of,
    spread_of,
)
from partitioner.planner.deadline import DECODING_MS
from partitioner.planner.make_plan import make_planned
from partitioner.planner.targets import plan_with_accuracy
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import Load, LogNormal, Scenario
from partitioner.simulation.setup import Assumptions, by_name, device_models
from tests.support.models.planning import BASE, known_problem, make_plan, settings, shares
from tests.unit.partitioner.cli.test_plan_command import NAMES

PROFILES = [read_profile(name) for name in NAMES]


def spreading(profile: DeviceProfile, sigma: float) -> DeviceProfile:
    """The profile always there, with this spread at every point and a link that wobbles."""
    away = math.exp(1.2815515655446004 * sigma)
    points = [
        msgspec.structs.replace(p, p10_ms=p.latency_ms / away, p90_ms=p.latency_ms * away)
        for p in profile.latency
    ]
    link = msgspec.structs.replace(profile.link, round_trip_p90_s=2 * profile.link.round_trip_s)
    return msgspec.structs.replace(profile, latency=points, availability=1.0, link=link)


def test_sigma_is_that_of_the_percentiles() -> None:
    draws = np.random.default_rng(0).lognormal(1.0, 0.3, 200_000)
    assert sigma_of(*np.percentile(draws, [10, 90])) == pytest.approx(0.3, rel=0.01)


def test_a_spread_is_that_of_points_of_about_the_same_latency() -> None:
    points = [
        msgspec.structs.replace(
            read_profile("n100").latency[0],
            latency_ms=ms,
            p10_ms=ms * math.exp(-1.2815515655446004 * sigma),
            p90_ms=ms * math.exp(1.2815515655446004 * sigma),
        )
        for ms, sigma in zip(
            (1, 1.1, 1.2, 1.3, 1.4, 90, 95, 100, 105, 110),
            # One point of either group was disturbed.
            (0.3, 0.3, 0.9, 0.3, 0.3, 0.05, 0.05, 0.4, 0.05, 0.05),
            strict=True,
        )
    ]
    spread = spread_of(points)
    assert spread.measured
    assert spread.sigma(np.array([0.1, 1.2, 100.0, 1e4])) == pytest.approx([0.3, 0.3, 0.05, 0.05])
    unknown = spread_of(read_profile("n100").latency)
    assert not unknown.measured
    assert unknown.sigma(np.array([3.0])) == [ASSUMED_SIGMA]


def test_jitter_is_what_the_link_s_percentiles_say() -> None:
    link = NetworkLink(bandwidth_bps=1e9, round_trip_s=0.004, round_trip_p90_s=0.0055)
    jitter = jitter_of(link)
    assert jitter.added_ms == 0
    delays = np.random.default_rng(0).exponential(jitter.mean_ms, (200_000, 2)).sum(axis=1)
    p50, p90 = np.percentile(delays, [50, 90])
    assert p90 - p50 == pytest.approx(1.5, rel=0.02)
    assumed = jitter_of(NetworkLink(bandwidth_bps=1e9, round_trip_s=0.004))
    assert assumed == Jitter(mean_ms=ASSUMED_JITTER_MS, added_ms=TWO_MEDIAN * ASSUMED_JITTER_MS)
    # A round trip cannot be quicker than nothing.
    wild = jitter_of(NetworkLink(bandwidth_bps=1e9, round_trip_s=0.001, round_trip_p90_s=0.1))
    assert wild.mean_ms * TWO_MEDIAN == pytest.approx(1.0)


def test_a_link_whose_90th_percentile_is_below_its_median_contradicts_itself() -> None:
    with pytest.raises(ValueError, match=r"`round_trip_p90_s` 0.001 is less than `round_trip_s`"):
        NetworkLink(bandwidth_bps=1e9, round_trip_s=0.004, round_trip_p90_s=0.001)


@pytest.mark.parametrize("sigma", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("mean_ms", [0.0, 0.1, 2.0])
def test_quantiles_and_shares_are_those_of_drawn_answers(sigma: float, mean_ms: float) -> None:
    jitter = Jitter(mean_ms=mean_ms, added_ms=0.0)
    random = np.random.default_rng(0)
    drawn = (
        10 * np.exp(sigma * random.standard_normal(400_000))
        + 3
        + random.exponential(1.0, (400_000, 2)).sum(axis=1) * mean_ms
        - TWO_MEDIAN * mean_ms
    )
    for percentile in (50, 90, 99):
        quantile = quantile_for(percentile, 1)
        by_ms = quantile.latency_ms(np.array([10.0]), np.array([3.0]), np.array([sigma]), jitter)[0]
        by_ms -= client_ms(1)
        real = float((drawn <= by_ms + 1e-6).mean())
        if sigma or mean_ms:
            # The two excesses are added as if they were normal, which holds better far out.
            off = 0.06 if percentile == 50 else 0.02
            assert real == pytest.approx(percentile / 100, abs=off)
        share = share_in_time(by_ms + 1e-6, 10.0, 3.0, sigma, jitter)
        assert share == pytest.approx(real, abs=0.015)


def test_without_a_percentile_only_compute_and_network_count() -> None:
    assert quantile_for(None, 8) is MEDIAN
    assert MEDIAN.latency_ms(
        np.array([1.23456]), np.array([2.0]), np.array([0.5]), Jitter(mean_ms=9, added_ms=9)
    ) == [3.235]


def test_more_members_leave_each_less_time() -> None:
    few, many = (quantile_for(90, members) for members in (2, 8))
    assert 1.28 < few.z < many.z
    assert many.client_ms - few.client_ms == pytest.approx(6 * CLIENT_SEND_MS)
    assert client_ms(1) == CLIENT_SEND_MS + CLIENT_FUSE_MS


def plan_promise(percentile: float, sigma: float, target_ms: float = 40.0) -> Plan:
    profiles = [spreading(p, sigma) for p in PROFILES]
    return make_plan(BASE, profiles, target_ms=target_ms, percentile=percentile)


def simulate_share(plan: Plan, profiles: Sequence[DeviceProfile]) -> float:
    """Share of answers with every member within the plan's target, one request at a time."""
    trace = simulate(
        Scenario(
            devices=device_models(plan, by_name(profiles), 1000, Assumptions()),
            load=Load(requests=8000, think_s=1.0),
            deadline_ms=1000.0,
            before=LogNormal(median_s=CLIENT_SEND_MS * len(plan.assignments) / 1e3),
            after_s=CLIENT_FUSE_MS / 1e3,
            client_bps=plan.client_bps or math.inf,
        )
    )
    whole = trace.by_subset()[tuple(range(len(plan.assignments)))]
    in_time = np.array(trace.latencies_s)[whole] * 1e3 <= plan.target_ms + 1e-9
    return float(in_time.sum() / len(trace.numbers))


@pytest.mark.parametrize(("percentile", "sigma"), [(90.0, 0.1), (95.0, 0.3), (99.0, 0.2)])
def test_a_plans_share_is_simulated(percentile: float, sigma: float) -> None:
    plan = plan_promise(percentile, sigma)
    assert plan.on_time is not None
    assert percentile / 100 - 0.01 <= plan.on_time <= percentile / 100 + 0.06
    share = simulate_share(plan, [spreading(p, sigma) for p in PROFILES])
    assert share == pytest.approx(plan.on_time, abs=0.02)
    # With the deadline that goes with it they are all in hand when the client decides.
    assert plan.deadline_ms is not None
    assert plan.deadline_ms == pytest.approx(plan.target_ms + DECODING_MS + 2.0, abs=0.5)


def test_a_plan_for_typical_answers_promises_no_share() -> None:
    steady = [spreading(p, 0.2) for p in PROFILES]
    plan = make_plan(BASE, steady, target_ms=40.0)
    assert (plan.percentile, plan.on_time) == (None, None)
    assert simulate_share(plan, steady) < 0.6


def test_the_surer_the_smaller() -> None:
    profiles = [spreading(p, 0.2) for p in PROFILES]
    plans = [make_plan(BASE, profiles, target_ms=40.0, percentile=share)
             for share in (None, 75.0, 95.0, 99.0)]  # fmt: skip
    accuracies = [shares(plan.accuracy)[1] for plan in plans]
    assert len(accuracies) == 4
    assert accuracies == sorted(accuracies, reverse=True)
    assert accuracies[0] > accuracies[-1]


def test_where_not_all_can_keep_it_fewer_do() -> None:
    """A device that is rarely in time would spoil every answer; without it, the others may."""
    wild = spreading(PROFILES[1], 1.5)
    steady = [spreading(p, 0.05) for p in (PROFILES[0], PROFILES[2])]
    plan = make_plan(BASE, [wild, *steady], target_ms=12.0, percentile=95.0)
    assert plan.on_time is not None
    assert plan.on_time >= 0.94
    assert "ms too late" in " ".join([*plan.left_out.values(), *(a.why for a in plan.assignments)])


def test_a_floor_holds_with_a_percentile_too() -> None:
    problem = known_problem(BASE, [spreading(p, 0.1) for p in PROFILES], percentile=95.0)
    plan = plan_with_accuracy(problem, 0.75).plan
    assert shares(plan.accuracy)[1] >= 0.75
    assert plan.on_time is not None
    assert plan.on_time >= 0.94


def test_it_is_said_what_is_kept_for_slow_answers(
    capsys: pytest.CaptureFixture[str], tmp_path: pytest.TempPathFactory
) -> None:
    from mdp.files import write_toml

    asked = settings(NAMES, latency_ms=40.0, percentile=95.0, anyway=True)
    planned = make_planned(BASE, asked, 1000, explained=True)
    assert "with slow answers and the client" in planned.plan.assignments[0].why
    assert "with slow answers and the client" in str(planned.explanations)
    print_planned(planned)
    out = capsys.readouterr().out
    assert "of the answers are predicted to be complete within 40 ms, with all devices " in out
    assert "(95 % were asked for)" in out
    path = tmp_path / "plan.toml"  # type: ignore[operator]
    write_toml(path, planned.plan)
    assert read_plan(path) == planned.plan
