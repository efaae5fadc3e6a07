"""A bundle that is taught what good items look like: what it says then, and what is refused."""

import json
import re
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")

import torch
from torch import Tensor, nn

from mdp.errors import InputError
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, file_entry, model_path
from mdp.formats.plan import Assignment, PredictedMs, Replica
from mdp.fusion.anomaly_table import Anomaly
from mdp.testing.bundles import write_bundle
from partitioner.assembly.ladder import add_rungs
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import open_dataset, open_scenes
from partitioner.export import anomaly_head
from partitioner.export import inspect_bundle as module
from partitioner.export.anomaly_head import maps_by_folds, plant_patch
from partitioner.export.inspect_bundle import InspectRequest, inspect_bundle
from partitioner.export.quantize import quantize_model
from partitioner.export.quantize_bundle import quantize_bundle
from partitioner.export.sessions import open_member
from partitioner.export.try_precision import QuantizeRequest
from partitioner.export.write import to_onnx
from partitioner.run.progress import Progress
from tests.support.inspection import CAMERAS, PARTS, write_scenes
from tests.support.models.runs import QUIET

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module", autouse=True)
def quick() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_ROUNDS", 1)
        yield


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("good"), 40)


@pytest.fixture(scope="module")
def defects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_scenes(tmp_path_factory.mktemp("defects"), 16, patched=range(16), seed=1)


@pytest.fixture(scope="module")
def inspected(tmp_path_factory: pytest.TempPathFactory, good: Path, defects: Path) -> Bundle:
    folder = tmp_path_factory.mktemp("inspected")
    request = InspectRequest(good=str(good), defects=str(defects), rate=0.05)
    return inspect_bundle(Bundle.open(PARTS), folder / "out", request, folder, QUIET)


def table_of(bundle: Bundle) -> Anomaly:
    found = bundle.fusion_weights().anomaly
    assert found
    return found


def test_models_get_heads_and_answer_their_classes_as_before(inspected: Bundle) -> None:
    before = Bundle.open(PARTS)
    assert inspected.digest != before.digest
    manifest, was = inspected.manifest, before.manifest
    assert (manifest.evaluation, manifest.labels) == (was.evaluation, was.labels)
    inspection = manifest.inspection
    assert inspection
    assert (inspection.good, inspection.defective) == (40, 8)
    for part, old in zip(manifest.plan.assignments, was.plan.assignments, strict=True):
        facts = inspection.members[part.k]
        assert (facts.device, facts.layers) == (part.device, "20 x 20 x 40, 10 x 10 x 112")
        assert 0 < facts.added_bytes < 300_000
        assert part.memory_bytes == old.memory_bytes + facts.added_bytes
        assert part.predicted_ms.compute >= old.predicted_ms.compute
        views = np.zeros((2, 160, 160, 3), dtype=np.uint8)
        found = open_member(inspected.model(part.k), part, len(manifest.labels)).run(views)
        plain = open_member(before.model(part.k), old, len(manifest.labels)).run(views)
        assert (found.bag == plain.bag).all()
        assert found.anomaly is not None


def test_each_side_finds_its_defects(inspected: Bundle) -> None:
    table = table_of(inspected)
    assert table.default == pytest.approx(2 / 41, abs=1e-6)
    found = {one.members: one.found[table.place] for one in table.subsets}
    assert found[0, 1, 2, 3] >= 0.75
    assert all(found[0, 1, 2, 3] >= found[k,] for k in range(4))
    assert max(found[k,] for k in range(4)) <= 0.75


def test_an_inspected_bundle_is_fitted_anew(inspected: Bundle, good: Path, tmp_path: Path) -> None:
    again = inspect_bundle(
        inspected, tmp_path / "out", InspectRequest(good=str(good), rate=0.1), tmp_path, QUIET
    )
    table = table_of(again)
    assert table.default == pytest.approx(4 / 41, abs=1e-6)
    assert (table.defective, table.subsets[0].found) == (0, ())
    first, second = inspected.manifest.inspection, again.manifest.inspection
    assert first
    assert second
    sizes = [[one.added_bytes for one in each.members] for each in (first, second)]
    assert sizes[0] == sizes[1]
    # New heads are in place of the old ones, in memory and in time.
    plain, renewed = Bundle.open(PARTS).manifest.plan, again.manifest.plan
    for was, part in zip(plain.assignments, renewed.assignments, strict=True):
        facts = second.members[part.k]
        assert part.memory_bytes == was.memory_bytes + facts.added_bytes
        expected_ms = was.predicted_ms.compute * max(1.0, facts.time_ratio)
        assert part.predicted_ms.compute == pytest.approx(expected_ms, abs=0.003)


