"""The benchmark of predictions: its shapes are unseen, and its errors are what they are called."""

import msgspec
import pytest

pytest.importorskip("torch")

from benchmarks import latency_numbers, latency_plans, latency_shapes
from benchmarks.latency_measure import Row
from mdp.errors import InputError
from tests.support.latencies import Formula

pytestmark = pytest.mark.torch

TRUTH = Formula(fixed_ms=0.2, layer_ms=0.05, mac_ms=2e-8, value_ms=3e-8, weight_ms=1e-7)


def row(case: latency_shapes.Case, factor: float = 1.0, threads: int = 1) -> Row:
    latency_ms = factor * TRUTH.predict_ms(case.spec, case.num_classes)
    return Row(
        case=case,
        precision="fp32",
        threads=threads,
        latency_ms=latency_ms,
        p10_ms=0.9 * latency_ms,
        p90_ms=1.1 * latency_ms,
        rounds=1,
        runs=5,
        others_cores=0.0,
    )


def test_unseen_sub_models_are_in_no_probe_and_always_the_same() -> None:
    cases = latency_shapes.unseen()
    assert cases == latency_shapes.unseen()
    assert len({case.spec for case in cases}) == len(cases) >= 35
    assert not {case.spec for case in cases} & {case.spec for case in latency_shapes.grid()}
    assert cases != latency_shapes.unseen(seed=latency_shapes.SEED + 1)


def test_errors_are_those_of_the_measurements() -> None:
    profile = latency_numbers.profile_of([row(case) for case in latency_shapes.grid()])
    rows = [row(case, factor=1.25) for case in latency_shapes.unseen()]
    compared = latency_numbers.compare(profile, rows)
    assert [one.error for one in compared] == pytest.approx([-0.2] * len(rows), abs=0.01)
    total = latency_numbers.error_sheet(compared).rows[0]
    assert total[:2] == ("all", str(len(rows)))
    assert total[5] == "-20.0%"


def test_a_way_that_the_profile_lacks_is_no_comparison() -> None:
    profile = latency_numbers.profile_of([row(case) for case in latency_shapes.grid()])
    with pytest.raises(InputError, match=r"points of fp32 .* with 2 threads, found 0"):
        latency_numbers.compare(profile, [row(latency_shapes.unseen()[0], threads=2)])


def test_a_plan_s_prediction_is_its_slowest_member() -> None:
    points = [row(case) for case in latency_shapes.grid()]
    fp32 = latency_numbers.profile_of(points)
    int8 = [msgspec.structs.replace(point, precision="int8") for point in fp32.latency]
    profile = msgspec.structs.replace(fp32, latency=[*fp32.latency, *int8])
    for parts in latency_plans.random_plans(latency_shapes.unseen()):
        assert len({case.num_classes for case, _ in parts}) == 1
        plan = latency_plans.predicted_plan(profile, parts)
        totals = [assignment.predicted_ms.total for assignment in plan.assignments]
        assert plan.target_ms == max(totals) > 0
