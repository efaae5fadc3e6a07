"""Models that exist as one bundle: what is taken, what is refused, and what comes out."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest

pytest.importorskip("torch")

import torch
from onnx import TensorProto, helper, numpy_helper
from PIL import Image

from mdp.console import Interrupted
from mdp.errors import ConfigError, MDPError
from mdp.formats.bundle import Bundle
from mdp.formats.plan import Region
from mdp.formats.profile import Precision
from mdp.fusion.fuse import fuse
from mdp.pictures.crop import crop, load_picture
from mdp.runtimes.onnxruntime import open_session
from partitioner.assembly.members import Model, file_owners, read_map, read_names, rows_of
from partitioner.cli.assemble import assemble
from partitioner.data.crops import View, load_views, picture_of
from partitioner.data.datasets import PictureSet, open_dataset, thin_out
from partitioner.data.memmaps import Views
from partitioner.export.quantize import quantize_model
from partitioner.export.sessions import run_session
from partitioner.fusion.novelty_fit import tells_distance
from partitioner.fusion.stacking import fit_subset
from partitioner.networks.families import Backbone, FamilyMember, NetworkStage, create
from partitioner.networks.feature_distance import FARTHEST, features_at
from partitioner.regions import REGIONS
from tests.support.models.trees import CLASSES, write_tree

pytestmark = pytest.mark.torch
#: A convolutional network of timm with 0.4 million numbers, and a vision transformer of that size.
CONV, VIT = "test_efficientnet", "test_vit"
SIDE = 32
PROFILES = ["n100", "laptop-cpu"]
#: More names than the data has classes, and in another order.
NAMES = ("stripes", "dog", "ring", "cross")


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("pictures") / "tree", each=140)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with good and bad models and labels."""
    folder = tmp_path_factory.mktemp("parts")
    put_conv(folder)
    put_vit(folder)
    put_onnx(folder / "net.onnx")
    put_onnx(folder / "five.onnx", classes=5)
    put_onnx(folder / "wide.onnx", sides=(SIDE, 48))
    put_onnx(folder / "int.onnx", kind=TensorProto.INT64)
    put_onnx(folder / "free.onnx", sides=("H", "W"))
    torch.save(create(Backbone(CONV, SIDE), 5).state_dict(), folder / "five.pt")
    (folder / "others.txt").write_text("cat\ndog\nstripes\nfish\n")
    (folder / "map.txt").write_text("ring\tcircle\n")
    return folder


def put_conv(folder: Path, classes: int = len(NAMES)) -> None:
    torch.manual_seed(0)
    network = create(Backbone(CONV, SIDE), classes)
    torch.save(network.state_dict(), folder / "conv.pt")


def put_vit(folder: Path) -> None:
    torch.manual_seed(1)
    member = FamilyMember(Backbone(VIT, SIDE, 2), len(NAMES), boosting=True)
    torch.save(member.state_dict(), folder / "vit.pt")


