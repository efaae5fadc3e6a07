"""The search against exhaustive search, on every small instance that can be enumerated."""

import itertools
import math
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from mdp.formats.plan import PLANNED_MEMBERS
from partitioner.estimates.accuracy import Predictor, predictor_for, read_shipped_law
from partitioner.estimates.accuracy_law import capability_of
from partitioner.estimates.network import waits_ms
from partitioner.planner.availability import Objective, exact_arrivals
from partitioner.planner.candidates import Candidate, DeviceCandidates, evaluate_device, fit_ways
from partitioner.planner.design_space import make_design_space, sub_model_grid
from partitioner.planner.limits import PlanLimits
from partitioner.planner.local_search import choose
from partitioner.planner.placement import Placement, Placements, total_energy_j
from tests.support.models.planning import TINY, device

PREDICTOR = predictor_for(read_shipped_law(), TINY.shape, num_classes=10)


def some_devices(
    seed: int, count: int, shapes: int, availability: tuple[float, ...] = (0.5, 0.8, 0.95, 1.0)
) -> list[DeviceCandidates]:
    """Unequal devices with a few shapes each, drawn from the teacher's grid."""
    draw = np.random.default_rng(seed)
    grid = sub_model_grid(TINY.shape)
    chosen = [grid[i] for i in sorted(draw.choice(len(grid), size=shapes, replace=False))]
    choices = make_design_space(TINY.shape, PREDICTOR, shapes=chosen)
    profiles = [
        device(
            f"d{i}",
            gmacs_per_s=float(draw.uniform(2, 60)),
            round_trip_ms=float(draw.uniform(0.2, 3)),
            availability=float(draw.choice(availability)),
        )
        for i in range(count)
    ]
    return [evaluate_device(p, fit_ways(p, ["fp32"]), choices) for p in profiles]


def exhaustive(devices: Sequence[DeviceCandidates], limits: PlanLimits) -> float:
    """The best expected accuracy of all plans without replicas, over every shape everywhere."""
    there = exact_arrivals([d.profile.availability for d in devices])
    objective = Objective(PREDICTOR.law, capability_of(PREDICTOR.teacher_accuracy), there)
    options: list[list[Candidate | None]] = []
    for d in devices:
        runs = [d.running(row) for row in range(len(d.choices))]
        options.append(
            [None, *(c for c in runs if c is not None and c.predicted_ms.total <= limits.target_ms)]
        )
    best = 0.0
    for combination in itertools.product(*options):
        taken = [(i, c) for i, c in enumerate(combination) if c is not None]
        if len({c.identity for _, c in taken}) < len(taken):
            continue
        if sum(c.energy_j or 0.0 for _, c in taken) > (limits.max_energy_j or math.inf):
            continue
        waits = waits_ms([c.request_bytes for _, c in taken], limits.client_bps)
        ends_ms = [c.predicted_ms.total + w for (_, c), w in zip(taken, waits, strict=True)]
        if max(ends_ms, default=0.0) > limits.target_ms:
            continue
        best = max(best, objective.value(objective.sums([(c, [i]) for i, c in taken])))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_two_or_three_devices_get_the_best_plan_there_is(seed: int) -> None:
    count, shapes = (2, 24) if seed % 2 else (3, 10)
    devices = some_devices(seed, count, shapes)
    target_ms = float(np.random.default_rng(seed).uniform(2, 20))
    limits = PlanLimits(target_ms=target_ms)
    placements, found = choose(devices, PREDICTOR, limits)
    best = exhaustive(devices, limits)
    # Devices that add next to nothing are left out; replicas may even be better.
    assert found >= best - len(devices) * 1e-4
    assert all(placement.candidate.predicted_ms.total <= target_ms for placement in placements)


