"""Optimisers that use curvature, beside AdamW, by one process.

    python -m benchmarks.crew.second_order --data FOLDER FOLDER --scratch FOLDER [--weights FILE]
        [--minutes 30]

Two class-per-folder trees, and two starts: the small ViT of `benchmarks.crew.lengths` from random
weights, and where a FILE with weights of timm's vit_tiny_patch16_224 is given, that network at 64
px with 2,000 pictures, AdamW and Muon alone. AdamW has all epochs, the others three quarters of
them, each with a whole schedule of the step size: they win if they end with no more loss, in no
more time: processor seconds of one thread, which work beside it changes little. From random weights
AdamW and Muon are also trained for five eighths.

K-FAC is `owner = {kind = "kfac"}` and Muon `owner = {kind = "muon"}` of a crew of one, SOAP is Adam
in the eigenbasis of Shampoo's preconditioner (Vyas and others, ICLR 2025, arXiv 2409.11321) for the
matrices of the blocks; beside each AdamW takes what is left, with the step size that was best for
it. Step sizes of each are tried on one seed, and the one that ends with the least loss is trained
with two more.

It goes on from the kept result, and begins nothing after so many minutes. Writes
benchmarks/results/crew-second-order.json after every training.
"""

import argparse
import io
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.crew.lengths import BATCH, network, outputs, prepare, split
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.crew.averaging.gradients import Gradients
from partitioner.crew.averaging.kfac import KfacSettings
from partitioner.crew.averaging.mean import Means
from partitioner.crew.averaging.muon import MuonSettings
from partitioner.crew.planning.syncplan import KfacOwner
from partitioner.networks.teacher import teacher_spec
from partitioner.networks.teacher_weights import load_teacher
from partitioner.run.progress import Progress
from partitioner.run.settings import MemberSchedule
from partitioner.training.cached_outputs import batch
from partitioner.training.compute import use_threads
from partitioner.training.distributed import Crew
from partitioner.training.loop import Index, TrainingStage, fit
from partitioner.training.synchroniser import EveryStep, Synchroniser

RESULT = RESULTS / "crew-second-order.json"
#: Pictures of training and calibration, of which a tenth is calibration, and of the test.
LIMIT_TRAIN, LIMIT_TEST = 6_000, 2_000
#: The same of a network with given weights, and its side in pixels.
GIVEN_TRAIN, GIVEN_SIDE = 2_200, 64
GIVEN_NETWORK = "vit_tiny_patch16_224"
SEEDS = 3
RATE, WEIGHT_DECAY = 1e-3, 0.05
SCRATCH, GIVEN = "random", "given"
ADAMW, MUON, SOAP, KFAC = "AdamW", "Muon", "SOAP", "K-FAC"
#: Step sizes by start and method, as multiples of 0.001; of Muon, with AdamW's size of a step, and
#: of K-FAC those of the layers that it has.
GRID: dict[tuple[str, str], tuple[float, ...]] = {
    (SCRATCH, ADAMW): (0.5, 1.0, 2.0, 4.0),
    (SCRATCH, MUON): (1.0, 2.0, 4.0, 8.0),
    (SCRATCH, SOAP): (1.0, 2.0, 4.0, 8.0),
    (SCRATCH, KFAC): (1.0, 3.0, 10.0, 30.0),
    (GIVEN, ADAMW): (0.1, 0.2, 0.4, 0.8, 1.6),
    (GIVEN, MUON): (0.1, 0.2, 0.4, 0.8, 1.6),
}
#: Methods and their epochs by start, AdamW's whole training first.
COMPARED: dict[str, tuple[tuple[str, int], ...]] = {
    SCRATCH: ((ADAMW, 8), (ADAMW, 5), (MUON, 6), (MUON, 5), (SOAP, 6), (KFAC, 6)),
    GIVEN: ((ADAMW, 4), (ADAMW, 3), (MUON, 3)),
}


