"""A cascade's rule: its first members, and the probability that ends it. Plain records.

The members of the first stage are asked alone. Their fused answer is final where its probability is
above a threshold; otherwise the others are asked as well. Threshold and members are fitted to
calibration pictures (`partitioner.fusion.cascade_fit`).
"""

from typing import Annotated

from msgspec import Meta

from mdp.files import Record
from mdp.fusion.fuse import Fusion, Share


class Cascade(Record, frozen=True):
    """Asking in two stages; `cascade` in a bundle's manifest."""

    #: Members of the first stage, ascending.
    first: Annotated[tuple[int, ...], Meta(min_length=1)]
    #: Calibration pictures that it was fitted to.
    pictures: Annotated[int, Meta(ge=1)]
    #: Under each fusion rule, the probability above which the first stage's answer is final; 1 is
    #: never.
    stacked: Share
    bagged: Share
    #: Share of the calibration pictures for which the others are asked, stacked.
    escalated: Share
    #: None without boost heads.
    boosted: Share | None = None

    def __post_init__(self) -> None:
        if list(self.first) != sorted(set(self.first)) or self.first[0] < 0:
            raise ValueError("`first` has to be distinct, not negative and ascending")

    def threshold(self, fusion: Fusion) -> float:
        """The probability above which the first stage's answer is final under `fusion`.

        Without boost heads, a boosted answer is a bagged one.
        """
        value: float | None = getattr(self, fusion)
        return self.bagged if value is None else value
