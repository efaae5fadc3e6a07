"""Parts of the picture's centred square that a member may see. Pure."""

from mdp.formats.plan import Region

#: The whole centred square.
WHOLE = Region()
#: Side of a corner, relative to the square's. Others were not tried.
PART_SIDE = 0.75
#: Centred parts, the largest first; the whole square is one of them.
CENTRES = tuple(Region(left=m, top=m, right=1 - m, bottom=1 - m) for m in (0.0, 0.0625, 0.125))
CORNERS = (
    Region(right=PART_SIDE, bottom=PART_SIDE),
    Region(left=1 - PART_SIDE, top=1 - PART_SIDE),
    Region(left=1 - PART_SIDE, bottom=PART_SIDE),
    Region(top=1 - PART_SIDE, right=PART_SIDE),
)
REGIONS = (*CENTRES, *CORNERS)


def where(region: Region) -> str:
    """A region as a person reads it."""
    if region == WHOLE:
        return "the whole square"
    wide, high = region.right - region.left, region.bottom - region.top
    names = {0.0: ("left", "top"), 1.0: ("right", "bottom")}
    # Where the free room beside the region is: all of it to one side, or evenly on both.
    across = names.get(region.left / (1 - wide) if wide < 1 else 0.5, ("", ""))[0]
    down = names.get(region.top / (1 - high) if high < 1 else 0.5, ("", ""))[1]
    place = " ".join(word for word in (down, across) if word) or "middle"
    return f"{wide:.0%} x {high:.0%} at the {place}"
