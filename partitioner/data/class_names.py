"""Rows of a classifier that belong to the classes of a data set, found by name. Pure."""

import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from mdp.errors import InputError

#: Most names in a message.
_SHOWN = 5


def fold(name: str) -> str:
    """A name without case, with `_`, `-` and any white space as one space, in one Unicode form.

    Systems write a letter with its accent as one character (NFC) or two (NFD).
    """
    name = unicodedata.normalize("NFC", name)
    return " ".join(name.replace("_", " ").replace("-", " ").casefold().split())


class ClassNames:
    """The names of a classifier's classes, in its order: one each, or several that mean the same.

    A name that is written exactly as asked for comes before those that only `fold` to it.
    """

    def __init__(self, rows: Iterable[Iterable[str]]) -> None:
        self._exact = defaultdict[str, list[int]](list)
        self._folded = defaultdict[str, list[int]](list)
        for row, names in enumerate(rows):
            for name in dict.fromkeys(names):
                self._exact[name].append(row)
            for name in dict.fromkeys(map(fold, names)):
                self._folded[name].append(row)

    def rows_named(self, name: str) -> list[int]:
        """Every row with this name."""
        return self._exact.get(name) or self._folded.get(fold(name), [])

    def rows_of(
        self, wanted: Sequence[str], mapped: Mapping[str, str], where: str, remedy: str
    ) -> list[int]:
        """The row of every class of the data, which `mapped` may rename.

        Raises InputError, which names `where` the names are from, for classes without a row or
        with several, and for one row that several classes have.
        """
        found = {label: self.rows_named(mapped.get(label, label)) for label in wanted}
        absent = [label for label, rows in found.items() if not rows]
        if absent:
            raise InputError(
                f"{where}: has no class named {', '.join(absent[:_SHOWN])} of the data "
                f"({len(absent)} of {len(wanted)} classes missing): {remedy}"
            )
        twice = [label for label, rows in found.items() if len(rows) > 1]
        if twice:
            raise InputError(
                f"{where}: has several classes named {', '.join(twice[:_SHOWN])}: expected one of "
                "each"
            )
        labels = defaultdict[int, list[str]](list)
        for label, (row,) in found.items():
            labels[row].append(label)
        shared = next((some for some in labels.values() if len(some) > 1), None)
        if shared:
            raise InputError(
                f"{where}: several classes of the data are mapped to one of its classes: "
                f"{', '.join(shared[:_SHOWN])}"
            )
        return [row for (row,) in found.values()]


def alike(names: Iterable[str]) -> list[list[str]]:
    """Names that differ in case, `_`, `-` or spaces alone, together."""
    folded = defaultdict[str, list[str]](list)
    for name in names:
        folded[fold(name)].append(name)
    return [some for some in folded.values() if len(some) > 1]
