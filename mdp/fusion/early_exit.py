"""Early termination: is what has arrived enough for the label of the whole? Pure.

Say P are the members that could be in an answer, and A those that have arrived. The answer of P has
the logits z_P = s + g: s from A, with P's weights and bias, and g from the members still awaited.
Let i be the class that leads s, by a margin m over the next one. The awaited can take the lead from
i only if they pull harder than that: g_j - g_i > m for some class j. Their *pull* max_j (g_j - g_i)
was measured on calibration pictures for each such pair P, A, and the largest one is in the bundle's
manifest. If m is larger than that, no awaited logits that pull within what was measured can change
the label, and it is given at once.

How sure that is: where a new picture is drawn like the n calibration pictures, it pulls harder than
all of them with a probability of at most 1 / (n + 1) (the rank of the largest of n + 1 exchangeable
numbers), and only some of those pictures also change the label.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations
from typing import Annotated

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from mdp.files import Record
from mdp.fusion.fuse import (
    MAX_WEIGHT,
    Contribution,
    Fusion,
    FusionWeights,
    Logits,
    SubsetWeights,
    fuse,
    rule_for,
    weights_for,
)

#: Pairs are measured where at most so many members are awaited, and at most so many others are not
#: possible any more.
MOST_AWAITED, MOST_GONE = 2, 1

Members = tuple[int, ...]
Strength = Annotated[float, Meta(ge=0, le=MAX_WEIGHT)]


class Pull(Record, frozen=True):
    """How hard the awaited members pulled at most, against the class that led without them."""

    #: All members that could be in the answer, and those that had arrived.
    members: Members
    arrived: Members
    #: Under each fusion rule.
    boosted: Strength
    stacked: Strength
    bagged: Strength

    def __post_init__(self) -> None:
        for members in (self.members, self.arrived):
            if list(members) != sorted(set(members)) or not members or members[0] < 0:
                raise ValueError("`members` and `arrived` have to be ascending and not empty")
        if not set(self.arrived) < set(self.members):
            raise ValueError("`arrived` has to be a part of `members`")


class EarlyBounds(Record, frozen=True):
    """What was measured for early termination; `early` in a bundle's manifest."""

    #: Calibration pictures of which each pull is the largest.
    pictures: Annotated[int, Meta(ge=1)]
    pulls: tuple[Pull, ...]


def early_pairs(count: int) -> list[tuple[Members, Members]]:
    """The pairs P, A of `count` members that are measured: who is possible, who has arrived."""
    pairs = []
    for size in range(max(2, count - MOST_GONE), count + 1):
        for members in combinations(range(count), size):
            for awaited in range(1, min(MOST_AWAITED, size - 1) + 1):
                pairs += [(members, arrived) for arrived in combinations(members, size - awaited)]
    return pairs


def part_of(weights: SubsetWeights, members: Sequence[int], *, bias: bool) -> SubsetWeights:
    """`weights` of ascending `members` only, with or without the bias of the whole."""
    chosen = [weights.members.index(k) for k in members]
    return SubsetWeights(
        members=tuple(members),
        a=tuple(weights.a[at] for at in chosen),
        b=tuple(weights.b[at] for at in chosen),
        bias=weights.bias if bias else (),
    )


def lead(scores: Logits) -> tuple[NDArray[np.intp], Logits]:
    """The leading class of `scores` `[..., C]`, and its margin over the next one."""
    leaders = scores.argmax(axis=-1)
    two = np.partition(scores, -2, axis=-1)
    return leaders, np.asarray(two[..., -1] - two[..., -2])


#: Pairs of sets of members whose weights are kept.
KEPT_PAIRS = 1024


class EarlyRule:
    """Decides for one bundle and one fusion whether an answer may end early."""

    def __init__(self, bounds: EarlyBounds, weights: FusionWeights, fusion: Fusion) -> None:
        self._weights, self._fusion = weights, fusion
        self._pulls = {(pull.members, pull.arrived): pull for pull in bounds.pulls}
        #: Pair -> weights of the whole for those that arrived, their own ones, and the bound.
        self._known: dict[
            tuple[Members, Members], tuple[SubsetWeights, SubsetWeights, float] | None
        ] = {}

    def enough(self, arrived: Mapping[int, Contribution], awaited: Collection[int]) -> bool:
        """Whether `arrived` has the label that it will have with the `awaited` members."""
        return bool(self.ends(arrived, awaited))

    def ends(
        self, arrived: Mapping[int, Contribution], awaited: Collection[int]
    ) -> NDArray[np.bool_]:
        """For contributions `[..., C]`, where that is so `[...]`.

        Only where it is also the label by the arrived ones' own weights, from which the answer's
        probabilities come.
        """
        pair = tuple(sorted({*arrived, *awaited})), tuple(sorted(arrived))
        if pair not in self._known:
            if len(self._known) >= KEPT_PAIRS:
                del self._known[next(iter(self._known))]
            self._known[pair] = self._look_up(*pair)
        known = self._known[pair]
        if known is None:
            return np.zeros(next(iter(arrived.values())).bag.shape[:-1], dtype=np.bool_)
        whole, own, bound = known
        leaders, margin = lead(fuse(arrived, whole))
        return np.asarray((margin > bound) & (leaders == fuse(arrived, own).argmax(axis=-1)))

    def _look_up(
        self, members: Members, arrived: Members
    ) -> tuple[SubsetWeights, SubsetWeights, float] | None:
        pull = self._pulls.get((members, arrived))
        if pull is None:
            return None
        rule, whole = self._rule(members)
        return part_of(whole, arrived, bias=True), self._rule(arrived)[1], getattr(pull, rule)

    def _rule(self, members: Members) -> tuple[Fusion, SubsetWeights]:
        fitted = self._weights.fitted(members) is not None
        rule = rule_for(members, self._fusion, fitted=fitted)
        return rule, weights_for(members, rule, self._weights)
