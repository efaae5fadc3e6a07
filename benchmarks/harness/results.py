"""What benchmarks keep: files in benchmarks/results, each with the machine that it was made on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


def kept(name: str) -> Any:
    """The content of benchmarks/results/`name`.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured_on(machine: Mapping[str, Any]) -> str:
    """What a reader has to know of the machine that figures are of."""
    return (
        f"{machine['cores']} virtual cores, {machine['processor']}, "
        f"load {machine['load_before']:g} before the run, {machine['date']}"
    )
