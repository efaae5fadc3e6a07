"""Pairs of classes that answers take for each other. Pure."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mdp.formats.bundle import Confusion
from mdp.fusion.fuse import Logits

#: Fewer confused pictures, or a smaller share of those of both classes, may be chance.
_LEAST, _LEAST_SHARE = 3, 0.1
#: Pairs that are kept.
MOST = 10


def confusions(
    logits: Logits, targets: NDArray[np.int64], labels: Sequence[str]
) -> tuple[Confusion, ...]:
    """The pairs that logits `[N, C]` of pictures of classes `targets` confuse most, at most `MOST`.

    Where two classes look alike to every member, their pictures are answered by chance: half of
    them are confused.
    """
    count = len(labels)
    taken = np.zeros((count, count), dtype=np.int64)
    np.add.at(taken, (targets, logits.argmax(axis=1)), 1)
    of_class, either = taken.sum(axis=1), np.triu(taken + taken.T, k=1)
    found = []
    for a, b in np.argwhere(either >= _LEAST).tolist():
        pictures = int(of_class[a] + of_class[b])
        if either[a, b] >= _LEAST_SHARE * pictures:
            pair = Confusion((labels[a], labels[b]), pictures, int(either[a, b]))
            found.append(pair)
    return tuple(sorted(found, key=lambda one: -one.confused)[:MOST])
