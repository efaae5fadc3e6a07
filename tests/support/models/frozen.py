"""A frozen pass, and a trainer of it."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from partitioner.crew.bus.control import CoordinatorClient
from partitioner.crew.bus.store import connect
from partitioner.crew.jobs.answers import FrozenPass, contribute
from partitioner.data.memmaps import Index

PICTURES, CLASSES, VARIANTS, TOKEN = 6_000, 20, (0, 1), "token"


def frozen(pace: float = float("inf")) -> FrozenPass:
    """A network that computes `pace` pictures a second at most."""
    torch.set_num_threads(1)
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, CLASSES))

    def outputs_of(variant: int) -> Callable[[Index], Sequence[Tensor]]:
        pictures = torch.randn(PICTURES, 16, generator=torch.Generator().manual_seed(variant))

        def of(index: Index) -> list[Tensor]:
            time.sleep(len(index) / pace)
            return [network(pictures[torch.from_numpy(index)])]

        return of

    return FrozenPass(
        name="answers",
        pictures=PICTURES,
        variants=VARIANTS,
        outputs_of=outputs_of,
        outputs=("logits",),
        arithmetic="fp32",
    )


def main(port: int, name: str, pace: float) -> None:
    """Be a trainer."""
    client = CoordinatorClient(connect("127.0.0.1", port, TOKEN))
    client.join(name, "d")
    contribute(client, frozen(pace))
    client.close()
