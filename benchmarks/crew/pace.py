"""What trainers that are not equally quick keep of their paces.

    python -m benchmarks.crew.pace

Real processes that speak gloo on loopback; computing is played by sleeping per picture, so that
the trainers fit on two cores. Four trainers, one of them three times slower: shares by pace beside
equal ones. Then trainers that are five times slower in a tenth of spells of 20 steps, drawn by
SHA-256: rounds by the pictures of all, DDP, local SGD by own steps, torch's PostLocalSGDOptimizer.
The share kept is the time that trainers would take who never wait over the time taken, from the
first to the last step, means included. Writes benchmarks/results/crew-pace.json.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.crew.played import Case, Cases, ideal_s, seconds
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from mdp.files import write_json

RESULT = RESULTS / "crew-pace.json"
#: Seconds of a quick trainer's equal share of a step, and its pictures.
UNIT_S, PICTURES = 0.2, 4
STEPS = 120


def constant() -> list[Case]:
    """Four trainers, the last three times slower."""
    each = UNIT_S / PICTURES
    base = Case(
        name="", how="gradients", picture_s=(each, each, each, 3 * each), pictures=10, steps=30
    )
    return [
        msgspec.structs.replace(base, name="gradients, equal shares"),
        msgspec.structs.replace(base, name="gradients, shares by pace", paces=(3, 3, 3, 1)),
    ]


def changing(trainers: int) -> list[Case]:
    """Spells of slowness."""
    base = Case(
        name="", how="gradients", picture_s=(UNIT_S / PICTURES,) * trainers, pictures=PICTURES,
        steps=STEPS, spells=True,
    )  # fmt: skip
    known: list[tuple[str, dict[str, Any]]] = [
        ("DDP", {}),
        ("local SGD, every 16 own steps", {"how": "own_steps", "every": 16}),
        ("PostLocalSGDOptimizer, every 16 own steps", {"how": "post_local_sgd", "every": 16}),
    ]
    for steps in (16, 64):
        name = f"rounds of {steps * trainers} steps of all"
        known.append((name, {"how": "rounds", "every": steps * trainers * PICTURES}))
    return [msgspec.structs.replace(base, name=name, **more) for name, more in known]


def run(cases: Sequence[Case], trainers: int) -> list[dict[str, Any]]:
    """What every case took, and what it keeps of the paces."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    asked = Cases(trainers=trainers, hosts=("127.0.0.1",) * trainers, port=port, cases=tuple(cases))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_bytes(msgspec.json.encode(asked))
        command = [sys.executable, "-m", "benchmarks.crew.played", name]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        started = [
            subprocess.Popen([*command, str(rank)], env=environment) for rank in range(trainers)
        ]
        if sum(process.wait() for process in started):
            raise SystemExit("a trainer failed")
        said = [
            msgspec.json.decode((folder / f"said-{rank}.json").read_bytes())
            for rank in range(trainers)
        ]
    return [
        {
            "name": case.name,
            "seconds": round(seconds(case.name, said), 2),
            "never_waiting_s": round(ideal_s(case), 2),
            "kept": round(ideal_s(case) / seconds(case.name, said), 3),
        }
        for case in cases
    ]


def main() -> None:
    """Measure and write."""
    machine = describe_machine()
    result: dict[str, Any] = {"machine": machine, "computing": "played by sleeping"}
    result["one of 4 three times slower"] = run(constant(), 4)
    for trainers in map(int, sys.argv[1:] or ("4", "8")):
        result[f"spells, {trainers} trainers"] = run(changing(trainers), trainers)
    write_json(RESULT, result)
    print(RESULT.read_text())


if __name__ == "__main__":
    main()
