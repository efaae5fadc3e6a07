"""Trainers of unequal pace compute one frozen pass; one is killed at any moment."""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mdp.testing.processes import until  # noqa: E402
from partitioner.crew.bus.control import Coordinator, CoordinatorClient  # noqa: E402
from partitioner.crew.bus.store import CoordinatorLost, serve_store  # noqa: E402
from partitioner.crew.coordinator.membership import MembershipMachine  # noqa: E402
from partitioner.crew.coordinator.watch import Watch  # noqa: E402
from partitioner.crew.jobs.answers import Shares, share_out  # noqa: E402
from partitioner.training.cached_outputs import keep_outputs  # noqa: E402
from tests.support.models.forked import Forked  # noqa: E402
from tests.support.models.frozen import PICTURES, TOKEN, VARIANTS, frozen, main  # noqa: E402

pytestmark = pytest.mark.torch

PACES, NAMES = (8_000, 4_000, 2_000), ("quick", "middling", "slow")


class Crew:
    """Three trainers that have joined and wait for a coordinator."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.store = store = serve_store("127.0.0.1", 0, TOKEN)
        machine = MembershipMachine("d", {"member-0": NAMES}, {})
        self.coordinator = Coordinator(store, machine, Watch(20.0), folder / "log.jsonl")
        stack.callback(self.coordinator.close)
        self.processes = [
            Forked(main, store.port, name, pace, stderr=folder / f"{name}.log")
            for name, pace in zip(NAMES, PACES, strict=True)
        ]
        for process in self.processes:
            stack.callback(process.kill)
        until(lambda: len(self.coordinator.states) == len(PACES), "three trainers", 180.0)

    def compute(self, folder: Path, killed: int, after: int) -> Shares:
        """Kill one trainer as soon as so many pictures are done."""
        done = 0

        def advance(more: int, said: str) -> None:
            nonlocal done
            done += more
            if done >= after:
                self.processes[killed].kill()

        return share_out(self.coordinator, frozen(), paths(folder), advance)


def paths(folder: Path) -> dict[int, list[Path]]:
    return {variant: [folder / f"logits-{variant}.npy"] for variant in VARIANTS}


@pytest.fixture
def crew(tmp_path: Path) -> Iterator[Crew]:
    with ExitStack() as stack:
        yield Crew(stack, tmp_path)


def test_a_killed_trainer_loses_nothing(crew: Crew, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    killed, after = draw.randrange(3), draw.randrange(1, len(VARIANTS) * PICTURES)
    found = crew.compute(tmp_path / "shared", killed, after)
    said = f"seed {seed}: trainer {killed} killed after {after} pictures"
    assert sum(found.pictures.values()) == len(VARIANTS) * PICTURES, said
    assert found.unequal == 0, said
    assert not found.refused, said
    work = frozen()
    for variant, (path,) in paths(tmp_path / "alone").items():
        keep_outputs(
            [path],
            work.outputs_of(variant),
            PICTURES,
            arithmetic="fp32",
            dtype=np.float16,
            advance=lambda more, said: None,
        )
        assert path.read_bytes() == paths(tmp_path / "shared")[variant][0].read_bytes(), said
    for rank, process in enumerate(crew.processes):
        assert process.wait(60) == (-9 if rank == killed else 0), said


def test_a_coordinator_that_died_is_named() -> None:
    store = serve_store("127.0.0.1", 0, TOKEN)
    port, client = store.port, CoordinatorClient(store)
    del store
    with pytest.raises(CoordinatorLost, match=f"127.0.0.1:{port}: the coordinator is lost"):
        client.reply()
    client.close()
