"""`mdp-agent probe` as a user starts it, on this machine's real runtimes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from devices.probe.child import Capabilities, ChildFailed, ListCapabilities, MeasureRun, SustainRun
from devices.probe.encoders import complete, extract, read_index
from devices.probe.measure import EncoderRun, MeasuredPoint, SustainedLoad
from devices.probe.worker import ProbeWorker
from mdp.formats.profile import DeviceProfile, read_profile
from mdp.testing.bundles import write_bundle
from mdp.testing.processes import PATIENCE_S
from tests.support.fleet import BIN, ROOT, Fleet

CPU = "CPUExecutionProvider"
SMALLEST = read_index().encoders[0]

pytestmark = pytest.mark.usefixtures("no_leaks")


def command(*args: object) -> list[str]:
    return [str(BIN / "mdp-agent"), "probe", *map(str, args)]


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceProfile, Any, str]:
    """One encoder, measured with a peer at hand: the profile, what was printed, what was said."""
    folder = tmp_path_factory.mktemp("probe")
    out = folder / "profiles" / "here.toml"
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        peer = fleet.start("alpha").address
        done = run("--out", out, "--shapes", 1, "--threads", 1, "--peer", peer, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return read_profile(out), json.loads(done.stdout), done.stderr


def test_the_profile_tells_what_was_measured(probed: tuple[DeviceProfile, Any, str]) -> None:
    profile, printed, said = probed
    assert printed["path"].endswith("here.toml")
    assert (printed["name"], len(printed["latency"])) == ("here", len(profile.latency))
    assert profile.name == "here"
    assert profile.provider == CPU
    assert profile.threads == 1
    ways = {(point.runtime, point.precision) for point in profile.latency}
    assert ways >= {
        ("onnxruntime", "fp32"),
        ("onnxruntime", "int8"),
        ("onnxruntime", "int8-static"),
    }
    assert {point.batch for point in profile.latency} == {1, 4}
    for point in profile.latency:
        assert (point.image_size, point.embed_dim, point.depth) == (8, 32, 1)
        assert point.p10_ms is not None
        assert point.p90_ms is not None
        assert point.p10_ms <= point.latency_ms <= point.p90_ms
        assert point.start_up_ms is not None
        assert point.start_up_ms > point.latency_ms
        # A session of onnxruntime takes some 20 MB, whatever the model.
        assert point.memory_bytes is not None
        assert 1e6 < point.memory_bytes < 500e6
    methods = {name: provenance.method for name, provenance in profile.provenance.items()}
    assert (methods["latency"], methods["link"]) == ("measured", "measured")
    assert methods["availability"] == "estimated"
    assert "mdp-agent probe with mdp-edge 0." in profile.provenance["latency"].source
    assert profile.probe is not None
    assert profile.probe.complete
    assert profile.probe.planned_points == len(profile.latency)
    assert profile.probe.cores == len(os.sched_getaffinity(0))
    assert profile.probe.versions["onnxruntime"].startswith("1.")
    assert profile.probe.others_cores is not None
    assert profile.probe.sustained is None
    assert "tcp://127.0.0.1:" in profile.provenance["link"].source
    assert 0 < profile.link.round_trip_s < 1
    assert profile.link.bandwidth_bps > 1e7
    assert "the link was not measured" not in said


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    out = tmp_path / "here.toml"
    process = subprocess.Popen(
        command("--out", out, "--threads", 1), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stderr is not None
        until_s = time.monotonic() + PATIENCE_S
        # Every tenth point is said.
        while not (line := process.stderr.readline()).startswith("10/"):
            assert line, "ended before it was interrupted"
            assert time.monotonic() < until_s
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, said
    profile = read_profile(out)
    assert profile.probe is not None
    assert not profile.probe.complete
    assert 10 <= len(profile.latency) < profile.probe.planned_points
    assert f"interrupted: {len(profile.latency)} of {profile.probe.planned_points} points" in said
    assert "marked incomplete" in said


@pytest.fixture
def worker() -> Iterator[ProbeWorker]:
    with ProbeWorker() as worker:
        yield worker


@pytest.fixture(scope="module")
def graphs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    extract(folder)
    return folder


@pytest.fixture(scope="module")
def model(graphs: Path) -> Path:
    complete(graphs / SMALLEST.file, graphs / "model.onnx")
    return graphs / "model.onnx"


def a_run(provider: str = CPU) -> EncoderRun:
    return EncoderRun(
        submodel=SMALLEST.submodel,
        runtime="onnxruntime",
        provider=provider,
        threads=1,
        batch=1,
        num_classes=10,
    )


def test_each_point_has_a_fresh_process(worker: ProbeWorker, model: Path) -> None:
    """In one process the second session would find the first one's memory and need none."""
    request = MeasureRun(run=a_run(), model=str(model), seconds=0.01)
    grown = []
    for _ in range(3):
        reply = worker.request(request, PATIENCE_S)
        assert isinstance(reply, MeasuredPoint), reply
        assert reply.memory_bytes is not None
        grown.append(reply.memory_bytes)
    assert min(grown) > 0.8 * max(grown)


