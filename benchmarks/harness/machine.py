"""The machine of a measurement."""

import datetime
import os
import platform
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
        # Builds of one version differ in speed.
        "python_build": f"{platform.python_compiler()}, {' '.join(platform.python_build())}",
        "versions": {name: _version(name) for name in PACKAGES},
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
