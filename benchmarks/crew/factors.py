"""Loss of rounds against averaged gradients once their lengths follow from the step size.

    python -m benchmarks.crew.factors --data FOLDER FOLDER --scratch FOLDER [--minutes 20] [--anew]

The networks, pictures and processes of `benchmarks.crew.lengths`, with fewer pictures, and beside
them the chain as users run it: a smaller network that is cut from its teacher and learns its
answers. Gradients, rounds of a sixteenth of an epoch, and rounds with `step_size = "auto"`,
`period = "grows"` and `moments`, each at 1, 2, 4 and 8 times the default step size with one seed,
and at its best of these with two more, both data sets; by four equal trainers, and by three of
which the paces are 4 : 2 : 1. Computing is real, the processes share the cores; unequal paces are
played by sleeping beside it.

It goes on from the kept result and begins nothing after so many minutes, so that it can be run in
pieces: the page says how many seeds each figure has. Writes benchmarks/results/crew-factors.json
after every few trainings. With `--trial` a few pictures do, and the result stays in the scratch
folder.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.crew import lengths
from benchmarks.crew.lengths import (
    BATCH,
    BEFORE,
    CUT,
    FINE_TUNED,
    FROM_SCRATCH,
    Learned,
    Learning,
    network,
    outputs,
    split,
)
from benchmarks.crew.pace import run_trainers
from benchmarks.crew.played import take_part
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.plan import SubModelSpec
from partitioner.data.variants import Labels
from partitioner.networks.submodel import SubModel
from partitioner.networks.weight_init import init_from
from partitioner.run.settings import MemberSchedule
from partitioner.training.loop import Index
from partitioner.training.student import DistillationTargets, MemberLoss, Student

RESULT = RESULTS / "crew-factors.json"
LIMIT_TRAIN, LIMIT_TEST = 6_000, 5_000
#: Of a trial.
FEW_TRAIN, FEW_TEST = 320, 100
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
GRID = {
    FROM_SCRATCH: (1.0, 2.0, 4.0, 8.0),
    FINE_TUNED: (1.0, 4.0, 2.0, 8.0),
    CUT: (1.0, 2.0, 4.0, 8.0),
}
#: Paces, and the seconds that each trainer sleeps for a picture, much longer than computing takes.
EQUAL, UNEQUAL = "equal", "4 : 2 : 1"
PACES: dict[str, tuple[float, ...]] = {
    EQUAL: (0.0,) * lengths.TRAINERS,
    UNEQUAL: (0.005, 0.010, 0.020),
}
#: Gradients have the weights of one process whatever the paces; what had lost is not tried again.
UNEQUAL_METHODS = (TODAY, SCALED, GROWING)
#: Of the network that is cut: picture, patch, width, blocks and heads of attention.
SMALLER = SubModelSpec(
    image_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=1, mlp_ratio=4.0
)


class Factored(Learned, frozen=True, kw_only=True):
    """One training by a method."""

    method: str
    paces_of: str = EQUAL


def case(
    data: str, start: str, method: str, rate: float, seed: int, pictures: int, paces: str = EQUAL
) -> Factored:
    """One training; rounds in int8."""
    trainers = len(PACES[paces])
    alike = lengths.case(data, start, 0 if method == GRADIENTS else 16, pictures, trainers)
    every = FIRST * BATCH if METHODS[method].get("grows") else round(CONSTANT * pictures)
    fields = {name: getattr(alike, name) for name in alike.__struct_fields__}
    changed = {
        "name": f"{data}, {start}, {method}, {paces.replace(' ', '')}, {rate:g}, {seed}",
        "every": every, "rate": rate, "seed": seed, "method": method, "paces_of": paces,
        "picture_s": PACES[paces],
    }  # fmt: skip
    return Factored(**fields | changed | METHODS[method])


class FactoredCases(Learning, frozen=True, kw_only=True):
    """All trainings."""

    cases: tuple[Factored, ...]


def cases_of(
    counts: Mapping[str, int], rows: Sequence[Mapping[str, Any]]
) -> Iterator[list[Factored]]:
    """All trainings, in parts of the same processes; equal paces come first.

    Of each data set and start the multiples of the step size are tried with the first seed, and
    other seeds with the best of each method by `rows`, which has what was trained before.
    """
    for places in (range(2), range(4)):
        for paces, data, start in product(PACES, counts, GRID):
            methods = tuple(METHODS) if paces == EQUAL else UNEQUAL_METHODS
            for place in places:
                yield [
                    case(data, start, method, GRID[start][place], 0, counts[data], paces)
                    for method in methods
                ]
            for seed in range(1, SEEDS):
                best = {one: _best_rate(rows, (data, start, one, paces)) for one in methods}
                yield [
                    case(data, start, method, rate, seed, counts[data], paces)
                    for method, rate in best.items()
                    if rate is not None
                ]


def _best_rate(rows: Sequence[Mapping[str, Any]], which: tuple[str, str, str, str]) -> float | None:
    """The multiple with the least test loss of the first seed; None where none was trained."""
    losses = {
        row["rate"]: row["test loss"]
        for row in rows
        if key_of(row)[:4] == which and not row["seed"]
    }
    return min(losses, key=lambda rate: losses[rate], default=None)


class Key(NamedTuple):
    """A training's place in the result."""

    data: str
    start: str
    method: str
    paces: str
    rate: float
    seed: int


