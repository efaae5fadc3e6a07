"""The real agent on an NVIDIA GPU: `make test-gpu`. Not collected by `make test`.

It serves the reference bundle, planned for CUDA, beside an agent that sees no GPU and was allowed
to fall back to the processor; the same crops go to both through keys and TCP, and their logits are
compared.
"""

import signal
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from mdp.client.sync import Client
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.formats.profile import Precision, read_profile
from mdp.runtimes.cuda import CUDA
from mdp.testing.agents import ANY_PORT, AgentProcess
from mdp.testing.processes import PATIENCE_S
from tests.support.fleet import BIN, PLENTY_MS, ROOT
from tests.support.two_agents import DEVICES, PICTURES, Side, likeness, pictures, reference_bundle

CPU = "CPUExecutionProvider"
#: Largest difference of a logit: sums in another order; in fp16, numbers of 11 bits.
TOLERANCE: dict[Precision, float] = {"fp32": 1e-4, "fp16": 0.05}
FIGURES = ROOT / "runs" / "gpu.json"
#: A command begun with this sees no GPU.
NO_GPU = ["env", "CUDA_VISIBLE_DEVICES="]
AGENT = str(BIN / "mdp-agent")

pytestmark = pytest.mark.timeout(5 * PATIENCE_S)


@pytest.fixture(scope="session")
def figures() -> Iterator[list[dict[str, Any]]]:
    """Measured figures; `python -m benchmarks.keep gpu` puts them into the results."""
    rows: list[dict[str, Any]] = []
    yield rows
    write_json(FIGURES, {"gpu": gpu_name(), "rows": rows})


CASES: list[tuple[str, Precision]] = [
    (device, precision) for precision in TOLERANCE for device in DEVICES
]


@dataclass(frozen=True)
class Both:
    """The same sub-model on the processor and on the GPU."""

    cpu: Side
    gpu: Side
    precision: Precision


@pytest.fixture(scope="module", params=CASES, ids=["-".join(case) for case in CASES])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Both]:
    device, precision = request.param
    folder = tmp_path_factory.mktemp("gpu")
    bundle = plan_for_gpu(folder / "bundle", precision)
    with (
        Side(folder / "cpu", bundle, device, PATIENCE_S) as cpu,
        Side(folder / "gpu", bundle, device, PATIENCE_S) as gpu,
    ):
        cpu.begin(*NO_GPU, AGENT, options=["--allow-fallback"])
        gpu.begin(AGENT)
        yield Both(cpu, gpu, precision)


def gpu_name() -> str:
    """The GPU and its driver."""
    asked = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def plan_for_gpu(folder: Path, precision: Precision) -> Bundle:
    """The reference bundle, planned for a GPU."""
    return reference_bundle(folder, precision, provider=CUDA)


def test_one_computes_on_the_gpu_and_the_other_says_that_it_does_not(both: Both) -> None:
    for side, provider, reason in (
        (both.gpu, CUDA, ""),
        (both.cpu, CPU, f"runs on {CPU}, not as planned"),
    ):
        with side.client() as client:
            (status,) = client.status(timeout_s=PATIENCE_S)
        assert (status.state, status.provider, status.reason) == ("READY", provider, reason)
    maps = Path(f"/proc/{both.gpu.agent.process.pid}/maps").read_text()
    assert "libonnxruntime_providers_cuda" in maps
    assert "/dev/nvidia" in maps


def test_its_logits_are_those_of_the_processor(both: Both, figures: list[dict[str, Any]]) -> None:
    here, there = both.cpu.logits(), both.gpu.logits()
    assert len(here) == PICTURES
    alike = likeness(here, there)
    compute_ms = {}
    for name, side in (("here", both.cpu), ("gpu", both.gpu)):
        with side.client() as client:
            answers = [client.classify(p, deadline_ms=PLENTY_MS) for p in pictures() * 10]
        compute_ms[name] = statistics.median(a.members[0].compute_ms for a in answers)
    row = {
        "device": both.gpu.assignment.device,
        "precision": both.precision,
        "pictures": len(here),
        **asdict(alike),
        "compute_ms": compute_ms,
    }
    figures.append(row)
    assert alike.largest_difference <= TOLERANCE[both.precision]
    assert alike.same_label == len(here)
    # Pictures that all look alike to the model would prove nothing.
    assert alike.largest_logit > 10 * TOLERANCE[both.precision]
    # Nor would logits of one and the same program.
    assert alike.largest_difference > 0


