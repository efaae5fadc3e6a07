"""Cost of longer rounds in loss and accuracy, beside gradients averaged in every step.

    python -m benchmarks.crew.lengths --data FOLDER FOLDER --scratch FOLDER

Four real processes train a small ViT, two class-per-folder trees, the same pictures, batches and
step sizes: from random weights, and fine-tuned from those that one process trained on the other
tree. Means as the planner proposes them (int8 in two phases). One process stands for averaged
gradients, which give its weights. Loss and accuracy of the last weights: on the test split, and on
pictures that were trained on. Writes
benchmarks/results/crew-lengths.json.
"""

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.crew.pace import run_trainers
from benchmarks.crew.played import Case, Cases, Trainer, take_part
from benchmarks.crew.star import TEACHER
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import open_dataset
from partitioner.networks.submodel import init_weights
from partitioner.networks.teacher import Teacher, build_teacher, teacher_spec
from partitioner.run.progress import Progress
from partitioner.run.settings import DRAWN_OR_CUT, MemberSchedule
from partitioner.training.cached_outputs import batch
from partitioner.training.loop import Index, TrainingStage, fit
from partitioner.training.synchroniser import Synchroniser

RESULT = RESULTS / "crew-lengths.json"
TRAINERS, BATCH = 4, 64
#: Pictures of training and calibration, of which a tenth is calibration, and of the test.
LIMIT_TRAIN, LIMIT_TEST = 12_000, 5_000
SHAPE: dict[str, Any] = TEACHER | {"embed_dim": 96, "depth": 3, "num_heads": 2}
SEED = 0
#: Rounds of an epoch; 0: gradients.
ROUNDS = (0, 8, 4, 2)
FINE_TUNED, FROM_SCRATCH, BEFORE = "fine-tuned", "from scratch", "before"
#: A smaller network that begins with a selection of a teacher's weights, and learns its answers.
CUT = "cut from its teacher"
#: AdamW's peak step size, as a teacher has by default, or a sub-model, and epochs.
RATES = {FINE_TUNED: 1e-4, FROM_SCRATCH: 1e-3, BEFORE: 1e-3, CUT: DRAWN_OR_CUT}
EPOCHS = {FINE_TUNED: 2, FROM_SCRATCH: 2, BEFORE: 4, CUT: 2}


class Learned(Case, frozen=True, kw_only=True):
    """One training with real computing."""

    data: str
    start: str
    rounds: int
    seed: int = SEED
    #: Times the default step size.
    rate: float = 1.0


class Learning(Cases, frozen=True, kw_only=True):
    """All trainings."""

    cases: tuple[Learned, ...]


def case(data: str, start: str, rounds: int, pictures: int, trainers: int = TRAINERS) -> Learned:
    """One training; its steps are of all trainers."""
    return Learned(
        name=f"{data}, {start}, {rounds} rounds",
        how="rounds" if rounds else "alone", picture_s=(0.0,) * trainers,
        pictures=BATCH // trainers, steps=-(-pictures // BATCH), epochs=EPOCHS[start],
        every=pictures // max(1, rounds), route="two_phase", codec="int8",
        data=data, start=start, rounds=rounds,
    )  # fmt: skip


