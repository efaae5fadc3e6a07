"""From plan and profiles to device models, and what their answers are worth."""

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Plan, PredictedAccuracy, PredictedMs, Replica
from mdp.formats.profile import DeviceProfile, read_profile
from mdp.testing.bundles import colour_plan, subset_accuracy, write_bundle
from partitioner.estimates.accuracy import read_shipped_law
from partitioner.estimates.accuracy_law import AccuracyLaw, LawMember, capability_of, together
from partitioner.estimates.latency import Way, fit_latency, own_way
from partitioner.estimates.latency_quantiles import ASSUMED_SIGMA
from partitioner.estimates.network import FRAMING_BYTES, network_ms
from partitioner.simulation.answer_accuracy import MeasuredSubsets, PredictedSubsets
from partitioner.simulation.engine import simulate
from partitioner.simulation.models import DeviceModel, Jittered, Load, LogNormal, Scenario
from partitioner.simulation.outcome import outcome_of
from partitioner.simulation.setup import (
    Assumptions,
    by_name,
    device_models,
    renewal,
    replica_model,
    sigma,
)
from partitioner.simulation.trace import Trace
from partitioner.simulation.what_ifs import add_device, compare, each_lost, hedge_after, without
from tests.support.bundles import CASCADE_ACCURACY, change_manifest, with_cascade

NAMES = ("n100", "raspberry-pi-5", "laptop-cpu")


@pytest.fixture(scope="module")
def profiles() -> dict[str, DeviceProfile]:
    return {name: read_profile(name) for name in NAMES}


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "bundle"))


def plan() -> Plan:
    return colour_plan(NAMES, (16, 12, 8))


def test_a_model_says_what_plan_and_profile_say(profiles: dict[str, DeviceProfile]) -> None:
    assumed = Assumptions(jitter_ms=0.0, sigma=0.3, loss=0.01)
    models = device_models(plan(), profiles, 3, assumed)
    assert [(m.name, m.k) for m in models] == list(zip(NAMES, range(3), strict=True))
    pi, profile = models[1], profiles["raspberry-pi-5"]
    assert pi.compute == LogNormal(median_s=0.001, sigma=0.3)
    assert pi.loss == 0.01
    assert pi.mean_up_s / (pi.mean_up_s + pi.mean_down_s) == pytest.approx(profile.availability)
    # Alone, a request takes what the cost model predicts for the network.
    still = replace(pi, k=0, compute=LogNormal(median_s=1e-9), loss=0.0, mean_up_s=math.inf)
    one = Scenario(devices=(still,), load=Load(requests=1), deadline_ms=1000.0)
    trace = simulate(one)
    assert trace.latencies_s[0] * 1e3 == pytest.approx(
        network_ms(profile.link, 12, 3, "raw"), abs=1e-5
    )


def test_a_device_with_a_camera_is_sent_no_crop(profiles: dict[str, DeviceProfile]) -> None:
    planned = plan()
    looking = [
        msgspec.structs.replace(
            a,
            camera=f"side-{a.k}",
            predicted_ms=msgspec.structs.replace(a.predicted_ms, network=2.0),
        )
        for a in planned.assignments
    ]
    seeing = msgspec.structs.replace(planned, assignments=looking)
    (first, *_) = device_models(seeing, profiles, 3, Assumptions(jitter_ms=0.0, sigma=0.0))
    assert first.request_bytes == FRAMING_BYTES
    assert first.waiting_bytes >= 3 * looking[0].spec.image_size ** 2
    assert isinstance(first.delay, Jittered)
    bytes_s = (first.request_bytes + first.reply_bytes) * 8 / first.bandwidth_bps
    assert first.delay.round_trip_s + bytes_s == pytest.approx(0.002)


def test_replicas_of_the_plan_and_copies(profiles: dict[str, DeviceProfile]) -> None:
    replica = Replica(
        k=0,
        device="raspberry-pi-5",
        predicted_ms=PredictedMs(compute=7.0, network=1.0, total=8.0),
        memory_bytes=1,
        provider="CPUExecutionProvider",
        threads=1,
        why="for tests",
    )
    with_one = msgspec.structs.replace(colour_plan(("n100",), (16,)), replicas=[replica])
    models = device_models(with_one, profiles, 3, Assumptions(), copies=2)
    assert [(m.name, m.k) for m in models] == [
        ("n100", 0),
        ("n100/2", 0),
        ("raspberry-pi-5", 0),
        ("raspberry-pi-5/2", 0),
    ]
    assert models[2].compute == LogNormal(median_s=0.007, sigma=ASSUMED_SIGMA)


