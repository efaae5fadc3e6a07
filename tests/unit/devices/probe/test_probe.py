"""The course of a probe: what fails, vanishes, is disturbed or interrupted. A fake device."""

from collections.abc import Sequence

import pytest

from devices.probe.child import ChildFailed, ListCapabilities, MeasureRun, SustainRun
from devices.probe.encoders import Encoder
from devices.probe.run import Probe, ProbeOptions
from devices.probe.schedule import best_provider
from mdp.errors import AgentError
from mdp.runtimes.cuda import TENSORRT
from tests.support.clock import Clock
from tests.support.probes import CPU, CUDA, ENCODERS, FakeDevice, FakeModels, latency_of

THOROUGH = ProbeOptions(threads=[1, 2])


def probe(device: FakeDevice, clock: Clock | None = None) -> Probe:
    return Probe(device.ask, FakeModels(), clock or Clock())  # type: ignore[arg-type]


def run(device: FakeDevice, options: ProbeOptions = THOROUGH) -> Probe:
    made = probe(device)
    made.run(ENCODERS, 10, options)
    return made


def test_everything_planned_is_measured_once() -> None:
    device = FakeDevice()
    result = run(device).result
    assert result.complete
    assert result.planned == len(result.points) == len(device.runs) == len(set(device.runs))
    assert result.dropped == {}
    assert result.versions == {"onnxruntime": "1.0"}
    assert isinstance(device.asked[0], ListCapabilities)


def test_at_last_a_load_is_sustained_on_all_threads() -> None:
    device = FakeDevice()
    result = run(device, ProbeOptions(threads=[1, 2], load_s=120.0)).result
    last = device.asked[-1]
    assert isinstance(last, SustainRun)
    assert last.seconds == 120
    assert last.run.threads == 2
    assert result.load_run == last.run
    assert result.load is not None
    assert result.load.last_ms == 13


def test_the_load_is_sustained_where_the_device_is_fastest() -> None:
    device = FakeDevice([CUDA, CPU])
    device.latency_ms = lambda run: latency_of(run) / (1 if run.provider == CPU else 50)
    run(device)
    last = device.asked[-1]
    assert isinstance(last, SustainRun)
    assert last.run.provider == CUDA


def test_openvino_alone_makes_a_profile() -> None:
    device = FakeDevice([], openvino={"CPU": ["FP32"]})
    result = run(device).result
    assert result.complete
    assert {point.runtime for point in result.points} == {"openvino"}
    assert best_provider(result.points) == CPU


def test_every_device_of_openvino_s_is_measured_and_named_in_its_points() -> None:
    device = FakeDevice(openvino={"CPU": ["FP32"], "GPU": ["FP32", "FP16"], "NPU": []})
    device.failing = lambda run, asked: "no driver" if run.provider == "NPU" else None
    result = run(device).result
    found = {(p.provider, p.threads) for p in result.points if p.runtime == "openvino"}
    assert found == {(CPU, 1), (CPU, 2), ("GPU", 1)}
    # No encoder here has another precision than fp32 and int8.
    assert {r.spec.precision for r in device.runs if r.provider == "GPU"} == {"fp32"}
    assert best_provider(result.points) == CPU


def test_a_provider_that_cannot_load_is_left_out_and_said() -> None:
    device = FakeDevice([CUDA, CPU])
    device.failing = lambda run, asked: "no libcudnn" if run.provider == CUDA else None
    result = run(device).result
    assert {point.provider for point in result.points} == {CPU}
    assert result.dropped["onnxruntime CUDA fp32"] == "no libcudnn"
    # One try was enough.
    assert sum(run.provider == CUDA and run.spec.precision == "fp32" for run in device.runs) == 1
    assert result.planned == len(result.points)
    assert result.complete


def test_a_provider_that_vanishes_is_dropped_with_its_points_and_said() -> None:
    device = FakeDevice([CUDA, CPU])
    device.failing = lambda run, n: "CUDA error 999" if run.provider == CUDA and n > 15 else None
    result = run(device).result
    assert {point.provider for point in result.points} == {CPU}
    assert result.dropped["onnxruntime CUDA fp32"].startswith("was lost after ")
    assert result.dropped["onnxruntime CUDA fp32"].endswith(" points: CUDA error 999")
    assert result.complete


def test_a_model_that_is_too_much_is_left_out_alone() -> None:
    device = FakeDevice()
    device.failing = lambda run, asked: "no memory" if run.spec.image_size == 64 else None
    result = run(device).result
    assert {point.image_size for point in result.points} == {8, 16, 32, 48}
    assert set(result.dropped.values()) == {"no memory"}
    assert "64 px, 128 wide, 2 deep: onnxruntime CPU fp32, 2 threads" in result.dropped
    assert result.planned == len(result.points)


