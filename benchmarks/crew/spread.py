"""Losses of networks whose trainers meet in groups, beside those that all meet.

    python -m benchmarks.crew.spread

Four copies in one process take the steps and means of a played crew's log, in its order: an MLP of
64-64-64-10 on 1,297 of scikit-learn's digits, tested on the other 500, batches of 64 cut into a
step of each of four trainers, 40 epochs, AdamW with cosine, moments of its own each; three seeds,
each way at the best of four step sizes by the test loss. Steps are as long as each other, means
take no time, so losses are at equal pictures. Adds to benchmarks/results/crew-meetings.json.
"""

import math
from collections.abc import Callable
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.crew.meetings import RESULT
from benchmarks.harness.page import Page
from benchmarks.harness.results import read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.averaging.flat import join, write
from partitioner.crew.coordinator.neighbours import Neighbours
from partitioner.crew.coordinator.partial import OnRequest, Shuffled, draw_by
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import LocalSgdSchedule, RoundSchedule
from partitioner.crew.coordinator.simulate import NETWORK, CrewScenario, CrewTrace, Paced, simulate
from partitioner.crew.messages import Commit, GoOn, Meet, Ready, Taken, Waiting

TRAINERS, BATCH, EPOCHS, TRAIN = 4, 16, 40, 1297
#: Steps of an epoch, each of one trainer.
BATCHES = TRAINERS * -(-TRAIN // (TRAINERS * BATCH))
STEP_SIZES, SEEDS = (1e-3, 3e-3, 1e-2, 3e-2), (0, 1, 2)
SITES = ("a", "a", "b", "b")

#: The schedule of a seed.
Making = Callable[[int], RoundSchedule]


def all_every(steps: int) -> Making:
    """Rounds of all."""
    return lambda seed: LocalSgdSchedule(
        NETWORK, RoundLengths(steps * TRAINERS, BATCHES, EPOCHS), expected=range(4)
    )


def pairs(cross_every: int, steps: int) -> Making:
    """Shuffled pairs of two sites."""
    return lambda seed: Shuffled(
        NETWORK,
        RoundLengths(steps * TRAINERS, BATCHES, EPOCHS),
        expected=range(4),
        draw=draw_by(seed),
        cross_every=cross_every,
        site_of=SITES.__getitem__,
    )


def requested(steps: int) -> Making:
    """Pairs on request."""
    return lambda seed: OnRequest(
        NETWORK,
        RoundLengths(steps * TRAINERS, BATCHES, EPOCHS),
        expected=range(4),
        draw=draw_by(seed),
    )


def neighbours(steps: int) -> Making:
    """A ring, of which each publishes."""
    return lambda seed: Neighbours(
        NETWORK, RoundLengths(steps * TRAINERS, BATCHES, EPOCHS), expected=range(4)
    )


WAYS: dict[str, Making] = {
    "mean of all every step": all_every(1),
    "mean of all every 4 steps": all_every(4),
    "mean of all every 8 steps": all_every(8),
    "shuffled pairs every step, crossing every 4": pairs(4, 1),
    "shuffled pairs every step, crossing every 8": pairs(8, 1),
    "shuffled pairs every 4 steps, crossing every 4": pairs(4, 4),
    "pairs on request every step": requested(1),
    "pairs on request every 4 steps": requested(4),
    "neighbours every step": neighbours(1),
    "neighbours every 4 steps": neighbours(4),
}


class Copies:
    """The trainers' networks."""

    #: Over the data.
    passes = EPOCHS

    def __init__(self, seed: int, step_size: float) -> None:
        digits = load_digits()
        order = np.random.default_rng(5).permutation(len(digits.target))
        pictures = torch.tensor(digits.data[order] / 16, dtype=torch.float32)
        labels = torch.tensor(digits.target[order])
        self._train = pictures[:TRAIN], labels[:TRAIN]
        self._test = pictures[TRAIN:], labels[TRAIN:]
        self._seed, self._step_size = seed, step_size
        torch.manual_seed(seed)
        first = self._new()
        self.networks = [self._new() for _ in range(TRAINERS)]
        for network in self.networks:
            network.load_state_dict(first.state_dict())
        self._optimisers = [torch.optim.AdamW(one.parameters()) for one in self.networks]
        self._done = 0
        #: Since the last mean, by trainer and number.
        self._published: dict[tuple[int, int], Tensor] = {}
        self._orders: dict[int, Tensor] = {}

    @staticmethod
    def _new() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def step(self, rank: int, epoch: int, claim: int) -> None:
        """Take a trainer's step."""
        if epoch not in self._orders:
            drawn = torch.Generator().manual_seed(1000 * self._seed + epoch)
            self._orders[epoch] = torch.randperm(TRAIN, generator=drawn)
        index = self._orders[epoch].tensor_split(BATCHES)[claim]
        pictures, labels = self._train
        optimiser = self._optimisers[rank]
        share = self._done / (BATCHES * self.passes)
        optimiser.param_groups[0]["lr"] = self._step_size * (1 + math.cos(math.pi * share)) / 2
        optimiser.zero_grad()
        cross_entropy(self.networks[rank](pictures[index]), labels[index]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        self._done += 1

    def meet(self, meet: Meet) -> None:
        """Take the weighted mean of those that meet."""
        members, weights = meet.members, meet.weights
        tensors = [list(self.networks[rank].parameters()) for rank in members]
        found = sum(w / sum(weights) * join(t) for w, t in zip(weights, tensors, strict=True))
        assert isinstance(found, Tensor)
        for mine in tensors:
            write(mine, found)
        self._published.clear()

    def publish(self, rank: int, since: int) -> None:
        """Keep a trainer's parameters for its neighbours."""
        self._published[rank, since] = join(list(self.networks[rank].parameters()))

    def take(self, rank: int, takes: tuple[Taken, ...]) -> None:
        """Take the mean of the own parameters and what neighbours have published."""
        mine = list(self.networks[rank].parameters())
        found = join(mine) * (1 - sum(taken.share for taken in takes))
        for source, since, share in takes:
            found += share * self._published[source, since]
        write(mine, found)

    def loss(self) -> float:
        """Loss of the first on the test pictures; all are alike at the end."""
        pictures, labels = self._test
        with torch.inference_mode():
            return float(cross_entropy(self.networks[0](pictures), labels))


def follow(trace: CrewTrace, copies: Copies) -> float:
    """Do what a log says; returns the test loss."""
    meetings: dict[int, Meet] = {}
    epoch = 0
    for _, event, actions in trace.log:
        if isinstance(event, Ready):
            for claim in event.claims:
                copies.step(event.rank, epoch, claim)
        elif isinstance(event, Waiting):
            copies.publish(event.rank, event.since)
        for action in actions:
            if isinstance(action, GoOn) and action.takes:
                copies.take(action.rank, action.takes)
            elif isinstance(action, Meet):
                meetings[action.seq] = action
            elif isinstance(action, Commit) and action.seq in meetings:
                meet = meetings.pop(action.seq)
                copies.meet(meet)
                epoch = action.epoch
    return copies.loss()


def losses(making: Making) -> dict[str, Any]:
    """Loss at the best step size, by seed."""
    trainers = tuple(Paced(name=f"t{i}", step_s=1.0) for i in range(TRAINERS))
    scenario = CrewScenario(trainers=trainers, every_pictures=1, batches=BATCHES, epochs=EPOCHS)
    traces = [simulate(scenario, making(seed)) for seed in SEEDS]
    sizes = {
        size: [follow(trace, Copies(seed, size)) for seed, trace in zip(SEEDS, traces, strict=True)]
        for size in STEP_SIZES
    }
    best = min(sizes, key=lambda size: mean(sizes[size]))
    return {"step_size": best, "losses": [round(loss, 4) for loss in sizes[best]]}


def figures() -> str:
    """Losses of each way."""
    rows = read_result(RESULT.stem)["losses"]
    return table(
        rows,
        ("averaged", "{name}"),
        ("step size", "{step_size:g}"),
        ("test loss", lambda row: f"{mean(row['losses']):.3f} ± {stdev(row['losses']):.3f}"),
    )


PAGE = Page("benchmarks.crew.spread", figures)


def main() -> None:
    """Train and write."""
    torch.set_num_threads(1)
    rows = []
    for name, making in WAYS.items():
        rows.append({"name": name, **losses(making)})
        print(rows[-1], flush=True)
    write_json(RESULT, read_result(RESULT.stem) | {"losses": rows})
    PAGE.write()


if __name__ == "__main__":
    main()