def test_every_device_needs_its_profile(profiles: dict[str, DeviceProfile]) -> None:
    less = {"n100": profiles["n100"]}
    expected = (
        "^--profiles: expected one of each device of the plan, found none of "
        "laptop-cpu, raspberry-pi-5$"
    )
    with pytest.raises(InputError, match=expected):
        device_models(plan(), less, 3, Assumptions())


def test_a_profile_named_twice(profiles: dict[str, DeviceProfile]) -> None:
    with pytest.raises(InputError, match=r"^--profiles: 'n100' is given twice$"):
        by_name([profiles["n100"], profiles["n100"]])


def with_spread(profile: DeviceProfile, low: float, high: float) -> DeviceProfile:
    points = [
        msgspec.structs.replace(p, p10_ms=p.latency_ms * low, p90_ms=p.latency_ms * high)
        for p in profile.latency
    ]
    return msgspec.structs.replace(profile, latency=points)


def test_spread_of_profile_or_option(profiles: dict[str, DeviceProfile]) -> None:
    plain = profiles["n100"]
    way = own_way(plain)
    assert sigma(plain, way, 5.0, Assumptions()) == ASSUMED_SIGMA
    measured = with_spread(plain, math.exp(-0.5), math.exp(0.5))
    assert sigma(measured, way, 5.0, Assumptions()) == pytest.approx(0.5 / 1.28155, rel=1e-4)
    assert sigma(measured, way, 5.0, Assumptions(sigma=0.0)) == 0.0
    # Of a way without points, the spread of all of them is taken.
    assert sigma(measured, Way(precision="int8"), 5.0, Assumptions()) > ASSUMED_SIGMA


def test_jitter_that_was_measured_is_not_added_twice(profiles: dict[str, DeviceProfile]) -> None:
    plain = profiles["n100"]
    link = msgspec.structs.replace(plain.link, round_trip_s=0.004, round_trip_p90_s=0.005)
    known = {**profiles, "n100": msgspec.structs.replace(plain, link=link)}
    found = device_models(plan(), known, 3, Assumptions())[0]
    still = replace(found, compute=LogNormal(median_s=1e-9), mean_up_s=math.inf, mean_down_s=0.0)
    trace = simulate(Scenario(devices=(still,), load=Load(requests=4000), deadline_ms=1000.0))
    p50_s, p90_s = np.percentile(trace.latencies_s, [50, 90])
    bytes_s = (network_ms(link, 16, 3, "raw") - 4.0) / 1e3
    assert p50_s - bytes_s == pytest.approx(0.004, rel=0.02)
    assert p90_s - bytes_s == pytest.approx(0.005, rel=0.03)


def test_renewal_keeps_the_availability() -> None:
    assert renewal(1.0, 10.0) == (math.inf, 0.0)
    assert renewal(0.0, 10.0) == (0.0, 10.0)
    up_s, down_s = renewal(0.98, 10.0)
    assert up_s == pytest.approx(490.0)
    assert down_s == 10.0


def test_an_added_device_is_predicted(profiles: dict[str, DeviceProfile]) -> None:
    n100 = profiles["n100"]
    model = replica_model(plan(), n100, 2, 3, Assumptions())
    spec = plan().assignments[2].vit
    predicted_ms = round(fit_latency(n100).predict_ms(spec, 3), 3)
    assert (model.name, model.k) == ("n100/added", 2)
    assert model.compute == LogNormal(median_s=predicted_ms / 1e3, sigma=ASSUMED_SIGMA)


def test_an_added_device_has_to_run_the_same_file(profiles: dict[str, DeviceProfile]) -> None:
    first, *others = plan().assignments
    spec = msgspec.structs.replace(first.vit, precision="int8")
    changed = msgspec.structs.replace(
        plan(), assignments=[msgspec.structs.replace(first, submodel=spec), *others]
    )
    with pytest.raises(InputError, match=r"profile 'n100': expected at least 3 .* of int8 in onnx"):
        replica_model(changed, profiles["n100"], 0, 3, Assumptions())


