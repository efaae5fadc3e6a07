"""Steps of dense layers along their curvature, each layer preconditioned by one trainer: K-FAC.

The curvature of the loss in a layer y = W x + c is taken as the Kronecker product of two small
matrices, its factors: A, the mean of a a^T over pictures, where a is the layer's input with a 1 for
c, and G, the mean of g g^T, where g is the gradient of a picture's loss by the layer's output. A
step is the gradient times the damped inverse of that product (Martens and Grosse, Optimizing neural
networks with Kronecker-factored approximate curvature, ICML 2015, arXiv 1503.05671). Of a layer
that sees tokens a is their mean and g their sum: the "reduce" setting of Eschenhagen and others,
Kronecker-factored approximate curvature for modern neural network architectures, NeurIPS 2023,
arXiv 2311.00636.

Among several trainers each layer has one owner, to which alone its gradients and factors are sent,
half of a symmetric matrix, and which sends no inverse but the step itself: preconditioning by one
trainer a layer, after DP-KFAC (Zhang, Shi, Wang and Li, arXiv 2206.15143), whose owners have
factors of their own pictures alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mdp.errors import InputError
from partitioner.crew.averaging.layer_owners import FLOP_PER_S, LayerOwners, copy_from_first
from partitioner.crew.averaging.mean import Means, Meeting

#: Steps between two updates of the factors, and between two decompositions.
UPDATE_EVERY, DECOMPOSE_EVERY = 10, 100
#: Share of the factors that an update keeps.
_KEPT = 0.95
#: The largest change of the network's answers by a step, as a Kullback-Leibler divergence to second
#: order.
_MOST_CHANGE = 0.01
_MOMENTUM = 0.9
#: Widest layer: a factor of 4,096 is decomposed in a minute, and its half has 34 MB.
_WIDEST = 4096
#: Operations of a decomposition as a multiple of the side's cube.
_OPERATIONS = 25


@dataclass(frozen=True, slots=True)
class Curvature:
    """Eigenvalues and eigenvectors of a layer's two factors, in double precision.

    The product of both has the products of their eigenvalues.
    """

    output_values: Tensor
    output_vectors: Tensor
    input_values: Tensor
    input_vectors: Tensor

    @classmethod
    def of(cls, outputs: Tensor, inputs: Tensor) -> "Curvature":
        """The decomposition of symmetric G and A; what rounding makes negative counts as 0."""
        found = [torch.linalg.eigh(one.double()) for one in (outputs, inputs)]
        (g, q_g), (a, q_a) = [(one.eigenvalues.clamp(min=0), one.eigenvectors) for one in found]
        return cls(g, q_g, a, q_a)

    @property
    def mean(self) -> float:
        """The mean eigenvalue of the product of both."""
        return float(self.output_values.mean() * self.input_values.mean())

    def precondition(self, gradient: Tensor, damping: float) -> Tensor:
        """(G x A + damping I)^-1 times `gradient` `[M, N]`, with G `[M, M]` and A `[N, N]`."""
        turned = self.output_vectors.T @ gradient.double() @ self.input_vectors
        turned /= torch.outer(self.output_values, self.input_values) + damping
        found: Tensor = self.output_vectors @ turned @ self.input_vectors.T
        return found.to(gradient.dtype)


def limit_change(step_size: float, change: float, most: float = _MOST_CHANGE) -> float:
    """The factor of all layers' steps by which answers change by at most `most`.

    change: the sum of step times gradient, over all numbers.
    """
    found = step_size**2 * abs(change)
    return 1.0 if found <= most else float((most / found) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class KfacSettings:
    """Numbers of K-FAC that a training chooses.

    With a small batch most of a gradient is noise, which lies in directions of little curvature:
    divided by it, it is nearly all of a step. So the damping is many times the mean curvature.
    """

    #: Step size as a multiple of the optimiser's.
    step: float
    #: Damping as a multiple of a layer's mean curvature, the mean of the eigenvalues.
    damping: float

    def prepare(self, module: nn.Module, means: Means) -> "Kfac":
        """The steps of a network's layers; raises InputError for a network without any."""
        return Kfac(module, means, self)


