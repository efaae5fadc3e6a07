"""What a result was measured on, kept beside every number."""

import datetime
import os
import platform
import time
from importlib import metadata
from pathlib import Path

PACKAGES = ("mdp-edge", "numpy", "onnxruntime", "openvino", "pillow", "pyzmq", "torch")


def describe_machine() -> dict[str, object]:
    """Processor, cores, memory, load, versions and date of this run."""
    info = Path("/proc/cpuinfo")
    models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines()
              if line.startswith("model name")] if info.exists() else []  # fmt: skip
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "load_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        # Builds of one version differ in how fast they interpret.
        "python_build": f"{platform.python_compiler()}, {' '.join(platform.python_build())}",
        "python_loop_ns": round(_loop_ns(), 1),
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _loop_ns() -> float:
    """What a step of a small loop takes in this interpreter, in nanoseconds: the best of five."""
    steps, best_s = 200_000, float("inf")
    for _ in range(5):
        counts: dict[int, int] = {}
        started_s = time.process_time()
        for step in range(steps):
            counts[step & 255] = counts.get(step & 255, 0) + 1
        best_s = min(best_s, time.process_time() - started_s)
    return best_s / steps * 1e9


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
