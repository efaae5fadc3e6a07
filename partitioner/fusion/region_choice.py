"""Choice of the part of the picture that each member sees, made on labelled pictures. Pure."""

from collections.abc import Callable, Sequence
from functools import cache, partial

from mdp.formats.plan import Region
from mdp.fusion.fuse import Contribution, fuse
from partitioner.fusion.stacking import Targets, fit_subset

#: At most so many pictures decide among the regions of each member that are best on the fewer ones
#: on which all are tried.
CHOSEN_ON, TRIED_ON, SHORTLISTED = 1000, 200, 3
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
    members, together = range(len(allowed)), _right_together(seen, targets)

    def alone(k: int, region: Region) -> int:
        return int((seen(k, region).bag.argmax(axis=1) == targets).sum())

    now = tuple(max(allowed[k], key=partial(alone, k)) for k in members)
    before = None
    while before != now and len(now) > 1:
        before = now
        for k in members:
            best = max(_exchanges(now, k, allowed[k]), key=together)
            if together(best) > together(now):
                now = best
    return list(now)


def shorten(
    allowed: Sequence[Sequence[Region]], seen: Seen, targets: Targets, most: int = SHORTLISTED
) -> list[list[Region]]:
    """At most `most` of each member's `allowed` regions, in their order, by few pictures.

    They are those with which it is right most often beside the regions that are best for the
    others, so that one of little worth alone stays where it adds the most.
    """
    best = tuple(choose_regions(allowed, seen, targets))
    together = _right_together(seen, targets)
    found = []
    for k, regions in enumerate(allowed):
        right = {one[k]: together(one) for one in _exchanges(best, k, regions)}
        # Of equally good ones the earlier stays, but for the best of all.
        ranked = sorted(regions, key=lambda region: (-right[region], region != best[k]))
        found.append([region for region in regions if region in ranked[:most]])
    return found


def _exchanges(
    now: tuple[Region, ...], k: int, regions: Sequence[Region]
) -> list[tuple[Region, ...]]:
    """All members' regions with each of `regions` for member `k`."""
    return [(*now[:k], region, *now[k + 1 :]) for region in regions]


def _right_together(seen: Seen, targets: Targets) -> Callable[[tuple[Region, ...]], int]:
    """Share of right answers of members that see such regions, stacked."""

    @cache
    def together(regions: tuple[Region, ...]) -> int:
        parts = {k: seen(k, region) for k, region in enumerate(regions)}
        fused = fuse(parts, fit_subset(parts, tuple(range(len(regions))), targets))
        return int((fused.argmax(axis=1) == targets).sum())

    return together
