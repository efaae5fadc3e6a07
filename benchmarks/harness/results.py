"""Kept results: files in benchmarks/results, each with the machine that it was measured on."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mdp.errors import InputError

RESULTS = Path(__file__).parents[1] / "results"


def read_result(name: str) -> Any:
    """The content of benchmarks/results/`name`.json; raises InputError where it is not there."""
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        raise InputError(f"{path}: not there: expected the result of its benchmark")
    return json.loads(path.read_text())


def format_machine(machine: Mapping[str, Any]) -> str:
    """The machine in a few words."""
    return (
        f"{machine['cores']} virtual cores, {machine['processor']}, "
        f"load {machine['load_before']:g} before the run, {machine['date']}"
    )