@pytest.mark.parametrize("precision", ["fp32", "int8-static"])
def test_a_network_of_a_family_is_measured(
    worker: ProbeWorker, graphs: Path, precision: str
) -> None:
    network = next(e for e in read_index().encoders if e.network and e.spec.precision == precision)
    complete(graphs / network.file, graphs / "network.onnx")
    run = msgspec.structs.replace(a_run(), submodel=None, network=network.network)
    request = MeasureRun(run=run, model=str(graphs / "network.onnx"), seconds=0.01)
    reply = worker.request(request, PATIENCE_S)
    assert isinstance(reply, MeasuredPoint), reply
    assert reply.latency_ms > 0


def test_an_absent_provider_fails_one_point_only(worker: ProbeWorker, model: Path) -> None:
    absent = MeasureRun(run=a_run("CUDAExecutionProvider"), model=str(model), seconds=0.01)
    reply = worker.request(absent, PATIENCE_S)
    assert isinstance(reply, ChildFailed)
    assert "CUDAExecutionProvider, this device has" in reply.reason
    sustain = SustainRun(run=a_run(), model=str(model), seconds=0.1)
    assert isinstance(worker.request(sustain, PATIENCE_S), SustainedLoad)


def test_a_silent_or_ended_process_is_replaced(worker: ProbeWorker, model: Path) -> None:
    endless = SustainRun(run=a_run(), model=str(model), seconds=1e6)
    worker.request(ListCapabilities(), PATIENCE_S)
    reply = worker.request(endless, 0.05)
    assert reply == ChildFailed(reason="nothing was heard for 0.05 s")
    assert isinstance(worker.request(ListCapabilities(), PATIENCE_S), Capabilities)
    # It also ends by itself after each reply, where points cannot be measured in forks.
    assert worker._process is not None
    worker._process.kill()
    here = worker.request(ListCapabilities(), PATIENCE_S)
    assert isinstance(here, Capabilities)
    assert CPU in here.providers
    assert "onnxruntime" in here.versions


def test_no_process_starts(
    worker: ProbeWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise ImportError('broken installation')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert worker.request(ListCapabilities(), PATIENCE_S) == ChildFailed(
        reason="the measuring process ended: ImportError: broken installation"
    )


def test_a_file_that_is_no_model_is_a_point_that_failed(
    worker: ProbeWorker, tmp_path: Path
) -> None:
    (tmp_path / "model.onnx").write_bytes(b"no model")
    reply = worker.request(
        MeasureRun(run=a_run(), model=str(tmp_path / "model.onnx"), seconds=0.01), PATIENCE_S
    )
    assert isinstance(reply, ChildFailed)
    assert "model.onnx: expected an ONNX model" in reply.reason