class Soap(torch.optim.Optimizer):
    """Adam in the eigenbasis of the gradient's two covariances, which turns every tenth step.

    After Vyas and others, SOAP: improving and stabilizing Shampoo using Adam, arXiv 2409.11321.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of every matrix."""
        for group in self.param_groups:
            for parameter in group["params"]:
                self._step(parameter, group["lr"], group["weight_decay"])

    def _step(self, parameter: nn.Parameter, rate: float, decay: float) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:
            state["covariances"] = [gradient @ gradient.T, gradient.T @ gradient]
            state["basis"] = [torch.linalg.eigh(one).eigenvectors for one in state["covariances"]]
            state["first"], state["second"] = torch.zeros_like(gradient), torch.zeros_like(gradient)
            state["steps"] = 0
            # The first gradient gives the basis alone.
            return
        left, right = state["basis"]
        state["steps"] += 1
        turned = left.T @ gradient @ right
        state["first"].lerp_(gradient, 0.05)
        state["second"].lerp_(turned.square(), 0.05)
        corrected = 1 - 0.95 ** state["steps"]
        first = left.T @ state["first"] @ right
        change = (first / corrected) / ((state["second"] / corrected).sqrt() + 1e-8)
        parameter.mul_(1 - rate * decay).sub_(rate * (left @ change @ right.T))
        for one, new in zip(
            state["covariances"], (gradient @ gradient.T, gradient.T @ gradient), strict=True
        ):
            one.lerp_(new, 0.05)
        if state["steps"] % 10 == 0:
            # A step of power iteration, orthogonalised.
            state["basis"] = [
                torch.linalg.qr(covariance @ basis).Q
                for covariance, basis in zip(state["covariances"], state["basis"], strict=True)
            ]


class Matrices(EveryStep):
    """Steps of the blocks' matrices by another optimiser than the loop's."""

    def __init__(
        self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], multiple: float
    ) -> None:
        """`multiple`: step size of the matrices as a multiple of the loop's."""
        super().__init__()
        self._make, self._multiple = make, multiple

    def wrap(
        self, module: nn.Module, optimiser: torch.optim.Optimizer, device: torch.device
    ) -> nn.Module:
        """The module as it is."""
        self._matrices = [
            parameter
            for name, parameter in module.named_parameters()
            if ".blocks." in name and parameter.dim() == 2
        ]
        assert self._matrices
        self._own = self._make(self._matrices)
        return super().wrap(module, optimiser, device)

    def update(self, optimiser: torch.optim.Optimizer) -> float:
        """Clip all gradients, and have each optimiser take its parameters' step."""
        assert self._module is not None
        norm = nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        for group in self._own.param_groups:
            group["lr"] = self._multiple * optimiser.param_groups[0]["lr"]
        self._own.step()
        for parameter in self._matrices:
            parameter.grad = None
        optimiser.step()
        return float(norm)


class Trained(NamedTuple):
    """A training's place in the result."""

    start: str
    data: str
    method: str
    epochs: int
    multiple: float
    seed: int


def sync_of(method: str, multiple: float, rate: float) -> Synchroniser:
    """The steps of a method, with these of its matrices as a multiple of 0.001.

    rate: that of the loop's optimiser.
    """
    of_loop = multiple * RATE / rate
    if method == SOAP:
        return Matrices(lambda matrices: Soap(matrices, rate, WEIGHT_DECAY), of_loop)
    owners: dict[str, KfacSettings | MuonSettings] = {
        MUON: MuonSettings(step=of_loop),
        KFAC: KfacSettings(step=of_loop, damping=KfacOwner().damping),
    }
    if method in owners:
        return Gradients(
            Crew(), Means(), lambda name: "fp32", bucket_bytes=2**25, owner=owners[method]
        )
    return EveryStep()


def module_of(one: Trained, classes: int, weights: Path | None) -> nn.Module:
    """The network before its training."""
    if one.start == SCRATCH:
        return network(classes, one.seed)
    torch.manual_seed(one.seed)
    spec = teacher_spec(GIVEN_NETWORK, {"img_size": GIVEN_SIDE})
    return load_teacher(spec, classes, weights)


