"""Rates and thresholds by which an item differs from the good ones. Plain records.

`mdp.fusion.anomaly` computes with them, `partitioner.fusion.anomaly_fit` fits them.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from mdp.files import Record
from mdp.fusion.rate_table import Rate, check_entry, check_numbers, check_rates, entry_of

#: The rate of rejected good items where nobody asks for another.
DEFAULT_GOOD_RATE = 0.01
#: Powers by which members' surprises are fused, the mean and the maximum among them.
MEAN, MAXIMUM = 1, 64
#: Cells of a map on each side.
MAP_SIDE = 16
MAP_BYTES = MAP_SIDE**2
#: A cell of a map with this value is as strange as the strangest one of a good item of a hundred.
MAP_LIMIT = 128

Share = Annotated[float, Meta(ge=0, le=1)]


class ScoreTail(Record, frozen=True):
    """Rates of a member's scores among good items.

    Below `scores[-1]` a rate is interpolated, in logarithms; above it falls exponentially.
    """

    #: Scores that shares `KNOTS` of good items exceed, ascending.
    scores: Annotated[tuple[float, ...], Meta(min_length=4, max_length=4)]
    #: How much higher a score is that a tenth of as many good items exceed.
    decade: Annotated[float, Meta(gt=0)]

    def __post_init__(self) -> None:
        if list(self.scores) != sorted(self.scores):
            raise ValueError("`scores` must not fall")
        check_numbers((*self.scores, self.decade))


#: Shares of good items with a higher score than those that a ScoreTail keeps.
KNOTS = (1.0, 0.5, 0.2, 0.1)


class SubsetAnomaly(Record, frozen=True, omit_defaults=True):
    """The thresholds of one arrival subset, or of all unlisted subsets of one size."""

    size: Annotated[int, Meta(ge=1)]
    #: For each of the rates, ascending: the surprise above which an item differs.
    thresholds: tuple[float, ...]
    #: Ascending; empty for all unlisted subsets of the size.
    members: tuple[int, ...] = ()
    #: For each of the rates: the share of the measured defects that is found; empty without any.
    found: tuple[Share, ...] = ()

    def __post_init__(self) -> None:
        check_entry(self)


class Anomaly(Record, frozen=True, omit_defaults=True):
    """Scores and thresholds of every arrival subset: `anomaly` in a bundle's `fusion.json`."""

    #: By member.
    tails: Annotated[tuple[ScoreTail, ...], Meta(min_length=1)]
    #: The power mean that fuses surprises: 1 is the mean, 64 the maximum.
    power: Annotated[int, Meta(ge=MEAN, le=MAXIMUM)]
    #: Rates of rejected good items that the good scenes support, ascending.
    rates: Annotated[tuple[Rate, ...], Meta(min_length=1)]
    #: The rate that answers are made for: one of `rates`.
    default: Rate
    #: Good scenes, or pictures, that tails and thresholds are fitted to.
    good: Annotated[int, Meta(ge=1)]
    subsets: list[SubsetAnomaly]
    #: Defective ones that the shares found were measured on.
    defective: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        check_rates(self.rates, self.default, self.subsets)
        for one in self.subsets:
            if len(one.found) not in (0, len(self.rates)):
                raise ValueError("`found` needs a number for each of `rates`, or none")
            if any(k >= len(self.tails) for k in one.members):
                raise ValueError("`subsets` name a member without a tail")

    def of(self, members: Sequence[int]) -> SubsetAnomaly | None:
        """The thresholds of ascending `members`: their own, else those of their size, else None."""
        return entry_of(self.subsets, members)

    @property
    def place(self) -> int:
        """The place of the default rate among `rates`."""
        return self.rates.index(self.default)