# What answers are worth.


def test_a_bundle_knows_what_was_measured(bundle: Bundle, tmp_path: Path) -> None:
    worth = MeasuredSubsets(bundle)
    assert worth.accuracy((0, 1)) == subset_accuracy((0, 1)).stacked
    assert [worth.mode(m) for m in [(1,), (0, 2)]] == ["single", "stacked"]
    assert worth.source == "as measured on 100 pictures of colours"
    raw = Bundle.open(write_bundle(tmp_path / "raw", evaluated=False))
    assert MeasuredSubsets(raw).accuracy((0, 1)) is None
    assert MeasuredSubsets(raw).source == "not known: the bundle has not been evaluated"


def test_between_the_rungs_that_were_measured_accuracy_is_estimated(tmp_path: Path) -> None:
    """Alone 50 % at the top, then 40 and 30; all at their lowest half of all at the top."""
    bundle = Bundle.open(write_bundle(tmp_path / "bundle", rungs=3))
    worth = MeasuredSubsets(bundle)
    assert worth.source.endswith("; estimated between the top and the lowest rungs")
    top = subset_accuracy((0, 2)).stacked
    lowered = {(0, 0): 0.0, (0, 1): 0.25, (1, 1): 0.5, (2, 0): 0.5, (2, 2): 1.0}
    for rungs, share in lowered.items():
        assert worth.accuracy((0, 2), rungs) == pytest.approx(top * (1 - share / 2)), rungs
    change_manifest(bundle.path, lambda m: m["evaluation"]["members"][0].update(accuracy=0.1))
    change_manifest(bundle.path, lambda m: m["evaluation"]["members"][2].update(accuracy=0.1))
    alike = MeasuredSubsets(Bundle.open(bundle.path))
    assert alike.accuracy((0, 2), (1, 0)) == pytest.approx(0.875 * top), "by the number of steps"


LAW = AccuracyLaw(alone=read_shipped_law().law.alone, sharpness=20.0, same_view=0.5, same_model=0.0)


def plan_with_accuracy(all_in: float, *alone: float | None) -> Plan:
    accuracy = PredictedAccuracy(all_in=all_in, expected=0.65, typical_error=0.02)
    parts = [
        msgspec.structs.replace(a, accuracy=value)
        for a, value in zip(plan().assignments, alone, strict=True)
    ]
    return msgspec.structs.replace(plan(), accuracy=accuracy, assignments=parts)


def test_a_plan_s_subsets_are_worth_what_the_law_says() -> None:
    worth = PredictedSubsets(plan_with_accuracy(0.75, 0.7, 0.65, 0.6), LAW)
    assert worth.source == "as predicted for each subset of the members"
    assert worth.accuracy((0, 1, 2)) == 0.75
    assert worth.accuracy((1,)) == pytest.approx(0.65)
    parts = [LawMember(capability=capability_of(a), view=a, model=a) for a in (0.7, 0.6)]
    expected = 1 - math.exp(-together(LAW, parts))
    assert worth.accuracy((0, 2)) == pytest.approx(expected)
    assert 0.7 < expected < 0.75
    # No part of a fleet is better than all of it, whatever another law said.
    assert PredictedSubsets(plan_with_accuracy(0.7, 0.7, 0.65, 0.6), LAW).accuracy((0, 1)) == 0.7


def test_a_plan_that_tells_no_member_s_accuracy_knows_whole_answers() -> None:
    worth = PredictedSubsets(plan_with_accuracy(0.7, 0.6, None, None), LAW)
    assert worth.accuracy((0, 1, 2)) == 0.7
    assert worth.accuracy((0,)) == pytest.approx(0.6)
    assert worth.accuracy((0, 1)) is None
    assert worth.source == "as the plan predicts it for answers of all members; of others not known"
    none = PredictedSubsets(plan(), LAW)
    assert none.accuracy((0, 1, 2)) is None
    assert none.source == "not known: the plan predicts none"


# Outcomes.


def devices(*names: str) -> tuple[DeviceModel, ...]:
    return tuple(
        DeviceModel(
            name=name, k=k, compute=LogNormal(median_s=0.01), delay=Jittered(round_trip_s=0.0)
        )
        for k, name in enumerate(names)
    )


