"""Backward passes by the memory layout of their pictures, on idle and on busy cores.

    python -m benchmarks.training.layout

Pictures lie in memory as channel after channel (contiguous), or as pixel after pixel (channels
last), as they come from files. Timed are the gradients of a plain ViT's patch embedding, of the
whole ViT, and of an EfficientNet-Lite0 whose weights lie either way. The layouts take turns, so
compare their ratio: first beside what else runs, then beside two processes that keep both cores
busy. Writes benchmarks/results/training-layout.json.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from benchmarks.harness.busy import busy
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from benchmarks.harness.turns import in_turns
from mdp.files import write_json
from mdp.formats.plan import SubModelSpec
from partitioner.training.compute import use_threads

RESULT = RESULTS / "training-layout.json"
THREADS, BUSY = 2, 2
LAYOUTS = ("contiguous", "channels last")


def networks() -> dict[str, tuple[Any, int, int]]:
    """Name -> a network that takes normalised pictures, their number, and their side in pixels."""
    import torch
    from torch import nn

    from partitioner.networks.families import Backbone, create
    from partitioner.networks.submodel import SubModel

    vit = SubModelSpec(
        image_size=24, patch_size=4, embed_dim=96, depth=6, num_heads=3, mlp_ratio=4.0
    )
    lite = [create(Backbone("tf_efficientnet_lite0", 96), 10) for _ in LAYOUTS]
    lite[1].to(memory_format=torch.channels_last)
    return {
        "patch embedding 32 wide, 24 px": (nn.Conv2d(3, 32, 4, 4), 64, 24),
        "patch embedding 96 wide, 24 px": (nn.Conv2d(3, 96, 4, 4), 64, 24),
        "patch embedding 192 wide, 224 px": (nn.Conv2d(3, 192, 16, 16), 32, 224),
        "plain ViT 96 x 6, 24 px": (SubModel(vit, 10).trunk, 64, 24),
        "EfficientNet-Lite0, 96 px": (lite[0], 16, 96),
        "EfficientNet-Lite0, 96 px, weights channels last": (lite[1], 16, 96),
    }


def pictures(layout: str, count: int, side: int) -> Any:
    """Random pictures `[count, 3, side, side]` in a layout."""
    import torch

    found = torch.rand(count, side, side, 3).permute(0, 3, 1, 2)
    return found if layout == "channels last" else found.contiguous()


def backward(network: Any, seen: Any, arithmetic: str) -> Callable[[], None]:
    """A function that computes the gradients of the mean square of the outputs."""
    import torch

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=arithmetic == "bf16"):
            loss = network(seen).float().square().mean()
        loss.backward()
        network.zero_grad(set_to_none=True)

    return step


def measure_layouts(rounds: int, least: int) -> Iterator[Mapping[str, object]]:
    """Median milliseconds of forward and backward together, per network, arithmetic and load."""
    for beside in (0, BUSY):
        with busy(beside):
            for name, (network, count, side) in networks().items():
                network.train()
                for arithmetic in ("bf16", "fp32"):
                    steps = {
                        layout: backward(network, pictures(layout, count, side), arithmetic)
                        for layout in LAYOUTS
                    }
                    took = in_turns(steps, rounds, least=least)
                    row = {
                        "network": name, "pictures": count, "arithmetic": arithmetic,
                        "busy_processes": beside, "load": round(os.getloadavg()[0], 2),
                        **{
                            layout: round(statistics.median(chain.from_iterable(blocks)), 2)
                            for layout, blocks in took.items()
                        },
                    }  # fmt: skip
                    print(row, flush=True)
                    yield row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training.layout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--least", type=int, default=3)
    asked = parser.parse_args()
    use_threads(THREADS)
    machine = describe_machine()
    rows = list(measure_layouts(asked.rounds, asked.least))
    write_json(RESULT, {"machine": machine, "threads": THREADS, "ms": rows})


if __name__ == "__main__":
    main()
