"""The accuracy benchmark: what is chosen, what fleets gain, how names are read."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")

from benchmarks.accuracy import unseen
from benchmarks.accuracy.compare import FLEETS, Field, compare, difference
from benchmarks.accuracy.networks import Network, parts_of
from benchmarks.accuracy.page import draw, figures
from mdp.fusion.fuse import Contribution
from partitioner.data.datasets import SPLITS

pytestmark = pytest.mark.torch
CLASSES, PICTURES = 5, 400


def a_field(networks: Sequence[tuple[str, str, int, str, float]]) -> Field:
    """Networks of body, kind, seed, part of the picture and share of right answers, that err
    independently.
    """
    random = np.random.default_rng(0)
    targets = {split: random.integers(0, CLASSES, PICTURES) for split in SPLITS[1:]}

    def logits(wanted: NDArray[np.int64], share: float) -> Contribution:
        named = np.where(random.random(PICTURES) < share, wanted, (wanted + 1) % 5)
        noise = random.normal(size=(PICTURES, CLASSES))
        both = (3 * np.eye(CLASSES)[named] + noise).astype(np.float32)
        return Contribution(both, both)

    made = {}
    for body, kind, seed, seen, share in networks:
        name = "-".join(part for part in ("cifar", body, kind, f"s{seed}@{seen}") if part)
        ms = float(body.rpartition("-")[2]) / 100
        own = {split: logits(wanted, share) for split, wanted in targets.items()}
        made[name] = Network(name, body, kind, seed, ms, own.__getitem__, seen)
    return Field(made, targets["calibration"], targets["test"])


def test_names_of_jobs_are_read() -> None:
    assert parts_of("cifar-cs3-64-labels-s0") == ("cs3-64", "labels", 0)
    assert parts_of("tiny-vit8-96-s2") == ("vit8-96", "", 2)
    assert parts_of("cifar-teacher") == ("teacher", "teacher", 0)


def test_a_difference_is_paired_over_pictures_and_seeds() -> None:
    ours = [np.array([True, True, True, False]), np.array([True, True, False, False])]
    theirs = [np.array([True, False, True, False]), np.array([True, False, False, False])]
    found = difference(ours, theirs)
    assert found["mean"] == pytest.approx(0.25)
    assert found["spread"] == pytest.approx(0)
    # Only the second picture differs, and it does in both seeds.
    assert found["error"] == pytest.approx(np.std([0, 1, 0, 0]) / 2)
    assert difference(ours[:1], theirs)["spread"] is None


def test_fleets_are_held_against_the_single_network_that_sees_its_best_part() -> None:
    bodies = FLEETS["cifar10"][0]
    networks = [
        (body, "", seed, seen, share)
        for body in bodies
        for seed in range(3)
        for seen, share in (("whole", 0.7), ("centre88", 0.75))
    ]
    own = a_field([*networks, ("teacher-512", "teacher", 0, "whole", 0.99)])
    found = compare(own, "cifar10")
    (budget,) = found["budgets"]
    assert budget["budget_ms"] == pytest.approx(0.64)
    assert all(name.endswith("@centre88") for name in budget["single"])
    rows = {row["method"].partition(":")[0]: row for row in budget["rows"]}
    assert rows["best single network, whole picture"]["gain"]["mean"] < 0
    fleet, parts = rows["one of each"], rows["the same three, each in its part"]
    assert np.mean(parts["all_in"]) > np.mean(fleet["all_in"]) > np.mean(fleet["one_missing"])
    assert np.mean(fleet["one_missing"]) > np.mean([own.right([n]) for n in fleet["members"][0]])
    assert parts["gain"]["mean"] > 2 * parts["gain"]["error"] > 0
    assert budget["one_device"]["ms"] == pytest.approx(5.12)
    page = figures({"sets": {"cifar10": found}})
    assert page.count("| the same three, each in its part") == 1
    assert draw({"sets": {"cifar10": found}}).startswith(b"<?xml")


def test_seeds_of_a_prediction_share_a_row() -> None:
    def told(measured: float) -> dict[str, object]:
        return {
            "run": "second recipe: cifar10", "members": ["a"], "epochs": [20.0], "starts": ["cut"],
            "measured": measured, "predicted": 0.85, "low": 0.8, "high": 0.9, "unknown": False,
        }  # fmt: skip

    page = unseen.figures({"rows": [told(0.84), told(0.78)]})
    assert "| cifar10 | a | 20 | 2 | 81.0 | 85.0 | +4.0 | 80.0 to 90.0 | 1 of 2 |" in page
    assert "- **Networks**: 2, median error 4.0 points, 1 inside the interval" in page
    assert "- Fleets: none." in page