def test_an_outcome_sums_a_trace_up(bundle: Bundle, tmp_path: Path) -> None:
    scenario = Scenario(devices=devices("a", "b", "c"), load=Load(requests=4), deadline_ms=50.0)
    trace = Trace(span_s=2.0, subsets={(0, 1, 2): 0, (1,): 1, (): 2})
    trace.numbers.extend([0, 1, 2, 3])
    trace.latencies_s.extend([0.010, 0.020, 0.048, 0.048])
    trace.subset.extend([0, 0, 1, 2])
    trace.partial.extend([0, 0, 1, 1])
    trace.sure.extend([0, 0, 0, 0])
    counts = {"asked": 4, "used": 2, "late": 1, "too_late": 1, "overloaded": 0}
    for name in "abc":
        trace.busy_s[name], trace.falls[name] = 0.5, 1
        trace.counts[name] = counts
    outcome = outcome_of(scenario, trace, MeasuredSubsets(bundle))
    right = 2 * subset_accuracy((0, 1, 2)).stacked + subset_accuracy((1,)).stacked
    assert outcome.accuracy == outcome.accuracy_at_least == pytest.approx(right / 4)
    assert outcome.accuracy_of_answers == pytest.approx(right / 3)
    assert (outcome.answered, outcome.complete, outcome.partial) == (0.75, 0.5, 0.25)
    assert outcome.latency_ms.p50 == pytest.approx(20.0)
    assert outcome.latency_ms.max == pytest.approx(48.0)
    assert outcome.throughput_per_s == 1.5
    assert outcome.modes == {"single": 0.25, "stacked": 0.5}
    assert outcome.devices["b"].utilisation == 0.25
    assert (outcome.devices["b"].k, outcome.devices["b"].falls) == (1, 1)
    # The same where (1,) is a first stage that was sure.
    trace.sure[2] = 1
    assert outcome_of(scenario, trace, MeasuredSubsets(bundle)).accuracy is None
    folder = with_cascade(write_bundle(tmp_path / "cascade"), 0.9)
    sure = outcome_of(scenario, trace, MeasuredSubsets(Bundle.open(folder)))
    right = 2 * subset_accuracy((0, 1, 2)).stacked + CASCADE_ACCURACY.stacked
    assert sure.accuracy == pytest.approx(right / 4)
    known = outcome_of(scenario, trace, PredictedSubsets(colour_plan(), LAW))
    assert (known.accuracy, known.accuracy_at_least) == (None, 0.0)
    assert list(msgspec.to_builtins(outcome)["latency_ms"]) == ["p50", "p90", "p99", "p99.9", "max"]


def test_what_ifs(bundle: Bundle) -> None:
    scenario = Scenario(devices=devices("a", "b", "c"), load=Load(requests=5), deadline_ms=50.0)
    spare = DeviceModel(
        name="d", k=0, compute=LogNormal(median_s=0.001), delay=Jittered(round_trip_s=0.0)
    )
    asked = [*each_lost(scenario), without("a", "b"), add_device(spare), hedge_after(2.0)]
    done: list[str] = []
    (first, second) = compare(scenario, [50.0, 100.0], asked, MeasuredSubsets(bundle), done.append)
    assert (first.deadline_ms, second.deadline_ms) == (50.0, 100.0)
    assert list(first.what_if) == [
        "without a",
        "without b",
        "without c",
        "without a, b",
        "with d for sub-model 0",
        "hedged after 2 ms",
    ]
    assert first.base.accuracy == subset_accuracy((0, 1, 2)).stacked
    assert first.what_if["without b"].accuracy == subset_accuracy((0, 2)).stacked
    assert first.what_if["without a, b"].modes == {"single": 1.0}
    # The faster of two gets all but the first request.
    assert first.what_if["with d for sub-model 0"].devices["d"].asked == 4
    assert len(done) == 2 * (1 + len(asked))
    assert each_lost(Scenario(devices=devices("a"), load=Load(requests=1), deadline_ms=9.0)) == []
    with pytest.raises(InputError, match=r"^the same change is asked for twice: "):
        compare(scenario, [50.0], [without("a"), without("a")], MeasuredSubsets(bundle))