def test_a_head_costs_its_replicas_as_well() -> None:
    assignment = Bundle.open(PARTS).manifest.plan.assignments[0]
    replica = Replica(
        k=0,
        device="spare",
        predicted_ms=PredictedMs(compute=10.0, network=2.0, total=12.0),
        memory_bytes=1000,
        provider="CPUExecutionProvider",
        threads=1,
        why="",
    )
    pairs: list[tuple[Assignment | Replica, Assignment | Replica]] = [
        (assignment, module._with_cost(assignment, 1.1, 500)),
        (replica, module._with_cost(replica, 1.1, 500)),
    ]
    for was, made in pairs:
        compute_ms = round(was.predicted_ms.compute * 1.1, 3)
        assert made.predicted_ms.compute == compute_ms
        assert made.predicted_ms.total == round(compute_ms + was.predicted_ms.network, 3)
        assert made.memory_bytes == was.memory_bytes + 500


def refused(tmp_path: Path, text: str, *, bundle: Bundle | None = None, **request: Any) -> None:
    """Check that nothing is written, and why."""
    out = tmp_path / "out"
    with pytest.raises(InputError, match=text):
        inspect_bundle(
            bundle or Bundle.open(PARTS), out, InspectRequest(**request), tmp_path, QUIET
        )
    assert not out.exists()


def test_good_scenes_with_defects_are_named(tmp_path: Path) -> None:
    folder = write_scenes(tmp_path / "good", 40, patched=(7, 22))
    refused(tmp_path, r"2 of 40 good scenes differ .* s0(07|22), s0(07|22): move", good=str(folder))
    taken = inspect_bundle(
        Bundle.open(PARTS),
        tmp_path / "out",
        InspectRequest(good=str(folder), all_good=True),
        tmp_path,
        QUIET,
    )
    assert table_of(taken).good == 40


def test_too_few_good_scenes_are_refused(tmp_path: Path) -> None:
    folder = write_scenes(tmp_path / "good", 12)
    refused(
        tmp_path, f"--data {folder}: expected at least 20 good scenes .* got 12", good=str(folder)
    )


def test_too_few_defects_to_choose_and_to_measure_are_refused(tmp_path: Path, good: Path) -> None:
    folder = write_scenes(tmp_path / "defects", 1, patched=[0])
    refused(
        tmp_path,
        f"--defects {folder}: expected at least 2 defective scenes, .* got 1",
        good=str(good),
        defects=str(folder),
    )


def test_a_folder_without_scenes_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "expected a folder of scenes, found none", good=str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    refused(tmp_path, "expected pictures, found no file", good=str(tmp_path / "empty"))
    folder = write_scenes(tmp_path / "good", 2)
    for scene in folder.iterdir():
        (scene / "top.jpg").unlink()
    refused(
        tmp_path, "expected scenes with a picture each of back, left, right, top", good=str(folder)
    )


class Trunk(nn.Module):
    """A small network for the shipped plan's pictures and classes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(3, 8, 8, 8), nn.Conv2d(8, 8, 3, 1, 1)
        self.head = nn.Linear(8, classes)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Logits of uint8 `[N, S, S, 3]`."""
        x = torch.relu(self.stem(images.permute(0, 3, 1, 2).float() / 128 - 1))
        x = x + torch.relu(self.first(x))
        return (self.head(x.mean(dim=(2, 3))),)


def with_trunks(folder: Path, precision: str, pixels: NDArray[np.uint8]) -> Bundle:
    """The shipped bundle with other models, in one precision."""
    shutil.copytree(PARTS, folder)
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    torch.manual_seed(0)
    exact = to_onnx(Trunk(len(content["labels"])), 160, ["bag"], {})
    for part in content["plan"]["assignments"]:
        part["network"]["precision"] = precision
        model = quantize_model(exact, precision, pixels, whole=True)  # type: ignore[arg-type]
        (folder / model_path(part["k"])).write_bytes(model)
        entry = file_entry(folder / model_path(part["k"]))
        content["files"][model_path(part["k"])] = msgspec.to_builtins(entry)
    path.write_text(json.dumps(content))
    return Bundle.open(folder)


def test_a_quantized_member_is_compared_with_its_fp32_model(tmp_path: Path, good: Path) -> None:
    scenes = open_scenes(str(good), CAMERAS)
    (pixels,) = load_views(scenes, [View(160, camera="top")], tmp_path, QUIET, "good")
    before = with_trunks(tmp_path / "fp32", "fp32", pixels)
    after = with_trunks(tmp_path / "int8", "int8-static", pixels)
    made = inspect_bundle(
        after,
        tmp_path / "made",
        InspectRequest(good=str(good), before=before, all_good=True),
        tmp_path,
        QUIET,
    )
    inspection = made.manifest.inspection
    assert inspection
    for one in inspection.members:
        assert one.fp32_planted_auc is not None
        assert one.planted_auc == pytest.approx(one.fp32_planted_auc, abs=0.02)
        assert one.planted_auc > 0.8
    # As if half of the area had to be gained.
    refused(
        tmp_path,
        r"sub-model 0 \(raspberry-pi-5-1\) tells planted patches apart .* in int8-static, in fp32 "
        r"with .*; sub-model 1 .*: expected at most -0.5 less: inspect the fp32 bundle",
        bundle=after,
        good=str(good),
        before=before,
        max_loss=-0.5,
    )