class Kfac:
    """Takes the steps of a network's dense layers, in place of its optimiser.

    Momentum and decay of weights, which
    is that of the optimiser's first group, are applied to the preconditioned gradients. Layers
    without a weight to train, or with more than 4,096 inputs or outputs, stay with the optimiser.
    """

    def __init__(self, module: nn.Module, means: Means, settings: KfacSettings) -> None:
        """Raises InputError for a network without such a layer."""
        self._settings, self._owners = settings, LayerOwners(means)
        self._layers = [
            PreconditionedLayer(name, layer)
            for name, layer in module.named_modules()
            # Others, as those within nn.MultiheadAttention, may be used without being called.
            if type(layer) is nn.Linear
            and layer.weight.requires_grad
            and max(layer.weight.shape) <= _WIDEST
        ]
        if not self._layers:
            raise InputError('owner = "kfac": expected a network with dense layers, found none')
        ignored = [name for layer in self._layers for name in layer.parameter_names]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)  # type: ignore[no-untyped-call]
        self._steps = 0
        self._note_next()

    @property
    def sent_bytes(self) -> int:
        """Bytes that this trainer has sent."""
        return self._owners.sent_bytes

    def share_weights(self, meeting: Meeting) -> None:
        """Give all members the first one's weights, as DDP does with the others to begin with."""
        copy_from_first((p for layer in self._layers for p in layer.parameters), meeting)

    def take_step(
        self, optimiser: torch.optim.Optimizer, pictures: Sequence[int], meeting: Meeting | None
    ) -> bool:
        """Take a step by the gradients of all members, and leave none to the optimiser.

        pictures: those of each member that count in this step. meeting: None for one trainer alone.
        Returns whether all numbers are finite, as every member sees; if not, weights stay as they
        are. Raises RuntimeError where a member is lost.
        """
        due = self._is_due
        place, members = (meeting.place, len(meeting.members)) if meeting else (0, 1)
        owners = self._place(meeting)
        parts = [layer.take(pictures, place, due=due) for layer in self._layers]
        own = [i for i, owner in enumerate(owners) if owner == place]
        gathered = self._owners.gather(parts, owners, meeting)
        decomposes = due and self._steps % DECOMPOSE_EVERY == 0
        preconditioned = {
            i: self._layers[i].precondition(
                gathered[i], members, self._settings.damping, due=due, decomposes=decomposes
            )
            for i in own
        }
        steps, change = self._spread(preconditioned, owners, meeting)
        self._steps += 1
        self._note_next()
        finite = bool(torch.tensor(change).isfinite()) and all(
            bool(step.isfinite().all()) for step in steps.values()
        )
        if finite:
            group = optimiser.param_groups[0]
            size = self._settings.step * group["lr"]
            scale = limit_change(size, change)
            for i, layer in enumerate(self._layers):
                layer.move(steps[i] * scale, size, group["weight_decay"])
        return finite

    @property
    def _is_due(self) -> bool:
        return self._steps % UPDATE_EVERY == 0

    def _note_next(self) -> None:
        for layer in self._layers:
            layer.notes = self._is_due

    def _place(self, meeting: Meeting | None) -> list[int]:
        """The places of the layers' owners."""
        cubes = [sum(side**3 for side in layer.shape) for layer in self._layers]
        seconds = [_OPERATIONS * one / FLOP_PER_S / DECOMPOSE_EVERY for one in cubes]
        numbers = [
            layer.gradient_numbers + layer.factor_numbers / UPDATE_EVERY for layer in self._layers
        ]
        return self._owners.place(seconds, numbers, meeting)

    def _spread(
        self,
        steps: Mapping[int, tuple[Tensor, float]],
        owners: Sequence[int],
        meeting: Meeting | None,
    ) -> tuple[dict[int, Tensor], float]:
        """The steps of all layers, and the sum of step times gradient over all numbers."""
        own = {
            i: torch.cat([step.flatten(), step.new_tensor([change])])
            for i, (step, change) in steps.items()
        }
        numbers = [layer.gradient_numbers + 1 for layer in self._layers]
        found = self._owners.spread(own, numbers, owners, meeting)
        changes = sum(float(found[i][-1]) for i in sorted(found))
        return {i: one[:-1].view(self._layers[i].shape) for i, one in found.items()}, changes


