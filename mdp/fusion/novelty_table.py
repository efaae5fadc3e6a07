"""Scores and thresholds by which an item is none of the classes. Plain records.

`mdp.fusion.novelty` computes the scores, `partitioner.fusion.novelty_fit` fits them.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta

from mdp.files import Record
from mdp.fusion.rate_table import Rate, check_entry, check_numbers, check_rates, entry_of

#: The rate of rejected known items where nobody asks for another.
DEFAULT_RATE = 0.02
#: What a score is a sum of.
Signal = Literal["energy", "doubt", "disagreement", "distance"]


class SubsetNovelty(Record, frozen=True):
    """The score of one arrival subset, or of all unlisted subsets of one size."""

    size: Annotated[int, Meta(ge=1)]
    #: Signals that count, by their weights.
    weights: dict[Signal, float]
    #: For each of the rates, ascending: the score above which an item is unknown.
    thresholds: tuple[float, ...]
    #: Ascending; empty for all unlisted subsets of the size.
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_entry(self)
        if not self.weights:
            raise ValueError("`weights` need at least one signal")
        check_numbers(self.weights.values())


class Novelty(Record, frozen=True):
    """Scores and thresholds of every arrival subset: `novelty` in a bundle's `fusion.json`."""

    #: Rates of rejected known items that the calibration supports, ascending.
    rates: Annotated[tuple[Rate, ...], Meta(min_length=1)]
    #: The rate of a client that asks for none: one of `rates`.
    default: Rate
    #: Calibration pictures, or scenes, that the thresholds are quantiles of.
    pictures: Annotated[int, Meta(ge=1)]
    subsets: list[SubsetNovelty]
    #: Pictures of no class that the signals were chosen by; 0: there were none, and scores are
    #: plain sums of the signals.
    unknown: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        check_rates(self.rates, self.default, self.subsets)

    def of(self, members: Sequence[int]) -> SubsetNovelty | None:
        """The score of ascending `members`: their own, else that of their size, else None."""
        return entry_of(self.subsets, members)

    def place(self, rate: float | None) -> int:
        """The place of a rate among `rates`, the default's for None.

        Of a rate between two, the lower one. Raises ValueError for one below all of them, which
        no calibration of this size supports, and for one that is far above.
        """
        wanted = self.default if rate is None else rate
        # The rates are rounded numbers, as is what a user types.
        found = bisect_right(self.rates, wanted * (1 + 1e-9)) - 1
        if found < 0:
            raise ValueError(
                f"expected at least {self.rates[0]:.6g}, the lowest rate that {self.pictures:,} "
                f"calibration pictures support, got {wanted:g}"
            )
        if wanted > self.rates[-1] + 1e-9:
            raise ValueError(f"expected at most {self.rates[-1]:.6g}, got {wanted:g}")
        return found