def train(one: Trained, rate: float, folder: Path, weights: Path | None) -> dict[str, Any]:
    """Train once; the row of the result, with the processor seconds of training alone."""
    pixels, labels = split(folder, one.data, "train")
    module = module_of(one, int(labels.max()) + 1, weights)
    rate = one.multiple * RATE if one.method == ADAMW else rate

    def loss_of(network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        logits = network(batch(pixels, index, torch.device("cpu"))).float()
        return {"loss": F.cross_entropy(logits, labels[index], label_smoothing=0.1)}

    schedule = MemberSchedule(
        epochs=one.epochs, batch_size=BATCH, learning_rate=rate, weight_decay=WEIGHT_DECAY
    )
    stage = TrainingStage(
        name="training", pictures=len(labels), schedule=schedule, seed=one.seed, autocast="bf16",
        checkpoint=folder / "second-order.pt", sync=sync_of(one.method, one.multiple, rate),
    )  # fmt: skip
    stage.checkpoint.unlink(missing_ok=True)
    started_s = time.process_time()
    fit(module, stage, loss_of, Progress(io.StringIO()))
    seconds = time.process_time() - started_s
    stage.checkpoint.unlink(missing_ok=True)
    row: dict[str, Any] = {**one._asdict(), "seconds": seconds}
    for name in ("test", "train"):
        seen, wanted = split(folder, one.data, name)
        logits, wanted = outputs(module, seen[:LIMIT_TEST]), wanted[:LIMIT_TEST]
        row[f"{name} loss"] = float(F.cross_entropy(logits, wanted))
        row[f"{name} %"] = 100 * float((logits.argmax(dim=1) == wanted).float().mean())
    return row


def best_multiple(rows: Sequence[Mapping[str, Any]], which: Trained) -> float | None:
    """The step size with the least test loss on the first seed; None before all were tried.

    which: any training of the same start, data, method and epochs.
    """
    first = [
        row for row in rows if trained(row) == which._replace(seed=0, multiple=row["multiple"])
    ]
    losses = {row["multiple"]: row["test loss"] for row in first}
    grid = GRID[which.start, which.method]
    return min(losses, key=losses.__getitem__) if losses.keys() == set(grid) else None


def trained(row: Mapping[str, Any]) -> Trained:
    """The training of a row."""
    return Trained(*(row[key] for key in Trained._fields))


def next_of(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], starts: Sequence[str]
) -> Trained | None:
    """The next training; all of AdamW's step sizes come before the others, which use the best."""
    known = {trained(row) for row in rows}
    for start, seed, data in product(starts, range(SEEDS), names):
        for method, epochs in COMPARED[start]:
            one = Trained(start, data, method, epochs, 0.0, seed)
            best = best_multiple(rows, one)
            for multiple in GRID[start, method] if seed == 0 or best is None else [best]:
                if (found := one._replace(multiple=multiple)) not in known:
                    return found
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.crew.second_order", description=__doc__
    )
    parser.add_argument("--data", type=Path, nargs=2, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args()
    folders, until_s = {SCRATCH: options.scratch}, time.monotonic() + 60 * options.minutes
    if options.weights is not None:
        folders[GIVEN] = options.scratch / "given"
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    use_threads(1)
    machine = describe_machine()
    counts = {
        SCRATCH: prepare(
            options.data, folders[SCRATCH], limit_train=LIMIT_TRAIN, limit_test=LIMIT_TEST
        )
    }
    if GIVEN in folders:
        counts[GIVEN] = prepare(
            options.data,
            folders[GIVEN],
            side=GIVEN_SIDE,
            limit_train=GIVEN_TRAIN,
            limit_test=LIMIT_TEST,
        )
    rows: list[dict[str, Any]] = []
    if RESULT.exists():
        rows = msgspec.json.decode(RESULT.read_bytes())["rows"]
    names = [source.name for source in options.data]
    while (one := next_of(rows, names, list(folders))) and time.monotonic() < until_s:
        (method, epochs), *_ = COMPARED[one.start]
        adamw = best_multiple(rows, one._replace(method=method, epochs=epochs))
        rows.append(train(one, RATE * (adamw or 1.0), folders[one.start], options.weights))
        write_json(RESULT, {"machine": machine, "pictures": counts, "rows": rows})
        print(rows[-1], flush=True)
    PAGE.write()


def figures() -> str:
    """A row for each start, data set and method: means over seeds at its best step size."""
    rows = read_result(RESULT.stem)["rows"]
    found = []
    for start, data in dict.fromkeys((row["start"], row["data"]) for row in rows):
        base: dict[str, float] = {}
        for method, epochs in COMPARED[start]:
            which = Trained(start, data, method, epochs, 0.0, 0)
            best = best_multiple(rows, which)
            if best is None:
                continue
            some = [
                row
                for row in rows
                if trained(row) == which._replace(multiple=best, seed=row["seed"])
            ]
            means = {
                key: mean(row[key] for row in some)
                for key in ("train loss", "test loss", "test %", "seconds")
            }
            base = base or means
            found.append((which, best, len(some), means, base))
    return table(
        found,
        ("weights", lambda one: one[0].start),
        ("pictures", lambda one: one[0].data),
        ("optimiser", lambda one: one[0].method),
        ("epochs", lambda one: one[0].epochs),
        ("step size, of 0.001", lambda one: f"{one[1]:g}"),
        ("seeds", lambda one: one[2]),
        ("training loss", lambda one: f"{one[3]['train loss']:.3f}"),
        ("test loss", lambda one: f"{one[3]['test loss']:.3f}"),
        ("test %", lambda one: f"{one[3]['test %']:.1f}"),
        ("CPU seconds, of AdamW's", lambda one: f"{one[3]['seconds'] / one[4]['seconds']:.2f}"),
    )


PAGE = Page("benchmarks.crew.second_order", figures)


if __name__ == "__main__":
    main()
