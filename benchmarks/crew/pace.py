"""Share of their paces that trainers keep which are not equally quick.

    python -m benchmarks.crew.pace

Real processes that speak gloo on loopback; computing is played by sleeping per picture, so that the
trainers fit on two cores. Four trainers, one of them three times slower: shares by pace beside
equal ones. Then trainers that are five times slower in a tenth of all periods of 20 steps, drawn by
SHA-256: rounds by the pictures of all, DDP, local SGD by own steps, torch's PostLocalSGDOptimizer.
The share kept is the time that trainers would take who never wait over the time taken, from the
first to the last step, means included. Beside it, of rounds, the share in virtual time, where means
take none: the mean over lengths within a sixteenth, as steps of one length fall in with slow
periods. Writes benchmarks/results/crew-pace.json.
"""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import msgspec

from benchmarks.crew.played import Case, Cases, ideal_s, seconds
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.coordinator.simulate import CrewScenario, Paced, simulate, slow_periods

RESULT = RESULTS / "crew-pace.json"
#: Seconds of a quick trainer's equal share of a step, and its pictures.
UNIT_S, PICTURES = 0.2, 4
STEPS, TRAINERS = 120, 8


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


def changing() -> list[Case]:
    """Spells of slowness."""
    base = Case(
        name="", how="gradients", picture_s=(UNIT_S / PICTURES,) * TRAINERS, pictures=PICTURES,
        steps=STEPS, slow_periods=True,
    )  # fmt: skip
    known: list[tuple[str, dict[str, Any]]] = [
        ("DDP", {}),
        ("local SGD, every 16 own steps", {"how": "own_steps", "every": 16}),
        ("PostLocalSGDOptimizer, every 16 own steps", {"how": "post_local_sgd", "every": 16}),
    ]
    for steps in (16, 32, 64):  # 16 is the planner's least
        name = f"rounds of {steps * TRAINERS} steps of all"
        known.append((name, {"how": "rounds", "every": steps * TRAINERS * PICTURES}))
    return [msgspec.structs.replace(base, name=name, **more) for name, more in known]


def run_trainers(
    kind: type[Cases], cases: Sequence[Case], trainers: int, folder: Path, module: str
) -> list[dict[str, Any]]:
    """Figures that each trainer, a process of `module` on loopback, gives of cases, by name."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    asked = kind(trainers=trainers, hosts=("127.0.0.1",) * trainers, port=port, cases=tuple(cases))
    (folder / "cases.json").write_bytes(msgspec.json.encode(asked))
    command = [sys.executable, "-m", module, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    started = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(trainers)]
    if sum(process.wait() for process in started):
        raise SystemExit("a trainer failed")
    return [
        msgspec.json.decode((folder / f"said-{rank}.json").read_bytes()) for rank in range(trainers)
    ]


def run(cases: Sequence[Case], trainers: int) -> list[dict[str, Any]]:
    """Time of every case, and the share that it keeps of the paces."""
    with tempfile.TemporaryDirectory() as name:
        said = run_trainers(Cases, cases, trainers, Path(name), "benchmarks.crew.played")
    rows = []
    for case in cases:
        took = seconds(case.name, said)
        rows.append(
            {
                "name": case.name,
                "seconds": round(took, 2),
                "never_waiting_s": round(ideal_s(case), 2),
                "kept": round(ideal_s(case) / took, 3),
                "kept_in_virtual_time": round(virtual(case), 3) if case.how == "rounds" else None,
            }
        )
    return rows


def virtual(case: Case) -> float:
    """Share that rounds keep where means and messages take no time."""
    steps = case.every // PICTURES
    lengths = range(steps * 15 // 16, steps * 17 // 16 + 1, steps // 128)
    paced = tuple(Paced(name=f"t{rank}", step_s=1.0) for rank in range(TRAINERS))
    return mean(
        ideal_s(case)
        / UNIT_S
        / simulate(
            CrewScenario(
                trainers=paced,
                every_pictures=length,
                batches=STEPS * TRAINERS,
                slowed=slow_periods(),
            )
        ).seconds
        for length in lengths
    )


CONSTANT, CHANGING = "one of 4 three times slower", f"slow periods, {TRAINERS} trainers"


def figures() -> str:
    result = read_result(RESULT.stem)
    found = {"constant": result[CONSTANT], "slow periods": result[CHANGING]}
    rows = [row | {"slow": slow} for slow, some in found.items() for row in some]

    def in_virtual_time(row: Mapping[str, Any]) -> str:
        share = row["kept_in_virtual_time"]
        return "" if share is None else f"{share:.2f}"

    return table(
        rows,
        ("slow", "{slow}"),
        ("averaged", lambda row: row["name"].removesuffix(" of all").partition(", every")[0]),
        ("kept", "{kept:.2f}"),
        ("in virtual time", in_virtual_time),
    )


PAGE = Page("benchmarks.crew.pace", figures)


def main() -> None:
    """Measure and write."""
    machine = describe_machine()
    result: dict[str, Any] = {"machine": machine, "computing": "played by sleeping"}
    result[CONSTANT] = run(constant(), 4)
    result[CHANGING] = run(changing(), TRAINERS)
    write_json(RESULT, result)
    PAGE.write()


if __name__ == "__main__":
    main()
