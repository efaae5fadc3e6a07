"""Number of pictures that a plan lets a device compute at once, by its profile."""

import pytest
from msgspec.structs import replace

from mdp.formats.plan import Plan, PredictedMs, Replica
from mdp.formats.profile import DeviceProfile, LatencyPoint, read_profile
from mdp.testing.bundles import colour_plan
from partitioner.estimates.batching import batch_shares, with_batches


def point(depth: int, latency_ms: float, batch: int = 1, **changes: object) -> LatencyPoint:
    return replace(
        LatencyPoint(
            image_size=64,
            patch_size=16,
            embed_dim=192,
            depth=depth,
            num_heads=3,
            mlp_ratio=4.0,
            threads=1,
            latency_ms=latency_ms,
            batch=batch,
        ),
        **changes,
    )


def profile(name: str, *points: LatencyPoint) -> DeviceProfile:
    return replace(read_profile("n100"), name=name, latency=list(points))


SINGLES = (point(2, 10.0), point(4, 20.0), point(8, 40.0))
#: 0.8, 0.75 and 0.7 of the time one by one.
FOURS = (point(2, 32.0, 4), point(4, 60.0, 4), point(8, 112.0, 4))


@pytest.fixture
def plan() -> Plan:
    """Three devices that compute for 10 ms, are 5 ms away, and have 50 ms."""
    plan = colour_plan()
    assignments = [
        replace(a, threads=1, predicted_ms=PredictedMs(compute=10.0, network=5.0, total=15.0))
        for a in plan.assignments
    ]
    return replace(plan, assignments=assignments)


def batches(plan: Plan, *points: LatencyPoint) -> list[int]:
    profiles = [profile(a.device, *points) for a in plan.assignments]
    return [a.batch for a in with_batches(plan, profiles).assignments]


def test_a_batch_that_pays_by_the_median_over_encoders_is_planned(plan: Plan) -> None:
    assert batches(plan, *SINGLES, *FOURS) == [4, 4, 4]
    profiled = profile("alpha", *SINGLES, *FOURS)
    assert batch_shares(plan.assignments[0], "fp32", profiled) == {4: 0.75}
    dear = (point(2, 39.0, 4), point(4, 77.0, 4), point(8, 160.0, 4))
    for fours in ((), dear):
        assert batches(plan, *SINGLES, *fours) == [1, 1, 1]


def test_a_batch_has_to_keep_the_target(plan: Plan) -> None:
    # 10 ms x 4 x 0.75 + 5 ms.
    assert batches(replace(plan, target_ms=35.0), *SINGLES, *FOURS) == [4, 4, 4]
    assert batches(replace(plan, target_ms=34.9), *SINGLES, *FOURS) == [1, 1, 1]


def test_of_several_sizes_the_quickest_a_picture_that_keeps_the_target(plan: Plan) -> None:
    eights = (point(2, 56.0, 8), point(4, 112.0, 8), point(8, 224.0, 8))
    assert batches(replace(plan, target_ms=100.0), *SINGLES, *FOURS, *eights) == [8, 8, 8]
    assert batches(replace(plan, target_ms=50.0), *SINGLES, *FOURS, *eights) == [4, 4, 4]


@pytest.mark.parametrize(
    "changes",
    [{"threads": 2}, {"precision": "int8"}, {"runtime": "openvino"}, {"embed_dim": 384}],
    ids=lambda changes: next(iter(changes)),
)
def test_what_was_measured_otherwise_says_nothing(plan: Plan, changes: dict[str, object]) -> None:
    others = [replace(four, **changes) for four in FOURS]
    assert batches(plan, *SINGLES, *others) == [1, 1, 1]


def test_a_replica_goes_by_its_own_profile(plan: Plan) -> None:
    replica = Replica(
        k=1,
        device="spare",
        predicted_ms=PredictedMs(compute=10.0, network=5.0, total=15.0),
        memory_bytes=1,
        provider="CPUExecutionProvider",
        threads=1,
        why="",
    )
    profiles = [profile(a.device, *SINGLES) for a in plan.assignments]
    spare = profile("spare", *SINGLES, *FOURS)
    planned = with_batches(replace(plan, replicas=[replica]), [*profiles, spare])
    assert [a.batch for a in planned.assignments] == [1, 1, 1]
    served = planned.assignment_of("spare")
    assert served is not None
    assert served.batch == planned.replicas[0].batch == 4