@dataclass(slots=True, eq=False)
class PreconditionedLayer:
    """A dense layer, what it notes of a step, and at its owner its factors."""

    name: str
    layer: nn.Linear
    #: Whether the next passes are noted.
    notes: bool = False
    #: Gradients of outputs, and inputs, of each pass of the step that goes on.
    _noted: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    _factors: tuple[Tensor, Tensor] | None = None
    _curvature: Curvature | None = None
    _momentum: Tensor | None = None

    def __post_init__(self) -> None:
        self.layer.register_forward_hook(self._note)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The weight, and the bias where there is one to train."""
        found = [self.layer.weight, self.layer.bias] if self._has_bias else [self.layer.weight]
        return cast(list[nn.Parameter], found)

    @property
    def _has_bias(self) -> bool:
        return self.layer.bias is not None and self.layer.bias.requires_grad

    @property
    def parameter_names(self) -> list[str]:
        """Their names in the network."""
        prefix = f"{self.name}." if self.name else ""
        return [f"{prefix}weight", f"{prefix}bias"][: len(self.parameters)]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs, and inputs with the bias's 1: the sides of G and A."""
        outputs, inputs = self.layer.weight.shape
        return outputs, inputs + self._has_bias

    @property
    def gradient_numbers(self) -> int:
        """Numbers of a gradient."""
        return self.shape[0] * self.shape[1]

    @property
    def factor_numbers(self) -> int:
        """Numbers of the upper triangles of both factors."""
        return sum(side * (side + 1) // 2 for side in self.shape)

    def _note(self, layer: nn.Module, given: tuple[Tensor], returned: Tensor) -> None:
        if not (self.notes and returned.requires_grad):
            return
        inputs = given[0].detach()

        def with_inputs(gradient: Tensor) -> None:
            self._noted.append((gradient.detach(), inputs))

        returned.register_hook(with_inputs)  # type: ignore[no-untyped-call]

    def take(self, pictures: Sequence[int], place: int, *, due: bool) -> Tensor:
        """The own gradient and, where they are due, the upper triangles of the own factors.

        The sums of the members' are `members` times the mean gradient, and the factors. Takes the
        gradient from the parameters.
        """
        if any(parameter.grad is None for parameter in self.parameters):
            raise RuntimeError(f"{self.name}: took no part in the loss of a step")
        parts = [p.grad for p in self.parameters if p.grad is not None]
        gradient = torch.cat([part.detach().view(self.shape[0], -1) for part in parts], dim=1)
        for parameter in self.parameters:
            parameter.grad = None
        found = [gradient.to("cpu", torch.float32).flatten()]
        if due:
            found += self._own_factors(pictures, place)
        self._noted = []
        return torch.cat(found)

    def _own_factors(self, pictures: Sequence[int], place: int) -> list[Tensor]:
        if not self._noted:
            raise RuntimeError(f"{self.name}: took no part in the loss of a step")
        total, passes = sum(pictures), len(self._noted)
        g, a = (
            torch.cat([_by_picture(one[side], side=side) for one in self._noted]) for side in (0, 1)
        )
        if not pictures[place]:
            # Of a picture that does not count.
            g, a = g[:0], a[:0]
        if self._has_bias:
            a = torch.cat([a, a.new_ones(len(a), 1)], dim=1)
        # What is noted is the gradient of the members' losses times their number.
        scale = total / len(pictures)
        outputs = (g * scale).T @ (g * scale) / (total * passes)
        inputs = a.T @ a / (total * passes)
        return [_upper(outputs), _upper(inputs)]

    def precondition(
        self, gathered: Tensor, members: int, damping: float, *, due: bool, decomposes: bool
    ) -> tuple[Tensor, float]:
        """The step `[M, N]` by the sums of what members sent, and the sum of step x gradient."""
        gradient = gathered[: self.gradient_numbers].view(self.shape) / members
        if due:
            self._update(gathered[self.gradient_numbers :])
        if decomposes and self._factors is not None and _are_finite(self._factors):
            self._curvature = Curvature.of(*self._factors)
        if self._curvature is None:
            return torch.full_like(gradient, torch.nan), torch.nan
        step = self._curvature.precondition(gradient, damping * self._curvature.mean)
        return step, float((step * gradient).sum())

    def _update(self, triangles: Tensor) -> None:
        outputs, inputs = self.shape
        parts = torch.split(triangles, [side * (side + 1) // 2 for side in (outputs, inputs)])
        new = _symmetric(parts[0], outputs), _symmetric(parts[1], inputs)
        if self._factors is None:
            self._factors = new
        else:
            for kept, one in zip(self._factors, new, strict=True):
                kept.lerp_(one, 1 - _KEPT)

    def move(self, step: Tensor, size: float, decay: float) -> None:
        """Change the parameters by a step `[M, N]` with momentum, and the weight by its decay."""
        if self._momentum is None:
            self._momentum = torch.zeros_like(step)
        self._momentum.mul_(_MOMENTUM).add_(step)
        weight, momentum = self.layer.weight, self._momentum.to(self.layer.weight.device)
        with torch.no_grad():
            weight.mul_(1 - size * decay).sub_(size * momentum[:, : weight.shape[1]])
            if self._has_bias:
                self.layer.bias.sub_(size * momentum[:, -1])


def _by_picture(rows: Tensor, *, side: int) -> Tensor:
    """Rows `[K, D]` of pictures in fp32: gradients of tokens added up, their inputs averaged."""
    rows = rows.to("cpu", torch.float32)
    if rows.dim() == 2:
        return rows
    tokens = rows.flatten(1, -2)
    return tokens.sum(dim=1) if side == 0 else tokens.mean(dim=1)


def _upper(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix, row by row."""
    rows, columns = torch.triu_indices(*matrix.shape)
    return matrix[rows, columns]


def _symmetric(triangle: Tensor, side: int) -> Tensor:
    """The inverse of `_upper`."""
    found = triangle.new_zeros(side, side)
    rows, columns = torch.triu_indices(side, side)
    found[rows, columns] = triangle
    found[columns, rows] = triangle
    return found


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(one.isfinite().all()) for one in tensors)
