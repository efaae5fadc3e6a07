"""The figure of cameras: its numbers are the kept ones, and it draws."""

from benchmarks.scenes.figure import lost, means, of_bundle, picture
from mdp.formats.bundle import Bundle
from mdp.formats.packaged import bundle_in_package

CAMERAS = ("a", "b", "c")
SUBSETS = {
    (0,): 50.0,
    (1,): 60.0,
    (2,): 70.0,
    (0, 1): 71.0,
    (0, 2): 72.0,
    (1, 2): 73.0,
    (0, 1, 2): 80.0,
}


def test_means_are_of_all_subsets_of_a_size() -> None:
    assert means(SUBSETS) == [60.0, 72.0, 80.0]


def test_a_lost_camera_leaves_the_others() -> None:
    assert lost(CAMERAS, SUBSETS) == {"a": 73.0, "b": 72.0, "c": 71.0}


def test_it_shows_what_the_bundle_was_measured_to_be() -> None:
    cameras, subsets = of_bundle(Bundle.open(bundle_in_package("parts")))
    drawn = picture().decode()
    assert len(subsets) == 15
    for name, value in lost(cameras, subsets).items():
        assert f"without {name} {value:.1f}" in drawn
