"""Bytes and gradients of training whose heads' gradients travel by their factors.

    python -m benchmarks.crew.heads

Four real processes that speak gloo train small ViTs of several widths and numbers of classes for a
step, on noise: gradients in fp32, the head's weight by factors, and in int8, all else in fp32.
Bytes are those of one trainer; the head's gradient is compared with that of fp32.
Writes benchmarks/results/crew-heads.json.
"""

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.crew.pace import run_trainers
from benchmarks.crew.played import Case, Cases, Trainer, take_part
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.files import write_json
from mdp.formats.plan import SubModelSpec
from partitioner.crew.averaging.gradients import Gradients
from partitioner.crew.averaging.mean import Means
from partitioner.crew.coordinator.sizes import CodecName, factors_ratio
from partitioner.networks.submodel import SubModel
from partitioner.training.distributed import Crew
from partitioner.training.loop import Index

RESULT = RESULTS / "crew-heads.json"
TRAINERS, PICTURES = 4, 16
HEAD = "bag.weight"
Way = Literal["fp32", "factors", "int8"]
WAYS: tuple[Way, ...] = ("fp32", "factors", "int8")
#: Width, blocks and heads of attention of each network, and its classes.
NETWORKS = (
    (96, 3, 2, 10),
    (96, 3, 2, 100),
    (96, 3, 2, 1_000),
    (640, 5, 10, 1_000),
    (640, 5, 10, 21_841),
)


class Headed(Case, frozen=True, kw_only=True):
    """A step of one network, whose head's gradient travels in one way."""

    blocks: int
    attention_heads: int
    classes: int
    way: Way


class HeadedCases(Cases, frozen=True, kw_only=True):
    """All of them."""

    cases: tuple[Headed, ...]


class Watched(Gradients):
    """Averaged gradients, of which that of the head is kept."""

    of_head: Tensor | None = None

    def update(self, optimiser: torch.optim.Optimizer) -> float:
        """Take the step, and keep what it was taken by."""
        norm = super().update(optimiser)
        assert self._module is not None
        self.of_head = self._module.get_parameter(HEAD).grad
        return norm


class HeadedTrainer(Trainer):
    """One process in one case."""

    case: Headed
    module: Any

    def __init__(self, case: Headed, cases: Cases, rank: int, folder: Path) -> None:
        super().__init__(case, cases, rank, folder)
        spec = SubModelSpec(
            image_size=32, patch_size=16, embed_dim=case.width, depth=case.blocks,
            num_heads=case.attention_heads, mlp_ratio=4.0,
        )  # fmt: skip
        torch.manual_seed(7)
        self.module = SubModel(spec, case.classes)
        drawn = torch.Generator().manual_seed(1)
        count = TRAINERS * PICTURES
        self.pixels = 255 * torch.rand(count, 3, 32, 32, generator=drawn)
        self.labels = torch.randint(case.classes, (count,), generator=drawn)

    def loss_of(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        """Cross-entropy of the bag head."""
        return {"loss": F.cross_entropy(network(self.pixels[index]).bag, self.labels[index])}

    def _gradients(self) -> dict[str, Any]:
        case, crew = self.case, Crew(self.rank, TRAINERS)

        def codec_of(tensor: str) -> CodecName:
            return "int8" if (tensor, case.way) == (HEAD, "int8") else "fp32"

        sync = Watched(
            crew, Means(route="two_phase"), codec_of, bucket_bytes=case.bucket_bytes,
            is_factored=(lambda tensor: tensor == HEAD) if case.way == "factors" else None,
        )  # fmt: skip
        self._fit(sync)
        return {"sent_bytes": sync.bytes_sent, "difference": self._difference(sync.of_head)}

    def _difference(self, own: Tensor | None) -> float:
        """Of a gradient from that of fp32, which comes first."""
        assert own is not None
        kept = self.folder / f"fp32-{self.rank}.pt"
        if self.case.way == "fp32":
            torch.save(own, kept)
        known = torch.load(kept)
        return float((own - known).norm() / known.norm())


def cases() -> list[Headed]:
    """Every network in every way, fp32 first."""
    return [
        Headed(
            name=f"{width} x {blocks}, {classes:,} classes, {way}", how="gradients",
            picture_s=(0.0,) * TRAINERS, pictures=PICTURES, steps=1, width=width,
            blocks=blocks, attention_heads=heads, classes=classes, way=way,
        )
        for width, blocks, heads, classes in NETWORKS
        for way in WAYS
    ]  # fmt: skip


def figures() -> str:
    """Bytes of each way, and how far the head's gradient is from that of fp32."""
    found = {
        (row["network"], row["classes"], row["way"]): row
        for row in read_result(RESULT.stem)["rows"]
    }
    networks = list(dict.fromkeys((network, classes) for network, classes, _ in found))

    def megabytes(way: Way) -> Callable[[tuple[str, int]], str]:
        return lambda which: f"{found[*which, way]['sent_bytes'] / 1e6:.2f}"

    def ratio(which: tuple[str, int]) -> str:
        width = found[*which, "fp32"]["width"]
        return f"{factors_ratio(which[1], width, TRAINERS * PICTURES):.2f}"

    def differences(which: tuple[str, int]) -> str:
        return " / ".join(f"{found[*which, way]['difference']:.0e}" for way in WAYS[1:])

    return table(
        networks,
        ("network, classes", "{0[0]}, {0[1]:,}"),
        ("factors / head in fp32", ratio),
        ("gradients in fp32, MB", megabytes("fp32")),
        ("head by factors, MB", megabytes("factors")),
        ("head in int8, MB", megabytes("int8")),
        ("its gradient differs by: factors / int8", differences),
    )


PAGE = Page("benchmarks.crew.heads", figures)


def main() -> None:
    """Train and write."""
    machine, some = describe_machine(), cases()
    with tempfile.TemporaryDirectory() as folder:
        said = run_trainers(HeadedCases, some, TRAINERS, Path(folder), "benchmarks.crew.heads")
    rows = [
        {
            "network": f"{case.width} x {case.blocks}", "width": case.width,
            "classes": case.classes, "way": case.way,
            "sent_bytes": max(one[case.name]["sent_bytes"] for one in said),
            "difference": max(one[case.name]["difference"] for one in said),
        }
        for case in some
    ]  # fmt: skip
    write_json(RESULT, {"machine": machine, "pictures": PICTURES, "rows": rows})
    PAGE.write()


if __name__ == "__main__":
    if sys.argv[1:]:
        take_part(HeadedCases, HeadedTrainer)
    else:
        main()
