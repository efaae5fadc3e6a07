"""The largest logits of a teacher's answers, and what the others weigh together. Pure.

After TinyViT's stored soft labels (Wu et al., arXiv 2207.10666). A row of m logits has 4 m + 2
bytes: the m largest in fp16, their classes in 16 bits each, and in fp16 the logarithm of the sum of
exp over all others, which count as equal. At the temperature of the training, that sum is of
softened logits: equal logits of the same sum would weigh more there. With m = C it is exact up to
fp16.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from partitioner.data.memmaps import Array, Index

#: Classes have 16 bits.
MOST_CLASSES = 2**16
_HIGHEST = float(np.finfo(np.float16).max)


class Keep(NamedTuple):
    """Number m of the logits of each row that are kept, and the temperature that softens them."""

    logits: int
    temperature: float = 1.0

    @property
    def numbers(self) -> int:
        """Numbers of 16 bits of a row."""
        return 2 * self.logits + 1


def largest(logits: Array, how: Keep) -> NDArray[np.uint16]:
    """The m largest of logits `[B, C]`, of equals the first, and what the others weigh together.

    Rows `[B, 2 m + 1]`: logits, classes, and the log-sum r of the others, -inf of none. Each of the
    n others counts as a logit r - log n: of all equal ones the one with their sum when softened.
    """
    keep, temperature = how
    values = np.asarray(logits, dtype=np.float32)
    order = np.argsort(-values, axis=1, kind="stable")
    classes, others = order[:, :keep], np.take_along_axis(values, order[:, keep:], axis=1)
    softened = np.logaddexp.reduce(others / temperature, axis=1, keepdims=True)
    evenly = math.log(max(1, others.shape[1]))
    rest = np.minimum(temperature * (softened - evenly) + evenly, _HIGHEST)
    kept = np.take_along_axis(values, classes, axis=1)
    return np.concatenate(
        [
            kept.astype(np.float16).view(np.uint16),
            classes.astype(np.uint16),
            rest.astype(np.float16).view(np.uint16),
        ],
        axis=1,
    )


def dense(packed: NDArray[np.uint16], classes: int) -> NDArray[np.float32]:
    """Logits `[B, C]` of rows that `largest` made, whose others have equal shares of their sum."""
    rows = np.ascontiguousarray(packed)
    keep = rows.shape[1] // 2
    logits = rows.view(np.float16).astype(np.float32)
    each = logits[:, -1:] - math.log(max(1, classes - keep))
    found = np.repeat(each, classes, axis=1)
    np.put_along_axis(found, rows[:, keep:-1].astype(np.int64), logits[:, :keep], axis=1)
    return found


@dataclass(frozen=True, slots=True)
class LargestLogits:
    """Kept rows of `largest`, which are read as logits `[B, C]`."""

    #: `[N, 2 m + 1]`.
    packed: NDArray[Any]
    classes: int

    def __getitem__(self, index: Index | slice) -> NDArray[np.float32]:
        """Logits of some pictures."""
        return dense(np.asarray(self.packed[index]), self.classes)


#: A teacher's logits `[N, C]` on disk, whole or the largest of each row.
Answers = Array | LargestLogits
