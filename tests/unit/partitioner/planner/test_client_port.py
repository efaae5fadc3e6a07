"""All crops of one picture leave through the client's one port, and plans know it."""

import itertools
import math
import re

import msgspec
import numpy as np
import pytest

from mdp.errors import PlanRefused
from mdp.files import write_toml
from mdp.formats.plan import read_plan
from mdp.formats.profile import DeviceProfile, NetworkLink
from partitioner.estimates.network import through_port, waits_ms
from partitioner.planner.candidates import evaluate_device
from partitioner.planner.explain import explain
from partitioner.planner.limits import PlanLimits
from partitioner.planner.local_search import choose
from partitioner.planner.placement import with_waits
from partitioner.planner.problem import make_problem
from partitioner.planner.search import plan_within
from partitioner.planner.targets import pareto, plan_with_accuracy
from tests.support.models.planning import TINY, device, known_problem, make_plan, shares
from tests.unit.partitioner.planner.test_choose import PREDICTOR, exhaustive, some_devices
from tests.unit.partitioner.planner.test_search import check

MBIT = 1e6


def profiles_on_links(mbit: float, *names: str, gmacs_per_s: float = 20.0) -> list[DeviceProfile]:
    """Equal devices, each on a link of this rate."""
    link = NetworkLink(bandwidth_bps=mbit * MBIT, round_trip_s=0.001)
    return [
        msgspec.structs.replace(device(name, gmacs_per_s=gmacs_per_s), link=link) for name in names
    ]


def test_a_crop_waits_for_the_bytes_of_all_others() -> None:
    assert waits_ms([150_000.0] * 3, 100 * MBIT) == [24.0, 24.0, 24.0]
    assert waits_ms([1000.0, 4000.0], 8 * MBIT) == [4.0, 1.0]
    assert waits_ms([150_000.0], 1 * MBIT) == [0.0]
    assert waits_ms([150_000.0] * 3, math.inf) == [0.0, 0.0, 0.0]
    assert waits_ms([], 1 * MBIT) == []


def test_a_port_that_is_planned_for_a_total_keeps_a_crop_from_the_rest_of_it() -> None:
    limits = PlanLimits(target_ms=20.0, client_bps=8 * MBIT, port_bytes=10_000.0)
    assert limits.port_wait_ms(np.array([1000.0, 4000.0])).tolist() == [9.0, 6.0]


def test_another_wait_replaces_the_one_before() -> None:
    limits = PlanLimits(target_ms=50.0, client_bps=8 * MBIT)
    placements, _ = choose(some_devices(0, 2, 24), PREDICTOR, limits)
    alone = placements[0].candidate.with_wait(0.0)
    waiting = alone.with_wait(5.0).with_wait(3.0)
    assert waiting.wait_ms == 3.0
    for part in ("network", "total"):
        longer = getattr(waiting.predicted_ms, part) - getattr(alone.predicted_ms, part)
        assert longer == pytest.approx(3.0, abs=2e-3)
    assert waiting.with_wait(3.0) is waiting


def test_no_link_is_faster_than_the_port() -> None:
    link = NetworkLink(bandwidth_bps=100 * MBIT, round_trip_s=0.001)
    assert through_port(link, 20 * MBIT).bandwidth_bps == 20 * MBIT
    assert through_port(link, 1000 * MBIT) == link


@pytest.mark.parametrize("seed", range(16))
def test_a_shared_port_costs_at_most_two_percent_of_the_best_plan(seed: int) -> None:
    draw = np.random.default_rng(seed)
    client_bps = float(np.exp(draw.uniform(np.log(4 * MBIT), np.log(100 * MBIT))))
    devices = [
        evaluate_device(
            msgspec.structs.replace(d.profile, link=through_port(d.profile.link, client_bps)),
            d.models,
            d.choices,
        )
        for d in some_devices(seed, *((2, 24) if seed % 2 else (3, 10)))
    ]
    limits = PlanLimits(target_ms=float(draw.uniform(4, 25)), client_bps=client_bps)
    placements, found = choose(devices, PREDICTOR, limits)
    assert found >= 0.98 * exhaustive(devices, limits)
    together = with_waits(placements, client_bps)
    assert all(run.predicted_ms.total <= limits.target_ms for s in together for run in s.candidates)


def test_one_device_is_planned_as_if_nothing_were_shared() -> None:
    one = profiles_on_links(10, "a")
    free, shared = (make_plan(TINY, one, target_ms=20, client_bps=b) for b in (math.inf, None))
    assert msgspec.structs.replace(shared, client_bps=None) == free
    assert shared.client_bps == 10 * MBIT


