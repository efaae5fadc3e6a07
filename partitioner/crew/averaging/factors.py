"""Gradients of dense layers, averaged by the factors that they are products of.

The gradient of y = W x + c over K pictures is U^T X, of the gradients U `[K, M]` of its outputs and
of its inputs X `[K, N]`. Where pictures are few beside the layer's width these are fewer bytes than
W: each trainer sends its own to all others, and multiplies what it has. After Poseidon's sufficient
factors (Zhang et al., USENIX ATC 2017), chosen for each layer in each step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mdp.errors import InputError
from partitioner.crew.averaging.codecs import CODECS
from partitioner.crew.averaging.layer_owners import copy_from_first
from partitioner.crew.averaging.mean import Mean, Means, Meeting, Segment, exchange
from partitioner.crew.coordinator.sizes import factors_ratio

_EXPECTED = 'codec = "factors": expected dense layers that see one row of a picture, as heads'


class Factors:
    """Dense layers of a network whose gradients DDP leaves to this.

    All trainers get the same gradients, up to the rounding of their products of matrices.
    """

    def __init__(self, module: nn.Module, is_factored: Callable[[str], bool], means: Means) -> None:
        """is_factored: tells of a tensor's name whether factors are asked for of it.

        Biases of dense layers stay with DDP. Raises InputError for other tensors, and without any.
        """
        dense = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
        self._layers: list[DenseLayer] = []
        self._factor_bytes = 0
        for name, parameter in module.named_parameters():
            if not (parameter.requires_grad and is_factored(name)):
                continue
            owner, _, kind = name.rpartition(".")
            if owner not in dense:
                raise InputError(f"{_EXPECTED}, found {name}")
            if kind == "weight":
                segment = Segment(0, parameter.numel(), CODECS["fp32"])
                layer = DenseLayer(name, parameter, Mean([segment], means))
                dense[owner].register_forward_hook(layer.note)
                self._layers.append(layer)
        if not self._layers:
            raise InputError(f"{_EXPECTED}, found none that match")
        names = [layer.name for layer in self._layers]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)  # type: ignore[no-untyped-call]

    @property
    def sent_bytes(self) -> int:
        """Bytes that this trainer has sent."""
        return self._factor_bytes + sum(layer.mean.sent_bytes for layer in self._layers)

    def share_weights(self, meeting: Meeting) -> None:
        """Give all members the first one's weights, as DDP does with the others to begin with.

        Of unlike processors each rounds its products in its own way, so that weights drift apart.
        """
        copy_from_first((layer.weight for layer in self._layers), meeting)

    def average(self, meeting: Meeting, pictures: Sequence[int]) -> None:
        """Replace the gradients of a step by their means over the members.

        pictures: those of each member that count. Raises RuntimeError where a member is lost.
        """
        for layer in self._layers:
            outputs, inputs, passes = layer.take(pictures[meeting.place])
            rows = [passes * count for count in pictures]
            if factors_ratio(outputs.shape[1], inputs.shape[1], sum(rows)) < 1:
                found = self._multiply(outputs, inputs, meeting, rows)
            else:
                assert layer.weight.grad is not None
                own = layer.weight.grad.detach().to("cpu", torch.float32).flatten()
                found = layer.mean.spread(layer.mean.collect(own, meeting))
            gradient = found.view(layer.weight.shape)
            layer.weight.grad = gradient.to(layer.weight.device, layer.weight.dtype)

    def _multiply(
        self, outputs: Tensor, inputs: Tensor, meeting: Meeting, rows: Sequence[int]
    ) -> Tensor:
        """The mean gradient, from the factors of all; each sends `rows` of its own."""
        codec, place = CODECS["fp32"], meeting.place
        widths = [outputs.shape[1], inputs.shape[1]]
        data = codec.encode(torch.cat([outputs, inputs], dim=1).flatten())
        others = [p for p in range(len(rows)) if p != place]
        sizes = {p: codec.bytes_of(rows[p] * sum(widths)) for p in others}
        known = exchange(meeting, dict.fromkeys(others, data), sizes) | {place: data}
        self._factor_bytes += len(others) * data.numel()
        numbers = [codec.decode(known[p], count * sum(widths)) for p, count in enumerate(rows)]
        factors = torch.cat(numbers).view(-1, sum(widths))
        of_outputs, of_inputs = torch.split(factors, widths, dim=1)
        return of_outputs.t() @ of_inputs / len(rows)


@dataclass(slots=True)
class DenseLayer:
    """A layer's weight, and the factors of its gradient in the step that goes on."""

    name: str
    weight: nn.Parameter
    #: For steps in which factors are more bytes.
    mean: Mean
    #: Gradients of outputs, and inputs, of each pass through the layer.
    noted: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def note(self, layer: nn.Module, given: tuple[Tensor], returned: Tensor) -> None:
        """Note the factors of a pass, as a forward hook; InputError for a layer of tokens."""
        if not returned.requires_grad:
            return
        inputs = given[0].detach()
        if inputs.dim() != 2:
            raise InputError(f"{_EXPECTED}, {self.name} sees tokens: {list(inputs.shape)}")

        def with_inputs(gradient: Tensor) -> None:
            self.noted.append((gradient, inputs))

        returned.register_hook(with_inputs)  # type: ignore[no-untyped-call]

    def take(self, pictures: int) -> tuple[Tensor, Tensor, int]:
        """Factors `[K, M]` and `[K, N]` of the step in fp32, and passes in which they arose.

        None of a picture that does not count. Raises InputError for rows that are not pictures.
        """
        if not self.noted:
            raise RuntimeError(f"{self.name}: took no part in the loss of a step")
        outputs, inputs = (
            torch.cat([one[side].detach().to("cpu", torch.float32) for one in self.noted])
            for side in (0, 1)
        )
        self.noted = []
        passes, rest = divmod(len(outputs), max(1, pictures))
        if rest:
            raise InputError(
                f"{_EXPECTED}, {self.name} has {len(outputs)} rows of {pictures} pictures"
            )
        return (outputs, inputs, passes) if pictures else (outputs[:0], inputs[:0], passes)
