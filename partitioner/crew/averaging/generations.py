"""Gradients averaged in every step, by a crew that loses members: generation after generation.

A generation is a fixed group. Where a member is lost, the step of the others fails; they meet
again, those furthest on give their last checkpoint to all, and go on from the end of that epoch.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch.distributed import ProcessGroup

from mdp.errors import TransferError
from mdp.files import write_bytes
from partitioner.crew.averaging.parameters import CrewEnded, ProcessGroups
from partitioner.crew.messages import (
    AnyAction,
    Commit,
    Done,
    Finished,
    GoOn,
    Meet,
    MeetingFailed,
    Refused,
    TrainerControl,
    Waiting,
)
from partitioner.training.checkpoint import epochs_of
from partitioner.training.distributed import Crew, StoppedElsewhere

_POLL_S = 1.0
#: Failures in a row with nobody lost and no epoch gained that end a training: it goes on over lines
#: that break now and then, not over those that do not hold for an epoch.
ATTEMPTS = 5


def train_in_generations(
    network: str,
    control: TrainerControl,
    groups: ProcessGroups,
    checkpoint: Path,
    train: Callable[[Crew, tuple[int, ...]], None],
) -> None:
    """Call `train` with the members of a generation until one of these ends well.

    `train` resumes from `checkpoint` and writes it after every epoch. Raises CrewEnded where the
    schedule refuses this trainer, TransferError where lines between the members break again and
    again, and the error of a training that fails for another reason with nobody lost.
    """
    position, members, failures = 0, tuple[int, ...](), 0
    control.report(
        Waiting(rank=control.rank, network=network, pictures=0, epoch=epochs_of(checkpoint))
    )
    while True:
        crew, these = _next_generation(network, control, groups, checkpoint)
        try:
            train(crew, these)
        except (RuntimeError, StoppedElsewhere) as error:
            # Of gloo, or of a member that ends with an error. Others that still wait in the group
            # fail once nothing here holds it any more.
            groups.drop(network, these)
            del crew
            reached = epochs_of(checkpoint)
            failures = failures + 1 if (these, reached) == (members, position) else 1
            if failures > 1 and "gloo" not in str(error):
                raise
            if failures == ATTEMPTS:
                raise TransferError(
                    f"{network}: connections between its trainers broke {ATTEMPTS} times in one "
                    "epoch: start again when they hold, and the training goes on from the last "
                    "epoch that ended"
                ) from error
            position, members = reached, these
            error.__traceback__ = None
            gc.collect()  # a wrapped network is in a cycle, with its group
            control.report(Waiting(rank=control.rank, network=network, pictures=position))
            continue
        control.report(Finished(rank=control.rank, network=network, pictures=position))
        while not isinstance(_next(network, control), GoOn | Commit):
            pass
        return


def _next_generation(
    network: str, control: TrainerControl, groups: ProcessGroups, checkpoint: Path
) -> tuple[Crew, tuple[int, ...]]:
    """The next generation, whose members all have the checkpoint of those furthest on."""
    meet = _next(network, control)
    while True:
        if not isinstance(meet, Meet):
            meet = _next(network, control)
            continue
        group: ProcessGroup | None = None
        try:
            # Of the collectives torch's types know only that a ProcessGroup has them.
            group = cast(ProcessGroup, groups.of(network, meet.seq, meet.members))
            place = meet.members.index(control.rank)
            giver = next(i for i, weight in enumerate(meet.weights) if weight)
            _give(group, place, giver, checkpoint)
        except RuntimeError:
            groups.drop(network, meet.members)
            group = None
            control.report(MeetingFailed(rank=control.rank, network=network, seq=meet.seq))
            meet = _next(network, control)
            continue
        control.report(Done(rank=control.rank, network=network, seq=meet.seq))
        members, meet = meet.members, _next(network, control)
        if isinstance(meet, Commit):
            return Crew(place, len(members), group, own_files=True), members
        groups.drop(network, members)


def _give(group: ProcessGroup, place: int, giver: int, checkpoint: Path) -> None:
    """Replace every member's checkpoint by the giver's, which may be none."""
    content = b""
    if place == giver and checkpoint.exists():
        content = checkpoint.read_bytes()
    size = torch.tensor([len(content)])
    group.broadcast(size, giver).wait()
    data = torch.empty(int(size), dtype=torch.uint8)
    if place == giver and content:
        data = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    if int(size):
        group.broadcast(data, giver).wait()
        if place != giver:
            write_bytes(checkpoint, data.numpy().tobytes())
    elif place != giver:
        checkpoint.unlink(missing_ok=True)


def _next(network: str, control: TrainerControl) -> AnyAction:
    """The next action for this network."""
    while True:
        action = control.poll(_POLL_S)
        if isinstance(action, Refused) and action.network in ("", network):
            raise CrewEnded(action.reason)
        if action is not None and action.network == network:
            return action
