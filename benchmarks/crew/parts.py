"""Losses and bytes of means of which parts travel, beside means of all numbers in int8.

    python -m benchmarks.crew.parts [ROW ...]

As `benchmarks.crew.spread`: four copies in one process, that MLP on digits, the log of a played
crew, three seeds, each way at the best of four step sizes by the test loss. Here an epoch of the
crew, which ends with a mean of every number, is five of the data's, 105 steps of each trainer, of
which there are four. Means are taken by the codecs of `Rounds`, with equal shards in two phases;
bytes are those that they wrote, of one trainer, of the whole training. Adds the rows that are
named, by default all, to benchmarks/results/crew-parts.json.
"""

import sys
from collections.abc import Sequence
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor

from benchmarks.crew.spread import BATCHES, SEEDS, TRAINERS, Copies, follow
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.averaging.codecs import CODECS
from partitioner.crew.averaging.flat import join, write
from partitioner.crew.averaging.mean import EVERY_NUMBER, Mask, Segment
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import LocalSgdSchedule
from partitioner.crew.coordinator.shares import by_pace
from partitioner.crew.coordinator.simulate import NETWORK, CrewScenario, Paced, simulate
from partitioner.crew.coordinator.sizes import CodecName, whole_codec
from partitioner.crew.messages import Meet

RESULT = RESULTS / "crew-parts.json"
#: Passes over the data in an epoch of the crew, and such epochs.
PASSES, EPOCHS = 5, 4
STEP_SIZES = (3e-3, 1e-2, 3e-2, 1e-1)
#: Row: steps of each trainer between means, codec, stride of the mask.
WAYS: dict[str, tuple[int, CodecName, int]] = {
    "int8 every 4 steps": (4, "int8", 1),
    "int8 every 16 steps": (16, "int8", 1),
    "int8 every 35 steps": (35, "int8", 1),
    "int8 every 105 steps": (105, "int8", 1),
    "a tenth in top4 every step": (1, "top4", 10),
    "a tenth in top4 every 4 steps": (4, "top4", 10),
}


class CodedCopies(Copies):
    """Copies that average what travels of their differences from the last mean, as `Rounds` do."""

    passes = PASSES * EPOCHS

    def __init__(self, seed: int, step_size: float, codec: CodecName, stride: int) -> None:
        super().__init__(seed, step_size)
        self._codec, self._stride = codec, stride
        self._postpones = stride > 1 or CODECS[codec].sparse
        self._common = self._read(0)
        self._errors = torch.zeros_like(self._common)
        #: What was left out of an epoch's last mean.
        self._left: list[Tensor] = []
        self._entered = False
        #: Of all trainers.
        self.sent_bytes = 0

    def _read(self, rank: int) -> Tensor:
        return join(list(self.networks[rank].parameters()))

    def _write(self, rank: int, vector: Tensor) -> None:
        write(list(self.networks[rank].parameters()), vector)

    def step(self, rank: int, epoch: int, claim: int) -> None:
        """Take a trainer's step."""
        for other, left in enumerate(self._left):
            self._write(other, self._common + left)
        self._left = []
        super().step(rank, PASSES * epoch + claim // BATCHES, claim % BATCHES)

    def meet(self, meet: Meet) -> None:
        """Take over x += C(mean) - C(own); at first all are alike, and nothing is sent."""
        if not self._entered:
            self._entered = True
            return
        mask = EVERY_NUMBER if meet.ends else Mask(self._stride, meet.seq)
        codec = whole_codec(self._codec) if meet.ends else self._codec
        own = [self._read(rank) - self._common for rank in range(TRAINERS)]
        weights = [1.0] * TRAINERS if self._postpones else meet.weights
        found, sent = self.average(own, [w / sum(weights) for w in weights], codec, mask)
        counted = zip(own, sent, weights, strict=True)
        left = [x - there if w else torch.zeros_like(x) for x, there, w in counted]
        self._common = self._common + found
        if meet.ends:
            self._left, left = left, [torch.zeros_like(self._common)] * TRAINERS
        for rank, rest in enumerate(left):
            self._write(rank, self._common + rest)

    def average(
        self, own: Sequence[Tensor], shares: Sequence[float], codec_name: CodecName, mask: Mask
    ) -> tuple[Tensor, list[Tensor]]:
        """The mean that all receive, and what was sent of each."""
        codec, n, start = CODECS[codec_name], len(own), 0
        found, sent = torch.zeros_like(own[0]), [torch.zeros_like(x) for x in own]
        for owner, length in enumerate(by_pace([1 / n] * n, len(own[0]))):
            segment = Segment(start, start + length, codec)
            places = mask.places_of(segment)
            start += length
            total = torch.zeros_like(own[0][places])
            for rank, x in enumerate(own):
                numbers = mask.take(x, segment)
                if rank != owner or codec.sparse:
                    data = codec.encode(numbers)
                    numbers = codec.decode(data, len(numbers))
                    self.sent_bytes += data.numel() if rank != owner else 0
                sent[rank][places] = numbers
                total = total.add(numbers, alpha=shares[rank])
            total = total + self._errors[places]
            data = codec.encode(total)
            self.sent_bytes += (n - 1) * data.numel()
            found[places] = codec.decode(data, len(total))
            self._errors[places] = total - found[places]
        return found, sent


def measure(steps: int, codec: CodecName, stride: int) -> dict[str, Any]:
    """Losses at the best step size, by seed, and bytes of a trainer."""
    batches = PASSES * BATCHES
    trainers = tuple(Paced(name=f"t{i}", step_s=1.0) for i in range(TRAINERS))
    scenario = CrewScenario(trainers=trainers, every_pictures=1, batches=batches, epochs=EPOCHS)
    schedule = LocalSgdSchedule(
        NETWORK, RoundLengths(steps * TRAINERS, batches, EPOCHS), expected=range(TRAINERS)
    )
    trace = simulate(scenario, schedule)
    losses: dict[float, list[float]] = {}
    for size in STEP_SIZES:
        losses[size] = []
        for seed in SEEDS:
            copies = CodedCopies(seed, size, codec, stride)
            losses[size].append(follow(trace, copies))
    best = min(losses, key=lambda size: mean(losses[size]))
    return {
        "step_size": best,
        "losses": [round(loss, 4) for loss in losses[best]],
        "bytes": copies.sent_bytes // TRAINERS,
    }


def figures() -> str:
    """Losses and bytes of each way."""
    found = read_result(RESULT.stem)["rows"]
    rows = [{"name": name, "way": way, **found[name]} for name, way in WAYS.items()]
    return table(
        rows,
        ("travels", "{name}"),
        ("crew.toml", _line),
        ("step size", "{step_size:g}"),
        ("test loss", lambda row: f"{mean(row['losses']):.3f} ± {stdev(row['losses']):.3f}"),
        ("KB", lambda row: f"{row['bytes'] / 1e3:,.0f}"),
    )


def _line(row: Any) -> str:
    _, codec, stride = row["way"]
    return f'`codec = "{codec}"' + (f", mask = {1 / stride:g}`" if stride > 1 else "`")


PAGE = Page("benchmarks.crew.parts", figures)


def main(*names: str) -> None:
    """Train and write."""
    torch.set_num_threads(1)
    rows = read_result(RESULT.stem)["rows"] if RESULT.exists() else {}
    for name in names or WAYS:
        rows[name] = measure(*WAYS[name])
        print(name, rows[name], flush=True)
        write_json(RESULT, {"rows": rows})
    if rows.keys() >= WAYS.keys():
        PAGE.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
