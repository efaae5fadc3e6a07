"""The benchmark of predictions: its shapes are unseen, and its errors are what they are called."""

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from benchmarks.latency import page as latency_page
from benchmarks.latency import plans as latency_plans
from benchmarks.latency import shapes as latency_shapes
from benchmarks.latency.measure import Row
from mdp.errors import InputError
from mdp.files import write_toml
from mdp.formats import profile as profiles
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import Link
from partitioner.estimates.latency_terms import COLUMN, PASSES, terms
from partitioner.planner.design_space import sub_model_grid

pytestmark = pytest.mark.torch

VIT_S = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=384, depth=12, num_heads=6, mlp_ratio=4.0
)
#: Milliseconds of each term: of a call, of a layer, of work, of what is read and written.
TRUTH_MS = {"call": 0.2, "layers": 0.05, "weights": 1e-7}
TRUTH_MS |= dict.fromkeys(["embedding_macs", "layer_macs", "attention_macs"], 2e-8)
TRUTH_MS |= {name: 3e-8 * times for name, times in PASSES.items()}


def truth_ms(spec: SubModelSpec, num_classes: int) -> float:
    counts = terms([spec], num_classes)[0]
    return sum(ms * float(counts[COLUMN[name]]) for name, ms in TRUTH_MS.items())


def row(case: latency_shapes.Case, factor: float = 1.0, threads: int = 1) -> Row:
    latency_ms = factor * truth_ms(case.spec, case.num_classes)
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


def profile_of(rows: list[Row]) -> profiles.DeviceProfile:
    here = profiles.Provenance(method="measured", source="a formula")
    numbers = ("threads", "memory_bytes", "link", "latency", "availability")
    shape = ("image_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    points = [
        profiles.LatencyPoint(
            **{name: getattr(row.case.spec, name) for name in shape},
            threads=row.threads,
            latency_ms=row.latency_ms,
            precision=row.precision,
            p10_ms=row.p10_ms,
            p90_ms=row.p90_ms,
        )
        for row in rows
    ]
    return profiles.DeviceProfile(
        name="this-machine",
        kind="cpu",
        provider="CPUExecutionProvider",
        threads=1,
        memory_bytes=2**33,
        link=Link(bandwidth_bps=1e9, round_trip_s=0.0),
        latency=points,
        provenance=dict.fromkeys(numbers, here),
    )


def test_unseen_sub_models_are_in_no_probe_and_always_the_same() -> None:
    cases = latency_shapes.unseen()
    assert cases == latency_shapes.unseen()
    assert len({case.spec for case in cases}) == len(cases) >= 35
    assert not {case.spec for case in cases} & {case.spec for case in latency_shapes.grid()}
    assert cases != latency_shapes.unseen(seed=latency_shapes.SEED + 1)


def test_errors_are_those_of_the_measurements() -> None:
    profile = profile_of([row(case) for case in latency_shapes.grid()])
    rows = [row(case, factor=1.25) for case in latency_shapes.unseen()]
    compared = latency_page.compare(profile, rows)
    assert [one.error for one in compared] == pytest.approx([-0.2] * len(rows), abs=0.01)
    total = latency_page.error_table(compared).splitlines()[2].strip("| ").split(" | ")
    assert total[:2] == ["all", str(len(rows))]
    assert float(total[5].rstrip("%")) == pytest.approx(-20, abs=1)


def test_a_way_that_the_profile_lacks_is_no_comparison() -> None:
    profile = profile_of([row(case) for case in latency_shapes.grid()])
    with pytest.raises(InputError, match=r"points of fp32 .* with 2 threads, found 0"):
        latency_page.compare(profile, [row(latency_shapes.unseen()[0], threads=2)])


def test_plannable_sub_models_are_what_the_planner_searches_and_in_no_probe() -> None:
    cases = latency_shapes.plannable()
    assert cases == latency_shapes.plannable()
    assert len({case.spec for case in cases}) == len(cases) == 36
    assert not {case.spec for case in cases} & {case.spec for case in latency_shapes.grid()}
    small = [case.spec for case in cases if case.num_classes == 1000]
    assert set(small) <= set(sub_model_grid(VIT_S))
    assert max(spec.embed_dim for spec in small) > 192


@pytest.fixture
def few_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_plans, "TARGETS_MS", {"vit_small_patch16_224": (8.0, 18.0)})


@pytest.mark.usefixtures("few_targets")
def test_plans_are_of_two_devices_and_predicted_as_their_slowest_member(tmp_path: Path) -> None:
    points = [row(case) for case in latency_shapes.grid()]
    profile = msgspec.structs.replace(profile_of(points), threads=1)
    paths = [str(tmp_path / f"core-{core}.toml") for core in (0, 1)]
    profiles = [msgspec.structs.replace(profile, name=Path(path).stem) for path in paths]
    for path, one in zip(paths, profiles, strict=True):
        write_toml(Path(path), one)
    plans = latency_plans.make_plans(paths)
    assert [plan.target_ms for plan in plans] == [8.0, 18.0]
    for plan in plans:
        assert {a.device for a in plan.assignments} == {"core-0", "core-1"}
        totals = [assignment.predicted_ms.total for assignment in plan.assignments]
        told = latency_plans.LinkAtWork(compute_ms=10.0, link=profile.link)
        both = latency_plans.predicted_ms(plan, profiles, [told])
        # The later of two is later than either is typically.
        assert max(totals) < both < 1.3 * max(totals)
        slower = msgspec.structs.replace(
            profile.link, round_trip_s=profile.link.round_trip_s + 0.002
        )
        more = latency_plans.LinkAtWork(compute_ms=10.0, link=slower)
        assert latency_plans.predicted_ms(plan, profiles, [more]) == pytest.approx(both + 2.0)


def test_the_link_lies_between_those_that_were_measured() -> None:
    links = [
        latency_plans.LinkAtWork(
            compute_ms=compute_ms,
            link=Link(bandwidth_bps=1e9, round_trip_s=cost_s, round_trip_p90_s=2 * cost_s),
        )
        for compute_ms, cost_s in ((1.0, 0.001), (11.0, 0.002), (31.0, 0.003))
    ]
    for compute_ms, cost_s in ((0.1, 0.001), (6.0, 0.0015), (11.0, 0.002), (99.0, 0.003)):
        link = latency_plans.link_beside(compute_ms, links)
        assert link.bandwidth_bps == 1e9
        assert link.round_trip_s == pytest.approx(cost_s)
        assert link.round_trip_p90_s == pytest.approx(2 * cost_s)
