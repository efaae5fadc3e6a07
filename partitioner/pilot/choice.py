"""Choose a network for each device by measured predictions, alone and together. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from partitioner.pilot.linear import Array, Index, log_softmax

#: Log-probabilities `[S, C]` of one candidate on the pictures that one device sees.
Predictions = Callable[[str, int], Array]

#: Devices' best candidates alone that the search begins from, and those that it tries.
_STARTS, _TRIED = 3, 16
#: Parts of the pictures; on each the choice by the others is measured.
_PARTS = 5


@dataclass(frozen=True, slots=True)
class ChosenNetworks:
    """A candidate for each device, and shares of right answers on pictures left out of the fits.

    Shares are of choices made without the pictures that they are measured on, as the best of many
    candidates looks better than it is where it was chosen.
    """

    #: Row of the candidate by device.
    rows: dict[str, int]
    #: Of each device alone, of all together, and of all without one.
    alone: dict[str, float]
    together: float
    without: dict[str, float]


def choose(
    allowed: Mapping[str, Sequence[int]],
    predictions: Predictions,
    targets: Index,
    groups: Sequence[Sequence[str]] = (),
) -> ChosenNetworks:
    """The candidates that are best together: of all devices, and with any one missing.

    Devices of one of `groups`, which are allowed the same, have the same one.
    """
    parts = _parts(targets)
    alone = {device: np.zeros(len(targets), dtype=bool) for device in allowed}
    without = {device: np.zeros(len(targets), dtype=bool) for device in allowed}
    together = np.zeros(len(targets), dtype=bool)
    for part in range(_PARTS):
        inside = parts == part
        rows = best_rows(allowed, predictions, targets, ~inside, groups)
        answers = {device: predictions(device, row)[inside] for device, row in rows.items()}
        total, right = np.sum(list(answers.values()), axis=0), targets[inside]
        together[inside] = total.argmax(axis=1) == right
        for device, own in answers.items():
            alone[device][inside] = own.argmax(axis=1) == right
            without[device][inside] = (total - own).argmax(axis=1) == right
    return ChosenNetworks(
        rows=best_rows(allowed, predictions, targets, np.ones(len(targets), dtype=bool), groups),
        alone={device: float(right.mean()) for device, right in alone.items()},
        together=float(together.mean()),
        without={
            device: float(right.mean()) for device, right in without.items() if len(allowed) > 1
        },
    )


def best_rows(
    allowed: Mapping[str, Sequence[int]],
    predictions: Predictions,
    targets: Index,
    counted: np.ndarray[tuple[int], np.dtype[np.bool_]],
    groups: Sequence[Sequence[str]] = (),
) -> dict[str, int]:
    """The candidate of each device with the least cross-entropy together, on pictures `counted`.

    Half of the cross-entropy is that of all devices, half the mean of those where one is missing.
    Devices of one of `groups` have the same; all others are by themselves. Groups are changed one
    at a time until none improves, from several starts.
    """
    grouped = {device for group in groups for device in group}
    units = [*groups, *([device] for device in allowed if device not in grouped)]
    answers = {
        (device, row): predictions(device, row)[counted]
        for device, rows in allowed.items()
        for row in rows
    }
    right = targets[counted]

    def alone(unit: Sequence[str], row: int) -> float:
        return sum(_loss(answers[device, row], right) for device in unit)

    ranked = [
        sorted(
            set(allowed[unit[0]]).intersection(*(allowed[device] for device in unit)),
            key=lambda row: (alone(unit, row), row),
        )[:_TRIED]
        for unit in units
    ]
    known: dict[tuple[int, ...], float] = {}

    def loss_of(rows: Mapping[str, int]) -> float:
        place = tuple(rows[device] for device in allowed)
        if place not in known:
            known[place] = _loss_together(rows, answers, right)
        return known[place]

    best: tuple[float, dict[str, int]] | None = None
    for start in range(_STARTS):
        rows = {
            device: of[min(start, len(of) - 1)]
            for unit, of in zip(units, ranked, strict=True)
            for device in unit
        }
        loss = loss_of(rows)
        improved = True
        while improved:
            improved = False
            for unit, of in zip(units, ranked, strict=True):
                for row in of:
                    changed = rows | dict.fromkeys(unit, row)
                    if (other := loss_of(changed)) < loss:
                        rows, loss, improved = changed, other, True
        if best is None or loss < best[0]:
            best = loss, rows
    assert best is not None
    return best[1]


def _parts(targets: Index) -> Index:
    """The part of each picture, of every class the same share."""
    parts = np.zeros(len(targets), dtype=np.int64)
    for target in np.unique(targets):
        places = np.flatnonzero(targets == target)
        parts[places] = np.arange(len(places)) % _PARTS
    return parts


def _loss_together(
    rows: Mapping[str, int], answers: Mapping[tuple[str, int], Array], right: Index
) -> float:
    """Cross-entropy of all, and of all but one on average, half each."""
    chosen = [answers[pair] for pair in rows.items()]
    total, count = np.sum(chosen, axis=0), len(chosen)
    if count == 1:
        return _loss(total, right)
    rest = [_fused_loss(total - own, count - 1, right) for own in chosen]
    return (_fused_loss(total, count, right) + float(np.mean(rest))) / 2


def _fused_loss(total: Array, count: int, right: Index) -> float:
    """Cross-entropy of a sum of answers at the best of three temperatures.

    Answers that err together are worth their mean, independent ones their sum.
    """
    return min(_loss(total / count**power, right) for power in (0.0, 0.5, 1.0))


def _loss(log_probabilities: Array, right: Index) -> float:
    """Cross-entropy of unnormalised log-probabilities `[S, C]`."""
    return -float(log_softmax(log_probabilities)[np.arange(len(right)), right].mean())
