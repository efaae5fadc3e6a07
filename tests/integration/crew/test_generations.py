"""Generations of a crew whose lines break, by a group of gloo and the schedule of a crew."""

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from msgspec.structs import replace  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

from mdp.errors import TransferError  # noqa: E402
from partitioner.crew.averaging.generations import ATTEMPTS, train_in_generations  # noqa: E402
from partitioner.crew.coordinator.schedule import SynchronousSchedule  # noqa: E402
from partitioner.crew.messages import (  # noqa: E402
    AnyAction,
    AnyEvent,
    Commit,
    GoOn,
    Meet,
    TrainerReport,
)  # fmt: skip
from tests.support.gloo import PlainGroups  # noqa: E402

pytestmark = pytest.mark.torch
BROKEN = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:41234"


class Control:
    """The one trainer's end of a schedule in this process."""

    rank = 0

    def __init__(self) -> None:
        self.schedule = SynchronousSchedule("member-0", 1, expected=[0])
        self.actions: list[AnyAction] = []
        self.since = self.meetings = 0

    def report(self, event: AnyEvent) -> None:
        if isinstance(event, TrainerReport):
            event = replace(event, since=self.since)
        self.actions += self.schedule.handle(event)

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        action = self.actions.pop(0)
        if isinstance(action, Commit | GoOn):
            self.since = action.seq
        self.meetings += isinstance(action, Meet)
        return action

    def claim(self, counter: str) -> int:
        raise AssertionError("batches are shared out, not claimed")


class Groups(PlainGroups):
    """Groups of which some were dropped."""

    dropped = 0

    def drop(self, network: str, members: object) -> None:
        self.dropped += 1


def trained(folder: Path, errors: Callable[[int], Exception | None]) -> tuple[Control, Groups]:
    """A training whose n-th generation ends with an error, or well."""
    control, groups = Control(), Groups(HashStore(), 0)
    generations = 0

    def train(crew: object, members: tuple[int, ...]) -> None:
        nonlocal generations
        generations += 1
        if (error := errors(generations)) is not None:
            raise error

    train_in_generations("member-0", control, groups, folder / "checkpoint.pt", train)
    return control, groups


def test_a_line_that_breaks_now_and_then_is_trained_on_over(tmp_path: Path) -> None:
    control, groups = trained(tmp_path, lambda n: RuntimeError(BROKEN) if n < ATTEMPTS else None)
    assert control.meetings == ATTEMPTS
    assert groups.dropped == ATTEMPTS - 1
    assert control.schedule.ended == "member-0 is trained"


def test_lines_that_do_not_hold_for_an_epoch_end_the_training_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(TransferError) as told:
        trained(tmp_path, lambda n: RuntimeError(BROKEN))
    assert str(told.value) == (
        "member-0: connections between its trainers broke 5 times in one epoch: start again when "
        "they hold, and the training goes on from the last epoch that ended"
    )


def test_another_error_is_tried_again_once(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        trained(tmp_path, lambda n: RuntimeError("out of memory"))
    control, _ = trained(tmp_path, lambda n: RuntimeError("out of memory") if n < 2 else None)
    assert control.meetings == 2