def test_the_port_is_as_fast_as_the_quickest_link_unless_told() -> None:
    profiles = [*profiles_on_links(5, "a"), *profiles_on_links(20, "b")]
    plan = make_plan(TINY, profiles, target_ms=20, num_classes=10)
    assert plan.client_bps == 20 * MBIT
    check(plan, profiles, 10)


def test_what_the_port_costs_is_planned_and_said() -> None:
    problem = make_problem(TINY, profiles_on_links(8, "a", "b", "c"), num_classes=10)
    solution = plan_within(problem, 30.0)
    plan = solution.plan
    assert len(plan.assignments) > 1
    assert all(a.predicted_ms.total <= 30.0 for a in plan.assignments)
    told = {e.device: " ".join(e.sentences) for e in explain(problem, solution)}
    for a in plan.assignments:
        said = re.search(r"waits ([\d.]+) ms for the crops of the others", told[a.device])
        assert said is not None
        assert 0 < float(said[1]) < a.predicted_ms.network
        assert "(8 Mbit/s)" in told[a.device]
    # The deadline that goes with the plan has room for it.
    last_ms = max(a.predicted_ms.total for a in plan.assignments)
    assert plan.deadline_ms is not None
    assert plan.deadline_ms > last_ms


def test_without_a_limit_nobody_waits_and_nothing_is_noted() -> None:
    problem = make_problem(
        TINY, profiles_on_links(8, "a", "b"), num_classes=10, client_bps=math.inf
    )
    solution = plan_within(problem, 30.0)
    assert solution.plan.client_bps is None
    assert "waits" not in str(explain(problem, solution))


def test_a_slower_port_never_makes_a_better_plan() -> None:
    profiles = profiles_on_links(100, "a", "b", "c")
    found = []
    for mbit in (math.inf, 100, 20, 5):
        plan = make_plan(TINY, profiles, target_ms=8, num_classes=10, client_bps=mbit * MBIT)
        found.append(shares(plan.accuracy)[1])
    assert found == sorted(found, reverse=True)
    assert found[0] > found[-1]


def test_who_finds_the_port_taken_is_left_out_for_that() -> None:
    quick, slow = (
        profiles_on_links(5, "a", gmacs_per_s=60.0),
        profiles_on_links(5, *"bcdefgh", gmacs_per_s=0.05),
    )
    plan = make_plan(TINY, [*quick, *slow], target_ms=8.5, num_classes=10)
    reasons = set(plan.left_out.values())
    assert "with its crop at the client's port too, the answers would be too late" in reasons


def test_two_devices_can_keep_the_target_that_is_named_for_two() -> None:
    profiles = profiles_on_links(8, "a", "b")
    with pytest.raises(PlanRefused) as caught:
        make_plan(TINY, profiles, target_ms=0.5, num_classes=10)
    said = re.search(r"two devices can take part from ([\d.]+) ms on", str(caught.value))
    assert said is not None
    named_ms = float(said[1])
    problem = make_problem(TINY, profiles, num_classes=10)
    limits = problem.limits(named_ms)
    a, b = (device.within(limits) for device in problem.devices)
    last_ms = [
        max(c.with_wait(w).predicted_ms.total for c, w in zip(pair, waits, strict=True))
        for pair in itertools.product(a, b)
        for waits in [waits_ms([c.request_bytes for c in pair], problem.client_bps)]
    ]
    assert named_ms - 0.1 < min(last_ms) <= named_ms


def test_the_pareto_list_and_the_floor_reckon_with_it() -> None:
    profiles = profiles_on_links(8, "a", "b", "c")
    problem = known_problem(TINY, profiles, num_classes=10)
    expected = [shares(point.accuracy)[1] for point in pareto(problem)]
    assert expected == sorted(expected)
    floor = expected[-1] - 0.002
    plan = plan_with_accuracy(problem, floor).plan
    assert shares(plan.accuracy)[1] >= floor
    assert max(a.predicted_ms.total for a in plan.assignments) <= plan.target_ms
    free = known_problem(TINY, profiles, num_classes=10, client_bps=math.inf)
    assert plan_with_accuracy(free, floor).plan.target_ms < plan.target_ms


def test_a_plan_file_names_its_port(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("plan") / "plan.toml"
    plan = make_plan(TINY, profiles_on_links(8, "a", "b"), target_ms=30, num_classes=10)
    write_toml(file, plan)
    assert "client_bps = 8000000.0" in file.read_text()
    assert read_plan(file) == plan
    # Older plans do not say.
    file.write_text(file.read_text().replace("client_bps = 8000000.0\n", ""))
    assert read_plan(file) == msgspec.structs.replace(plan, client_bps=None)
