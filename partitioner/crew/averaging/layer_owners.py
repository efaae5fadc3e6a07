"""Layers of a network, each with one owner among its trainers, who alone takes the layer's step.

The others send to it what the step needs, and it sends to all what has come of it.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from partitioner.crew.averaging.mean import Means, Meeting, exchange

#: Operations a second of a processor.
FLOP_PER_S = 1e10


class LayerOwners:
    """The owners of layers in the meetings of a network, and what they exchange; counts bytes."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self.sent_bytes = 0

    def place(
        self, seconds: Sequence[float], numbers: Sequence[float], meeting: Meeting | None
    ) -> list[int]:
        """The place of each layer's owner in a meeting; 0 for one trainer alone.

        seconds: of an owner's computing, by layer. numbers: which each other trainer sends to it.
        """
        if meeting is None:
            return [0] * len(seconds)
        n = len(meeting.members)
        slowest = min(self._means.uplink(member) for member in meeting.members)
        receives = [(n - 1) * 4 * count / slowest for count in numbers]
        return owners_of(list(zip(seconds, receives, strict=True)), n)

    def gather(
        self, parts: Sequence[Tensor], owners: Sequence[int], meeting: Meeting | None
    ) -> dict[int, Tensor]:
        """The sums over all members of what is sent of the own layers, by layer.

        parts: the own numbers `[N]` of each layer, of as many with every member.
        """
        place = meeting.place if meeting else 0
        own = [i for i, owner in enumerate(owners) if owner == place]
        found = {i: parts[i] for i in own}
        if meeting is None:
            return found
        others = [p for p in range(len(meeting.members)) if p != place]
        sent = {p: _join(parts[i] for i, owner in enumerate(owners) if owner == p) for p in others}
        size = 4 * sum(parts[i].numel() for i in own)
        received = self._exchange(meeting, sent, dict.fromkeys(others, size))
        # In the order of members, so that the sums are the same whoever the owner is.
        cut = {p: _cut(received[p], [parts[i].numel() for i in own]) for p in others}
        cut[place] = [parts[i] for i in own]
        for row, i in enumerate(own):
            found[i] = torch.stack([cut[p][row] for p in sorted(cut)]).sum(dim=0)
        return found

    def spread(
        self,
        own: Mapping[int, Tensor],
        numbers: Sequence[int],
        owners: Sequence[int],
        meeting: Meeting | None,
    ) -> dict[int, Tensor]:
        """The outcomes of all layers, `[N]` by layer, of which the own ones are sent to all.

        numbers: of each layer's outcome.
        """
        found = dict(own)
        if meeting is None:
            return found
        others = [p for p in range(len(meeting.members)) if p != meeting.place]
        layers = {p: [i for i, owner in enumerate(owners) if owner == p] for p in others}
        sizes = {p: 4 * sum(numbers[i] for i in rows) for p, rows in layers.items()}
        data = _join(own[i] for i in sorted(own))
        received = self._exchange(meeting, dict.fromkeys(others, data), sizes)
        for p, rows in layers.items():
            cut = _cut(received[p], [numbers[i] for i in rows])
            found |= dict(zip(rows, cut, strict=True))
        return found

    def _exchange(
        self, meeting: Meeting, sent: Mapping[int, Tensor], sizes: Mapping[int, int]
    ) -> dict[int, Tensor]:
        self.sent_bytes += sum(data.numel() for data in sent.values())
        return exchange(meeting, sent, sizes)


def owners_of(costs: Sequence[tuple[float, float]], trainers: int) -> list[int]:
    """The place of each layer's owner, by its seconds of computing and of receiving.

    The costliest first, each to the trainer who is then done first, computing and receiving side by
    side (Graham's rule of longest processing time, 1969). Of equal ones the first, and the lowest
    place.
    """
    computing, receiving = [0.0] * trainers, [0.0] * trainers
    found = [0] * len(costs)
    for i in sorted(range(len(costs)), key=lambda i: -max(costs[i])):
        computes, receives = costs[i]
        place = min(
            range(trainers), key=lambda p: max(computing[p] + computes, receiving[p] + receives)
        )
        computing[place] += computes
        receiving[place] += receives
        found[i] = place
    return found


def copy_from_first(parameters: Iterable[nn.Parameter], meeting: Meeting) -> None:
    """Give all members the first one's values of parameters that DDP does not share."""
    for parameter in parameters:
        value = parameter.detach().to("cpu", copy=True).contiguous()
        meeting.group.broadcast(value, 0).wait()
        with torch.no_grad():
            parameter.copy_(value)


def _join(parts: Iterable[Tensor]) -> Tensor:
    """Numbers of all parts as bytes."""
    found = [part.flatten() for part in parts]
    return torch.cat([*found, torch.zeros(0)]).view(torch.uint8)


def _cut(data: Tensor, numbers: Sequence[int]) -> list[Tensor]:
    """The inverse of `_join`, in one row each."""
    return list(torch.split(data.view(torch.float32), list(numbers)))
