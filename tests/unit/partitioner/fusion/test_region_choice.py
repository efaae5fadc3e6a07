"""Part of the picture that each member sees, chosen on labelled pictures."""

from collections.abc import Mapping

import numpy as np

from mdp.formats.plan import Region
from mdp.fusion.fuse import Contribution
from partitioner.fusion.region_choice import choose_regions, shorten
from partitioner.regions import CENTRES, CORNERS, REGIONS, WHOLE

COUNT, CLASSES = 400, 4
TARGETS = np.random.default_rng(0).integers(0, CLASSES, COUNT)


def answers(right: slice, seed: int = 0) -> Contribution:
    """Logits that tell the class of the pictures in `right`, and chance elsewhere."""
    logits = np.random.default_rng(seed).normal(size=(COUNT, CLASSES)).astype(np.float32)
    rows = np.arange(COUNT)[right]
    logits[rows, TARGETS[right]] += 8
    return Contribution(logits, logits)


def choose(members: int, told: Mapping[Region, slice]) -> list[Region]:
    """By members that know what `told` says where they see those regions, and little elsewhere."""
    known = {r: answers(told.get(r, slice(0, 80)), seed) for seed, r in enumerate(REGIONS)}
    return choose_regions([REGIONS] * members, lambda k, region: known[region], TARGETS)


def test_one_member_sees_what_is_best_alone() -> None:
    assert choose(1, {CENTRES[2]: slice(0, 300), CORNERS[0]: slice(0, 250)}) == [CENTRES[2]]


def test_members_see_what_is_best_together() -> None:
    # The second best alone knows nothing that the best does not; a poorer corner knows the rest.
    told = {WHOLE: slice(0, 280), CENTRES[1]: slice(0, 270), CORNERS[3]: slice(250, None)}
    assert set(choose(2, told)) == {WHOLE, CORNERS[3]}


def shortlist(told: Mapping[Region, slice], most: int) -> list[list[Region]]:
    known = {r: answers(told.get(r, slice(0, 80)), seed) for seed, r in enumerate(REGIONS)}
    return shorten([REGIONS] * 2, lambda k, region: known[region], TARGETS, most)


def test_a_region_that_adds_to_the_others_is_shortlisted() -> None:
    told = {WHOLE: slice(0, 280), CENTRES[1]: slice(0, 270), CORNERS[3]: slice(250, None)}
    best = [regions[0] for regions in shortlist(told, 1)]
    # The second best alone is not.
    assert set(best) == {WHOLE, CORNERS[3]}
    for region, regions in zip(best, shortlist(told, 3), strict=True):
        assert len(regions) == 3
        assert region in regions
        assert regions == [one for one in REGIONS if one in regions]


def test_of_equals_the_first_are_shortlisted() -> None:
    same = answers(slice(0, 200))
    found = shorten([REGIONS, CORNERS[:1]], lambda k, region: same, TARGETS, 3)
    assert found == [list(REGIONS[:3]), [CORNERS[0]]]


def test_of_equals_the_first_is_seen_by_all() -> None:
    same = answers(slice(0, 200))
    assert choose_regions([REGIONS] * 3, lambda k, region: same, TARGETS) == [WHOLE] * 3


def test_what_was_said_is_kept() -> None:
    said = CORNERS[1]
    known = {r: answers(slice(0, 300 if r == WHOLE else 100)) for r in REGIONS}
    found = choose_regions([(said,), REGIONS], lambda k, region: known[region], TARGETS)
    assert found == [said, WHOLE]