def put_onnx(
    path: Path, kind: int = TensorProto.FLOAT, classes: int = len(NAMES), sides: Any = (SIDE, SIDE)
) -> None:
    """A classifier that says how red, green and blue a picture is, and one more number."""
    channels = ["N", 3, *sides] if kind == TensorProto.FLOAT else ["N", *sides, 3]
    weights = np.random.default_rng(0).normal(size=(3, classes)).astype(np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["images", "axes"], ["mean"], keepdims=0),
            helper.make_node("MatMul", ["mean", "w"], ["boost"]),
        ],
        "colours",
        [helper.make_tensor_value_info("images", kind, channels)],
        [helper.make_tensor_value_info("boost", TensorProto.FLOAT, ["N", classes])],
        [numpy_helper.from_array(np.array([2, 3]), "axes"), numpy_helper.from_array(weights, "w")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.save(model, path)


CONV_MODEL = {"timm": CONV, "weights": "conv.pt", "image_size": SIDE}
VIT_MODEL = {"timm": VIT, "weights": "vit.pt", "image_size": SIDE, "depth": 2}
ONNX_MODEL = {"onnx": "net.onnx", "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.5, 1.0]}


def write_models(folder: Path, *models: dict[str, Any]) -> Path:
    """A models.toml, its labels beside it."""
    (folder / "labels.txt").write_text("\n".join(NAMES) + "\n")
    entries = [
        {"device": device, "labels": "labels.txt"} | model
        for device, model in zip(PROFILES, models, strict=False)
    ]
    path = folder / "models.toml"
    path.write_bytes(msgspec.toml.encode({"models": entries}))
    return path


def run(parts: Path, folder: Path, tree: Path, *models: dict[str, Any]) -> Bundle:
    out = folder / "bundle"
    assemble(
        models=write_models(parts, *models),
        data=str(tree),
        profiles=PROFILES,
        out=out,
        limit=33,
        json=True,
    )
    return Bundle.open(out)


def together(bundle: Bundle, tree: Path, regions: Sequence[Region]) -> float:
    """On how many calibration pictures the members are right, stacked, where they see these."""
    from partitioner.export.sessions import contribution, open_member

    pictures = thin_out(open_dataset(str(tree)).calibration, 33)
    parts = {}
    for k, region in enumerate(regions):
        views = np.stack(
            [crop(load_picture(picture_of(one, None)), region, SIDE) for one in pictures.sources]
        )
        member = open_member(bundle.model(k), bundle.manifest.plan.assignments[k], len(CLASSES))
        parts[k] = contribution(member, views)
    fused = fuse(parts, fit_subset(parts, tuple(parts), pictures.targets))
    return float((fused.argmax(axis=1) == pictures.targets).sum())


def test_a_network_and_an_onnx_file_become_a_bundle(
    parts: Path, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted_on: list[View] = []

    def noted(pictures: PictureSet, views: list[View], *more: Any) -> list[Views]:
        fitted_on.extend(views)
        return load_views(pictures, views, *more)

    monkeypatch.setattr("partitioner.assembly.write.load_views", noted)
    left = Region(right=0.5)
    network = CONV_MODEL | {"licence": "MIT", "region": {"right": 0.5}}
    bundle = run(parts, tmp_path, tree, network, ONNX_MODEL)
    manifest = bundle.manifest
    seen = [a.region for a in manifest.plan.assignments]
    # What is said, and else what is best beside it.
    right = [together(bundle, tree, [left, region]) for region in REGIONS]
    assert len(set(right)) > 1
    assert seen[0] == left
    assert right[REGIONS.index(seen[1])] == max(right)
    # An ONNX file does not tell the distance of its features.
    assert bundle.fusion_weights().novelty
    assert not tells_distance(bundle.fusion_weights())
    assert fitted_on[-1] == View(SIDE, seen[1])
    assert manifest.labels == sorted(CLASSES)
    assert manifest.plan.teacher is None
    first, second = manifest.plan.assignments
    assert first.submodel is None
    assert first.spec.words == f"{SIDE} px, {CONV}"
    assert second.spec.outline == "net.onnx"
    assert second.network is not None
    assert second.network.macs == 3 * len(NAMES)
    assert "estimated" in first.why
    assert manifest.evaluation is not None
    assert len(manifest.evaluation.subsets) == 3
    assert "sha256" in manifest.provenance["model_0"]
    assert manifest.provenance["model_0"].endswith("licence: MIT")
    for name in manifest.files:
        bundle.verified(name)
    with pytest.raises(ConfigError, match="expected a plain ViT"):
        _ = manifest.plan.assignments[0].vit
    with pytest.raises(ConfigError, match="the plan has no teacher"):
        _ = manifest.plan.require_teacher()


def test_a_trained_member_is_quantized(parts: Path, tmp_path: Path, tree: Path) -> None:
    from partitioner.export.sessions import contribution, open_member

    bundle = run(parts, tmp_path, tree, VIT_MODEL | {"precision": "int8-static"})
    assert bundle.manifest.plan.assignments[0].spec.precision == "int8-static"
    noise = np.random.default_rng(0).integers(0, 256, (2, SIDE, SIDE, 3), dtype=np.uint8)
    found = contribution(
        open_member(bundle.model(0), bundle.manifest.plan.assignments[0], len(CLASSES)), noise
    )
    assert [head.shape for head in found.heads] == [(2, len(CLASSES))]
    assert bundle.fusion_weights().rules == ("stacked", "bagged")
    kinds = {
        t.data_type
        for t in onnx.load_from_string(bundle.content("submodels/0/model.onnx")).graph.initializer
    }
    assert TensorProto.INT8 in kinds


def test_timm_networks_tell_the_distance_of_their_features(
    parts: Path, tmp_path: Path, tree: Path
) -> None:
    data = tmp_path / "data"
    shutil.copytree(tree, data)
    random = np.random.default_rng(0)
    (data / "unknown").mkdir()
    for number in range(20):
        noise = random.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        Image.fromarray(noise).save(data / "unknown" / f"{number}.png")
    one_region: dict[str, Any] = {"region": {}}
    bundle = run(parts, tmp_path, data, VIT_MODEL | one_region, CONV_MODEL | one_region)
    assert bundle.manifest.labels == sorted(CLASSES)
    novelty, evaluation = bundle.fusion_weights().novelty, bundle.manifest.evaluation
    assert novelty
    assert (novelty.pictures, novelty.unknown) == (33, 10)
    assert all("distance" in one.weights for one in novelty.subsets if len(one.weights) > 1)
    assert evaluation is not None
    assert evaluation.rejection
    assert evaluation.rejection.unknown_pictures == 10
    assert [one.members for one in evaluation.rejection.subsets] == [(0,), (1,), (0, 1)]
    assert all(one.auc is not None for one in evaluation.rejection.subsets)
    # The mean over the classes says that noise is as far as anything.
    noise = random.integers(0, 256, (8, SIDE, SIDE, 3), dtype=np.uint8)
    (logits,) = run_session(open_session(bundle.verified("submodels/0/model.onnx")), noise, ["bag"])
    assert logits.mean(axis=1) == pytest.approx(-FARTHEST, abs=1e-3)


WRONG_LABELS = {"labels": "others.txt"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (CONV_MODEL | {"timm": "efficientnet_b99"}, "has no such model"),
        (CONV_MODEL | {"weights": "none.pt"}, "none.pt: expected a file of weights, found none"),
        ({"timm": CONV, "image_size": SIDE}, "expected `weights` beside `timm`, found none"),
        ({"timm": CONV, "weights": "conv.pt"}, "expected `image_size` beside `timm`, found none"),
        ({}, "expected either `onnx` or `timm`, found neither"),
        (CONV_MODEL | {"onnx": "net.onnx"}, "expected either `onnx` or `timm`, found both"),
        (CONV_MODEL | {"depth": 65}, "Expected `int` <= 64 - at `$.models[0].depth`, found 65"),
        (ONNX_MODEL | {"std": [1.0, 0.5, 0.0]}, "expected `std` above 0, found 0"),
        (CONV_MODEL | {"timm": "test_resnet"}, "expected the tensors of ResNet"),
        (CONV_MODEL | {"weights": "five.pt"}, "as many rows as its labels file has names"),
        (VIT_MODEL | {"depth": 1}, "expected the tensors of test_vit"),
        (VIT_MODEL | WRONG_LABELS, "has no class named cross, ring of the data (2 of 3"),
        (CONV_MODEL | {"map": "map.txt"}, "has no class named ring of the data"),
        (ONNX_MODEL | {"onnx": "five.onnx"}, "output boost is [0, 5], expected [N, 4]"),
        (ONNX_MODEL | {"onnx": "wide.onnx"}, "expected square pictures as float [N, 3, S, S]"),
        (ONNX_MODEL | {"onnx": "int.onnx"}, "expected square pictures as float [N, 3, S, S]"),
        (ONNX_MODEL | {"onnx": "free.onnx"}, "expected the key `image_size`"),
        (ONNX_MODEL | {"image_size": 48}, "takes pictures of 32 px, not `image_size` 48"),
        ({"onnx": "net.onnx"}, "takes floats: expected the keys `mean` and `std`"),
        (ONNX_MODEL | {"onnx": "labels.txt"}, "labels.txt: expected an ONNX model"),
    ],
)
def test_what_cannot_be_assembled_is_named(
    parts: Path, tmp_path: Path, tree: Path, model: dict[str, Any], expected: str
) -> None:
    with pytest.raises(MDPError) as error:
        run(parts, tmp_path, tree, model)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "bundle").exists()


def test_a_device_without_a_profile_is_named(parts: Path, tmp_path: Path, tree: Path) -> None:
    with pytest.raises(MDPError, match="device 'n100' has no profile in --profiles"):
        assemble(
            models=write_models(parts, CONV_MODEL),
            data=str(tree),
            profiles=["laptop-cpu"],
            out=tmp_path / "bundle",
        )


def test_a_bundle_that_was_there_stays_until_the_new_one_is_measured(
    parts: Path, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C says that it is as it was."""
    before = run(parts, tmp_path, tree, CONV_MODEL)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("partitioner.export.evaluate.evaluate", interrupt)
    with pytest.raises(Interrupted, match="is as it was"):
        run(parts, tmp_path, tree, ONNX_MODEL)
    after = Bundle.open(tmp_path / "bundle")
    assert (after.digest, after.manifest.evaluation) == (before.digest, before.manifest.evaluation)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]


def test_rows_are_found_by_name() -> None:
    assert rows_of(NAMES, ["cross", "ring"], {}, "x") == [3, 2]
    assert rows_of(NAMES, ["cross", "wolf"], {"wolf": "dog"}, "x") == [3, 1]
    with pytest.raises(MDPError, match="x: has several classes named a"):
        rows_of(["a", "b", "a"], ["a", "b"], {}, "x")
    with pytest.raises(MDPError, match="mapped to one"):
        rows_of(NAMES, ["cross", "wolf"], {"wolf": "cross"}, "x")


@pytest.mark.parametrize("text", ["a b\n", "a\t\n", "a\tb\na\tc\n", "a\tb\tc\n"])
def test_a_map_has_two_columns(tmp_path: Path, text: str) -> None:
    (tmp_path / "map.txt").write_text(text)
    with pytest.raises(ConfigError, match="expected a class of the data, a tab"):
        read_map(tmp_path / "map.txt")


def test_a_byte_order_mark_is_of_no_name(tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text("bolt\nnut\n", encoding="utf-8-sig")
    assert read_names(tmp_path / "labels.txt") == ["bolt", "nut"]


@pytest.mark.parametrize("text", ["", "one\n", "one\n\ntwo\n"])
def test_a_labels_file_names_a_class_on_each_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "labels.txt").write_text(text)
    with pytest.raises(
        ConfigError,
        match=r"the name of a class on each line, at least 2, found (line 2 empty|[01] in all)",
    ):
        read_names(tmp_path / "labels.txt")


def test_each_member_sees_its_own_camera(parts: Path, tmp_path: Path) -> None:
    """Another device's camera, which shows nothing, adds nothing; the front one's class shows."""
    random = np.random.default_rng(0)
    # What the colours' classifier takes for these classes.
    colours = {"cross": (0, 1, 1), "ring": (1, 1, 0), "stripes": (1, 0, 0)}
    for label, seen in colours.items():
        for n in range(60):
            scene = tmp_path / "scenes" / label / f"{n:02d}"
            scene.mkdir(parents=True)
            pixels = np.array(seen) * 200 + random.uniform(0, 20, (SIDE, SIDE, 3))
            Image.fromarray(pixels.astype(np.uint8)).save(scene / "front.png")
            Image.new("RGB", (SIDE, SIDE)).save(scene / "side.png")
    models: list[dict[str, Any]] = [
        ONNX_MODEL | {"camera": camera, "region": {}} for camera in ("front", "side")
    ]
    bundle = run(parts, tmp_path, tmp_path / "scenes", *models)
    assert bundle.manifest.plan.cameras == ["front", "side"]
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    shares = {subset.members: subset.stacked for subset in evaluation.subsets}
    assert shares[1,] == pytest.approx(1 / 3)
    assert shares[0,] == shares[0, 1] > 0.9


def test_cameras_of_one_network_share_a_file_made_for_the_pictures_of_all(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    greys = {"dark": 30, "bright": 220}
    random = np.random.default_rng(0)
    for label in ("cross", "ring", "stripes"):
        for n in range(80):
            scene = tmp_path / "scenes" / label / f"{n:02d}"
            scene.mkdir(parents=True)
            for camera, grey in greys.items():
                pixels = random.integers(grey - 20, grey + 20, (SIDE, SIDE, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(scene / f"{camera}.png")
    seen: dict[str, list[Views]] = {"measured from": [], "ranges of": []}

    def features(
        module: torch.nn.Module, place: str, pixels: Views, stage: NetworkStage | None
    ) -> torch.Tensor:
        seen["measured from"].append(pixels)
        return features_at(module, place, pixels, stage)

    def ranges(model: bytes, precision: Precision, pixels: Views, *, whole: bool) -> bytes:
        seen["ranges of"].append(pixels)
        return quantize_model(model, precision, pixels, whole=whole)

    monkeypatch.setattr("partitioner.assembly.write.features_at", features)
    monkeypatch.setattr("partitioner.assembly.write.quantize_model", ranges)
    models: list[dict[str, Any]] = [
        CONV_MODEL | {"camera": camera, "region": {}, "precision": "int8-static"}
        for camera in greys
    ]
    bundle = run(parts, tmp_path, tmp_path / "scenes", *models)
    files = bundle.manifest.files
    assert files["submodels/0/model.onnx"] == files["submodels/1/model.onnx"]
    for pixels in (*seen["measured from"], *seen["ranges of"]):
        means = pixels.mean(axis=(1, 2, 3))
        assert (means < 100).sum() == (means > 150).sum() == len(means) / 2
    # Once each, not once for each camera.
    assert [len(pictures) for pictures in seen.values()] == [1, 1]
    # Each looks at its own camera all the same.
    assert bundle.manifest.plan.cameras == ["dark", "bright"]


def test_only_what_is_equal_but_for_device_and_camera_is_shared() -> None:
    def model(device: str, **more: Any) -> Model:
        return Model(device=device, labels="l.txt", timm=CONV, weights="w", image_size=SIDE, **more)

    whole = Region()
    assert file_owners([model("a"), model("b")]) == [0, 1]  # their regions are chosen
    models = [
        model("a", region=whole, camera="x"),
        model("b", region=Region(right=0.5), camera="y"),
        model("c", region=whole, camera="y"),
        model("d", region=whole, camera="z", precision="int8-static"),
        model("e", region=whole, camera="z"),
    ]
    assert file_owners(models) == [0, 1, 0, 3, 0]


def test_a_camera_is_named_for_every_model_or_for_none(parts: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a `camera` for every model or for none"):
        run(parts, tmp_path, tmp_path, ONNX_MODEL | {"camera": "front"}, ONNX_MODEL)
