"""Choose a network for each device by measured predictions, alone and together. Pure."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from partitioner.pilot.linear import Array, Index
from partitioner.pilot.truth import LabelTruth, OneLabel

#: Answers `[S, C]` of one candidate on the pictures that one device sees, which add up (`truth`).
Predictions = Callable[[str, int], Array]

#: Powers of their number by which sums of answers are divided: answers that err together are worth
#: their mean, independent ones their sum. Few for each step of a search, more for its outcome.
_POWERS, _FINE_POWERS = (0.0, 0.5, 1.0), tuple(step / 8 for step in range(9))
#: Devices' best candidates alone that the search begins from, and those that it tries; where these
#: are of too few networks, so many of each.
_STARTS, _TRIED, _OF_NETWORK = 3, 16, 4
#: Parts of the pictures; on each the choice by the others is measured.
_PARTS = 5
#: One-sided 95 % quantile of the standard normal distribution: standard errors of a difference
#: above which it is sure.
_SURELY = 1.645


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


#: Share of a frozen network's errors that a training of so many epochs takes away, at least, and
#: the fewest epochs that do: a quarter to a half was measured (docs/lab-log.md).
_MENDED, _MENDS = 0.25, 6


def without_slow(
    allowed: Mapping[str, Sequence[int]], errors: Mapping[int, float], epochs: Mapping[int, float]
) -> dict[str, list[int]]:
    """The candidates of each device that are worth the minutes of their training.

    `errors` are the shares of wrong answers of frozen candidates, `epochs` those that there is time
    for. One is left out where another that the device may serve is trained for more epochs and is
    then expected to err less.
    """

    def error_after(row: int) -> float:
        return errors[row] * (1 - _MENDED * min(1.0, epochs[row] / _MENDS))

    return {
        device: [
            row
            for row in rows
            if not any(
                epochs[other] > epochs[row] and error_after(other) < error_after(row)
                for other in rows
            )
        ]
        for device, rows in allowed.items()
    }


def choose(
    allowed: Mapping[str, Sequence[int]],
    predictions: Predictions,
    targets: Index,
    groups: Sequence[Sequence[str]] = (),
    networks: Mapping[int, str] | None = None,
    truth: LabelTruth | None = None,
    cameras: Mapping[str, str] = MappingProxyType({}),
) -> ChosenNetworks:
    """The candidates that are best together: of all devices, and with any one missing.

    Devices of one of `groups`, which are allowed the same, have the same one. `networks` names the
    network of each candidate, `cameras` the camera of each device where they see scenes: see
    `best_rows`. `truth` has the labels where several may hold; then `targets` index sets of them.
    """
    truth = OneLabel(targets) if truth is None else truth
    parts = _parts(targets)
    alone = {device: np.zeros(len(targets), dtype=bool) for device in allowed}
    without = {device: np.zeros(len(targets), dtype=bool) for device in allowed}
    together = np.zeros(len(targets), dtype=bool)
    for part in range(_PARTS):
        inside = parts == part
        rows = best_rows(allowed, predictions, targets, ~inside, groups, networks, truth, cameras)
        answers = {device: predictions(device, row) for device, row in rows.items()}
        summed, asked, count = np.sum(list(answers.values()), axis=0), truth.part(inside), len(rows)
        # Several labels are told otherwise at another temperature, one label is not.
        power = _best_power(summed[~inside], count, truth.part(~inside))
        together[inside] = asked.right(summed[inside] / count**power)
        for device, own in answers.items():
            alone[device][inside] = asked.right(own[inside])
            rest = (summed - own)[inside] / max(1, count - 1) ** power
            without[device][inside] = asked.right(rest)
    return ChosenNetworks(
        rows=best_rows(
            allowed,
            predictions,
            targets,
            np.ones(len(targets), dtype=bool),
            groups,
            networks,
            truth,
            cameras,
        ),
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
    networks: Mapping[int, str] | None = None,
    truth: LabelTruth | None = None,
    cameras: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, int]:
    """The candidate of each device with the least cross-entropy together, on pictures `counted`.

    Half of the cross-entropy is that of all devices, half the mean of those where one is missing.
    Devices of one of `groups` have the same; all others are by themselves. Groups are changed one
    at a time until none improves, from several starts.

    Equal answers to one picture add nothing to each other. So where `networks` names the network
    of each candidate, and the best choice has one candidate twice for one picture, the best choice
    of different networks replaces it unless that is surely worse, picture by picture. Cuts of one
    network err together: in place of the best one twice they are a loss (docs/lab-log.md). Devices
    answer one picture where they have one camera in `cameras`, or none.
    """
    grouped = {device for group in groups for device in group}
    units = [*groups, *([device] for device in allowed if device not in grouped)]
    # Devices that answer one picture have the same answers, which may be a gigabyte.
    seen: dict[tuple[str | None, int], Array] = {}
    answers: dict[tuple[str, int], Array] = {}
    for device, rows in allowed.items():
        for row in rows:
            picture = cameras.get(device), row
            if picture not in seen:
                seen[picture] = predictions(device, row)[counted]
            answers[device, row] = seen[picture]
    right = (OneLabel(targets) if truth is None else truth).part(counted)

    def alone(unit: Sequence[str], row: int) -> float:
        return sum(float(right.losses(answers[device, row]).mean()) for device in unit)

    every = [
        sorted(
            set(allowed[unit[0]]).intersection(*(allowed[device] for device in unit)),
            key=lambda row: (alone(unit, row), row),
        )
        for unit in units
    ]
    ranked = [of[:_TRIED] for of in every]
    known: dict[tuple[int, ...], Array] = {}

    def losses_of(rows: Mapping[str, int]) -> Array:
        place = tuple(rows[device] for device in allowed)
        if place not in known:
            known[place] = _losses_together(rows, answers, right)
        return known[place]

    def loss_of(rows: Mapping[str, int]) -> float:
        return float(losses_of(rows).mean())

    starts = [[of[min(start, len(of) - 1)] for of in ranked] for start in range(_STARTS)]
    best = _search(units, ranked, starts, loss_of)
    rivals = _rivals(units, cameras)
    taken = [best[unit[0]] for unit in units]
    if networks is None or not any(
        taken[unit] == taken[other] for unit, others in enumerate(rivals) for other in others
    ):
        return best
    for tried in (ranked, [_of_each_network(of, networks) for of in every]):
        starts = [_different(tried, networks, rivals, skip) for skip in range(_STARTS)]
        starts = [start for start in starts if start]
        if starts:
            different = _search(units, tried, starts, loss_of, networks, rivals)
            worse = losses_of(different) - losses_of(best)
            error = float(worse.std()) / math.sqrt(len(worse))
            return best if float(worse.mean()) > _SURELY * error else different
    return best


def _rivals(units: Sequence[Sequence[str]], cameras: Mapping[str, str]) -> list[list[int]]:
    """For each unit the places of those with a device that answers the same picture."""
    seen = [{cameras.get(device) for device in unit} for unit in units]
    return [
        [other for other in range(len(units)) if other != place and seen[other] & own]
        for place, own in enumerate(seen)
    ]


def _of_each_network(ranked: Sequence[int], networks: Mapping[int, str]) -> list[int]:
    """The best rows of each network, in the order of `ranked`."""
    counts = dict[str, int]()
    found = list[int]()
    for row in ranked:
        counts[networks[row]] = counts.get(networks[row], 0) + 1
        if counts[networks[row]] <= _OF_NETWORK:
            found.append(row)
    return found


def _different(
    ranked: Sequence[Sequence[int]],
    networks: Mapping[int, str],
    rivals: Sequence[Sequence[int]],
    skip: int,
) -> list[int]:
    """The best row of each unit of a network that no rival before it has; or none.

    That of the first unit is the one at place `skip`.
    """
    taken: list[int] = []
    for of, others in zip(ranked, rivals, strict=True):
        used = {networks[taken[other]] for other in others if other < len(taken)}
        free = [row for row in of if networks[row] not in used]
        if not free:
            return []
        taken.append(free[min(0 if taken else skip, len(free) - 1)])
    return taken


def _search(
    units: Sequence[Sequence[str]],
    ranked: Sequence[Sequence[int]],
    starts: Sequence[Sequence[int]],
    loss_of: Callable[[Mapping[str, int]], float],
    networks: Mapping[int, str] | None = None,
    rivals: Sequence[Sequence[int]] = (),
) -> dict[str, int]:
    """The rows by device with the least loss that is found from `starts`, a row of each unit.

    With `networks` those of `rivals` stay different, as in `starts`.
    """
    found: list[tuple[float, dict[str, int]]] = []
    for start in starts:
        rows = {device: row for unit, row in zip(units, start, strict=True) for device in unit}
        loss = loss_of(rows)
        improved = True
        while improved:
            improved = False
            for place, (unit, of) in enumerate(zip(units, ranked, strict=True)):
                used = set[str]()
                if networks is not None:
                    used = {networks[rows[units[other][0]]] for other in rivals[place]}
                for row in of:
                    if networks is not None and networks[row] in used:
                        continue
                    changed = rows | dict.fromkeys(unit, row)
                    if (other := loss_of(changed)) < loss:
                        rows, loss, improved = changed, other, True
        found.append((loss, rows))
    return min(found, key=lambda one: one[0])[1]


def _parts(targets: Index) -> Index:
    """The part of each picture, of every class the same share.

    Classes with fewer pictures than there are parts begin with different ones, so that no part has
    all pictures.
    """
    parts = np.zeros(len(targets), dtype=np.int64)
    for place, target in enumerate(np.unique(targets)):
        places = np.flatnonzero(targets == target)
        first = place if len(places) < _PARTS else 0
        parts[places] = (first + np.arange(len(places))) % _PARTS
    return parts


def _losses_together(
    rows: Mapping[str, int], answers: Mapping[tuple[str, int], Array], right: LabelTruth
) -> Array:
    """Cross-entropy `[S]` of all, and of all but one on average, half each."""
    chosen = [answers[pair] for pair in rows.items()]
    total, count = np.sum(chosen, axis=0), len(chosen)
    if count == 1:
        return right.losses(total)
    rest = [_fuse_losses(total - own, count - 1, right) for own in chosen]
    found: Array = (_fuse_losses(total, count, right) + np.mean(rest, axis=0)) / 2
    return found


def _fuse_losses(total: Array, count: int, right: LabelTruth) -> Array:
    """Cross-entropy `[S]` of a sum of `count` answers at the best of the temperatures."""
    found = [right.losses(total / count**power) for power in _POWERS]
    return min(found, key=lambda losses: float(losses.mean()))


def _best_power(total: Array, count: int, right: LabelTruth) -> float:
    """The power of `count` by which a sum of as many answers has the least cross-entropy."""
    return min(_FINE_POWERS, key=lambda power: float(right.losses(total / count**power).mean()))
