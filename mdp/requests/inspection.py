"""Tells whether items differ from the good ones, and which cameras have moved since. Pure.

A camera that was moved finds every item different, and no other camera does. Looks at it are
counted by CUSUM (as in `camera_drift`): as many as a fifth of all items may have a defect on one
side, a moved camera finds four in five or more. A look counts where the others find the item good,
and where to more than half of them it is not that of the last look that counted: a scene that
stands still is one item. A side that is missing, or whose camera is suspected, is blind: it does
not decide.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from msgspec import Struct

from mdp.fusion.anomaly import fuse_surprises, share_range, surprise
from mdp.fusion.anomaly_table import Anomaly

#: Shares of items on which a camera in its place, and a moved one, are above their threshold.
FAULTY, MOVED = 0.2, 0.8
#: Looks that count, on average, to a wrong alarm, and to a wrong end of a right one.
LOOKS_TO_ALARM, LOOKS_TO_END = 100_000, 1_000
#: Surprises that differ by less decades may be of one item.
_SAME = 0.15


class Difference(Struct, frozen=True, kw_only=True):
    """Difference of an item from the good ones, by the sides that count."""

    #: Whether the item is like the good ones.
    normal: bool
    #: Decades by which good items are rarer than at the threshold; above 0 the item differs.
    anomaly: float
    #: The rate of good items that the threshold was made to reject.
    good_rejected: float
    #: The share of measured defects that these sides do not find; None where none were measured.
    defects_missed: float | None
    #: The range of that share among all defects like these, in 19 of 20 cases; None as well.
    defects_missed_least: float | None = None
    defects_missed_most: float | None = None


class _Side:
    """CUSUM of one camera."""

    __slots__ = ("last", "moved", "sum")

    def __init__(self) -> None:
        self.sum, self.moved = 0.0, False
        #: The others' surprises in the last look that counted.
        self.last: Mapping[int, float] = {}

    def saw(self, others: Mapping[int, float], *, above: bool) -> None:
        """Take in a look that the others find good."""
        apart = [abs(value - self.last.get(k, math.inf)) > _SAME for k, value in others.items()]
        if sum(apart) * 2 <= len(apart):
            return
        self.last = others
        ratio = math.log(MOVED / FAULTY) if above else math.log((1 - MOVED) / (1 - FAULTY))
        self.sum = max(0.0, self.sum - ratio if self.moved else self.sum + ratio)
        if self.sum >= math.log(LOOKS_TO_END if self.moved else LOOKS_TO_ALARM):
            self.moved, self.sum = not self.moved, 0.0


class Inspector:
    """The anomaly scores of one bundle's members, in the answers of one client."""

    def __init__(self, table: Anomaly) -> None:
        self._table = table
        self._sides: dict[str, _Side] = {}

    @property
    def cameras_moved(self) -> frozenset[str]:
        """Devices whose cameras have been moved since the good scenes, as the looks say."""
        return frozenset(device for device, side in self._sides.items() if side.moved)

    def surprises(self, scores: Mapping[int, float]) -> dict[int, float]:
        """Surprises of members' scores."""
        return {k: float(surprise(one, self._table.tails[k])) for k, one in scores.items()}

    def alone(self, k: int, surprised: float) -> float | None:
        """Decades of a member's surprise above its own threshold, None where none was fitted."""
        own = self._table.of((k,))
        return None if own is None else surprised - own.thresholds[self._table.place]

    def difference(self, surprises: Mapping[int, float]) -> Difference | None:
        """Difference of an item by members' surprises; None of those nothing was fitted for."""
        members = tuple(sorted(surprises))
        fitted = self._table.of(members) if members else None
        if fitted is None:
            return None
        place = self._table.place
        fused = fuse_surprises([np.asarray(surprises[k]) for k in members], self._table.power)
        # Rounded before it decides: what is called different is above 0.
        above = round(float(fused) - fitted.thresholds[place], 4)
        missed = round(1 - fitted.found[place], 4) if fitted.found else None
        least = most = None
        if missed is not None and self._table.defective:
            least, most = (round(one, 4) for one in share_range(missed, self._table.defective))
        return Difference(
            normal=above <= 0,
            anomaly=above,
            good_rejected=self._table.default,
            defects_missed=missed,
            defects_missed_least=least,
            defects_missed_most=most,
        )

    def saw(
        self,
        surprises: Mapping[int, float],
        devices: Mapping[int, str],
        suspects: Collection[str] = (),
    ) -> None:
        """Take in a look: surprises of members, whose `devices` by member are no `suspects`."""
        for k, surprised in surprises.items():
            device = devices[k]
            own = self.alone(k, surprised)
            if device in suspects or own is None:
                continue
            others = {
                other: value
                for other, value in surprises.items()
                if other != k and devices[other] not in self.cameras_moved | frozenset(suspects)
            }
            beside = self.difference(others)
            # Alone, nobody can say whether it is the camera or the items.
            if beside is not None and beside.normal:
                self._sides.setdefault(device, _Side()).saw(others, above=own > 0)


def blind_sides(assigned: Sequence[str], seen: Collection[int]) -> tuple[str, ...]:
    """Devices of a plan's members, in order, whose sides are not among those `seen`."""
    return tuple(device for k, device in enumerate(assigned) if k not in seen)
