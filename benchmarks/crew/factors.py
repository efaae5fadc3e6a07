"""Loss of rounds against averaged gradients once their lengths follow from the step size.

    python -m benchmarks.crew.factors --data FOLDER FOLDER --scratch FOLDER [--minutes 20] [--more]

The networks, pictures and processes of `benchmarks.crew.lengths`, with fewer pictures: gradients,
rounds of a sixteenth of an epoch, and rounds with `step_size = "auto"`, `period = "grows"` and
`moments`, each at several multiples of the default step size. Trains in the order of seeds and ends
after so many minutes: the page says how many seeds every figure has. Computing is real, four
processes share the cores. Writes benchmarks/results/crew-factors.json after every training.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.crew import lengths
from benchmarks.crew.lengths import BATCH, BEFORE, FINE_TUNED, FROM_SCRATCH, Learned, Learning
from benchmarks.crew.pace import run_trainers
from benchmarks.crew.played import take_part
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json

RESULT = RESULTS / "crew-factors.json"
LIMIT_TRAIN, LIMIT_TEST = 6_000, 5_000
SEEDS = 3
#: Steps of all together in a round of a sixteenth of an epoch, and in the first that grow.
CONSTANT, FIRST = 1 / 16, 3
GRADIENTS, TODAY = "gradients", "rounds of a sixteenth"
SCALED, GROWING, MOMENTS = f"{TODAY}, auto", "growing rounds, auto", "the same, moments"
#: Of rounds: fields of a case.
METHODS: dict[str, dict[str, Any]] = {
    GRADIENTS: {},
    TODAY: {},
    SCALED: {"scales": True},
    GROWING: {"scales": True, "grows": True},
    MOMENTS: {"scales": True, "grows": True, "moments": 3},
}
#: Multiples of the default step size, those that matter most first.
GRID = {FROM_SCRATCH: (1.0, 2.0), FINE_TUNED: (1.0, 4.0)}


class Factored(Learned, frozen=True, kw_only=True):
    """One training by a method."""

    method: str


def case(data: str, start: str, method: str, rate: float, seed: int, pictures: int) -> Factored:
    """One training; rounds of four trainers, in int8."""
    alike = lengths.case(data, start, 0 if method == GRADIENTS else 16, pictures)
    every = FIRST * BATCH if METHODS[method].get("grows") else round(CONSTANT * pictures)
    fields = {name: getattr(alike, name) for name in alike.__struct_fields__}
    changed = {
        "name": f"{data}, {start}, {method}, {rate:g}, {seed}", "every": every, "rate": rate,
        "seed": seed, "method": method,
    }  # fmt: skip
    return Factored(**fields | changed | METHODS[method])


class FactoredCases(Learning, frozen=True, kw_only=True):
    """All trainings."""

    cases: tuple[Factored, ...]


def cases_of(counts: dict[str, int]) -> Iterator[list[Factored]]:
    """All trainings, in parts, seed by seed; of the first of the data alone."""
    data = next(iter(counts))
    for seed in range(SEEDS):
        for place in range(2):
            for start, grid in GRID.items():
                yield [
                    case(data, start, method, grid[place], seed, counts[data]) for method in METHODS
                ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crew.factors", description=__doc__)
    parser.add_argument("--data", type=Path, nargs=2, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--more", action="store_true", help="go on from the kept result")
    options = parser.parse_args()
    folder, until_s = options.scratch, time.monotonic() + 60 * options.minutes
    folder.mkdir(parents=True, exist_ok=True)
    lengths.LIMIT_TRAIN, lengths.LIMIT_TEST = LIMIT_TRAIN, LIMIT_TEST
    counts = lengths.prepare(options.data, folder)
    machine = describe_machine()
    rows: list[dict[str, Any]] = read_result(RESULT.stem)["rows"] if options.more else []
    known = {(row["start"], row["method"], row["rate"], row["seed"]) for row in rows}
    *_, other = counts
    before = lengths.case(other, BEFORE, 0, counts[other])
    if not (folder / f"before-{other}.pt").exists():
        run_trainers(Learning, [before], lengths.TRAINERS, folder, "benchmarks.crew.lengths")
    for some in cases_of(counts):
        if time.monotonic() > until_s:
            break
        some = [o for o in some if (o.start, o.method, o.rate, o.seed) not in known]
        if not some:
            continue
        said = run_trainers(
            FactoredCases, some, lengths.TRAINERS, folder, "benchmarks.crew.factors"
        )
        rows += [
            {"method": one.method, "rate": one.rate, "seed": one.seed, **said[0][one.name]}
            for one in some
        ]
        write_json(RESULT, {"machine": machine, "pictures": counts, "rows": rows})
    PAGE.write()


class FactoredLearner(lengths.Learner):
    """One process in one training."""


def figures() -> str:
    """Loss against gradients at the default step size, mean over seeds, at each step size."""
    rows = read_result(RESULT.stem)["rows"]
    base = {
        (row["start"], row["seed"]): row["test loss"]
        for row in rows
        if row["method"] == GRADIENTS and row["rate"] == 1.0
    }
    keys = [(start, method) for start in GRID for method in METHODS]

    def cell(place: int) -> Any:
        def text(which: tuple[str, str]) -> str:
            start, _ = which
            found = [
                100 * (row["test loss"] / base[start, row["seed"]] - 1)
                for row in rows
                if (row["start"], row["method"]) == which
                and row["rate"] == GRID[start][place]
                and (start, row["seed"]) in base
            ]
            return f"{mean(found):+.1f} ({len(found)})" if found else ""

        return text

    def megabytes(which: tuple[str, str]) -> str:
        sent = [
            row["sent_bytes"] for row in rows
            if (row["start"], row["method"]) == which and "sent_bytes" in row
        ]  # fmt: skip
        return f"{mean(sent) / 1e6:.1f}" if sent else ""

    return table(
        {which: which for which in keys},
        ("trained", "{0[0]}, {0[1]}"),
        ("default step size", cell(0)),
        ("2 (scratch) or 4 times (fine-tuned)", cell(1)),
        ("MB", megabytes),
    )


PAGE = Page("benchmarks.crew.factors", figures)


if __name__ == "__main__":
    if sys.argv[1].startswith("-"):
        main()
    else:
        take_part(FactoredCases, FactoredLearner)
