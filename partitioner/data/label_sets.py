"""Labels that do not exclude each other, as folders name them. Pure.

A folder `bent+scratched` holds the items of which both labels hold, `none` those of which none
does. A set of labels is what a class is elsewhere: splits have the same share of every set.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.formats.bundle import JOINED_BY, NO_LABEL

Held = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LabelSets:
    """The labels of a data set, sorted, and the sets of them that items have, sorted."""

    labels: tuple[str, ...]
    #: Each in the order of `labels`; the empty one is that of items without any.
    sets: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, folders: Iterable[str], where: str) -> "LabelSets":
        """The sets that folders of `where` name; raises InputError."""
        found = {labels_of(folder, where) for folder in folders}
        labels = tuple(sorted(set().union(*found)))
        if len(labels) < 2:
            raise InputError(
                f"{where}: expected at least 2 labels where several may hold, found "
                f"{', '.join(labels) or 'none'}: without --labels several its folders are classes"
            )
        return cls(labels, tuple(sorted(found)))

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each set: `bent+scratched`, `none`."""
        return tuple(JOINED_BY.join(one) or NO_LABEL for one in self.sets)

    @property
    def joined(self) -> tuple[str, ...]:
        """The names of sets of several labels."""
        return tuple(JOINED_BY.join(one) for one in self.sets if len(one) > 1)

    def place(self, folder: str, where: str) -> int:
        """The index of the set that a folder names; raises InputError."""
        return self.sets.index(labels_of(folder, where))

    def flags(self, targets: NDArray[np.int64]) -> Held:
        """Tell whether each label holds `[N, L]`, of items with these indices of sets `[N]`."""
        table = np.array([[label in one for label in self.labels] for one in self.sets])
        found: Held = table[targets]
        return found


def labels_of(folder: str, where: str) -> tuple[str, ...]:
    """The labels that hold of a folder's items, sorted; raises InputError for an unusable name."""
    if folder == NO_LABEL:
        return ()
    parts = [part.strip() for part in folder.split(JOINED_BY)]
    if not all(parts):
        raise InputError(
            f"{where}: folder {folder!r}: expected labels joined by {JOINED_BY!r}, one is empty"
        )
    if NO_LABEL in parts:
        raise InputError(
            f"{where}: folder {folder!r}: {NO_LABEL!r} is for items without any label, so that no "
            "other goes with it"
        )
    for part in parts:
        if parts.count(part) > 1:
            raise InputError(f"{where}: folder {folder!r}: names {part!r} twice")
    return tuple(sorted(parts))


def check_labels_apart(train: Sequence[str], test: Sequence[str], where: str, below: str) -> None:
    """Raise InputError where a test split has labels, or labels together, that training has not.

    Both are names of folders.
    """
    taught, tested = LabelSets.of(train, f"{where}/train"), LabelSets.of(test, f"{where}/{below}")
    if strange := sorted(set(tested.labels) - set(taught.labels)):
        raise InputError(
            f"{where}/{below}: expected labels of train/, found others: {', '.join(strange[:5])}"
        )
    if missing := sorted(set(taught.labels) - set(tested.labels)):
        raise InputError(
            f"{where}/{below}: expected items of every label of train/, found none of "
            f"{', '.join(missing[:5])}"
        )
    for one, other, name, there in (
        (taught, tested, below, "train/"),
        (tested, taught, "train", f"{below}/"),
    ):
        if one.joined and not other.joined:
            raise InputError(
                f"{where}/{name}: its labels exclude each other, but {there} has items of several, "
                f"as {one.joined[0]}"
            )


def check_held(sets: LabelSets, targets: NDArray[np.int64], where: str) -> None:
    """Raise InputError for a label that holds of all items of a split, or of none.

    Also for a split without items.
    """
    if not len(targets):
        raise InputError(
            f"{where}: has no items: expected more of some set of labels, so that one can be held "
            "out"
        )
    held = sets.flags(targets)
    for label, share in zip(sets.labels, held.mean(axis=0).tolist(), strict=True):
        if share in (0.0, 1.0):
            which = "all" if share else "none"
            raise InputError(
                f"{where}: label {label!r} holds of {which} of {len(targets):,} items: expected "
                f"some with it and some without (a folder {NO_LABEL!r} has those without any)"
            )


def remark_on_sets(sets: LabelSets) -> str:
    """One line where no items have several labels; empty where some do."""
    if sets.joined:
        return ""
    return f"no folder joins labels by {JOINED_BY!r}: answers with several of them are not measured"


def remark_on_classes(labels: Sequence[str]) -> str:
    """One line on classes that look like several others together; empty without any."""
    for label in labels:
        parts = label.split(JOINED_BY)
        if len(parts) > 1 and set(parts) < set(labels):
            return (
                f"class {label!r} is one of its own beside {' and '.join(map(repr, parts))}: "
                "labels that hold together are learned with --labels several"
            )
    return ""