def key_of_case(case: Factored) -> Key:
    return Key(case.data, case.start, case.method, case.paces_of, case.rate, case.seed)


def key_of(row: Mapping[str, Any]) -> Key:
    """Rows of before unequal paces are of equal ones."""
    paces = row.get("paces", EQUAL)
    return Key(row["data"], row["start"], row["method"], paces, row["rate"], row["seed"])


def take_up(path: Path, counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows that are kept; raises InputError where they are of other pictures."""
    if not path.exists():
        return []
    kept = msgspec.json.decode(path.read_bytes())
    if kept["pictures"] != counts:
        raise InputError(
            f"{path}: expected a result of {dict(counts)} pictures, found {kept['pictures']}: "
            "give the same folders, or --anew"
        )
    rows: list[dict[str, Any]] = kept["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crew.factors", description=__doc__)
    parser.add_argument("--data", type=Path, nargs=2, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--anew", action="store_true", help="without the kept result")
    parser.add_argument("--trial", action="store_true", help="with a few pictures, kept nowhere")
    options = parser.parse_args()
    folder, until_s = options.scratch, time.monotonic() + 60 * options.minutes
    folder.mkdir(parents=True, exist_ok=True)
    train, test, result = LIMIT_TRAIN, LIMIT_TEST, RESULT
    if options.trial:
        train, test, result = FEW_TRAIN, FEW_TEST, folder / RESULT.name
    counts = lengths.prepare(options.data, folder, limit_train=train, limit_test=test)
    machine = describe_machine()
    rows = [] if options.anew else take_up(result, counts)
    known = {key_of(row) for row in rows}
    for data in counts:
        teach(data, counts[data], folder)
    for some in cases_of(counts, rows):
        if time.monotonic() > until_s:
            break
        some = [one for one in some if key_of_case(one) not in known]
        if not some:
            continue
        trainers = len(some[0].picture_s)
        said = run_trainers(FactoredCases, some, trainers, folder, "benchmarks.crew.factors")
        rows += [row_of(one, [trainer[one.name] for trainer in said]) for one in some]
        known |= {key_of_case(one) for one in some}
        write_json(result, {"machine": machine, "pictures": counts, "rows": rows})
    print(f"{len(rows)} trainings: {result}")
    if not options.trial:
        PAGE.write()


def teach(data: str, pictures: int, folder: Path) -> None:
    """Train the network that others start from, and keep its centred answers; once."""
    before = lengths.case(data, BEFORE, 0, pictures)
    weights, kept = folder / f"before-{data}.pt", answers_in(folder, data)
    if not weights.exists():
        run_trainers(Learning, [before], lengths.TRAINERS, folder, "benchmarks.crew.lengths")
    if not kept.exists():
        pixels, labels = split(folder, data, "train")
        teacher = network(int(labels.max()) + 1)
        teacher.load_state_dict(torch.load(weights))
        logits = outputs(teacher, pixels)
        np.save(kept, (logits - logits.mean(dim=1, keepdim=True)).half().numpy())


def answers_in(folder: Path, data: str) -> Path:
    """The file of a teacher's answers `[N, C]` to the training pictures."""
    return folder / f"answers-{data}.npy"


def row_of(one: Factored, said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result of a training that is kept: what the first trainer says, and all pictures."""
    told = {k: v for k, v in said[0].items() if k != "pictures"}
    pictures = [trainer.get("pictures", 0) for trainer in said]
    return {
        "method": one.method, "paces": one.paces_of, "rate": one.rate, "seed": one.seed,
        "pictures": pictures, **told,
    }  # fmt: skip


class FactoredLearner(lengths.Learner):
    """One process in one training."""

    case: Factored

    def __init__(self, case: Factored, cases: FactoredCases, rank: int, folder: Path) -> None:
        super().__init__(case, cases, rank, folder)
        self.own = 0
        if case.start != CUT:
            return
        classes = int(self.labels.max()) + 1
        teacher = network(classes)
        teacher.load_state_dict(torch.load(folder / f"before-{case.data}.pt"))
        torch.manual_seed(case.seed)
        smaller = SubModel(SMALLER, classes)
        init_from(smaller.trunk, teacher)
        self.module = Student(smaller)
        targets = DistillationTargets(
            pixels=[self.pixels],
            labels=[Labels(self.labels.numpy(), classes)],
            teacher=[np.load(answers_in(folder, case.data), mmap_mode="r")],
            before=[],
            imitated=[],
        )
        self.of_member = MemberLoss(targets, MemberSchedule())

    def loss_of(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        """Sleep as long as this trainer is slow, beside what computing takes."""
        time.sleep(len(index) * self.case.picture_s[self.rank])
        self.own += len(index)
        if self.case.start == CUT:
            return self.of_member(network, index, epoch)
        return super().loss_of(network, index, epoch)

    def logits(self, pixels: Any) -> Tensor:
        """Of pictures, `[N, C]`."""
        if self.case.start != CUT:
            return super().logits(pixels)
        return outputs(_Bag(self.module), pixels)

    def run(self) -> dict[str, Any]:
        """Train; what it took, and the pictures that this trainer trained on."""
        said = super().run()
        return said | {"pictures": self.own}


class _Bag(nn.Module):
    """The logits that a sub-model serves."""

    def __init__(self, student: Student) -> None:
        super().__init__()
        self.student = student

    def forward(self, pixels: Tensor) -> Tensor:
        """`[B, 3, S, S]` -> `[B, C]`."""
        logits: Tensor = self.student(pixels).bag
        return logits


class Compared(NamedTuple):
    """A method against averaged gradients, in percent of test loss, each a mean over seeds."""

    #: At the default step size of both.
    default: float | None
    #: Each side at the multiple of it with the least mean loss.
    best: float | None
    multiples: tuple[float, float] | None
    seeds: int
    megabytes: float | None


Losses = Mapping[float, Mapping[int, float]]


def compare(rows: Sequence[Mapping[str, Any]], which: tuple[str, str, str, str]) -> Compared:
    """A method of a data set, start and paces; of what was trained, seeds that both sides have."""
    theirs = _losses(rows, (*which[:2], GRADIENTS, EQUAL))
    ours = _losses(rows, which)
    sent = [
        row["sent_bytes"] / 1e6 for row in rows if key_of(row)[:4] == which and "sent_bytes" in row
    ]
    if not (ours and theirs):
        return Compared(None, None, None, 0, None)
    best = _least(ours), _least(theirs)
    default = _more(ours, theirs, 1.0, 1.0)
    at_best = _more(ours, theirs, *best)
    seeds = len(ours[best[0]].keys() & theirs[best[1]].keys())
    return Compared(default, at_best, best, seeds, mean(sent) if sent else None)


def _losses(rows: Sequence[Mapping[str, Any]], which: tuple[str, str, str, str]) -> Losses:
    """Test losses by multiple of the default step size and seed."""
    found: dict[float, dict[int, float]] = {}
    for row in rows:
        key = key_of(row)
        if key[:4] == which:
            found.setdefault(key.rate, {})[key.seed] = row["test loss"]
    return found


def _least(losses: Losses) -> float:
    """The multiple with the least mean loss, of those with the most seeds."""
    most = max(map(len, losses.values()))
    some = [rate for rate in losses if len(losses[rate]) == most]
    return min(some, key=lambda rate: mean(losses[rate].values()))


def _more(ours: Losses, theirs: Losses, rate: float, other: float) -> float | None:
    """By how much the losses are more, in percent, over the seeds that both have."""
    both = ours.get(rate, {}).keys() & theirs.get(other, {}).keys()
    found = [100 * (ours[rate][seed] / theirs[other][seed] - 1) for seed in sorted(both)]
    return mean(found) if found else None


def figures() -> str:
    """Every method against gradients of the same data and start."""
    rows = read_result(RESULT.stem)["rows"]
    there = {key_of(row)[:4] for row in rows}
    data = sorted({key[0] for key in there})
    wanted = [
        (one, start, method, paces)
        for paces in PACES
        for one in data
        for start in GRID
        for method in METHODS
    ]
    found = {which: compare(rows, which) for which in wanted if which in there}

    def percent(key: str) -> Callable[[tuple[str, str, str, str]], str]:
        def cell(which: tuple[str, str, str, str]) -> str:
            value = getattr(found[which], key)
            return "" if value is None else f"{value:+.1f}"

        return cell

    def multiples(which: tuple[str, str, str, str]) -> str:
        return " / ".join(f"{one:g}" for one in found[which].multiples or ())

    def megabytes(which: tuple[str, str, str, str]) -> str:
        sent = found[which].megabytes
        return "" if sent is None else f"{sent:.1f}"

    return table(
        [which for which in found if which[2] != GRADIENTS],
        ("trained", "{0[0]}, {0[1]}"),
        ("paces", "{0[3]}"),
        ("averaged", "{0[2]}"),
        ("default step size", percent("default")),
        ("each at its best", percent("best")),
        ("of times: rounds / gradients", multiples),
        ("seeds", lambda which: found[which].seeds),
        ("MB", megabytes),
    )


PAGE = Page("benchmarks.crew.factors", figures)


if __name__ == "__main__":
    if sys.argv[1].startswith("-"):
        main()
    else:
        take_part(FactoredCases, FactoredLearner)
