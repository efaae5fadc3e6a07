"""The accuracy benchmark: what is chosen, what a part brings, how names are read."""

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.accuracy import unseen
from benchmarks.accuracy.compare import (
    FLEETS,
    Field,
    compared,
    difference,
    swapped,
)
from benchmarks.accuracy.networks import Network, parts_of
from benchmarks.accuracy.page import draw, figures
from mdp.fusion.fuse import Contribution

pytestmark = pytest.mark.torch
CLASSES, PICTURES = 5, 400


def a_field(networks: Sequence[tuple[str, str, int, float]]) -> Field:
    """Networks of body, kind, seed and share of right answers, that err independently."""
    random = np.random.default_rng(0)
    targets = [random.integers(0, CLASSES, PICTURES) for _ in range(2)]

    def logits(split: int, share: float) -> Contribution:
        named = np.where(random.random(PICTURES) < share, targets[split], (targets[split] + 1) % 5)
        noise = random.normal(size=(PICTURES, CLASSES))
        both = (3 * np.eye(CLASSES)[named] + noise).astype(np.float32)
        return Contribution(both, both)

    made = {}
    for body, kind, seed, share in networks:
        name = "-".join(part for part in ("cifar", body, kind, f"s{seed}") if part)
        ms = float(body.rpartition("-")[2]) / 100
        both = logits(0, share), logits(1, share)
        made[name] = Network(name, body, kind, seed, ms, *both)
    return Field(made, targets[0], targets[1])


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


def test_rivals_and_ablations_are_compared_and_shown() -> None:
    bodies = FLEETS["cifar10"][0]
    networks = [(body, "", seed, 0.75) for body in bodies for seed in range(3)]
    networks += [(body, "labels", 0, 0.3) for body in bodies]
    networks += [("teacher-512", "teacher", 0, 0.99)]
    own = a_field(networks)
    found = compared(own, "cifar10")
    (budget,) = found["budgets"]
    assert budget["budget_ms"] == pytest.approx(0.64)
    rows = {row["method"].partition(":")[0]: row for row in budget["rows"]}
    assert set(rows) >= {"one of each", "the same three, best answer that came"}
    fleet = next(row for method, row in rows.items() if method == "one of each")
    assert np.mean(fleet["all_in"]) > np.mean(fleet["one_missing"]) > np.mean(fleet["one_in"])
    assert fleet["gain"]["mean"] > 2 * fleet["gain"]["error"] > 0
    assert budget["one_device"]["ms"] == pytest.approx(5.12)
    parts = {row["part"]: row for row in found["ablations"]}
    labels = parts["the teacher, against labels alone (3 of 3 members)"]
    assert labels["brings"]["mean"] > labels["noise"]
    assert not any(part.startswith("boosting") for part in parts)
    page = figures({"sets": {"cifar10": found}, "checks": []})
    assert "| CIFAR-10 | the teacher, against labels alone (3 of 3 members) |" in page
    assert page.count("earns its place") >= 1
    assert draw({"sets": {"cifar10": found}}).startswith(b"<?xml")


def test_a_fleet_is_swapped_where_there_is_something_to_swap() -> None:
    own = a_field([("a-1", "", 0, 0.5), ("b-1", "", 0, 0.5), ("b-1", "boost", 0, 0.5)])
    base, boosted = ["cifar-a-1-s0", "cifar-b-1-s0"], ["cifar-a-1-s0", "cifar-b-1-boost-s0"]
    assert swapped(own, ("a-1", "b-1"), "boost", "") == (boosted, base)
    assert swapped(own, ("a-1", "b-1"), "stack", "boost") == (base, base)


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
