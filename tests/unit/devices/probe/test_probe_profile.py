"""From points to a profile, its sentences and its warnings. Pure."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from devices.probe.link import MeasuredLink
from devices.probe.measure import EncoderRun
from devices.probe.profile import SystemReport, profile_of
from devices.probe.report import report, throttling, warnings
from devices.probe.run import Probe, ProbeOptions, ProbeResult
from mdp.errors import AgentError
from mdp.files import write_toml
from mdp.formats.profile import DeviceProfile, Sustained, read_profile
from tests.support.clock import Clock
from tests.support.probes import CPU, CUDA, ENCODERS, FakeDevice, FakeModels, make_point, spec

DEVICE = SystemReport(
    name="here",
    date="2026-11-20",
    processor="Test Processor 9",
    virtual=False,
    cores=2,
    available_bytes=8_000_000_000,
    idle_temperature_c=41.0,
)
LINK = MeasuredLink(
    peer="tcp://10.0.0.5:7500",
    round_trip_s=0.00123456,
    p10_s=0.001,
    p90_s=0.002,
    bandwidth_bps=93_456_789.0,
    request_bytes=3_145_728,
)


def probe_on(device: FakeDevice, **options: float) -> ProbeResult:
    made = Probe(device.ask, FakeModels(), Clock())  # type: ignore[arg-type]
    made.run(ENCODERS, 10, ProbeOptions(threads=[1, 2], **options))  # type: ignore[arg-type]
    return made.result


@pytest.fixture(scope="module")
def profile() -> DeviceProfile:
    return profile_of(probe_on(FakeDevice(), load_s=180.0), DEVICE, LINK)


def tiny(image_size: int, latency_ms: float) -> tuple[EncoderRun, object]:
    """A ViT-Tiny, 12 layers of 192, measured."""
    shape = replace(
        spec(image_size=image_size), patch_size=16, embed_dim=192, depth=12, num_heads=3
    )
    run = EncoderRun(
        submodel=shape, runtime="onnxruntime", provider=CPU, threads=2, batch=1, num_classes=10
    )
    return run, make_point(latency_ms)


def test_a_written_profile_reads_as_it_was(profile: DeviceProfile, tmp_path: Path) -> None:
    write_toml(tmp_path / "here.toml", profile)
    assert read_profile(tmp_path / "here.toml") == profile


def test_a_profile_says_what_was_measured_and_what_was_judged(profile: DeviceProfile) -> None:
    methods = {number: given.method for number, given in profile.provenance.items()}
    assert methods == {
        "threads": "estimated",
        "memory_bytes": "estimated",
        "availability": "estimated",
        "link": "measured",
        "latency": "measured",
        "power_w": "measured",
    }
    assert "onnxruntime 1.0 on Test Processor 9, 2026-11-20" in profile.provenance["latency"].source
    assert profile.memory_bytes == 4_000_000_000
    assert profile.power_w == 5.0


@pytest.mark.parametrize("spin", [True, False])
def test_a_profile_says_how_its_threads_waited(spin: bool) -> None:
    device = FakeDevice()
    profile = profile_of(probe_on(device, spin=spin), DEVICE, None)
    assert {run.spin for run in device.runs} == {spin}
    assert profile.spin == spin
    assert any("threads spin" in line for line in report(profile)) == spin


def test_a_shared_machine_s_points_are_said_to_be_measured_beside_others() -> None:
    device = FakeDevice()
    device.others_cores = lambda asked: 1.0
    result = probe_on(device, shared=True)
    # Nothing was measured anew, as nothing was disturbed.
    assert len(device.runs) == result.planned
    profile = profile_of(result, DEVICE, LINK)
    source = profile.provenance["latency"].source
    assert source.endswith("; beside other processes on the same machine, as it will be used")
    assert profile.probe is not None
    assert profile.probe.busy_points == 0
    assert not any("not quiet" in line for line in warnings(profile))


def test_the_link_is_what_was_measured_to_four_digits(profile: DeviceProfile) -> None:
    assert (profile.link.round_trip_s, profile.link.bandwidth_bps) == (0.001235, 93_460_000.0)
    assert profile.link.round_trip_p90_s == 0.002
    source = profile.provenance["link"].source
    assert "to the agent at tcp://10.0.0.5:7500, 2026-11-20" in source
    assert "(p10 1, p90 2 ms)" in source
    assert "the way back is taken to be as fast" in source


def test_a_link_nobody_measured_is_said_to_be_a_guess() -> None:
    profile = profile_of(probe_on(FakeDevice()), DEVICE, None)
    assert profile.provenance["link"].method == "estimated"
    assert profile.provenance["link"].source.startswith("not measured: ")
    assert (
        "the link was not measured: --peer tcp://HOST:PORT of a running agent measures it"
        in warnings(profile)
    )


def test_the_profile_s_own_provider_is_not_repeated_in_every_point(profile: DeviceProfile) -> None:
    assert profile.provider == CPU
    assert profile.threads == 2
    assert {point.provider for point in profile.latency} == {None}


def test_a_faster_gpu_becomes_the_profile_s_provider_and_the_processor_s_points_stay() -> None:
    result = probe_on(FakeDevice([CUDA, CPU]))
    for run in list(result.measured):
        if run.provider == CUDA:
            result.measured[run] = replace(result.measured[run], latency_ms=0.1, p10_ms=0.1)
    profile = profile_of(result, DEVICE, None)
    assert (profile.provider, profile.kind, profile.threads) == (CUDA, "gpu", 1)
    assert {point.provider for point in profile.latency} == {None, CPU}


def test_too_few_points_make_no_profile() -> None:
    result = probe_on(FakeDevice())
    for run in list(result.measured)[2:]:
        del result.measured[run]
    with pytest.raises(AgentError, match=r"^2 points were measured, a profile needs 3: none is"):
        profile_of(result, DEVICE, None)


def test_an_interrupted_probe_is_marked_and_said() -> None:
    result = probe_on(FakeDevice())
    planned = result.planned
    for run in list(result.measured)[5:]:
        del result.measured[run]
    result.complete = False
    profile = profile_of(result, DEVICE, LINK)
    assert profile.probe is not None
    assert not profile.probe.complete
    assert warnings(profile)[0] == f"incomplete: 5 of {planned} points were measured"


def test_a_machine_that_was_not_quiet_is_said() -> None:
    device = FakeDevice()
    device.others_cores = lambda asked: 0.8
    profile = profile_of(probe_on(device), DEVICE, LINK)
    count = len(profile.latency)
    said = warnings(profile)
    assert said[0].startswith(
        f"the machine was not idle: other processes kept it busy during {count} of {count} points "
        "(0.8 cores in the median)"
    )
    assert f"{count} of them while other processes kept" in profile.provenance["latency"].source


def test_a_quiet_and_complete_probe_with_a_peer_needs_no_warning(profile: DeviceProfile) -> None:
    assert warnings(profile) == []


def test_a_point_that_contradicts_the_others_does_not_get_into_the_profile() -> None:
    result = probe_on(FakeDevice())
    run = next(iter(result.measured))
    assert run.submodel is not None
    deeper = replace(run, submodel=replace(run.submodel, depth=3))
    result.measured[deeper] = make_point(result.measured[run].latency_ms / 3, others_cores=1.0)
    profile = profile_of(result, DEVICE, LINK)
    assert len(profile.latency) == len(result.measured) - 1
    assert any("contradicts itself" in line for line in warnings(profile))


def test_throttling_is_told_from_keeping_speed(profile: DeviceProfile) -> None:
    assert profile.probe is not None
    assert profile.probe.sustained is not None
    assert throttling(profile.probe.sustained) == (
        "it throttles: 10 ms in the first minute, 13 in the last of 3, 30 % slower; plan with the "
        "slower"
    )
    steady = Sustained(shape="any", minutes=10.0, first_minute_ms=10.0, last_minute_ms=10.5)
    assert throttling(steady).startswith("it keeps its speed: 10 ms in the first minute, 10.5")


def test_a_short_load_claims_nothing_about_throttling() -> None:
    profile = profile_of(probe_on(FakeDevice(), load_s=5.0), DEVICE, LINK)
    assert profile.probe is not None
    assert profile.probe.sustained is None
    assert profile.probe.load_temperature_c == 70.0


def test_the_report_has_encoders_by_ways(profile: DeviceProfile) -> None:
    lines = list(report(profile))
    ways = [line for line in lines if line.startswith("  (")]
    points = profile.latency
    assert len(ways) == len({(p.precision, p.threads, p.batch) for p in points})
    rows = [line for line in lines if line.startswith("64/4, 128 x 2, 2 heads, MLP x 4 ")]
    point = next(p for p in points if (p.image_size, p.precision, p.threads) == (64, "fp32", 2))
    assert f"{point.latency_ms:.3g}" in rows[0].split()
    assert "- under load it is 70 degrees Celsius warm, 41 before" in lines
    assert "- under load it takes 5 W" in lines


def test_disturbed_points_are_starred() -> None:
    device = FakeDevice()
    device.others_cores = lambda asked: 0.8
    assert any(" 11.6*" in line for line in report(profile_of(probe_on(device), DEVICE, LINK)))
