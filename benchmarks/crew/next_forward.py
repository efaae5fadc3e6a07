"""Means of gradients in two halves, one during each pass, beside torch's DDP.

    sudo python -m benchmarks.crew.next_forward

The trainers and cables of `benchmarks.crew.net`: four, 20 Mbit/s, computing played by sleeping.
Networks of 16 equal layers, 2.3 MB, whose backward pass takes as long as a mean in two phases
takes over these cables, half as long, or a quarter. Torch's DDP, this package's gradients at once,
by a ring and in two phases, and `when = "next_forward"`, each with buckets of 1, 2 and 4 layers,
20 steps each; the quickest size of each counts. The first step, in which torch learns the order of
the gradients, counts too. Needs root and iproute2. Writes
benchmarks/results/crew-next-forward.json.
"""

from collections.abc import Callable
from itertools import product
from typing import Any, Literal

import torch
from torch import nn

from benchmarks.crew.net import MBIT, PICTURES, PORT, TRAINERS, namespaces, run_in
from benchmarks.crew.played import Case, Cases, Trainer, seconds, take_part
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.averaging.gradients import Gradients
from partitioner.crew.averaging.next_forward import NextForwardGradients
from partitioner.crew.planning.costs import next_forward_s, step_s
from partitioner.training.distributed import Crew
from partitioner.training.synchroniser import EveryStep

RESULT = RESULTS / "crew-next-forward.json"
LAYERS, WIDTH, STEPS = 16, 190, 20
SIZE = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
#: Seconds in which a trainer sends what it has to, in both phases.
MEAN_S = 2 * (TRAINERS - 1) / TRAINERS * SIZE * 8 / (MBIT * 1e6)
#: Seconds of a mean, of those of a backward pass.
RATIOS = (1, 2, 4)
BUCKETS = (1, 2, 4)
Way = Literal["DDP", "at once, ring", "at once, two_phase", "next_forward"]
WAYS: tuple[Way, ...] = ("DDP", "at once, ring", "at once, two_phase", "next_forward")


class Bucketed(EveryStep):
    """Torch's DDP with buckets of a size."""

    def __init__(self, crew: Crew, bucket_bytes: int) -> None:
        super().__init__(crew)
        self._bucket_bytes = bucket_bytes

    def wrap(
        self, module: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
    ) -> nn.Module:
        """DDP around the module."""
        self._module = module
        return nn.parallel.DistributedDataParallel(
            module, bucket_cap_mb=self._bucket_bytes / 2**20, gradient_as_bucket_view=True
        )


class HalvedCase(Case, frozen=True, kw_only=True):
    """A training by one way."""

    way: Way
    ratio: int


class HalvedCases(Cases, frozen=True, kw_only=True):
    """All of them."""

    cases: tuple[HalvedCase, ...]


class HalvedTrainer(Trainer):
    """One process in one case."""

    def _gradients(self) -> dict[str, Any]:
        case = self.case
        assert isinstance(case, HalvedCase)
        crew = Crew(self.rank, self.cases.trainers)
        if case.way == "DDP":
            return self._fit(Bucketed(crew, case.bucket_bytes))
        kind: Callable[..., Gradients] = Gradients
        if case.way == "next_forward":
            kind = NextForwardGradients
        sync = kind(crew, self._means(), self._codec_of, bucket_bytes=case.bucket_bytes)
        return self._fit(sync) | {"sent_bytes": sync.bytes_sent}


def cases() -> list[HalvedCase]:
    """One for each way, size of buckets and ratio."""
    found = []
    for ratio, way, layers in product(RATIOS, WAYS, BUCKETS):
        picture_s = 1.5 * MEAN_S / ratio / PICTURES
        case = HalvedCase(
            name=f"{way}, {layers} layers a bucket, c = {ratio} b",
            how="gradients", picture_s=(picture_s,) * TRAINERS, pictures=PICTURES, steps=STEPS,
            layers=LAYERS, width=WIDTH, uplink=(1.0,) * TRAINERS, sites=("a",) * TRAINERS,
            route="ring" if way == "at once, ring" else "two_phase",
            bucket_bytes=layers * SIZE // LAYERS + 1, way=way, ratio=ratio,
        )  # fmt: skip
        found.append(case)
    return found


def main() -> None:
    """Measure and write."""
    machine, asked = describe_machine(), cases()
    with namespaces(TRAINERS) as names:
        said = run_in(names, asked, PORT, "benchmarks.crew.next_forward", HalvedCases)
    rows = [
        {
            "ratio": case.ratio,
            "way": case.way,
            "bucket layers": round(case.bucket_bytes * LAYERS / SIZE),
            "step_s": seconds(case.name, said) / STEPS,
            "sent_bytes": [one[case.name].get("sent_bytes") for one in said],
        }
        for case in asked
    ]
    write_json(
        RESULT,
        {
            "machine": machine,
            "computing": "played by sleeping",
            "link_mbit_per_s": MBIT,
            "network_bytes": SIZE,
            "mean_s": MEAN_S,
            "steps": STEPS,
            "rows": rows,
        },
    )
    PAGE.write()


def figures() -> str:
    """A row for each ratio and way, by its quickest size of buckets."""
    result = read_result(RESULT.stem)
    found: list[dict[str, Any]] = []
    for ratio in RATIOS:
        best = {
            way: min(
                (row for row in result["rows"] if (row["ratio"], row["way"]) == (ratio, way)),
                key=lambda row: float(row["step_s"]),
            )
            for way in WAYS
        }
        compute_s = 1.5 * result["mean_s"] / ratio
        predicted = {
            "DDP": step_s("gradients", compute_s, result["mean_s"]),
            "next_forward": next_forward_s(compute_s, result["mean_s"]),
        }
        found += [
            row
            | {
                "speed": best["DDP"]["step_s"] / row["step_s"],
                "predicted": predicted["DDP"] / predicted.get(way, predicted["DDP"]),
            }
            for way, row in best.items()
        ]
    return table(
        found,
        ("a mean takes, of a backward pass", "{ratio} times"),
        ("means", "{way}"),
        ("layers a bucket", "{bucket layers}"),
        ("seconds of a step", "{step_s:.2f}"),
        ("speed, of DDP's", "{speed:.2f}"),
        ("without any other cost", "{predicted:.2f}"),
    )


PAGE = Page("benchmarks.crew.next_forward", figures)


if __name__ == "__main__":
    import sys

    if len(sys.argv) > 1:
        take_part(HalvedCases, HalvedTrainer)
    else:
        main()
