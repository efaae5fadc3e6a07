"""Choice of the part of the picture that each member sees, made on labelled pictures. Pure."""

from collections.abc import Callable, Sequence
from functools import cache, partial

from mdp.formats.plan import Region
from mdp.fusion.fuse import Contribution, fuse
from partitioner.fusion.stacking import Targets, fit_subset

#: At most so many pictures decide.
CHOSEN_ON = 1000
#: Member k's logits `[N, C]` of the pictures where it sees a region.
Seen = Callable[[int, Region], Contribution]


def choose_regions(
    allowed: Sequence[Sequence[Region]], seen: Seen, targets: Targets
) -> list[Region]:
    """The regions with which members `0, 1, ...` are, stacked, right most often on `targets` `[N]`.

    Begins with the region that is best for each member alone, and exchanges one member's for
    another of its `allowed` ones until no exchange is right on more pictures. Of equally good
    regions the earlier is chosen.
    """
    members = range(len(allowed))

    def alone(k: int, region: Region) -> int:
        return int((seen(k, region).bag.argmax(axis=1) == targets).sum())

    @cache
    def together(regions: tuple[Region, ...]) -> int:
        parts = {k: seen(k, region) for k, region in enumerate(regions)}
        fused = fuse(parts, fit_subset(parts, tuple(members), targets))
        return int((fused.argmax(axis=1) == targets).sum())

    now = tuple(max(allowed[k], key=partial(alone, k)) for k in members)
    before = None
    while before != now and len(now) > 1:
        before = now
        for k in members:
            choices = [(*now[:k], region, *now[k + 1 :]) for region in allowed[k]]
            best = max(choices, key=together)
            if together(best) > together(now):
                now = best
    return list(now)
