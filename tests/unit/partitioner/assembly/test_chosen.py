"""Networks with given weights: measured, chosen, and assembled with fitted classifiers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import save_file

from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import SubModelSpec
from partitioner.cli.assemble import assemble
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import open_dataset
from partitioner.networks.families import Backbone, FamilyMember, create
from partitioner.pilot.features import cut_features
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
