"""Own rows of a network's classifier beside the fitted one."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from mdp.errors import InputError
from mdp.formats.profile import read_profiles
from partitioner.assembly.class_rows import rows_by_network
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import open_dataset
from partitioner.networks.families import Backbone, create, own_classifier
from partitioner.pilot.candidates import DeviceLatency
from partitioner.pilot.features import cut_features, own_rows
from partitioner.pilot.linear import fit
from partitioner.pilot.measure import PilotPictures, fit_member, run_pilot
from partitioner.run.progress import Progress
from tests.support.models.trees import write_tree

pytestmark = pytest.mark.torch
VIT = "test_vit"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("pictures") / "tree", each=50)


@pytest.fixture(scope="module")
def knowing(tmp_path_factory: pytest.TempPathFactory, tree: Path) -> Path:
    """A folder with a vision transformer whose own classifier tells the classes of `tree` apart."""
    folder = tmp_path_factory.mktemp("knowing")
    pictures = open_dataset(str(tree)).train
    (views,) = load_views(pictures, [View(160)], folder / "views", Progress(), "train")
    network = create(Backbone(VIT, 160), 5)
    depth, width = len(network.blocks), network.num_features
    save_file(network.state_dict(), folder / f"{VIT}.safetensors")
    found = cut_features(VIT, 160, folder / f"{VIT}.safetensors", [depth], views, lambda *_: None)
    token = found[depth][:, :width]
    classifier = fit(token, pictures.targets, 3, penalty=1.0, sharpness=8.0)
    with torch.no_grad():
        network.head.weight[[4, 0, 2]] = torch.from_numpy(classifier.weight).float()
        network.head.bias[[4, 0, 2]] = torch.from_numpy(classifier.bias).float()
    save_file(network.state_dict(), folder / f"{VIT}.safetensors")
    (folder / "labels.txt").write_text("\n".join(["Ring", "a", "stripes", "b", "CROSS"]))
    return folder


def test_a_whole_network_that_knows_the_classes_answers_with_its_own_rows(
    knowing: Path, tmp_path: Path
) -> None:
    """Three pictures of each class are too few to fit a classifier to."""
    few = write_tree(tmp_path / "few", each=5, seed=7)
    data = open_dataset(str(few))
    files, name = {VIT: knowing / f"{VIT}.safetensors"}, "n100"
    rows = rows_by_network(files, data.labels, knowing)
    assert rows == {VIT: [4, 0, 2]}
    (profile,) = read_profiles([name])
    devices = [DeviceLatency.of(profile, 3, sees=False)]
    progress, cache = Progress(), tmp_path / "cache"
    found = [
        run_pilot(data, files, devices, {}, 50.0, cache, progress, known) for known in (rows, {})
    ]
    with_rows, without = found
    depth = len(create(Backbone(VIT, 160), 0).blocks)
    blended = {
        (one.candidate.depth, one.candidate.spec.image_size)
        for one in with_rows.measured.values()
        if one.blend is not None
    }
    assert (depth, 160) in blended
    assert {layers for layers, _ in blended} == {depth}
    assert all(one.blend is None for one in without.measured.values())
    row = next(
        row
        for row, one in with_rows.measured.items()
        if (one.candidate.depth, one.candidate.spec.image_size) == (depth, 160)
    )
    assert with_rows.accuracy_of(row) >= without.accuracy_of(row)
    assert sum(one["own_rows"] for one in with_rows.to_json(10)["candidates"]) == len(blended)
    # What is written answers as what was measured: own rows and fitted ones are one classifier.
    pictures, measured = PilotPictures.of(data, 64), with_rows.measured[row]

    def written_with(known: list[int] | None) -> Any:
        path = tmp_path / "member.safetensors"
        fit_member(measured.candidate, files[VIT], known, pictures, 3, cache, progress, path)
        return load_file(path)["bag.weight"].numpy()

    written, fitted = written_with(rows[VIT]), written_with(None)
    blend = measured.blend
    assert blend is not None
    own = load_file(files[VIT])["head.weight"].numpy()[[4, 0, 2]]
    expected = blend.fitted_factor * fitted
    expected[:, : own.shape[1]] += blend.own_factor * own
    assert written == pytest.approx(expected, abs=1e-4)


def test_own_rows_that_read_another_feature_are_left_out(tmp_path: Path) -> None:
    """CAFormer's classifier reads what a layer of its head makes of the feature."""
    file = tmp_path / "caformer_s18.safetensors"
    tensors = {"head.fc.fc2.weight": torch.zeros(5, 2048), "head.fc.fc2.bias": torch.zeros(5)}
    save_file(tensors, file)
    assert own_classifier("caformer_s18", file) is not None
    assert own_rows("caformer_s18", 0, file, [0, 1]) is None


def test_names_of_classes_in_a_folder_are_of_its_networks_alone(
    knowing: Path, tmp_path: Path
) -> None:
    """Others were trained on other classes; a file that is no network's has none."""
    elsewhere = tmp_path / f"{VIT}.safetensors"
    elsewhere.write_bytes((knowing / elsewhere.name).read_bytes())
    (tmp_path / "yolov8n.safetensors").write_bytes(elsewhere.read_bytes())
    labels = ["cross", "ring", "stripes"]
    files = {VIT: knowing / elsewhere.name, "yolov8n": tmp_path / "yolov8n.safetensors"}
    assert list(rows_by_network(files, labels, knowing)) == [VIT]
    assert rows_by_network({VIT: elsewhere}, labels, knowing) == {}
    (tmp_path / "labels.txt").write_text("\n".join(["1", "2", "3"]))
    with pytest.raises(InputError, match=r"labels\.txt: names 3 classes, expected 5"):
        rows_by_network({VIT: elsewhere}, labels, tmp_path)


def test_own_rows_read_the_class_token_after_all_layers_alone(knowing: Path) -> None:
    file = knowing / f"{VIT}.safetensors"
    depth = len(create(Backbone(VIT, 160), 0).blocks)
    assert own_rows(VIT, depth - 1, file, [0, 1]) is None
    found = own_rows(VIT, depth, file, [4, 0])
    assert found is not None
    assert found.weight == pytest.approx(load_file(file)["head.weight"].numpy()[[4, 0]], abs=1e-6)
