"""The benchmark of predictions: its shapes are unseen, and its errors are what they are called."""

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")

from benchmarks.latency import page, plans, shapes
from benchmarks.latency.measure import Row
from benchmarks.latency.plans import LinkAtWork
from mdp.files import write_toml
from mdp.formats.profile import DeviceProfile, LatencyPoint, Link, Provenance
from partitioner.estimates.latency_terms import COLUMN, PASSES, terms

pytestmark = pytest.mark.torch
#: Milliseconds of each term: of a call, of a layer, of work, of what is read and written.
TRUTH_MS = {"call": 0.2, "layers": 0.05, "weights": 1e-7}
TRUTH_MS |= dict.fromkeys(["embedding_macs", "layer_macs", "attention_macs"], 2e-8)
TRUTH_MS |= {name: 3e-8 * times for name, times in PASSES.items()}


def truth_ms(case: shapes.Case) -> float:
    counts = terms([case.spec], case.num_classes)[0]
    return sum(ms * float(counts[COLUMN[name]]) for name, ms in TRUTH_MS.items())


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    """Of a device that takes what the formula says."""
    here = Provenance(method="measured", source="a formula")
    numbers = ("threads", "memory_bytes", "link", "latency", "availability")
    shape = ("image_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio")
    points = [
        LatencyPoint(
            **{name: getattr(case.spec, name) for name in shape}, threads=1, precision="fp32",
            latency_ms=truth_ms(case), p10_ms=0.9 * truth_ms(case), p90_ms=1.1 * truth_ms(case),
        )
        for case in shapes.grid()
    ]  # fmt: skip
    return DeviceProfile(
        name="core-0", kind="cpu", provider="CPUExecutionProvider", threads=1,
        memory_bytes=2**33, link=Link(bandwidth_bps=1e9, round_trip_s=0.0), latency=points,
        provenance=dict.fromkeys(numbers, here),
    )  # fmt: skip


def test_compared_sub_models_are_in_no_probe_and_errors_are_those_of_measurements(
    profile: DeviceProfile,
) -> None:
    cases = [*shapes.unseen(), *shapes.plannable()]
    assert cases == [*shapes.unseen(), *shapes.plannable()]
    assert len({case.spec for case in cases}) == len(cases) == shapes.UNSEEN + 36
    assert not {case.spec for case in cases} & {case.spec for case in shapes.grid()}
    rows = [
        Row(case=case, precision="fp32", threads=1, latency_ms=1.25 * truth_ms(case), p10_ms=1,
            p90_ms=1, rounds=1, runs=5, others_cores=0.0)
        for case in cases[: shapes.UNSEEN]
    ]  # fmt: skip
    compared = page.compare(profile, rows)
    assert [one.error for one in compared] == pytest.approx([-0.2] * len(rows), abs=0.01)
    total = page.error_table(compared).splitlines()[2].strip("| ").split(" | ")
    assert total[:2] == ["all", str(len(rows))]
    assert float(total[5].rstrip("%")) == pytest.approx(-20, abs=1)


def at_work(compute_ms: float, trip_s: float) -> LinkAtWork:
    link = Link(bandwidth_bps=1e9, round_trip_s=trip_s, round_trip_p90_s=2 * trip_s)
    return LinkAtWork(compute_ms=compute_ms, link=link)


def test_plans_are_predicted_as_their_slowest_member_with_the_link_that_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: DeviceProfile
) -> None:
    monkeypatch.setattr(plans, "TARGETS_MS", {"vit_small_patch16_224": (8.0, 18.0)})
    profiles = [msgspec.structs.replace(profile, name=name) for name in ("core-0", "core-1")]
    paths = [str(tmp_path / f"{one.name}.toml") for one in profiles]
    for path, one in zip(paths, profiles, strict=True):
        write_toml(path, one)
    made = plans.make_plans(paths)
    assert [plan.target_ms for plan in made] == [8.0, 18.0]
    for plan in made:
        slowest_ms = max(a.predicted_ms.total for a in plan.assignments)
        both = plans.predicted_ms(plan, profiles, [at_work(10.0, 0.0)])
        # The later of two is later than either is typically.
        assert slowest_ms < both < 1.3 * slowest_ms
        more = plans.predicted_ms(plan, profiles, [at_work(10.0, 0.002)])
        assert both + 2.0 <= more < both + 4.0
    links = [at_work(ms, s) for ms, s in ((1.0, 0.001), (11.0, 0.002), (31.0, 0.003))]
    for compute_ms, trip_s in ((0.1, 0.001), (6.0, 0.0015), (11.0, 0.002), (99.0, 0.003)):
        link = plans.link_beside(compute_ms, links)
        assert link.round_trip_s == pytest.approx(trip_s)
        assert link.round_trip_p90_s == pytest.approx(2 * trip_s)
