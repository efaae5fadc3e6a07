"""Detects cameras that were covered, turned or moved, in looks without labels. Pure.

A member's own label is compared with the one that the others of the same look fuse to, where that
is probable. How often both agree is known from calibration scenes or, for a bundle without them,
from the first looks; a camera is suspected once it agrees half as often. The test is CUSUM (E. S.
Page, Continuous inspection schemes, Biometrika 41, 1954). At a threshold of log A, independent
looks bring a wrong alarm once in A of them or less often (G. Lorden, Procedures for reacting to a
change in distribution, Annals of Mathematical Statistics 42, 1971).

Looks at a scene that stands still are not independent: a look counts where the others' label
differs from the last one that counted. While it never changes, nothing is found out. Of two
cameras that disagree, both are suspected, and cameras that fail together may agree.

A look at an item of none of the classes says nothing of a camera: labels that are not right do not
agree. What a covered camera sees is no such item, so its others decide whether the look counts.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mdp.fusion.fuse import Contribution, FusionWeights, Logits, rule_for, weights_for

#: Looks that count, on average, to a camera's wrong alarm, and to a wrong end of a right one.
LOOKS_TO_ALARM, LOOKS_TO_END = 100_000, 1_000
#: The others' label counts from this probability on.
PROBABLE = 0.5
#: Agreement of a suspect, as a share of what is expected.
LOST = 0.5
#: Sets of members whose weights are kept.
_KEPT = 256
#: Of a bundle without known agreement, so many looks that count are taken for normal.
LOOKS_TO_LEARN = 60
#: Of the normal distribution, for a one-sided bound of 95 %.
_QUANTILE = 1.645
#: Agreement is never expected to be rarer (it would tell nothing) or more certain than this.
RATES = (0.2, 0.98)


class _Camera:
    """CUSUM of one camera."""

    __slots__ = ("agreed", "differed", "last", "learnt", "sum", "suspect")

    def __init__(self, rate: float | None) -> None:
        """`rate` is the expected agreement; None: it is learnt."""
        #: Looks so far in which both agreed, and all of them; None once the agreement is known.
        self.learnt: tuple[int, int] | None = (0, 0)
        if rate is not None:
            self._expect(rate)
        self.sum, self.suspect = 0.0, False
        #: The others' label in the last look that counted.
        self.last = -1

    def _expect(self, rate: float) -> None:
        rate = min(max(rate, RATES[0]), RATES[1])
        #: Log-likelihood ratios of a suspect over a working camera.
        self.agreed, self.differed = math.log(LOST), math.log((1 - LOST * rate) / (1 - rate))
        self.learnt = None

    def saw(self, own: int, others: int) -> bool:
        """Tell whether this look changes the verdict."""
        if others == self.last:
            return False
        self.last = others
        if self.learnt is not None:
            agreed, counted = self.learnt
            self.learnt = agreed + (own == others), counted + 1
            if self.learnt[1] == LOOKS_TO_LEARN:
                self._expect(at_least(*self.learnt))
            return False
        ratio = self.agreed if own == others else self.differed
        self.sum = max(0.0, self.sum - ratio if self.suspect else self.sum + ratio)
        return self.sum >= math.log(LOOKS_TO_END if self.suspect else LOOKS_TO_ALARM)


class CameraDrift:
    """The cameras of one fleet, in the looks of one client."""

    def __init__(self, fusion: FusionWeights) -> None:
        """Cameras of members with the `agreement` of `fusion`, learnt where that has none."""
        self._fusion, self._rates = fusion, fusion.agreement or ()
        self._cameras: dict[str, _Camera] = {}
        self._weights: dict[tuple[tuple[int, ...], frozenset[int]], tuple[Logits, Logits]] = {}

    def saw(
        self,
        contributions: Mapping[int, Contribution],
        devices: Sequence[str],
        unknown: Collection[int] = (),
    ) -> tuple[str, ...]:
        """Take in a look, contributions of ascending members and their devices; all suspects.

        For the members in `unknown` it does not count: their others take the item for unknown.
        """
        members = tuple(contributions)
        for k, device in zip(members, devices, strict=True):
            if device not in self._cameras:
                self._cameras[device] = _Camera(self._rates[k] if self._rates else None)
        cameras = [self._cameras[device] for device in devices]
        doubted = frozenset(k for k, one in zip(members, cameras, strict=True) if one.suspect)
        key = members, doubted
        if key not in self._weights:
            if len(self._weights) >= _KEPT:
                self._weights.clear()
            self._weights[key] = weights_beside(members, doubted, self._fusion)
        logits = np.array([each.bag for each in contributions.values()])
        labels = labels_beside(logits, *self._weights[key])
        changed = [
            camera
            for k, camera, (own, others) in zip(members, cameras, labels, strict=True)
            if k not in unknown and others is not None and camera.saw(own, others)
        ]
        if changed:
            self._judge(changed)
        return tuple(device for device, camera in self._cameras.items() if camera.suspect)

    def _judge(self, changed: Sequence[_Camera]) -> None:
        """Change the verdict on the worst, on which the evidence against the others depends."""
        worst = max(camera.sum for camera in changed)
        for camera in changed:
            if camera.sum == worst:
                camera.suspect = not camera.suspect
        for camera in self._cameras.values():
            camera.sum = 0.0


def at_least(agreed: int, counted: int) -> float:
    """The share of looks in which both agree, at least, where they did `agreed` of `counted` times.

    Wilson's bound, one-sided (E. B. Wilson, Journal of the American Statistical Association 22,
    1927).
    """
    count = max(counted, 1)
    rate = agreed / count
    centre = rate + _QUANTILE**2 / (2 * count)
    half = _QUANTILE * math.sqrt(rate * (1 - rate) / count + (_QUANTILE / (2 * count)) ** 2)
    return max(0.0, (centre - half) / (1 + _QUANTILE**2 / count))


def weights_beside(
    members: tuple[int, ...], doubted: frozenset[int], fusion: FusionWeights
) -> tuple[Logits, Logits]:
    """Weights `[2K, K]`, biases `[2K, C]`: each of K members, then its others but `doubted`."""
    groups: list[tuple[int, ...]] = [(k,) for k in members]
    groups += [tuple(i for i in members if i != k and i not in doubted) for k in members]
    weights = np.zeros((len(groups), len(members)), dtype=np.float32)
    bias = np.zeros((len(groups), fusion.num_classes), dtype=np.float32)
    for row, group in enumerate(groups):
        # Without others all classes are equally probable, too little to count.
        if group:
            fitted = weights_for(group, rule_for(group, "stacked", fusion), fusion)
            weights[row, [members.index(k) for k in group]] = fitted.b
            if fitted.bias:
                bias[row] = fitted.bias
    return weights, bias


def labels_beside(logits: Logits, weights: Logits, bias: Logits) -> list[tuple[int, int | None]]:
    """Of each of K members' `logits` `[K, C]`: its class, and its others' if that is probable."""
    fused = weights.dot(logits) + bias
    best, count = fused.argmax(axis=1).tolist(), len(logits)
    others = fused[count:]
    wholes = np.exp(others - others.max(axis=1, keepdims=True)).sum(axis=1).tolist()
    return [
        (best[row], best[count + row] if whole * PROBABLE < 1 else None)
        for row, whole in enumerate(wholes)
    ]
