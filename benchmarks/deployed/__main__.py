"""Keep the figures of `make containers`, `make systemd` and others in the results and the page.

    python -m benchmarks.deployed containers compose arm64      (make containers KEEP=yes)

These targets leave their figures in runs/deployed, a file for each part that was not skipped. Other
parts keep the figures that they have. The machine is added, so run it on the same one.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.deployed.page import PAGE, PARTS
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from mdp import console
from mdp.errors import InputError
from mdp.files import write_json

FOUND = Path(__file__).parents[2] / "runs" / "deployed"
RESULT = RESULTS / "deployed.json"


def main() -> None:
    """Write the results, and the page that shows them; raises InputError."""
    measured = read_parts(FOUND, sys.argv[1:])
    kept = json.loads(RESULT.read_text())["parts"] if RESULT.is_file() else {}
    machine = describe_machine()
    # The load of each part is its own.
    del machine["load_before"]
    new = {name: {"machine": machine, **part} for name, part in measured.items()}
    write_json(RESULT, {"parts": dict(sorted({**kept, **new}.items()))})
    PAGE.write()


def read_parts(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """Figures that a target has left, by part; raises InputError for none and unknown ones."""
    if unknown := sorted(set(names) - set(PARTS)):
        raise InputError(f"expected some of {', '.join(PARTS)}, got {unknown[0]!r}")
    paths = [path for name in names if (path := folder / f"{name}.json").is_file()]
    if not paths:
        raise InputError(
            f"{folder}: expected figures of {' or '.join(names) or 'a part'}, found none"
        )
    found = {path.stem: json.loads(path.read_text()) for path in paths}
    for path in paths:
        if unknown := sorted(set(found[path.stem]["values"]) - set(PARTS[path.stem][1])):
            raise InputError(
                f"{path}: {unknown[0]}: expected a figure that benchmarks/deployed/page.py names"
            )
    return found


if __name__ == "__main__":
    console.run(main, "benchmarks.deployed")
