"""Checks and look-ups of tables with a threshold for every arrival subset and rate. Pure."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Protocol, TypeVar

from msgspec import Meta

Rate = Annotated[float, Meta(gt=0, lt=1)]
#: No number of a bundle is larger.
MAX_SCORE = 1e9


class OfSubset(Protocol):
    """The entry of one arrival subset, or without `members` of all unlisted ones of one size."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def members(self) -> tuple[int, ...]:
        """Ascending; empty for all unlisted subsets of the size."""

    @property
    def thresholds(self) -> tuple[float, ...]:
        """For each of the table's rates, ascending."""


Entry = TypeVar("Entry", bound=OfSubset)


def check_numbers(numbers: Iterable[float]) -> None:
    """Raise ValueError for a number that is not finite, or above `MAX_SCORE` in size."""
    # Written so that a NaN is refused too.
    if not all(abs(number) <= MAX_SCORE for number in numbers):
        raise ValueError(f"numbers have to be finite and at most {MAX_SCORE:g} in size")


def check_entry(entry: OfSubset) -> None:
    """Raise ValueError for members that are none, or thresholds that rise with the rate."""
    if list(entry.members) != sorted(set(entry.members)) or any(k < 0 for k in entry.members):
        raise ValueError("`members` have to be distinct, not negative and ascending")
    if entry.members and len(entry.members) != entry.size:
        raise ValueError("`size` has to be the number of `members`")
    if list(entry.thresholds) != sorted(entry.thresholds, reverse=True):
        raise ValueError("`thresholds` must not rise with the rate")
    check_numbers(entry.thresholds)


def check_rates(rates: Sequence[float], default: float, entries: Sequence[OfSubset]) -> None:
    """Raise ValueError unless each entry is listed once, with a threshold for each rate."""
    if list(rates) != sorted(set(rates)):
        raise ValueError("`rates` have to be distinct and ascending")
    if default not in rates:
        raise ValueError("`default` has to be one of `rates`")
    keys = [one.members or one.size for one in entries]
    if len(set(keys)) != len(keys):
        raise ValueError("`subsets` list the same members or size twice")
    if any(len(one.thresholds) != len(rates) for one in entries):
        raise ValueError("`thresholds` need a number for each of `rates`")


def entry_of(entries: Iterable[Entry], members: Sequence[int]) -> Entry | None:
    """The entry of ascending `members`: their own, else that of their size, else None."""
    wanted, shared = tuple(members), None
    for one in entries:
        if one.members == wanted:
            return one
        if not one.members and one.size == len(wanted):
            shared = one
    return shared
