"""The items that come by in the live demo, and bundles that come with the distribution."""

import shutil
from itertools import islice
from pathlib import Path

import pytest

from mdp.demo.live import items_of
from mdp.demo.scenes import Scenes
from mdp.errors import InputError
from mdp.formats.bundle import Bundle, model_path
from mdp.formats.packaged import packaged_bundle, unpacked_bundle


def scene(name: str) -> dict[str, Path]:
    return {"top": Path(name)}


def test_every_ninth_item_is_of_no_class_and_all_come_round() -> None:
    known = [(str(number), scene(f"k{number}")) for number in range(16)]
    scenes = Scenes({"alpha": "top"}, known, [scene("u0"), scene("u1"), scene("u2")])
    some = list(islice(items_of(scenes), 54))
    assert [one.number for one in some] == list(range(1, 55))
    assert [n for n, one in enumerate(some, 1) if one.label is None] == [9, 18, 27, 36, 45, 54]
    strange = [one.scene["top"].name for one in some if one.label is None]
    assert strange == ["u0", "u1", "u2"] * 2
    assert [one.label for one in some if one.label is not None] == [label for label, _ in known] * 3


def test_without_items_of_no_class_none_comes_by() -> None:
    scenes = Scenes({"alpha": "top"}, [(str(n), scene(f"k{n}")) for n in range(9)], [])
    assert all(one.label is not None for one in islice(items_of(scenes), 40))


def test_equal_models_are_in_a_package_once(tmp_path: Path) -> None:
    whole = packaged_bundle("parts")
    assert unpacked_bundle(whole, tmp_path / "unused") == whole
    assert not (tmp_path / "unused").exists()
    package = tmp_path / "package"
    shutil.copytree(whole, package, ignore=shutil.ignore_patterns("1", "2", "3"))
    made = unpacked_bundle(package, tmp_path / "made")
    assert made == tmp_path / "made"
    bundle = Bundle.open(made)
    for assignment in bundle.manifest.plan.assignments:
        entry = bundle.manifest.files[model_path(assignment.k)]
        assert (made / model_path(assignment.k)).stat().st_size == entry.size_bytes
    assert bundle.digest == Bundle.open(whole).digest
    assert (made / "scenes").is_dir()


def test_a_bundle_that_there_is_not() -> None:
    with pytest.raises(InputError, match=r"bolts: expected a bundle's folder, or one of .*parts"):
        packaged_bundle("bolts")
