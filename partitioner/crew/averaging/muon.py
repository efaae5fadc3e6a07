"""Steps of blocks' matrices by Muon, each matrix at one trainer.

A step is the momentum of the gradient with all its singular values made one, by five steps of
Newton and Schulz: torch's own optimiser (Jordan and others, Muon: an optimizer for hidden layers in
neural networks, 2024), as long as one of AdamW's (Liu and others, Muon is scalable for LLM
training, arXiv 2502.16982). All that it needs is the averaged gradient, so that each matrix has one
owner, to which alone the others send theirs, which computes the step and has the momentum, and
which sends the new weights to all: as many bytes as a mean.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mdp.errors import InputError
from partitioner.crew.averaging.layer_owners import FLOP_PER_S, LayerOwners, copy_from_first
from partitioner.crew.averaging.mean import Means, Meeting

#: Products of matrices in a step of Newton and Schulz, and such steps.
_PRODUCTS, _STEPS = 3, 5


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSettings:
    """Numbers of Muon that a training chooses."""

    #: Step size as a multiple of the optimiser's.
    step: float

    def prepare(self, module: nn.Module, means: Means) -> "MuonSteps":
        """The steps of a network's matrices; raises InputError for a network without any."""
        return MuonSteps(module, means, self)


class MuonSteps:
    """Takes the steps of the matrices of a network's blocks, in place of its optimiser.

    The decay of weights is that of the optimiser's first group. All other parameters stay with it.
    """

    def __init__(self, module: nn.Module, means: Means, settings: MuonSettings) -> None:
        """Raises InputError for a network without such matrices."""
        self._settings = settings
        named = {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad and parameter.dim() == 2 and "blocks" in name.split(".")
        }
        if not named:
            raise InputError('owner = "muon": expected a network with blocks of dense layers')
        self._names, self._matrices = list(named), list(named.values())
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, self._names)  # type: ignore[no-untyped-call]
        self._muon = torch.optim.Muon(self._matrices, lr=0.0, adjust_lr_fn="match_rms_adamw")
        self._owners = LayerOwners(means)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this trainer has sent."""
        return self._owners.sent_bytes

    def share_weights(self, meeting: Meeting) -> None:
        """Give all members the first one's weights, as DDP does with the others to begin with."""
        copy_from_first(self._matrices, meeting)

    def take_step(
        self, optimiser: torch.optim.Optimizer, pictures: Sequence[int], meeting: Meeting | None
    ) -> bool:
        """Take a step by the mean gradients of all members, and leave none to the optimiser.

        meeting: None for one trainer alone. Returns whether all numbers are finite, as every member
        sees; if not, weights stay as they are. Raises RuntimeError where a member is lost.
        """
        numbers = [matrix.numel() for matrix in self._matrices]
        seconds = [_operations(*matrix.shape) / FLOP_PER_S for matrix in self._matrices]
        owners = self._owners.place(seconds, numbers, meeting)
        gathered = self._owners.gather(
            [self._take_gradient(i) for i in range(len(numbers))], owners, meeting
        )
        if not _all_finite(gathered.values(), meeting):
            return False
        members = len(meeting.members) if meeting else 1
        for i, total in gathered.items():
            matrix = self._matrices[i]
            matrix.grad = (total / members).view(matrix.shape).to(matrix.device, matrix.dtype)
        theirs = optimiser.param_groups[0]
        for group in self._muon.param_groups:
            group["lr"] = self._settings.step * theirs["lr"]
            group["weight_decay"] = theirs["weight_decay"]
        self._muon.step()  # type: ignore[no-untyped-call]
        for matrix in self._matrices:
            matrix.grad = None
        own = {i: self._matrices[i].detach().to("cpu", torch.float32).flatten() for i in gathered}
        found = self._owners.spread(own, numbers, owners, meeting)
        with torch.no_grad():
            for i in found.keys() - own.keys():
                self._matrices[i].copy_(found[i].view(self._matrices[i].shape))
        return True

    def _take_gradient(self, i: int) -> Tensor:
        """The own gradient of a matrix `[N]`, which is taken from it."""
        matrix = self._matrices[i]
        if matrix.grad is None:
            raise RuntimeError(f"{self._names[i]}: took no part in the loss of a step")
        found = matrix.grad.detach().to("cpu", torch.float32).flatten()
        matrix.grad = None
        return found


def _operations(rows: int, columns: int) -> float:
    """Operations of a step: of products of the shorter side's square, one of them by the longer."""
    short, long = sorted((rows, columns))
    return _STEPS * (2 * (_PRODUCTS - 1) * short * short * long + 2 * short**3)


def _all_finite(own: Iterable[Tensor], meeting: Meeting | None) -> bool:
    """Tell whether the numbers of all members are finite; `own` are those here."""
    odd = torch.tensor([sum(not bool(one.isfinite().all()) for one in own)])
    if meeting is not None:
        meeting.group.allreduce([odd]).wait()
    return not bool(odd)