def test_a_model_that_cannot_be_written_is_left_out_alone() -> None:
    class FullDisk(FakeModels):
        def path(self, encoder: Encoder) -> str:
            if encoder.spec.image_size == 64:
                raise OSError(28, "No space left on device")
            return super().path(encoder)

    made = Probe(FakeDevice().ask, FullDisk(), Clock())  # type: ignore[arg-type]
    made.run(ENCODERS, 10, THOROUGH)
    reasons = set(made.result.dropped.values())
    assert reasons == {"the model cannot be written: No space left on device"}
    assert {point.image_size for point in made.result.points} == {8, 16, 32, 48}


def test_a_backend_that_compiles_for_long_is_measured_on_the_quick_encoders_only() -> None:
    device = FakeDevice([CUDA, CPU])
    device.start_up_ms = lambda run: 20_000.0 if run.provider == CUDA else 30.0
    result = run(device).result
    assert {p.image_size for p in result.points if p.provider == CUDA} == {8, 16, 32}
    assert {p.image_size for p in result.points if p.provider == CPU} == {8, 16, 32, 48, 64}
    assert result.dropped["onnxruntime CUDA fp32, beyond the quick encoders"] == (
        "loading the smallest took 20 s"
    )
    assert result.planned == len(result.points)


def test_a_provider_that_compiles_in_its_first_run_is_slow_to_start_too() -> None:
    device = FakeDevice([TENSORRT, CPU])
    device.latency_ms = lambda run: 4000.0 if run.provider == TENSORRT else latency_of(run)
    result = run(device).result
    assert "onnxruntime Tensorrt fp32, beyond the quick encoders" in result.dropped


def test_disturbed_points_are_measured_again_and_the_quieter_is_kept() -> None:
    device = FakeDevice()
    device.others_cores = lambda asked: 1.5 if asked in (3, 4) else 0.0
    result = run(device).result
    again = device.runs[result.planned :]
    assert again == device.runs[1:3]
    assert result.busy == 0


@pytest.mark.parametrize("factors", [(3, 1), (1, 3, 0.5), (3, 1, 0.5, 3), (3, 1, 3, 1)])
def test_of_several_rounds_each_point_s_middle_one_counts(factors: Sequence[float]) -> None:
    device = FakeDevice()
    once = {p.latency_ms for p in run(device).result.points}
    device = FakeDevice()
    # Some of every point's measurements fall into a slow spell.
    device.latency_ms = lambda asked: latency_of(asked) * factors[device.runs.count(asked) - 1]
    rounds = len(factors)
    result = run(device, ProbeOptions(threads=[1, 2], rounds=rounds)).result
    assert len(device.runs) == rounds * result.planned == rounds * len(result.points)
    assert {p.latency_ms for p in result.points} == once


def test_a_point_that_fails_in_a_later_round_keeps_its_first_measurement() -> None:
    device = FakeDevice()
    result = run(device).result
    first = {p.latency_ms for p in result.points}
    device = FakeDevice()
    device.failing = lambda asked, _: "gone" if device.runs.count(asked) > 1 else None
    result = run(device, ProbeOptions(threads=[1, 2], rounds=2)).result
    assert {p.latency_ms for p in result.points} == first
    assert result.complete


def test_measuring_again_ends_when_its_time_is_over() -> None:
    device, clock = FakeDevice(), Clock()

    def busy(asked: int) -> float:
        clock.now_s += 1.0
        return 1.5

    device.others_cores = busy
    made = probe(device, clock)
    made.run(ENCODERS, 10, ProbeOptions(threads=[1], again_s=5.0))
    assert len(device.runs) == made.result.planned + 5


@pytest.mark.parametrize("quick", [True, False])
def test_each_point_gets_its_time(quick: bool) -> None:
    device = FakeDevice()
    run(device, ProbeOptions(threads=[1], quick=quick, point_s=0.7))
    assert {r.seconds for r in device.asked if isinstance(r, MeasureRun)} == {0.7}
    assert (64 in {r.spec.image_size for r in device.runs}) is not quick


def test_nothing_to_measure_with_is_said() -> None:
    device = FakeDevice([])
    with pytest.raises(
        AgentError, match=r"^neither onnxruntime nor openvino can be used here; pip"
    ):
        run(device)
    device.here = ChildFailed(reason="the measuring process ended: Illegal instruction")
    with pytest.raises(AgentError, match=r"here: the measuring process ended: Illegal instruction"):
        run(device)


def test_nothing_that_works_is_said_with_every_reason() -> None:
    device = FakeDevice()
    device.failing = lambda run, asked: "no space left on device"
    with pytest.raises(
        AgentError,
        match=r"^nothing could be measured on this device: onnxruntime CPU fp32: no space left",
    ):
        run(device)
