"""Items that differ, sides that are blind, and cameras that have moved."""

import numpy as np
import pytest

from mdp.fusion.anomaly_table import MAXIMUM, Anomaly, ScoreTail, SubsetAnomaly
from mdp.fusion.fuse import list_subsets
from mdp.requests.inspection import Inspector, blind_sides

DEVICES = {0: "a", 1: "b", 2: "c"}
TAIL = ScoreTail(scores=(0.0, 0.3, 0.7, 1.0), decade=1.0)


def inspector(found: dict[int, float] | None = None) -> Inspector:
    """Thresholds of 2 decades; `found` is the share of defects that so many members find."""
    subsets = [
        SubsetAnomaly(
            size=len(one), thresholds=(2.0,), members=one, found=(found[len(one)],) if found else ()
        )
        for one in list_subsets(range(3))
    ]
    return Inspector(
        Anomaly(
            tails=(TAIL,) * 3,
            power=MAXIMUM,
            rates=(0.01,),
            default=0.01,
            good=99,
            subsets=subsets,
            defective=30 if found else 0,
        )
    )


def looks(one: Inspector, count: int, high: int | None = None, also: int | None = None) -> None:
    """So many looks at other items, at which the members `high` and `also` find a difference."""
    random = np.random.default_rng(0)
    for _ in range(count):
        seen = {
            k: float(random.uniform(5, 30)) if k in (high, also) else float(random.uniform(0, 1.5))
            for k in DEVICES
        }
        one.saw(seen, DEVICES)


def test_one_camera_is_enough_to_find_a_difference() -> None:
    one = inspector({1: 0.4, 2: 0.7, 3: 0.9})
    surprises = one.surprises({0: 0.5, 1: 3.5, 2: 0.2})
    found = one.difference(surprises)
    assert found is not None
    assert (found.normal, found.good_rejected) == (False, 0.01)
    assert found.anomaly == pytest.approx(1.5)
    assert found.defects_missed == pytest.approx(0.1)
    assert one.alone(1, surprises[1]) == pytest.approx(1.5)
    without = one.difference({k: surprises[k] for k in (0, 2)})
    assert without is not None
    assert without.normal
    assert without.defects_missed == pytest.approx(0.3)
    assert (without.defects_missed_least, without.defects_missed_most) == (0.1666, 0.4788)
    assert one.difference({}) is None


def test_what_is_hardly_above_the_threshold_is_called_as_its_number_says() -> None:
    found = inspector().difference({0: 2.00004})
    assert found is not None
    assert (found.normal, found.anomaly) == (True, 0.0)
    found = inspector().difference({0: 2.00006})
    assert found is not None
    assert (found.normal, found.anomaly) == (False, 0.0001)


def test_without_measured_defects_nothing_is_said_of_them() -> None:
    found = inspector().difference({0: 0.5})
    assert found is not None
    assert found.defects_missed is None
    assert (found.defects_missed_least, found.defects_missed_most) == (None, None)


def test_a_moved_camera_is_told_from_defects() -> None:
    one = inspector()
    looks(one, 6, high=1)
    assert not one.cameras_moved
    looks(one, 6, high=1)
    assert one.cameras_moved == {"b"}
    looks(one, 10)
    assert not one.cameras_moved


def test_a_fifth_of_the_items_may_be_faulty_on_one_side() -> None:
    one = inspector()
    for _ in range(100):
        looks(one, 4)
        looks(one, 1, high=2)
    assert not one.cameras_moved


def test_items_that_two_cameras_find_faulty_say_nothing_of_a_camera() -> None:
    one = inspector()
    looks(one, 50, high=0, also=2)
    assert not one.cameras_moved


def test_a_scene_that_stands_still_is_one_item() -> None:
    one = inspector()
    for _ in range(100):
        one.saw({0: 0.5, 1: 12.0, 2: 0.3}, DEVICES)
        # The noise of a camera makes no other item.
        one.saw({0: 0.6, 1: 14.0, 2: 0.8}, DEVICES)
    assert not one.cameras_moved


def test_a_camera_that_is_suspected_already_or_alone_is_not_judged() -> None:
    one = inspector()
    random = np.random.default_rng(0)
    for _ in range(50):
        one.saw({0: 0.5, 1: float(random.uniform(5, 30)), 2: 0.3}, DEVICES, suspects=("b",))
        one.saw({1: float(random.uniform(5, 30))}, DEVICES)
    assert not one.cameras_moved


def test_sides_that_do_not_count_are_blind() -> None:
    assert blind_sides(["a", "b", "c"], [0, 2]) == ("b",)
    assert blind_sides(["a", "b"], [0, 1]) == ()
