"""Networks with given weights: measured, chosen, and assembled with fitted classifiers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file, save_file

from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import read_profiles
from partitioner.assembly.class_rows import rows_by_network
from partitioner.cli.assemble import assemble
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import open_dataset
from partitioner.networks.families import Backbone, FamilyMember, create
from partitioner.pilot.candidates import DeviceLatency
from partitioner.pilot.features import cut_features, own_rows
from partitioner.pilot.linear import fit
from partitioner.pilot.measure import Pictures, run_pilot, write_member
from partitioner.run.progress import Progress
from tests.support.models.trees import CLASSES, write_scenes, write_tree

pytestmark = pytest.mark.torch
VIT = "test_vit"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small vision transformer, and a network that no catalogue has."""
    folder = tmp_path_factory.mktemp("weights")
    for name in (VIT, "test_efficientnet"):
        torch.manual_seed(0)
        state = create(Backbone(name, 160), 5).state_dict()
        save_file(state, folder / f"{name}.safetensors")
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("pictures") / "tree", each=50)


def run(out: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[Bundle, Any]:
    """The bundle, and what the command prints as JSON."""
    import json

    assemble(out=out, limit=64, json=True, **options)
    return Bundle.open(out), json.loads(capsys.readouterr().out)


def test_depths_are_measured_and_the_chosen_cut_is_what_the_bundle_serves(
    weights: Path, tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, said = run(
        tmp_path / "bundle",
        capsys,
        weights=weights,
        latency_ms=5.0,
        data=str(tree),
        profiles=["n100"],
    )
    pilot, depth = said["pilot"], len(create(Backbone(VIT, 160), 0).blocks)
    measured = {(one["network"], one["image_size"], one["depth"]) for one in pilot["candidates"]}
    assert {of for of, _, _ in measured} == {VIT}
    assert {layers for _, _, layers in measured} == set(range(1, depth + 1))
    plan, evaluation = bundle.manifest.plan, bundle.manifest.evaluation
    assert plan.target_ms == 5.0
    assert evaluation is not None
    for assignment, member in zip(plan.assignments, evaluation.members, strict=True):
        assert isinstance(assignment.submodel, SubModelSpec)
        chosen = pilot["chosen"][assignment.device]
        assert chosen["network"] == (
            f"{VIT}, first {assignment.submodel.depth} layers at "
            f"{assignment.submodel.image_size} px"
        )
        # A cut with random weights still tells rings from stripes; both were measured by pictures
        # that the classifier had not seen.
        assert member.accuracy > 0.6
        assert member.accuracy == pytest.approx(chosen["accuracy"], abs=0.25)
        assert chosen["latency_ms"] <= 5.0
    assert bundle.manifest.provenance[f"given_{VIT}"].startswith(f"{VIT}.safetensors, sha256 ")
    assert pilot["together"]["low"] < pilot["together"]["accuracy"] < pilot["together"]["high"]


def test_features_of_a_depth_are_those_of_the_network_cut_there(weights: Path, tree: Path) -> None:
    pictures = open_dataset(str(tree)).calibration
    (views,) = load_views(pictures, [View(64)], tree.parent / "views", Progress(), "test")
    found = cut_features(VIT, 64, weights / f"{VIT}.safetensors", [1, 2], views, lambda *_: None)
    for depth in (1, 2):
        backbone = Backbone(VIT, 64, depth, "tokens")
        member = FamilyMember(backbone, 3, weights / f"{VIT}.safetensors").eval()
        with torch.inference_mode():
            pixels = torch.from_numpy(np.array(views)).permute(0, 3, 1, 2).float()
            own = member(pixels).feature.numpy()
        # Measured in bf16 where the processor has it.
        assert found[depth] == pytest.approx(own, abs=0.1)


def test_each_device_with_a_camera_is_measured_on_its_own_pictures(
    weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes = write_scenes(tmp_path / "scenes", each=24)
    bundle, said = run(
        tmp_path / "bundle",
        capsys,
        weights=weights,
        latency_ms=5.0,
        data=str(scenes),
        profiles=["n100", "laptop-cpu"],
        camera=["n100=left", "laptop-cpu=right"],
    )
    plan = bundle.manifest.plan
    assert {a.device: a.camera for a in plan.assignments} == {"n100": "left", "laptop-cpu": "right"}
    train = open_dataset(str(scenes), cameras=["left", "right"]).train
    whole = [source for source in train.sources if len(source) == 2]  # type: ignore[arg-type]
    assert said["pilot"]["pictures"] == len(whole) == len(train) - 1
    assert bundle.manifest.labels == sorted(CLASSES)
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    assert {subset.members for subset in evaluation.subsets} == {(0,), (1,), (0, 1)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "expected either --models or --weights, got neither"),
        ({"weights": True, "models": True}, "expected either --models or --weights, got both"),
        ({"weights": True}, "--weights: expected --latency-ms beside it, got none"),
        ({"models": True, "latency_ms": 5.0}, "expected --weights beside them, got --models"),
        (
            {"weights": True, "latency_ms": 5.0, "camera": ["n100=left"]},
            "--camera: expected one for every device, got none: laptop-cpu",
        ),
        (
            {"weights": True, "latency_ms": 5.0, "camera": ["board=left"]},
            "--camera: 'board' has no profile in --profiles",
        ),
        ({"weights": True, "latency_ms": 0.1}, "--latency-ms 0.1: nothing fits 'n100'"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    weights: Path, tree: Path, tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    given = options | {
        name: path
        for name, path in (("weights", weights), ("models", tmp_path / "models.toml"))
        if name in options
    }
    with pytest.raises(InputError) as error:
        assemble(data=str(tree), profiles=["n100", "laptop-cpu"], out=tmp_path / "bundle", **given)
    assert expected in str(error.value)
    assert not (tmp_path / "bundle").exists()


def test_a_folder_without_networks_says_what_was_expected(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    with pytest.raises(
        InputError, match="expected a plain vision transformer or a network of the catalogue"
    ):
        assemble(
            weights=tmp_path / "weights",
            latency_ms=5.0,
            data=str(tree),
            profiles=["n100"],
            out=tmp_path / "bundle",
        )


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
    assert sum(one["own_rows"] for one in with_rows.to_json()["candidates"]) == len(blended)
    # What is written answers as what was measured: own rows and fitted ones are one classifier.
    pictures, measured = Pictures.of(data, 64), with_rows.measured[row]
    write_member(measured, files[VIT], pictures, 3, cache, progress, tmp_path / "m.safetensors")
    written = load_file(tmp_path / "m.safetensors")["bag.weight"].numpy()
    write_member(
        without.measured[row], files[VIT], pictures, 3, cache, progress, tmp_path / "f.safetensors"
    )
    fitted = load_file(tmp_path / "f.safetensors")["bag.weight"].numpy()
    blend = measured.blend
    assert blend is not None
    own = load_file(files[VIT])["head.weight"].numpy()[[4, 0, 2]]
    expected = blend.own_factor * np.hstack([own, np.zeros_like(own)])
    assert written == pytest.approx(expected + blend.fitted_factor * fitted, abs=1e-4)


def test_own_rows_read_the_class_token_after_all_layers_alone(knowing: Path) -> None:
    file = knowing / f"{VIT}.safetensors"
    depth = len(create(Backbone(VIT, 160), 0).blocks)
    assert own_rows(VIT, 160, depth - 1, file, [0, 1]) is None
    found = own_rows(VIT, 96, depth, file, [4, 0])
    assert found is not None
    width = found.weight.shape[1] // 2
    assert not found.weight[:, width:].any()
    assert found.weight[:, :width] == pytest.approx(
        load_file(file)["head.weight"].numpy()[[4, 0]], abs=1e-6
    )