def test_pictures_computed_together_come_out_the_same(both: Both, tmp_path: Path) -> None:
    device, shown = both.gpu.assignment.device, pictures()
    bundle = Bundle.open(both.gpu.bundle)
    with Side(tmp_path / "batches", bundle, device, PATIENCE_S) as batches:
        batches.begin(AGENT, options=["--batch", 4])
        with both.gpu.client() as alone, batches.client() as together:
            wanted = [alone.classify(picture, deadline_ms=PLENTY_MS) for picture in shown]
            got = list(together.stream(shown * 4, in_flight=16, deadline_ms=PLENTY_MS))
    for number, answer in enumerate(got):
        expected = wanted[number % len(shown)]
        assert (answer.used, answer.label) == ((device,), expected.label)
        difference = TOLERANCE[both.precision]
        assert answer.probability == pytest.approx(expected.probability, abs=difference)


def test_another_bundle_takes_over_while_the_first_is_asked(tmp_path: Path) -> None:
    device = DEVICES[0]
    bundles = {precision: plan_for_gpu(tmp_path / precision, precision) for precision in TOLERANCE}
    (tmp_path / "live").symlink_to("fp32")
    command = [AGENT, "run", "--json", "--bundle", str(tmp_path / "live"), "--device", device,
               "--bind", ANY_PORT, "--threads", "1"]  # fmt: skip
    with ExitStack() as stack:
        agent = AgentProcess(device, command, tmp_path / "log")
        stack.callback(agent.close)
        agent.wait_for("READY")
        fleet = tmp_path / "fleet.toml"
        new_fleet(bundles["fp32"], [f"{device}={agent.address}"], fleet)
        client = stack.enter_context(Client.connect(fleet, timeout_s=PATIENCE_S))
        shown = pictures()
        before = [client.classify(picture, deadline_ms=PLENTY_MS) for picture in shown]
        (tmp_path / "link").symlink_to("fp16")
        (tmp_path / "link").replace(tmp_path / "live")
        agent.signal(signal.SIGHUP)
        asked = 0
        while client.status(timeout_s=PATIENCE_S)[0].counts.get("renewed", 0) == 0:
            for picture, expected in zip(shown, before, strict=True):
                answer = client.classify(picture, deadline_ms=PLENTY_MS)
                assert answer.used == (device,)
                assert answer.probability == expected.probability
                asked += 1
        assert asked > 0
        newer = tmp_path / "newer.toml"
        new_fleet(bundles["fp16"], [f"{device}={agent.address}"], newer)
        later = stack.enter_context(Client.connect(newer, timeout_s=PATIENCE_S))
        for picture, expected in zip(shown, before, strict=True):
            assert later.classify(picture, deadline_ms=PLENTY_MS).label == expected.label


def test_an_agent_that_sees_no_gpu_refuses(tmp_path: Path) -> None:
    bundle = plan_for_gpu(tmp_path / "bundle", "fp32")
    command = [*NO_GPU, AGENT, "run", "--bundle", str(bundle.path), "--device", DEVICES[0],
               "--bind", ANY_PORT]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert f"the plan asks for {CUDA}" in done.stderr
    assert "cannot start it" in done.stderr


def test_a_probe_measures_the_gpu(tmp_path: Path) -> None:
    out = tmp_path / "gpu.toml"
    command = [AGENT, "probe", "--out", str(out), "--shapes", "1", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    profile = read_profile(out)
    ways = {(p.provider or profile.provider, p.precision) for p in profile.latency}
    assert ways >= {(CUDA, "fp32"), (CUDA, "fp16"), (CPU, "fp32")}
