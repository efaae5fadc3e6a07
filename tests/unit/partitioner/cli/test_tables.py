"""The report of a build, for people."""

import msgspec
import pytest

from mdp.formats.bundle import Bundle, Manifest, Rejection
from mdp.formats.packaged import bundles_in_package
from partitioner.cli.tables import arrived_devices, rejection_of


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    """Of four cameras, measured on items of no class too."""
    return Bundle.open(bundles_in_package()["parts"]).manifest


def measured(manifest: Manifest) -> Rejection:
    assert manifest.evaluation is not None
    found = manifest.evaluation.rejection
    assert isinstance(found, Rejection)
    return found


@pytest.mark.parametrize(
    ("members", "expected"),
    [
        ((0, 1, 2, 3), "all"),
        ((0, 1, 3), "all but raspberry-pi-5-3"),
        ((0, 2), "raspberry-pi-5-1 + raspberry-pi-5-3"),
        ((1,), "raspberry-pi-5-2"),
        ((), ""),
    ],
)
def test_devices_that_are_in(manifest: Manifest, members: tuple[int, ...], expected: str) -> None:
    assert arrived_devices(members, manifest.plan) == expected


def test_of_two_devices_each_is_named(manifest: Manifest) -> None:
    two = msgspec.structs.replace(manifest.plan, assignments=manifest.plan.assignments[:2])
    assert arrived_devices((0, 1), two) == "raspberry-pi-5-1 + raspberry-pi-5-2"
    assert arrived_devices((1,), two) == "raspberry-pi-5-2"


def test_unknown_items_that_were_measured_have_a_table(manifest: Manifest) -> None:
    table = rejection_of(measured(manifest), manifest.plan)
    assert not isinstance(table, str)
    assert table.row_count == len(measured(manifest).subsets)


def test_without_unknown_items_a_line_says_so(manifest: Manifest) -> None:
    none = msgspec.structs.replace(measured(manifest), unknown_pictures=0)
    shares = [one.known for one in none.subsets]
    assert rejection_of(none, manifest.plan) == (
        f"items of a class that are called unknown: {min(shares):.1%} to {max(shares):.1%}, "
        f"with thresholds for {none.rate:.1%}; how many of no class are found "
        "is not known: a folder `unknown` has pictures of them"
    )
