"""Bundles that come with the distribution: found by name, made whole where copies are left out."""

import json
import shutil
from pathlib import Path

import pytest

from mdp.errors import InputError
from mdp.formats import packaged
from mdp.formats.bundle import MANIFEST, Bundle, model_path
from mdp.formats.packaged import (
    bundle_by_name,
    bundle_in_package,
    bundles_in_package,
    unpack_bundle,
)


def test_equal_models_are_in_a_package_once(tmp_path: Path) -> None:
    whole = bundle_in_package("parts")
    assert unpack_bundle(whole, tmp_path / "unused") == whole
    assert not (tmp_path / "unused").exists()
    package = tmp_path / "package"
    shutil.copytree(whole, package, ignore=shutil.ignore_patterns("1", "2", "3"))
    made = unpack_bundle(package, tmp_path / "made")
    assert made == tmp_path / "made"
    bundle = Bundle.open(made)
    for assignment in bundle.manifest.plan.assignments:
        entry = bundle.manifest.files[model_path(assignment.k)]
        assert (made / model_path(assignment.k)).stat().st_size == entry.size_bytes
    assert bundle.digest == Bundle.open(whole).digest
    assert (made / "scenes").is_dir()


def test_a_bundle_that_there_is_not() -> None:
    with pytest.raises(InputError, match=r"bolts: expected a bundle's folder, or one of .*parts"):
        bundle_in_package("bolts")


@pytest.fixture
def lean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only packaged bundle, without the models that are copies of another's; an empty cache."""
    folder = tmp_path / "package/parts"
    shutil.copytree(
        bundle_in_package("parts"), folder, ignore=shutil.ignore_patterns("1", "2", "3")
    )
    monkeypatch.setattr(packaged, "bundles_in_package", lambda: {"parts": folder})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_a_folder_comes_before_a_name(lean: Path) -> None:
    (lean.parents[1] / "parts").mkdir()
    assert bundle_by_name(Path("parts")) == Path("parts")
    assert bundle_by_name(Path("some/bolts")) == Path("some/bolts")
    with pytest.raises(InputError, match=r"bolts: expected a bundle's folder, or one of .*parts"):
        bundle_by_name(Path("bolts"))
    assert bundle_by_name(None) is None


def test_what_is_named_is_made_whole_once(lean: Path, tmp_path: Path) -> None:
    found = bundle_by_name(Path("parts"))
    assert found is not None
    assert found.parent == tmp_path / "cache/mdp/bundles"
    bundle = Bundle.open(found)
    assert all((found / model_path(one.k)).is_file() for one in bundle.manifest.plan.assignments)
    first = (found / model_path(3)).stat().st_ino
    assert bundle_by_name(Path("parts")) == found
    assert (found / model_path(3)).stat().st_ino == first
    assert list(found.parent.iterdir()) == [found]


def test_an_upgrade_that_measured_the_same_models_anew_is_what_is_found(lean: Path) -> None:
    before = bundle_by_name(Path("parts"))
    manifest = lean / MANIFEST
    content = json.loads(manifest.read_text())
    content["evaluation"]["pictures"] = 9999
    manifest.write_text(json.dumps(content))
    after = bundle_by_name(Path("parts"))
    assert before is not None
    assert after is not None
    evaluation = Bundle.open(after).manifest.evaluation
    assert evaluation is not None
    assert evaluation.pictures == 9999
    assert Bundle.open(after).digest == Bundle.open(before).digest


def test_a_whole_one_stays_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert bundle_by_name(Path("parts")) == bundles_in_package()["parts"]


def test_a_cache_that_cannot_be_written(
    lean: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(InputError, match=r"file/mdp/bundles: cannot be written: Not a directory"):
        bundle_by_name(Path("parts"))
