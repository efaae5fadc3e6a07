"""Some cells of the fault matrix, with real agents; `make faults` runs all of it."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faults.promises import Kind, summary
from benchmarks.faults.runs import Pace, run_cell
from benchmarks.faults.scene import ROOT, Scene
from benchmarks.faults.table import FAULTS
from mdp.testing.machine_faults import mounting_works

#: As many calls as a fault needs, with a deadline that a busy machine can keep; how long they took
#: is for `make faults` to judge.
QUICK = Pace(whole=False, deadline_ms=2_000.0, grace_ms=5_000.0)
BY_NAME = {fault.name: fault for fault in FAULTS}
#: What needs no root and no waiting for a deadline. The client of "alone" gets errors.
CELLS: list[tuple[Kind, str]] = [
    ("stacked", "crash"),
    ("stacked", "constant outputs"),
    ("stacked", "no memory to have"),
    ("stacked", "idle client, flapping device"),
    ("replicas", "hang"),
    ("replicas", "wrong bundle"),
    ("alone", "restart"),
    ("alone", "NaN outputs"),
]


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Kind, Scene]]:
    made: dict[Kind, Scene] = {}
    yield made
    for scene in made.values():
        scene.close()


@pytest.mark.parametrize(("kind", "name"), CELLS, ids=[f"{n}-{k}" for k, n in CELLS])
def test_what_is_promised_is_what_comes(
    scenes: dict[Kind, Scene], tmp_path_factory: pytest.TempPathFactory, kind: Kind, name: str
) -> None:
    fault = BY_NAME[name]
    if why := fault.hindered():
        pytest.skip(why)
    if kind not in scenes:
        scenes[kind] = Scene(tmp_path_factory.mktemp(kind), kind)
    run = run_cell(scenes[kind], fault, kind, QUICK)
    assert run.broken == [], summary(run.of("turning", "faulty"))
    # The fault took effect and was healed.
    faulty, whole = scenes[kind].faulty, len(scenes[kind].setting.members)
    under = run.of("turning", "faulty")
    if fault.promise.used == "never":
        assert all(faulty not in call.used for call in run.of("faulty"))
    assert any(faulty not in call.used for call in under)
    assert [len(call.used) for call in run.of("after")] == [whole] * 6


def test_a_name_that_is_not_resolved_is_one_device_s_trouble(tmp_path: Path) -> None:
    if why := mounting_works():
        pytest.skip(why)
    name, out = "host name without an address", tmp_path / "faults.json"
    command = [
        sys.executable, "-m", "benchmarks.faults", "--faults", name, "--kinds", "stacked",
        "--deadline-ms", "2000", "--grace-ms", "5000", "--out", str(out),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert [fault["not_run"] for fault in result["faults"]] == [""]
    assert [row["kept"] for row in result["rows"]] == [True]
