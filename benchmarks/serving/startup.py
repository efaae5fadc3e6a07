"""What starting costs: `import mdp`, and an agent with a 6 MB sub-model, from start to READY.

    python -m benchmarks.serving.startup

Imports are timed as whole processes, in turns with the imports they are compared with. The agent
is a real process with a real ViT sub-model of untrained weights; time runs from its creation to
its READY event, memory is its resident set after 20 requests.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil
import torch

from benchmarks.harness.machine import describe_machine
from mdp import Client
from mdp.cli.bench import noise_picture, percentiles
from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle, file_entry, model_path
from mdp.formats.fleet import new_fleet
from mdp.formats.plan import SubModelSpec
from mdp.testing.agents import AgentProcess, agent_command
from mdp.testing.bundles import LABELS, write_bundle
from partitioner.export.write import ServedMember, to_onnx
from partitioner.networks.submodel import SubModel

RESULTS = Path(__file__).parents[1] / "results" / "startup.json"
BASE = "import numpy, zmq, PIL"
SPEC = SubModelSpec(image_size=64, patch_size=8, embed_dim=160, depth=5, num_heads=5, mlp_ratio=4.0)
REQUESTS = 20


def seconds_of(code: str) -> float:
    """Wall time of a fresh interpreter that runs `code`."""
    started_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True)
    return time.perf_counter() - started_s


def measure_imports(runs: int) -> dict[str, object]:
    """Median milliseconds of both imports and of their difference, pair by pair."""
    pairs = [(seconds_of(BASE) * 1e3, seconds_of("import mdp") * 1e3) for _ in range(runs)]
    base, ours = zip(*pairs, strict=True)
    extra = [b - a for a, b in pairs]
    loaded = subprocess.run(
        [sys.executable, "-c", "import mdp, sys; print(*sys.modules)"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    return {
        "base_ms": percentiles(base, (50,)),
        "mdp_ms": percentiles(ours, (50,)),
        "extra_ms": percentiles(extra, (50, 90)),
        "loads_torch_or_onnxruntime": bool({"torch", "onnxruntime"} & set(loaded)),
    }


def vit_bundle(folder: Path) -> Bundle:
    """A bundle of one device whose model is an untrained ViT of SPEC's shape."""
    torch.manual_seed(0)
    write_bundle(folder, devices=("board",), sizes=(SPEC.image_size,))
    model = folder / model_path(0)
    module = ServedMember(SubModel(SPEC, len(LABELS)))
    model.write_bytes(to_onnx(module, SPEC.image_size, ["boost", "bag"], {}))
    manifest = Bundle.open(folder).manifest
    files = {**manifest.files, model_path(0): file_entry(model)}
    write_json(folder / MANIFEST, msgspec.structs.replace(manifest, files=files))
    return Bundle.open(folder)


def measure_agent(bundle: Bundle) -> dict[str, float]:
    """Milliseconds from process start to READY, and resident MiB when READY and after requests."""
    command = agent_command(bundle.path, "board", "--threads", 1)
    started_s = time.perf_counter()
    with AgentProcess("board", command) as agent:
        agent.wait_for("READY")
        ready_ms = (time.perf_counter() - started_s) * 1e3
        memory = psutil.Process(agent.process.pid).memory_info
        at_ready = memory().rss / 2**20
        fleet = bundle.path.parent / "fleet.toml"
        new_fleet(bundle, [f"board={agent.address}"], fleet)
        with Client.connect(fleet) as client:
            answers = [client.classify(noise_picture(224)) for _ in range(REQUESTS)]
        after = memory().rss / 2**20
        agent.terminate()
    assert not any(answer.partial for answer in answers)
    return {"ready_ms": ready_ms, "rss_ready_mib": at_ready, "rss_after_requests_mib": after}


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="Start-up time and memory.")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    machine = describe_machine()
    imports = measure_imports(options.runs)
    with tempfile.TemporaryDirectory() as name:
        bundle = vit_bundle(Path(name) / "bundle")
        size_mb = (bundle.path / model_path(0)).stat().st_size / 1e6
        agents = [measure_agent(bundle) for _ in range(options.runs)]
    agent = {key: percentiles([run[key] for run in agents], (50, 90)) for key in agents[0]}
    print(f"import mdp: {imports['extra_ms']} ms more than `{BASE}`")
    print(f"loads torch or onnxruntime: {imports['loads_torch_or_onnxruntime']}")
    print(f"agent with a {size_mb:.1f} MB sub-model: {agent}")
    outcome = {"machine": machine, "imports": imports, "model_mb": size_mb, "agent": agent}
    options.out.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
