"""Pages of the bundles to start from: their figures are those of the manifests."""

import re
from pathlib import Path

import pytest

from mdp.formats.bundle import Bundle

BUNDLES = Path(__file__).parents[3] / "examples/bundles"
NAMES = sorted(path.parent.name for path in BUNDLES.glob("*/manifest.json"))


def test_every_bundle_is_listed_and_has_a_page() -> None:
    listed = re.findall(
        r"^\| \[(\w+)\]\(\w+/README\.md\)", (BUNDLES / "README.md").read_text(), re.M
    )
    assert sorted(listed) == NAMES
    assert len(NAMES) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_what_its_bundle_is(name: str) -> None:
    bundle = Bundle.open(BUNDLES / name)
    plan, evaluation = bundle.manifest.plan, bundle.manifest.evaluation
    assert evaluation is not None
    page = (BUNDLES / name / "README.md").read_text()
    for part in ("**Recipe.**", "**Provenance and licence.**"):
        assert part in page
    right = {subset.members: subset.stacked for subset in evaluation.subsets}
    members = range(len(plan.assignments))
    without = [right[tuple(k for k in members if k != lost)] for lost in members]
    for k, assignment in enumerate(plan.assignments):
        # The last two columns: alone, and all others.
        row = re.search(rf"^\| {re.escape(assignment.device)}\b.*$", page, re.M)
        assert row is not None
        assert re.findall(r"([\d.]+) %", row[0])[-2:] == [
            f"{100 * share:.1f}" for share in (evaluation.members[k].accuracy, without[k])
        ]
    whole, least = (f"{100 * share:.1f} %" for share in (right[tuple(members)], min(without)))
    assert f"**{whole}**" in page
    assert f"{evaluation.pictures:,} test" in page
    overview = (BUNDLES / "README.md").read_text()
    assert re.search(rf"^\| \[{name}\]\(.*?\) \| {whole} \| {least} \|", overview, re.M)
