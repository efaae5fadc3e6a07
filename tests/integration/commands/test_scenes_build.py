"""A build from scenes: every sub-model is trained on the pictures of its device's camera."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from mdp.errors import InputError
from mdp.formats.bundle import Bundle, SubsetAccuracy
from partitioner.build.steps import reopen
from partitioner.cli.main import main
from partitioner.data.datasets import open_dataset
from partitioner.run import progress
from partitioner.run.folder import RunFolder
from tests.support.command_lines import run_here
from tests.support.models.runs import (
    QUIET,
    SHARED_ARGS,
    SHARED_MS,
    config_of,
    tiny_plan,
    write_profiles,
)
from tests.support.models.training import train
from tests.support.models.trees import write_scenes

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("quick_exports")]
CAMERAS = ("left", "right")
NONE: Mapping[str, Any] = {}
NAMED = ["--camera", "alpha=left", "beta=right"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scenes of two cameras, of which one lacks a camera, and two profiles."""
    made = tmp_path_factory.mktemp("scenes")
    write_scenes(made / "scenes", each=16)
    write_profiles(made)
    return made


def build(
    folder: Path, out: str, *more: str, changes: Mapping[str, Any] = NONE, **schedule: Any
) -> Any:
    config = folder / f"{out}.toml"
    tables = {"schedule": {"batch_size": 16, **schedule}, "augmentation": {"variants": 2}}
    config.write_bytes(msgspec.toml.encode({**tables, **changes}))
    return run_here(
        main, "mdp-partition", "build", "--teacher", "vit_tiny_patch16_224",
        "--teacher-arg", *SHARED_ARGS, "--profiles", str(folder / "alpha.toml"),
        str(folder / "beta.toml"), "--latency-ms", str(SHARED_MS), "--data",
        str(folder / "scenes"), "--config", str(config), "--teacher-epochs", "2", "--epochs", "2",
        "--anyway", "--out", str(folder / out), *more,
    )  # fmt: skip


def test_a_build_from_scenes_trains_and_measures_every_camera(folder: Path) -> None:
    done = build(folder, "own", *NAMED, teacher_views="both")
    assert done.returncode == 0, done.stderr
    assert "scenes of which nothing is measured: 1 without 'right'" in done.stderr
    bundle = Bundle.open(folder / "own")
    assignments = bundle.manifest.plan.assignments
    assert {a.device: a.camera for a in assignments} == {"alpha": "left", "beta": "right"}
    evaluation = bundle.manifest.evaluation
    assert evaluation is not None
    assert [subset.members for subset in evaluation.subsets] == [(0,), (1,), (0, 1)]
    assert evaluation.pictures == 9
    assert evaluation.teacher is not None
    # Each camera's answers of the teacher are kept, for each variant; one scene has one picture.
    kept = [np.load(path) for path in (folder / "own.run" / "cache").glob("teacher-*-logits.npy")]
    scenes = 16 * 3 - 9 - 3
    assert [len(answers) for answers in kept] == [2 * scenes - 1] * 2
    assert len({path.read_bytes() for path in (folder / "own.run").glob("member-*")}) == 2
    # The run and the bundle know the cameras.
    assert reopen(RunFolder(folder / "own.run"), QUIET).data.cameras == CAMERAS
    for more in (["--run", str(folder / "own.run")], ["--data", str(folder / "scenes")]):
        again = run_here(
            main, "mdp-partition", "evaluate", "--bundle", str(bundle.path), *more, "--json"
        )
        assert again.returncode == 0, again.stderr
        assert msgspec.convert(json.loads(again.stdout)["subsets"], list[SubsetAccuracy]) == (
            evaluation.subsets
        )


def test_one_shared_network_is_trained_once_for_all_cameras(folder: Path, tmp_path: Path) -> None:
    plan = tiny_plan()
    first = plan.assignments[0]
    plan = replace(
        plan,
        assignments=[
            replace(first, camera="left"),
            replace(first, k=1, device="beta", camera="right"),
            replace(plan.assignments[1], k=2, device="gamma", camera="right"),
        ],
    )
    source = str(folder / "scenes")
    data = open_dataset(source, cameras=CAMERAS)
    schedule = {"shared": True, "teacher_views": "fused", "patience": 1}
    wanted = config_of(source, epochs=1, schedule=schedule)
    without = replace(plan, assignments=[replace(first, camera=None), *plan.assignments[1:]])
    with pytest.raises(InputError, match=r"--camera: expected one for .* got none: alpha"):
        train(RunFolder(tmp_path / "odd"), without, data, wanted, QUIET)
    work = train(RunFolder(tmp_path / "run"), plan, data, wanted, QUIET)
    one, two, three = (work.run.member(k).read_bytes() for k in range(3))
    # The third has another shape, and learns the pictures of all cameras too.
    assert one == two != three
    curves = json.loads(work.run.curves.read_text())
    assert sorted(curves) == ["member-0", "member-2", "teacher"]
    places = [work.training_rows(assignment) for assignment in plan.assignments]
    assert places == [slice(None)] * 3


@pytest.mark.parametrize(
    ("more", "schedule", "expected"),
    [
        ([*NAMED, "gamma=top"], {}, "--camera: expected cameras of alpha, beta; camera 'top' is "
         "said to be gamma's, which --profiles lacks"),
        (["--camera", "alpha=left", "beta=top"], {}, "expected scenes with a picture each of left, "
         "top, found none among 16 (cameras there: left, right)"),
        (["--camera", "alpha=left", "alpha=right"], {}, "--camera: 'alpha' is given twice"),
        (["--camera", "left"], {}, "--camera: expected device=camera, got 'left'"),
        (NAMED, {"boost_weight": 1.0}, "boost_weight`: expected 0 with --camera, got 1: sub-models "
         "see different pictures"),
        ([], {"shared": True}, "shared`: expected --camera for every device beside it"),
    ],
)  # fmt: skip
def test_cameras_that_do_not_fit_are_one_line(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    schedule: dict[str, Any],
    expected: str,
) -> None:
    # A slow machine brings more lines.
    monkeypatch.setattr(progress, "LINE_EVERY_S", math.inf)
    done = build(folder, "odd", *more, **schedule)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert expected in line
    assert not (folder / "odd").exists()
    assert not (folder / "odd.run").exists()


def test_settings_that_scenes_do_not_have_are_one_line(folder: Path) -> None:
    for changes, expected in (
        ({"run": {"teaching": "live"}}, "expected pictures without scenes, got cameras"),
        ({"augmentation": {"mixup": 0.2}}, "expected own with mixup or cutmix, got fused"),
    ):
        done = build(folder, "odd", *NAMED, changes=changes, teacher_views="fused")
        assert done.returncode == 2
        assert expected in done.stderr.splitlines()[-1]
