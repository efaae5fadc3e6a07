"""Loss and seconds of rounds over lines of 10 Mbit/s: all numbers in int8, or a tenth in top4.

    sudo python -m benchmarks.crew.slow_lines --data FOLDER --scratch FOLDER

Four trainers in the namespaces of `benchmarks.crew.net`, with cables of 10 Mbit/s, train the small
ViT of `benchmarks.crew.lengths` from random weights, two epochs. Computing is real, and every
trainer sleeps 10 ms for each picture beside it, which makes it slower than what two cores take for
all four. Rounds of a quarter to a sixteenth of an epoch in int8, and of a sixteenth and of two
batches in top4 with a mask of a tenth (CocktailSGD). Of step sizes of once and twice the default
the better for one seed counts, two further seeds are trained with it. Seconds are those from the
first step to the last mean. Needs root and iproute2. Writes
benchmarks/results/crew-slow-lines.json.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from torch import Tensor, nn

from benchmarks.crew import lengths
from benchmarks.crew.lengths import BATCH, FROM_SCRATCH, Learned, Learning
from benchmarks.crew.net import PORT, TRAINERS, namespaces, run_in
from benchmarks.crew.played import Cases, seconds, take_part
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.coordinator.sizes import CodecName
from partitioner.training.loop import Index
from partitioner.training.synchroniser import Synchroniser

RESULT = RESULTS / "crew-slow-lines.json"
MBIT, PICTURE_S = 10, 0.010
LIMIT_TRAIN, LIMIT_TEST = 2_000, 5_000
RATES, SEEDS = (1.0, 2.0), 3


class Way(NamedTuple):
    """A codec, the stride of its mask, and rounds of an epoch; 0: of two batches each."""

    codec: CodecName
    stride: int
    rounds: int

    @property
    def words(self) -> str:
        """As the page shows it."""
        travels = "all in int8" if self.codec == "int8" else "a tenth in top4"
        every = f"1/{self.rounds} epoch" if self.rounds else "two batches"
        return f"{travels}, every {every}"


WAYS = (
    Way("int8", 1, 4),
    Way("int8", 1, 8),
    Way("int8", 1, 16),
    Way("top4", 10, 16),
    Way("top4", 10, 0),
)


class SlowCase(Learned, frozen=True, kw_only=True):
    """One training in one way."""

    way: int
    #: Of the pictures.
    scratch: str


class SlowCases(Learning, frozen=True, kw_only=True):
    """All of them."""

    cases: tuple[SlowCase, ...]


def case(folder: Path, data: str, pictures: int, way: Way, rate: float, seed: int) -> SlowCase:
    """One training."""
    alike = lengths.case(data, FROM_SCRATCH, way.rounds or 1, pictures)
    fields = {name: getattr(alike, name) for name in alike.__struct_fields__}
    number = WAYS.index(way)
    return SlowCase(**fields | {
        "name": f"{number}, {rate:g}, {seed}", "codec": way.codec, "stride": way.stride,
        "every": pictures // way.rounds if way.rounds else 2 * BATCH,
        "picture_s": (PICTURE_S,) * TRAINERS, "rate": rate, "seed": seed, "way": number,
        "uplink": (1.0,) * TRAINERS, "sites": ("a",) * TRAINERS, "scratch": str(folder),
    })  # fmt: skip


class SlowLearner(lengths.Learner):
    """One process in one training."""

    case: SlowCase

    def __init__(self, case: SlowCase, cases: Cases, rank: int, folder: Path) -> None:
        super().__init__(case, cases, rank, Path(case.scratch))

    def loss_of(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        """Sleep beside computing."""
        if self.first_s is None:
            self.first_s = time.monotonic()
        time.sleep(len(index) * self.case.picture_s[self.rank])
        return super().loss_of(network, index, epoch)

    def _fit(self, sync: Synchroniser) -> dict[str, Any]:
        self._train(sync)
        took = self._took()
        return self._measure() | took


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crew.slow_lines", description=__doc__
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    folder, data = options.scratch.resolve(), options.data.name
    folder.mkdir(parents=True, exist_ok=True)
    (pictures,) = lengths.prepare(
        [options.data], folder, limit_train=LIMIT_TRAIN, limit_test=LIMIT_TEST
    ).values()
    machine, rows = describe_machine(), list[dict[str, Any]]()

    def train(cases: Sequence[SlowCase]) -> None:
        # A run each: the store of a case has a port of its own by its place.
        with namespaces(TRAINERS, MBIT) as names:
            said = run_in(names, cases, PORT, "benchmarks.crew.slow_lines", SlowCases)
        for one in cases:
            first = said[0][one.name]
            rows.append({
                "way": one.way, "rate": one.rate, "seed": one.seed,
                "seconds": seconds(one.name, said), "sent_bytes": first["sent_bytes"],
                "test loss": first["test loss"], "test %": first["test %"],
            })  # fmt: skip

    train([case(folder, data, pictures, way, rate, 0) for way in WAYS for rate in RATES])
    best = {way: best_rate(rows, number) for number, way in enumerate(WAYS)}
    train([
        case(folder, data, pictures, way, best[way], seed)
        for way in WAYS
        for seed in range(1, SEEDS)
    ])  # fmt: skip
    write_json(
        RESULT,
        {
            "machine": machine,
            "computing": "real, and 10 ms of sleep for a picture",
            "link_mbit_per_s": MBIT,
            "data": data,
            "pictures": pictures,
            "rows": rows,
        },
    )
    PAGE.write()


def best_rate(rows: Sequence[Mapping[str, Any]], way: int) -> float:
    """The multiple of the step size with the least test loss of the first seed."""
    first = [row for row in rows if row["way"] == way and row["seed"] == 0]
    return float(min(first, key=lambda row: float(row["test loss"]))["rate"])


def compared(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row of means over the seeds for each way."""
    for number, way in enumerate(WAYS):
        rate = best_rate(rows, number)
        some = [row for row in rows if (row["way"], row["rate"]) == (number, rate)]
        losses = [row["test loss"] for row in some]
        yield {
            "way": way.words,
            "rate": rate,
            "seconds": mean(row["seconds"] for row in some),
            "mb": mean(row["sent_bytes"] for row in some) / 1e6,
            "loss": mean(losses),
            "spread": stdev(losses),
            "right": mean(row["test %"] for row in some),
            "seeds": len(some),
        }


def figures() -> str:
    """A row for each way."""
    return table(
        compared(read_result(RESULT.stem)["rows"]),
        ("travels", "{way}"),
        ("step size, times the default", "{rate:g}"),
        ("seconds", "{seconds:.1f}"),
        ("MB of a trainer", "{mb:.2f}"),
        ("test loss", "{loss:.3f} ± {spread:.3f}"),
        ("test %", "{right:.1f}"),
        ("seeds", "{seeds}"),
    )


PAGE = Page("benchmarks.crew.slow_lines", figures)


if __name__ == "__main__":
    if sys.argv[1].startswith("-"):
        main()
    else:
        take_part(SlowCases, SlowLearner)