@pytest.mark.parametrize("seed", range(12))
def test_an_energy_limit_is_kept_and_nearly_used_up(seed: int) -> None:
    devices = some_devices(100 + seed, 3, 9)
    unlimited, _ = choose(devices, PREDICTOR, PlanLimits(target_ms=20.0))
    limit_j = 0.6 * total_energy_j(unlimited)
    limits = PlanLimits(target_ms=20.0, max_energy_j=limit_j)
    placements, found = choose(devices, PREDICTOR, limits)
    assert total_energy_j(placements) <= limit_j * (1 + 1e-9)
    assert found >= 0.98 * exhaustive(devices, limits)


def test_more_time_is_never_worse() -> None:
    devices = some_devices(7, 6, 60)
    start: Placements = ()
    before = 0.0
    for target_ms in (2.0, 3.0, 5.0, 8.0, 13.0, 21.0):
        start, found = choose(devices, PREDICTOR, PlanLimits(target_ms=target_ms), start)
        assert found >= before
        before = found


def same_shape(count: int, availability: Sequence[float]) -> list[DeviceCandidates]:
    """Devices that can run one and the same shape only."""
    shape = sub_model_grid(TINY.shape)[40]
    choices = make_design_space(TINY.shape, PREDICTOR, shapes=[shape])
    profiles = [device(f"d{i}", availability=availability[i]) for i in range(count)]
    return [evaluate_device(p, fit_ways(p, ["fp32"]), choices) for p in profiles]


def test_a_second_device_replicates_one_that_is_often_away() -> None:
    placements, found = choose(same_shape(2, [0.6, 0.9]), PREDICTOR, PlanLimits(target_ms=50.0))
    assert [placement.devices for placement in placements] == [[1, 0]]
    alone = PREDICTOR.accuracy(placements[0].candidate.capability)
    assert found == pytest.approx(alone * (1 - 0.4 * 0.1))


def test_nobody_replicates_a_device_that_is_always_there() -> None:
    placements, _ = choose(same_shape(2, [1.0, 1.0]), PREDICTOR, PlanLimits(target_ms=50.0))
    assert [placement.devices for placement in placements] in ([[0]], [[1]])


def test_of_many_devices_some_become_replicas() -> None:
    devices = some_devices(3, 24, 200, availability=(0.3,))
    placements, _ = choose(devices, PREDICTOR, PlanLimits(target_ms=15.0))
    busy = [d for placement in placements for d in placement.devices]
    assert len(placements) <= PLANNED_MEMBERS
    assert len(busy) == len(set(busy)) > len(placements)
    assert len({placement.candidate.identity for placement in placements}) == len(placements)


def test_the_same_search_finds_the_same_plan() -> None:
    devices = some_devices(11, 14, 80)
    first: tuple[Placements, float] = choose(devices, PREDICTOR, PlanLimits(target_ms=10.0))
    assert choose(devices, PREDICTOR, PlanLimits(target_ms=10.0)) == first
    assert isinstance(first[0][0], Placement)
    assert isinstance(PREDICTOR, Predictor)


def test_a_gpu_beside_a_processor_runs_what_it_is_quicker_at_and_need_not_pad() -> None:
    processor = device("d0", gmacs_per_s=5.0, fixed_ms=0.1)
    gpu = device("d0", gmacs_per_s=500.0, fixed_ms=0.5, layer_ms=0.01)
    points = [msgspec.structs.replace(p, runtime="openvino", provider="GPU.1") for p in gpu.latency]
    both = msgspec.structs.replace(processor, latency=[*processor.latency, *points])
    shapes = [
        msgspec.structs.replace(TINY.shape, embed_dim=width, num_heads=width // 16, depth=depth)
        for width, depth in ((32, 1), (192, 8), (176, 8))
    ]
    choices = make_design_space(TINY.shape, PREDICTOR, shapes=shapes)
    device_of_both = evaluate_device(both, fit_ways(both, ["fp32"]), choices)
    runs = [device_of_both.running(row) for row in range(3)]
    ways = [(run.way.runtime, run.way.provider) for run in runs if run is not None]
    on_processor, on_gpu = ("onnxruntime", "CPUExecutionProvider"), ("openvino", "GPU.1")
    assert ways == [on_processor, on_gpu, on_processor]
