"""Gain of views together, as measured subsets of cameras tell."""

from pathlib import Path

import msgspec
import pytest

from mdp.errors import ConfigError, InputError
from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle
from mdp.testing.bundles import write_bundle
from partitioner.estimates.accuracy import fit_views
from partitioner.estimates.accuracy_records import read_runs, read_scenes, record_subsets

#: Accuracies of three cameras alone, and of pairs and all with p of 2 and 8.
ALONE = [((0,), 0.6), ((1,), 0.7), ((2,), 0.8)]
TOGETHER = {
    2.0: [((0, 1), 0.7797), ((0, 2), 0.8431), ((1, 2), 0.8660), ((0, 1, 2), 0.8902)],
    8.0: [((0, 1), 0.7048), ((0, 2), 0.8004), ((1, 2), 0.8038), ((0, 1, 2), 0.8042)],
}


@pytest.mark.parametrize("sharpness", TOGETHER)
def test_the_sharpness_of_measured_subsets_is_found(sharpness: float) -> None:
    views = fit_views([record_subsets([*ALONE, *TOGETHER[sharpness]])])
    assert views is not None
    assert views.sharpness == pytest.approx(sharpness, rel=0.02)
    assert views.error < 0.001
    assert views.subsets == 4


def test_nothing_is_told_by_single_cameras_or_none() -> None:
    assert fit_views([]) is None
    assert fit_views([record_subsets(ALONE)]) is None


@pytest.mark.parametrize("evaluated", [True, False])
def test_bundles_of_cameras_tell_of_views_alone(tmp_path: Path, evaluated: bool) -> None:
    folder = write_bundle(tmp_path / "b", evaluated=evaluated)
    assert read_scenes([folder]) == []
    manifest = Bundle.open(folder).manifest
    seeing = [msgspec.structs.replace(a, camera=a.device) for a in manifest.plan.assignments]
    plan = msgspec.structs.replace(manifest.plan, assignments=seeing)
    write_json(folder / MANIFEST, msgspec.structs.replace(manifest, plan=plan))
    assert read_runs([folder]) == []
    if evaluated:
        (subsets,) = read_scenes([folder])
        assert len(subsets) == 7
        return
    with pytest.raises(ConfigError, match="expected a measured bundle"):
        read_scenes([folder])


def test_shares_of_all_labels_of_an_item_are_no_accuracies_of_classes(tmp_path: Path) -> None:
    folder = write_bundle(tmp_path / "b", several=True)
    with pytest.raises(InputError, match="--runs: expected a bundle with one label an item"):
        read_runs([folder])
