"""The bundles that come along answer as their manifests say, at once and without any training."""

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from mdp.formats.bundle import Bundle
from tests.support.fleet import ROOT

BUNDLES = ROOT / "examples/bundles"
BUNDLE = BUNDLES / "cifar10"
#: No test here depends on a machine that has nothing else to do.
PATIENT = ("--deadline-ms", "10000")
#: Test pictures; what all members are right on, at least, and all but one.
PROMISED = {"cifar10": (10_000, 0.85, 0.85), "imagenette": (3_925, 0.96, 0.93)}
PICTURES = 500
#: What the four cameras of `parts` are right on, at least.
TOGETHER = 0.95
#: CIFAR-10 as a tree of JPEGs: a folder that the caller names, or an archive beside the project.
MDP = str(Path(sys.executable).parent / "mdp")
TREE = os.environ.get("MDP_CIFAR10")
ARCHIVE = ROOT.parent / "shared/data/cifar10.tar.xz"


@pytest.mark.parametrize("name", PROMISED)
def test_it_is_whole_small_and_accurate(name: str) -> None:
    pictures, together, one_missing = PROMISED[name]
    bundle = Bundle.open(BUNDLES / name)
    for file in bundle.manifest.files:
        bundle.verified(file)
    sizes = [file.stat().st_size for file in bundle.path.rglob("*")]
    assert sum(sizes) < 12e6
    assert max(sizes) < 5e6
    assert len(bundle.manifest.labels) == 10
    assert any("vit" in a.spec.outline for a in bundle.manifest.plan.assignments)
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    assert evaluation.pictures == pictures
    shares = {subset.members: subset.stacked for subset in evaluation.subsets}
    assert shares[0, 1, 2] >= together
    assert min(share for members, share in shares.items() if len(members) == 2) >= one_missing
    assert "Apache-2.0" in (bundle.path / "README.md").read_text()


def test_the_bundle_of_four_cameras_is_whole_small_and_accurate() -> None:
    bundle = Bundle.open(BUNDLES / "parts")
    for file in bundle.manifest.files:
        bundle.verified(file)
    files = [path for path in bundle.path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 6e6
    assert bundle.manifest.plan.cameras == ["top", "left", "right", "back"]
    # All cameras share one network, which is there once.
    models = [path for path in bundle.path.rglob("model.onnx") if not path.is_symlink()]
    assert len(models) == 1
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    shares = {subset.members: subset.stacked for subset in evaluation.subsets}
    assert shares[0, 1, 2, 3] >= TOGETHER
    best = max(member.accuracy for member in evaluation.members)
    assert shares[0, 1, 2, 3] >= best + 0.08
    assert evaluation.rejection
    assert evaluation.rejection.unknown_pictures
    assert "Apache-2.0" in (bundle.path / "README.md").read_text()
    scenes = sorted((bundle.path / "scenes").glob("*/*"))
    labels = {path.parent.name for path in scenes}
    assert labels == {*bundle.manifest.labels, "unknown"}
    assert len(scenes) == 60
    for scene in scenes:
        assert {path.stem for path in scene.iterdir()} == set(bundle.manifest.plan.cameras)


@pytest.mark.usefixtures("no_leaks")
def test_the_demo_shows_four_cameras_at_once(tmp_path: Path) -> None:
    work, seen = tmp_path / "work", tmp_path / "seen.json"
    command = [MDP, "demo", "--text", "--work", str(work), "--report", str(seen)]
    done = subprocess.run(
        [*command, *PATIENT], cwd=ROOT, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(seen.read_text())
    assert content["ok"] is True
    assert len(content["claims"]) == 11
    assert content["live"]["pictures"] == 48
    assert content["unknown"]["items"] == 12
    assert content["covered"]["device"] == "raspberry-pi-5-1"


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("name", PROMISED)
def test_the_demo_serves_it_without_training(tmp_path: Path, name: str) -> None:
    work, seen = tmp_path / "work", tmp_path / "seen.json"
    command = [MDP, "demo", "--text", "--bundle", str(BUNDLES / name)]
    done = subprocess.run(
        [*command, "--work", str(work), "--report", str(seen), *PATIENT],
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(seen.read_text())
    assert content["ok"] is True
    assert content["live"]["modes"] == ["stacked"]
    assert not (work / "bundle").exists()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CIFAR-10 with all of its test pictures and three of each class to train on."""
    if TREE:
        return Path(TREE)
    if not ARCHIVE.is_file():
        pytest.skip("CIFAR-10 is not at hand: set MDP_CIFAR10 to a folder with train/ and test/")
    folder = tmp_path_factory.mktemp("cifar10")
    with tarfile.open(ARCHIVE) as archive:
        few = (
            member
            for member in archive
            if "/test/" in member.name or (member.isfile() and member.name.endswith("/0001.jpg"))
            or member.name.endswith(("/0002.jpg", "/0003.jpg"))
        )  # fmt: skip
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder, members=few)
    return folder / "cifar10"


@pytest.mark.torch
def test_its_accuracy_is_as_stated(tree: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from partitioner.data.datasets import open_dataset
    from partitioner.export.evaluate import evaluate
    from tests.support.models.runs import QUIET

    bundle = Bundle.open(BUNDLE)
    data = open_dataset(str(tree), limit_test=PICTURES)
    wanted = json.loads((BUNDLE / "evaluation-500.json").read_text())
    assert data.test.digest == wanted["data_digest"]
    found = evaluate(bundle, data, None, tmp_path, QUIET).evaluation
    measured = bundle.manifest.evaluation
    assert measured is not None
    for ours, kept, said in zip(found.subsets, wanted["subsets"], measured.subsets, strict=True):
        assert list(ours.members) == kept["members"] == list(said.members)
        for rule in ("boosted", "stacked", "bagged"):
            # A picture may fall to the other side where processors round differently.
            assert getattr(ours, rule) == pytest.approx(kept[rule], abs=1.5 / PICTURES)
            share = getattr(said, rule)
            error = (share * (1 - share) / PICTURES) ** 0.5
            assert getattr(ours, rule) == pytest.approx(share, abs=3.5 * error)
