"""Parts of a bundle that calibration logits decide: weights, cascade and hashes."""

from pathlib import Path
from typing import Any

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

from mdp.files import read_json
from mdp.formats.bundle import Bundle, file_entry
from mdp.fusion.fuse import Contribution, FusionWeights
from mdp.testing.bundles import write_bundle
from partitioner.fusion.bundle_fit import TrainingAnswers, agreement, fit_bundle
from partitioner.fusion.cascade_fit import fit_cascade
from partitioner.fusion.novelty_fit import fit_novelty
from partitioner.fusion.stacking import fit_fusion


def test_weights_are_written_and_every_file_is_hashed(tmp_path: Path) -> None:
    folder, random = write_bundle(tmp_path / "bundle"), np.random.default_rng(0)
    manifest = Bundle.open(folder).manifest
    targets = random.integers(0, 3, 600)
    contributions = {
        k: Contribution(*(4 * np.eye(3)[targets] + random.normal(size=(2, 600, 3))))
        for k in range(3)
    }
    files, cascade = fit_bundle(folder, manifest.plan, contributions, targets)
    fusion = read_json(folder / "fusion.json", FusionWeights)
    assert replace(fusion, novelty=UNSET) == fit_fusion(contributions, targets)
    assert fusion.novelty == fit_novelty(contributions, fusion)
    assert cascade == fit_cascade(manifest.plan, contributions, targets, fusion)
    assert cascade is not None
    assert b'"agreement"' not in (folder / "fusion.json").read_bytes()
    assert files == {name: file_entry(folder / name) for name in manifest.files}
    assert files["fusion.json"] != manifest.files["fusion.json"]


def test_a_network_before_its_training_says_how_good_the_trained_one_is(tmp_path: Path) -> None:
    folder, random = write_bundle(tmp_path / "bundle"), np.random.default_rng(1)
    plan = Bundle.open(folder).manifest.plan

    def answers(
        of: np.ndarray, noises: tuple[float, ...], size: float = 1.0
    ) -> dict[int, Contribution]:
        truth = size * np.eye(3)[of]
        drawn = [truth + size * noise * random.normal(size=truth.shape) for noise in noises]
        return {k: Contribution(None, head.astype(np.float32)) for k, head in enumerate(drawn)}

    def shares(known: dict[int, Contribution], of: np.ndarray, more: TrainingAnswers | None) -> Any:
        fit_bundle(folder, plan, known, of, more=more)
        fusion = read_json(folder / "fusion.json", FusionWeights)
        weights = next(one.b for one in fusion.subsets if one.members == (0, 1, 2))
        return np.array(weights) / sum(weights)

    few, many, every = np.arange(60) % 3, np.arange(600) % 3, frozenset({0, 1, 2})
    trained, before = (0.6, 0.9, 0.9), (0.7, 1.0, 1.0)
    right = shares(answers(np.arange(9000) % 3, trained, 5.0), np.arange(9000) % 3, None)
    apart = []
    for _ in range(12):
        known, frozen = answers(few, trained, 5.0), answers(many, before, 2.0)
        alone = shares(known, few, None)
        fitted = shares(known, few, TrainingAnswers(frozen, many, every))
        # The size of the logits before says nothing of theirs now.
        louder = {k: Contribution(None, 7 * one.bag) for k, one in frozen.items()}
        again = shares(known, few, TrainingAnswers(louder, many, every))
        np.testing.assert_allclose(again, fitted, atol=0.02)
        apart.append([np.abs(one - right).sum() for one in (alone, fitted)])
    without, with_them = np.mean(apart, axis=0)
    assert with_them < 0.7 * without


def test_pictures_of_no_class_choose_the_score(tmp_path: Path) -> None:
    folder, random = write_bundle(tmp_path / "bundle"), np.random.default_rng(0)
    plan, targets = Bundle.open(folder).manifest.plan, np.arange(30) % 3
    known, strange = (
        {
            k: Contribution(
                None, (signal * np.eye(3)[targets] + random.normal(size=(30, 3))).astype(np.float32)
            )
            for k in range(3)
        }
        for signal in (4.0, 0.5)
    )
    said: list[str] = []
    fit_bundle(folder, plan, known, targets, unknown=strange, note=said.append)
    fusion = read_json(folder / "fusion.json", FusionWeights)
    assert fusion.novelty == fit_novelty(known, fusion, unknown=strange)
    assert fusion.novelty
    assert fusion.novelty.unknown == 30
    assert len(said) == 1
    assert said[0].startswith("unknown items: 30 calibration pictures support no rate")


def test_cameras_get_how_often_each_agrees_with_the_others(tmp_path: Path) -> None:
    folder, random = write_bundle(tmp_path / "bundle"), np.random.default_rng(0)
    plan = Bundle.open(folder).manifest.plan
    own = [replace(part, camera=f"side-{part.k}") for part in plan.assignments]
    targets = random.integers(0, 3, 400)
    signal, noise = 4 * np.eye(3)[targets], (0.1, 0.1, 8.0)
    contributions = {
        k: Contribution(None, (signal + spread * random.normal(size=(400, 3))).astype(np.float32))
        for k, spread in enumerate(noise)
    }
    fit_bundle(folder, replace(plan, assignments=own), contributions, targets)
    fusion = read_json(folder / "fusion.json", FusionWeights)
    assert fusion.agreement == agreement(contributions, fusion)
    assert isinstance(fusion.agreement, tuple)
    assert len(fusion.agreement) == 3
    assert min(fusion.agreement[:2]) > 0.98
    assert 0.3 < fusion.agreement[2] < 0.75
