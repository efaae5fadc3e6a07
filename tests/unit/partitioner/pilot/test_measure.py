"""Measurements of the pilot with few pictures, and its remarks on classes and networks."""

import io
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from mdp.formats.profile import read_profiles
from partitioner.data.datasets import open_dataset
from partitioner.networks.families import Backbone, create
from partitioner.pilot.candidates import DeviceLatency
from partitioner.pilot.measure import LEAST, Pilot, PilotPictures, run_pilot
from partitioner.pilot.truth import OneLabel
from partitioner.run.progress import Progress
from tests.support.models.trees import CLASSES, write_tree

pytestmark = pytest.mark.torch
VIT = "test_vit"
(N100,) = read_profiles(["n100"])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files of a small vision transformer, and of a network that no catalogue has."""
    folder, found = tmp_path_factory.mktemp("weights"), {}
    for name in (VIT, "test_efficientnet"):
        torch.manual_seed(0)
        found[name] = folder / f"{name}.safetensors"
        save_file(create(Backbone(name, 160), 5).state_dict(), found[name])
    return found


def pilot_of(tree: Path, weights: dict[str, Path]) -> tuple[Pilot, str]:
    """The pilot of these pictures for one device, and the lines that it says."""
    said = io.StringIO()
    device = DeviceLatency.of(N100, len(CLASSES), sees=False)
    found = run_pilot(
        open_dataset(str(tree)), weights, [device], {}, 2.0, tree.parent, Progress(said)
    )
    return found, said.getvalue()


def test_five_pictures_of_a_class_are_enough_and_the_interval_is_wide(
    weights: dict[str, Path], tmp_path: Path
) -> None:
    pilot, said = pilot_of(write_tree(tmp_path / "tree", each=7), weights)
    assert pilot.count == 5 * len(CLASSES)
    together = pilot.to_json(12)["together"]
    assert 0 <= together["low"] <= together["accuracy"] <= together["high"] <= 1
    assert together["high"] - together["low"] > 0.25
    assert "one training picture" not in said


def test_classes_with_one_training_picture_are_named(
    weights: dict[str, Path], tmp_path: Path
) -> None:
    """A single picture left out cannot be recognised: of its class nothing else is known."""
    tree = write_tree(tmp_path / "tree", each=12)
    for path in sorted((tree / CLASSES[1]).iterdir())[3:]:
        path.unlink()
    pilot, said = pilot_of(tree, weights)
    assert isinstance(pilot.truth, OneLabel)
    single = pilot.truth.targets == 1
    assert single.sum() == 1
    for row in pilot.measured:
        answers = pilot.measured[row].left_out.answers
        assert np.isfinite(answers).all()
        assert answers[single].argmax(axis=1).tolist() != [1]
    assert (
        "one training picture alone, so that it counts as wrong in what is predicted: ring\n"
        in said
    )


def test_networks_of_unknown_latency_are_named(weights: dict[str, Path], tmp_path: Path) -> None:
    _, said = pilot_of(write_tree(tmp_path / "tree", each=7), weights)
    assert "not tried, as the latency is unknown: test_efficientnet\n" in said


def test_a_rare_class_is_among_the_pictures_that_are_compared(tmp_path: Path) -> None:
    tree = write_tree(tmp_path / "tree", each=60)
    for path in sorted((tree / CLASSES[1]).iterdir())[10:]:
        path.unlink()
    data = open_dataset(str(tree))
    of_each = np.bincount(data.train.targets)
    found = PilotPictures.of(data, 12)
    compared = np.bincount(found.pictures.targets)
    assert of_each.tolist() == [43, 7, 43]
    assert compared[1] == LEAST
    assert (compared >= LEAST).all()
    assert len(set(found.pictures.names)) == len(found.pictures) < 20
    assert [name.split("/")[0] for name in found.pictures.names] == [
        data.labels[target] for target in found.pictures.targets
    ]