class Learner(Trainer):
    """One process in one training."""

    case: Learned
    module: Any

    def __init__(self, case: Learned, cases: Cases, rank: int, folder: Path) -> None:
        super().__init__(case, cases, rank, folder)
        self.pixels, self.labels = split(folder, case.data, "train")
        self.module = network(int(self.labels.max()) + 1, case.seed)
        if case.start == FINE_TUNED:
            (other,) = (path for path in folder.glob("before-*") if case.data not in path.name)
            weights = torch.load(other)
            own = self.module.state_dict()
            fitting = {name: w for name, w in weights.items() if own[name].shape == w.shape}
            self.module.load_state_dict(own | fitting)

    def loss_of(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        logits = network(batch(self.pixels, index, torch.device("cpu"))).float()
        return {"loss": F.cross_entropy(logits, self.labels[index], label_smoothing=0.1)}

    def _fit(self, sync: Synchroniser) -> dict[str, Any]:
        self._train(sync)
        return self._measure()

    def _train(self, sync: Synchroniser) -> None:
        case = self.case
        rate = case.rate * RATES[case.start]
        schedule = MemberSchedule(epochs=case.epochs, batch_size=BATCH, learning_rate=rate)
        stage = TrainingStage(
            name="learning", pictures=len(self.labels), schedule=schedule, seed=case.seed,
            autocast="bf16", checkpoint=self.folder / f"{case.name}-{self.rank}.pt", sync=sync,
        )  # fmt: skip
        # What a run that was stopped has left is no part of this one.
        stage.checkpoint.unlink(missing_ok=True)
        fit(self.module, stage, self.loss_of, Progress(io.StringIO()))
        stage.checkpoint.unlink(missing_ok=True)

    def _measure(self) -> dict[str, Any]:
        case = self.case
        if self.rank:
            return {}
        if case.start == BEFORE:
            torch.save(self.module.state_dict(), self.folder / f"before-{case.data}.pt")
        said: dict[str, Any] = {
            "data": case.data, "start": case.start, "rounds": case.rounds
        }  # fmt: skip
        for name in ("test", "train"):
            pixels, labels = split(self.folder, case.data, name)
            logits, labels = self.logits(pixels[:LIMIT_TEST]), labels[:LIMIT_TEST]
            said[f"{name} loss"] = float(F.cross_entropy(logits, labels))
            said[f"{name} %"] = 100 * float((logits.argmax(dim=1) == labels).float().mean())
        return said

    def logits(self, pixels: Any) -> Tensor:
        """Of pictures, `[N, C]`."""
        return outputs(self.module, pixels)


def network(classes: int, seed: int = SEED) -> Teacher:
    torch.manual_seed(seed)
    teacher = build_teacher(teacher_spec("vit_tiny_patch16_224", SHAPE), classes, pretrained=False)
    init_weights(teacher.network)
    return teacher


def outputs(module: nn.Module, pixels: Any) -> Tensor:
    """Logits `[N, C]`."""
    module.eval()
    with torch.inference_mode():
        parts = np.array_split(np.arange(len(pixels)), 20)
        return torch.cat([module(batch(pixels, p, torch.device("cpu"))).float() for p in parts])


def split(folder: Path, data: str, name: str) -> tuple[Any, Tensor]:
    """Pictures `[N, side, side, 3]`, memory-mapped, and labels `[N]`."""
    pixels = np.load(folder / f"{data}-{name}.npy", mmap_mode="r")
    return pixels, torch.from_numpy(np.load(folder / f"{data}-{name}-labels.npy"))


def prepare(
    sources: Sequence[Path],
    folder: Path,
    *,
    side: int = 32,
    limit_train: int = LIMIT_TRAIN,
    limit_test: int = LIMIT_TEST,
) -> dict[str, int]:
    """Cut the pictures of every tree, `side` wide; how many are trained on."""
    counts = {}
    for source in sources:
        data = open_dataset(str(source), limit_train=limit_train, limit_test=limit_test)
        counts[source.name] = len(data.train)
        for name in ("train", "test"):
            if not (folder / f"{source.name}-{name}-labels.npy").exists():
                some = data.split(name)
                (pixels,) = load_views(some, [View(side)], folder, Progress(io.StringIO()), name)
                np.save(folder / f"{source.name}-{name}.npy", pixels)
                np.save(folder / f"{source.name}-{name}-labels.npy", some.targets)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crew.lengths", description=__doc__)
    parser.add_argument("--data", type=Path, nargs=2, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    options = parser.parse_args()
    folder = options.scratch
    folder.mkdir(parents=True, exist_ok=True)
    counts = prepare(options.data, folder)
    before = [case(data, BEFORE, 0, counts[data]) for data in counts]
    cases = [
        case(data, start, rounds, counts[data])
        for data in counts
        for start in (FINE_TUNED, FROM_SCRATCH)
        for rounds in ROUNDS
    ]
    machine = describe_machine()
    said = run_trainers(Learning, [*before, *cases], TRAINERS, folder, "benchmarks.crew.lengths")
    rows = [said[0][one.name] for one in cases]
    write_json(RESULT, {"machine": machine, "pictures": counts, "rows": rows})
    PAGE.write()


def figures() -> str:
    rows = read_result(RESULT.stem)["rows"]
    alone = {(row["data"], row["start"]): row for row in rows if not row["rounds"]}

    found = {(row["data"], row["start"], row["rounds"]): row for row in rows}

    def more(rounds: int) -> Callable[[tuple[str, str]], str]:
        """Percent of loss and points of accuracy, against averaged gradients."""

        def cell(which: tuple[str, str]) -> str:
            row, base = found.get((*which, rounds)), alone[which]
            if row is None:
                return ""
            loss = 100 * (row["test loss"] / base["test loss"] - 1)
            return f"{loss:+.1f}, {row['test %'] - base['test %']:+.1f}"

        return cell

    columns = [(f"1/{rounds} epoch", more(rounds)) for rounds in ROUNDS if rounds]
    return table(alone, ("trained", "{0[0]}, {0[1]}"), *columns)


PAGE = Page("benchmarks.crew.lengths", figures)


if __name__ == "__main__":
    if sys.argv[1].startswith("-"):
        main()
    else:
        take_part(Learning, Learner)