def changed(source: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Bundle:
    """A copy of a bundle with another manifest."""
    shutil.copytree(source, folder)
    content = json.loads((folder / MANIFEST).read_text())
    change(content)
    (folder / MANIFEST).write_text(json.dumps(content))
    return Bundle.open(folder)


def test_the_bundle_before_has_to_be_the_same_one(tmp_path: Path) -> None:
    def exact(content: dict[str, Any]) -> None:
        for part in content["plan"]["assignments"]:
            part["network"]["precision"] = "fp32"

    def other_classes(content: dict[str, Any]) -> None:
        exact(content)
        content["labels"][0] += " of another kind"

    def other_cameras(content: dict[str, Any]) -> None:
        exact(content)
        parts = content["plan"]["assignments"]
        parts[0]["camera"], parts[1]["camera"] = parts[1]["camera"], parts[0]["camera"]

    for change, text in (
        (other_classes, "--fp32 .*: expected the classes of .*parts, found others"),
        (other_cameras, "--fp32 .*: expected sub-model 0 to see what that of .* sees"),
    ):
        before = changed(PARTS, tmp_path / change.__name__, change)
        refused(tmp_path, text, good="none", before=before)
    plain = changed(PARTS, tmp_path / "exact", exact)
    refused(
        tmp_path,
        "--fp32 .*: .*exact has no quantized sub-model to compare",
        bundle=plain,
        good="none",
        before=plain,
    )


def test_cameras_that_hardly_see_patches_are_named(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if no patch could be seen, before two of the four cameras.
    views = iter((True, False, True, False))

    def plant(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return pixels if next(views) else plant_patch(pixels)

    monkeypatch.setattr(anomaly_head, "plant_patch", plant)
    said = StringIO()
    made = inspect_bundle(
        Bundle.open(PARTS),
        tmp_path / "out",
        InspectRequest(good=str(good)),
        tmp_path,
        Progress(said),
    )
    inspection = made.manifest.inspection
    assert inspection
    # The same pictures have the same scores: both are by what was fitted without them.
    areas = [one.planted_auc for one in inspection.members]
    assert areas[::2] == [0.5, 0.5]
    found = [one.planted_found or 0.0 for one in inspection.members]
    # Of 40 good pictures one is expected above a threshold that one of 41 is above, and two are
    # there in one draw of four.
    assert max(found[::2]) <= 2 / 40
    assert min(found[1::2]) > module.SEEING
    warnings = [line for line in said.getvalue().splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1
    first, second, third, _ = made.manifest.plan.assignments
    for part in (first, third):
        assert re.search(
            rf"camera {part.camera} \({part.device}\) finds [0-5]% of planted patches \(area under "
            r"the curve 0.50\)",
            warnings[0],
        )
    assert warnings[0].startswith("warning: nearly blind at 2.44% of good items rejected: camera ")
    assert second.device not in warnings[0]


def test_features_that_are_no_numbers_are_refused(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any) -> Any:
        maps = maps_by_folds(*arguments)
        maps[3, 0, 0] = np.nan
        return maps

    monkeypatch.setattr(anomaly_head, "maps_by_folds", broken)
    refused(
        tmp_path, r"submodels/0/model.onnx: its middle layers .* not finite of good", good=str(good)
    )


def test_the_bundle_before_has_to_be_in_fp32(tmp_path: Path, good: Path) -> None:
    refused(
        tmp_path,
        "--fp32 .*: expected sub-model 0 as .* in fp32, found .* in int8-static",
        good=str(good),
        before=Bundle.open(PARTS),
    )


def test_heads_are_fitted_after_quantizing(inspected: Bundle, tmp_path: Path) -> None:
    data: Any = None
    with pytest.raises(InputError, match=r"has anomaly heads, .*: quantize the bundle"):
        quantize_bundle(
            inspected, data, None, QuantizeRequest(max_loss=0.01), tmp_path / "q", tmp_path, QUIET
        )


def test_files_of_the_bundle_are_whole(inspected: Bundle) -> None:
    for name in inspected.manifest.files:
        inspected.verified(name)
    assert (inspected.path / MANIFEST).is_file()
    assert FUSION in inspected.manifest.files
    assert {part.camera for part in inspected.manifest.plan.assignments} == {*CAMERAS}


def test_a_bundle_has_rungs_or_heads(inspected: Bundle, tmp_path: Path) -> None:
    rungs = Bundle.open(write_bundle(tmp_path / "rungs", rungs=2))
    with pytest.raises(InputError, match="has rungs, which get no anomaly heads"):
        inspect_bundle(rungs, tmp_path / "out", InspectRequest(good="none"), tmp_path, QUIET)
    data = open_dataset("digits")
    with pytest.raises(InputError, match="has anomaly heads, which rungs lack"):
        add_rungs(inspected, data, "int8", tmp_path / "out", 10, tmp_path, QUIET)
    assert not (tmp_path / "out").exists()
