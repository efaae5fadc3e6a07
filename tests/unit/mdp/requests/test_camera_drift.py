"""Cameras that were covered or turned, in looks without labels."""

from collections.abc import Collection, Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.fusion.fuse import Contribution, FusionWeights
from mdp.requests.camera_drift import CameraDrift, at_least

CLASSES = 10
NAMES = ("alpha", "beta", "gamma", "delta")


def fusion(cameras: int = 4, rate: float = 0.8) -> FusionWeights:
    """Plain means of outputs, and cameras that agree in `rate` of the looks."""
    return FusionWeights(num_classes=CLASSES, subsets=[], agreement=(rate,) * cameras)


def look(
    detector: CameraDrift, labels: tuple[int, ...], unknown: Collection[int] = ()
) -> tuple[str, ...]:
    """One look at which each camera's network is sure of its label; returns the suspects.

    For the members in `unknown` the item is of no class.
    """
    logits = 10 * np.eye(CLASSES, dtype=np.float32)
    seen = {k: Contribution(None, logits[label]) for k, label in enumerate(labels)}
    return detector.saw(seen, NAMES[: len(labels)], unknown)


def scenes(
    seed: int, count: int, *, rate: float = 0.85, covered: int | None = None
) -> Iterator[tuple[int, ...]]:
    """Labels of four cameras; each is right in `rate` of the scenes, a covered one says 0."""
    random = np.random.default_rng(seed)
    for _ in range(count):
        truth = int(random.integers(CLASSES))
        labels = [truth if random.random() < rate else int(random.integers(CLASSES)) for _ in NAMES]
        if covered is not None:
            labels[covered] = 0
        yield tuple(labels)


@pytest.mark.parametrize("covered", range(4))
def test_a_covered_camera_is_found_within_50_looks_and_well_again(covered: int) -> None:
    detector = CameraDrift(fusion())
    told = [look(detector, labels) for labels in scenes(covered, 100)]
    assert set(told) == {()}
    told = [look(detector, labels) for labels in scenes(10 + covered, 50, covered=covered)]
    assert told[-1] == (NAMES[covered],)
    told = [look(detector, labels) for labels in scenes(20 + covered, 100)]
    assert told[-1] == ()


def test_no_wrong_alarm_in_2_000_independent_looks() -> None:
    detector = CameraDrift(fusion())
    assert {look(detector, labels) for labels in scenes(7, 2000)} == {()}


@settings(max_examples=20)
@given(st.lists(st.integers(0, CLASSES - 1), max_size=60), st.integers(0, 3))
def test_agreeing_cameras_are_no_suspects(labels: list[int], odd: int) -> None:
    detector = CameraDrift(fusion())
    for label in labels:
        assert look(detector, (label,) * 4) == ()
    detector = CameraDrift(fusion())
    for label in labels:
        seen = [1] * 4
        seen[odd] = label
        assert look(detector, (seen[0], seen[1], seen[2], seen[3])) == ()


def test_a_scene_that_stands_still_counts_once() -> None:
    detector = CameraDrift(fusion())
    for _ in range(100):
        assert look(detector, (3, 3, 3, 5)) == ()


def test_items_of_no_class_make_no_suspects() -> None:
    detector = CameraDrift(fusion())
    told = {look(detector, labels, range(4)) for labels in scenes(3, 100, rate=0.0)}
    assert told == {()}
    # The others know what a covered camera lies about.
    told = {look(detector, labels, {0, 1, 2}) for labels in scenes(4, 50, covered=3)}
    assert (NAMES[3],) in told


def test_of_two_cameras_that_disagree_both_are_suspects() -> None:
    detector = CameraDrift(FusionWeights(num_classes=CLASSES, subsets=[], agreement=(0.8, 0.8)))
    for turn in range(40):
        told = look(detector, (turn % CLASSES, (turn + 1) % CLASSES))
    assert told == NAMES[:2]


def test_one_camera_alone_is_never_a_suspect() -> None:
    detector = CameraDrift(fusion())
    for turn in range(100):
        assert look(detector, (turn % CLASSES,)) == ()


def test_a_suspect_is_no_measure_of_the_others() -> None:
    detector = CameraDrift(fusion(3))
    for turn in range(60):
        now = turn % CLASSES
        told = look(detector, (now, now, (now + 3) % CLASSES))
    assert told == ("gamma",)
    for turn in range(60):
        now = turn % CLASSES
        # What beta says is now compared with alpha alone.
        told = look(detector, (now, (now + 1) % CLASSES, (now + 1) % CLASSES))
    assert set(told) >= {"alpha", "beta"}


@pytest.mark.parametrize("covered", range(4))
def test_without_known_agreement_the_first_looks_are_taken_for_normal(covered: int) -> None:
    detector = CameraDrift(FusionWeights(num_classes=CLASSES, subsets=[]))
    told = [look(detector, labels) for labels in scenes(covered, 600)]
    assert set(told) == {()}
    told = [look(detector, labels) for labels in scenes(10 + covered, 50, covered=covered)]
    assert told[-1] == (NAMES[covered],)


def test_a_camera_that_was_covered_from_the_start_is_not_noticed() -> None:
    detector = CameraDrift(FusionWeights(num_classes=CLASSES, subsets=[]))
    assert {look(detector, labels) for labels in scenes(3, 300, covered=1)} == {()}


@pytest.mark.parametrize(
    ("agreed", "counted", "rate"), [(0, 0, 0.0), (0, 50, 0.0), (50, 50, 0.9487), (80, 100, 0.7266)]
)
def test_the_lower_bound_of_a_share(agreed: int, counted: int, rate: float) -> None:
    assert at_least(agreed, counted) == pytest.approx(rate, abs=1e-4)


def test_cameras_that_always_agreed_are_watched_too() -> None:
    detector = CameraDrift(fusion(rate=1.0))
    told = [look(detector, labels) for labels in scenes(3, 50, rate=1.0, covered=1)]
    assert told[-1] == (NAMES[1],)
