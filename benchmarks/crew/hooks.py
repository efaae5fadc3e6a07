"""Loss of averaged gradients in fewer bytes, beside torch's own hooks.

    python -m benchmarks.crew.hooks --data FOLDER FOLDER --scratch FOLDER

The small ViT of `benchmarks.crew.lengths` from random weights, trained for two epochs of 5,400
pictures of two class-per-folder trees by four processes on loopback, which average gradients every
step: in fp32 and in int8 with error feedback by this package, and by torch's DDP with its hooks for
fp16 and for PowerSGD (Vogels and others, NeurIPS 2019, arXiv 1905.13727) of rank 1 and 4 with error
feedback, after 10 steps in fp32. Each at once and twice the default step size, the better counts;
three seeds. Bytes are those that a trainer sends: as counted by this package; of the hooks, those
of gloo's ring for the numbers that they send. Computing is real. Writes
benchmarks/results/crew-hooks.json.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from benchmarks.crew.lengths import FROM_SCRATCH, Learned, Learner, Learning, prepare
from benchmarks.crew.lengths import case as case_of
from benchmarks.crew.pace import run_trainers
from benchmarks.crew.played import take_part
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.averaging.gradients import Gradients
from partitioner.training.distributed import Crew
from partitioner.training.synchroniser import EveryStep

RESULT = RESULTS / "crew-hooks.json"
LIMIT_TRAIN, LIMIT_TEST = 6_000, 5_000
SEEDS, RATES, TRAINERS = 3, (1.0, 2.0), 4
#: Steps of PowerSGD that send everything.
WARM_UP = 10
#: More than the network has.
BUCKET_BYTES = 100 * 2**20
Way = Literal["fp32", "int8", "torch's fp16", "PowerSGD, rank 1", "PowerSGD, rank 4"]


class Hooked(Learned, frozen=True, kw_only=True):
    """One training by one way."""

    way: Way


class HookedCases(Learning, frozen=True, kw_only=True):
    """All trainings."""

    cases: tuple[Hooked, ...]


class HookedSteps(EveryStep):
    """Torch's DDP with one of its hooks."""

    def __init__(self, crew: Crew, way: Way) -> None:
        super().__init__(crew)
        self._way, self._steps, self._numbers = way, 0, 0
        self._state: PowerSGDState | None = None

    def wrap(
        self, module: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
    ) -> nn.Module:
        """DDP around the module."""
        self._module = module
        self._numbers = sum(p.numel() for p in module.parameters() if p.requires_grad)
        # In several buckets PowerSGD's messages over gloo come in another order at each trainer.
        wrapped = nn.parallel.DistributedDataParallel(module, bucket_cap_mb=BUCKET_BYTES / 2**20)
        if self._way == "torch's fp16":
            wrapped.register_comm_hook(None, fp16_compress_hook)
        else:
            self._state = PowerSGDState(
                None,
                matrix_approximation_rank=int(self._way.split()[-1]),
                start_powerSGD_iter=WARM_UP,
            )
            wrapped.register_comm_hook(self._state, powerSGD_hook)
        return wrapped

    def update(self, optimiser: torch.optim.Optimizer) -> float:
        """Take a step of one's own."""
        self._steps += 1
        return super().update(optimiser)

    @property
    def bytes_sent(self) -> float:
        """Bytes that a trainer sends in gloo's ring."""
        ring = 2 * (self.crew.size - 1) / self.crew.size
        if self._state is None:
            return ring * 2 * self._numbers * self._steps
        compressed = float(self._state.total_numel_after_compression)
        return ring * 4 * (compressed + WARM_UP * self._numbers)


class HookedTrainer(Learner):
    """One process in one training."""

    case: Hooked

    def _gradients(self) -> dict[str, Any]:
        case = self.case
        crew = Crew(self.rank, self.cases.trainers)
        sync: Gradients | HookedSteps = HookedSteps(crew, case.way)
        if case.way in ("fp32", "int8"):
            sync = Gradients(crew, self._means(), self._codec_of, bucket_bytes=case.bucket_bytes)
        return self._fit(sync) | {"sent_bytes": sync.bytes_sent}


def cases(counts: Mapping[str, int]) -> list[Hooked]:
    """All trainings, seed by seed."""
    found = []
    for seed, data, way, rate in product(range(SEEDS), counts, get_args(Way), RATES):
        alike = case_of(data, FROM_SCRATCH, 0, counts[data], TRAINERS)
        fields = {name: getattr(alike, name) for name in alike.__struct_fields__}
        ring = way != "int8"
        changed = {
            "name": f"{data}, {way}, {rate:g}, {seed}", "how": "gradients", "way": way,
            "rate": rate, "seed": seed, "route": "ring" if ring else "two_phase",
            "codec": "fp32" if ring else "int8",
        }  # fmt: skip
        found.append(Hooked(**fields | changed))
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crew.hooks", description=__doc__)
    parser.add_argument("--data", type=Path, nargs=2, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    folder = options.scratch
    folder.mkdir(parents=True, exist_ok=True)
    counts = prepare(options.data, folder, limit_train=LIMIT_TRAIN, limit_test=LIMIT_TEST)
    asked, machine = cases(counts), describe_machine()
    said = run_trainers(HookedCases, asked, TRAINERS, folder, "benchmarks.crew.hooks")
    rows = [
        {"way": one.way, "rate": one.rate, "seed": one.seed, **said[0][one.name]} for one in asked
    ]
    write_json(RESULT, {"machine": machine, "pictures": counts, "rows": rows})
    PAGE.write()


def means_of(rows: Sequence[Mapping[str, Any]], data: str, way: str) -> dict[str, float]:
    """Means over seeds at the step size with the least test loss."""
    found = []
    for rate in RATES:
        some = [row for row in rows if (row["data"], row["way"], row["rate"]) == (data, way, rate)]
        keys = ("test loss", "test %", "sent_bytes")
        found.append({"rate": rate} | {key: mean(row[key] for row in some) for key in keys})
    return min(found, key=lambda one: one["test loss"])


def figures() -> str:
    """A row for each data set and way."""
    rows, found = read_result(RESULT.stem)["rows"], list[dict[str, Any]]()
    for data in dict.fromkeys(row["data"] for row in rows):
        base = means_of(rows, data, "fp32")
        for way in get_args(Way):
            one = means_of(rows, data, way)
            more = 100 * (one["test loss"] / base["test loss"] - 1)
            found.append({"data": data, "way": way, **one, "more": more})
    return table(
        found,
        ("pictures", "{data}"),
        ("gradients", "{way}"),
        ("step size, times the default", "{rate:g}"),
        ("test loss", "{test loss:.3f}"),
        ("more than fp32's, %", "{more:+.1f}"),
        ("test %", "{test %:.1f}"),
        ("MB sent", lambda row: f"{row['sent_bytes'] / 1e6:.0f}"),
    )


PAGE = Page("benchmarks.crew.hooks", figures)


if __name__ == "__main__":
    if sys.argv[1].startswith("-"):
        main()
    else:
        take_part(HookedCases, HookedTrainer)
