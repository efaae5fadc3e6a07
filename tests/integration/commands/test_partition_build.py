"""Whole builds by `mdp-partition`: as one process that is stopped, and command by command."""

import json
import math
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mdp.errors import InputError, PlanRefused
from mdp.formats.bundle import Bundle
from partitioner import api
from partitioner.cli.main import main
from partitioner.run import progress
from tests.support.command_lines import run_here
from tests.support.fleet import PLENTY_MS, ROOT, Fleet
from tests.support.models.runs import SHARED_ARGS, SHARED_MS, write_profiles
from tests.support.models.trees import CLASSES, write_tree

pytestmark = pytest.mark.torch
COMMAND = str(Path(sys.executable).parent / "mdp-partition")
PATIENCE_S = 120.0


TEACHER = ["--teacher", "vit_tiny_patch16_224", "--teacher-arg", *SHARED_ARGS]
#: Small enough for a test, long enough to be stopped in the middle.
KNOBS = ["--teacher-epochs", "5", "--epochs", "8"]
CONFIG = "[schedule]\nbatch_size = 16\n[augmentation]\nvariants = 2\n"
NAME = ["--name", "patterns"]


def plan_arguments(folder: Path) -> list[str]:
    profiles = ["--profiles", str(folder / "alpha.toml"), str(folder / "beta.toml")]
    return [*TEACHER, *profiles, "--latency-ms", str(SHARED_MS), "--data", str(folder / "tree")]


def build_arguments(folder: Path, out: Path, *more: str) -> list[str]:
    config = ["--config", str(folder / "run.toml")]
    return ["build", *plan_arguments(folder), *config, *KNOBS, *NAME, "--out", str(out), *more]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:partitioner"}


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return run_here(main, "mdp-partition", *args)


@contextmanager
def start(args: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def interrupt_once(args: list[str], appeared: Path) -> tuple[int, str]:
    """Start a build and press Ctrl-C as soon as a file is there; returns exit code and stderr."""
    with start(args) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while not appeared.exists():
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
        return process.returncode, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree of pictures and two profiles."""
    made = tmp_path_factory.mktemp("build")
    write_tree(made / "tree", each=40)
    write_profiles(made)
    (made / "run.toml").write_text(CONFIG)
    return made


@dataclass
class Whole:
    """A bundle made without a stop by the four commands, and what each printed."""

    bundle: Path
    plan: dict[str, Any]
    train: dict[str, Any]
    export: dict[str, Any]
    evaluate: dict[str, Any]


@pytest.fixture(scope="module")
def whole(folder: Path) -> Whole:
    """The four steps one by one, each as a command line of its own."""
    out, kept, plan = str(folder / "whole"), str(folder / "whole.run"), str(folder / "plan.toml")
    data = ["--data", str(folder / "tree")]
    commands = (
        ["plan", *plan_arguments(folder), "--epochs", "8", "--out", plan],
        ["train", "--plan", plan, *data, "--run", kept, *KNOBS, "--config", f"{folder}/run.toml"],
        ["export", "--run", kept, "--out", out, *NAME],
        ["evaluate", "--bundle", out, "--write"],
    )
    printed = []
    for command in commands:
        done = run(*command, "--json")
        assert done.returncode == 0, done.stderr
        printed.append(json.loads(done.stdout))
    return Whole(Path(out), *printed)


def test_four_commands_make_an_evaluated_bundle(whole: Whole) -> None:
    bundle = Bundle.open(whole.bundle)
    assert bundle.manifest.labels == list(CLASSES)
    # The two are equal, so either may come first.
    assert {a.device for a in bundle.manifest.plan.assignments} == {"alpha", "beta"}
    for name in bundle.manifest.files:
        bundle.verified(name)
    assert whole.plan["refused"] is False
    assert whole.train["members"] == 2
    assert whole.export["digest"] == bundle.digest
    assert max(entry["error"] for entry in whole.export["max_abs_error"]) < 1e-3
    evaluation, printed = bundle.manifest.evaluation, whole.evaluate
    assert evaluation is not None
    assert evaluation.teacher is not None
    assert printed["pictures"] == evaluation.pictures == 24
    assert printed["predicted"] == whole.plan["accuracy"]
    assert printed["predicted"]["all_in"] is None
    assert printed["teacher"]["accuracy"] == evaluation.teacher.accuracy > 0.6
    assert [m["accuracy"] for m in printed["members"]] == [m.accuracy for m in evaluation.members]
    assert [s["members"] for s in printed["subsets"]] == [[0], [1], [0, 1]]
    assert {"boosted", "stacked", "bagged"} <= printed["subsets"][0].keys()
    assert all(member["latency_ms"] > 0 for member in printed["members"])
    together = bundle.expected_accuracy((0, 1), "stacked")
    assert together is not None
    assert together > 0.6


def test_one_device_alone_is_built_and_served(folder: Path, tmp_path: Path) -> None:
    out, tree = tmp_path / "one", folder / "tree"
    done = run(
        "build", *TEACHER, "--profiles", str(folder / "alpha.toml"), "--data", str(tree),
        "--latency-ms", str(SHARED_MS), "--teacher-epochs", "2", "--epochs", "2",
        "--config", str(folder / "run.toml"), "--out", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    bundle = Bundle.open(out)
    assert [a.device for a in bundle.manifest.plan.assignments] == ["alpha"]
    measured = bundle.expected_accuracy((0,), "stacked")
    unknown = "accuracy with all in: not predicted (the teacher's accuracy on such pictures is "
    beside = next(line for line in done.stdout.splitlines() if line.startswith(unknown))
    assert beside.endswith(f", measured {measured:.1%}")
    written, after, run_folder = done.stdout.splitlines()[-3:]
    assert written == f"{out}: 1 sub-model, digest {bundle.digest}"
    assert f"mdp-agent run --bundle {out} --device alpha" in after
    assert run_folder.startswith(f"{out}.run (")
    assert "may be removed" in run_folder

    with Fleet(tmp_path, out).start_all("alpha") as fleet, fleet.client() as client:
        answer = client.classify(tree / "ring" / "000.png", deadline_ms=PLENTY_MS)
    assert (answer.used, answer.partial) == (("alpha",), False)
    # A picture that is taken for one of no class has none.
    expected = None if answer.known is False else bundle.expected_accuracy((0,), "stacked")
    assert answer.expected_accuracy == expected


def test_a_build_that_was_stopped_ends_with_the_same_bundle(folder: Path, whole: Whole) -> None:
    out, kept = folder / "stopped", folder / "stopped.run"
    args = build_arguments(folder, out)
    code, err = interrupt_once([COMMAND, *args], kept / "checkpoint-member-0.pt")
    assert code == 130, err
    assert err.splitlines()[-1] == (
        f"mdp-partition: interrupted; what is finished is kept in {kept}, "
        "and the same command goes on from there"
    )
    assert "Traceback" not in err
    assert not out.exists()
    assert not list(kept.rglob("*.partial"))
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert "training the teacher" not in done.stderr
    assert "every arrival subset" in done.stdout
    # What is left goes on, and takes no room: weights, the teacher, its answers, and no pictures.
    assert not list(kept.glob("cache/view*")) + list(kept.glob("cache/canvas*"))
    assert "takes up to " in err
    left_bytes = sum(path.stat().st_size for path in (kept / "cache").iterdir())
    pictures_bytes = 3 * 12**2 * len(list((folder / "tree").glob("*/*")))
    assert left_bytes < pictures_bytes
    assert Bundle.open(out).digest == Bundle.open(whole.bundle).digest
    assert Bundle.open(out).manifest.evaluation == Bundle.open(whole.bundle).manifest.evaluation


def test_a_live_build_keeps_no_answers_and_goes_on_after_its_last_member(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, kept = folder / "live", folder / "live.run"
    plain = folder / "run.toml"
    live = folder / "live.toml"
    live.write_text(plain.read_text() + '\n[run]\nteaching = "live"\n')
    args = [str(live) if arg == str(plain) else arg for arg in build_arguments(folder, out)]
    code, err = interrupt_once([COMMAND, *args], kept / "member-0.safetensors")
    assert code == 130, err
    assert not out.exists()
    done = run(*args)
    assert done.returncode == 0, done.stderr
    assert "training sub-model 0" not in done.stderr
    assert not list(kept.rglob("teacher-*-logits.npy"))
    assert not (kept / "left-behind").exists()
    together = Bundle.open(out).expected_accuracy((0, 1), "stacked")
    assert together is not None
    assert together > 0.6
    live.write_text(live.read_text().replace("[schedule]", "[schedule]\npatience = 2"))
    # A slow machine brings more lines.
    monkeypatch.setattr(progress, "LINE_EVERY_S", math.inf)
    refused = run(*args)
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "schedule.patience 2: expected 0" in line


@pytest.fixture(scope="module")
def config(folder: Path) -> api.BuildConfig:
    """Options of the commands above, in one file."""
    profiles = [str(folder / f"{name}.toml") for name in ("alpha", "beta")]
    (folder / "all.toml").write_text(f"""
[plan]
teacher = "vit_tiny_patch16_224"
teacher_args = {{{", ".join(SHARED_ARGS)}}}
profiles = {profiles}
latency_ms = {SHARED_MS}
[run]
data = "{folder / "tree"}"
[teacher_schedule]
epochs = 5
[schedule]
epochs = 8
batch_size = 16
[augmentation]
variants = 2
""")
    return api.read_config(folder / "all.toml")


def test_python_makes_the_same_without_printing(
    folder: Path, whole: Whole, config: api.BuildConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = api.plan(config.plan, data=config.options.data, epochs=8)
    assert json.loads(msgspec.json.encode(planned.as_json())) == whole.plan
    again = folder / "again"
    errors = api.export(f"{whole.bundle}.run", again, name="patterns")
    assert list(errors) == [0, 1]
    assert Bundle.open(again).digest == Bundle.open(whole.bundle).digest
    report = api.evaluate(again, run=f"{whole.bundle}.run", write=True)
    assert report.evaluation == Bundle.open(again).manifest.evaluation
    # All is done already, and only evaluated again.
    report = api.build(config, whole.bundle, name="patterns")
    assert report.evaluation == Bundle.open(whole.bundle).manifest.evaluation
    assert capsys.readouterr() == ("", "")


def test_errors_of_the_python_api_name_the_key(config: api.BuildConfig) -> None:
    changed = msgspec.structs.replace
    with pytest.raises(InputError, match=r"^schedule\.epochs: expected `int` >= 1, got 0$"):
        api.build(changed(config, schedule=api.MemberSchedule(epochs=0)), "b")
    with pytest.raises(InputError, match=r"^plan\.latency_ms: expected a number above 0, got -1"):
        api.plan(changed(config.plan, latency_ms=-1.0))
    with pytest.raises(InputError, match=r"^plan\.teacher: timm has no model 'vit_tiny'"):
        api.plan(changed(config.plan, teacher="vit_tiny", teacher_args={}))
    with pytest.raises(PlanRefused, match="plan refused: "):
        api.plan(changed(config.plan, latency_ms=1000.0))


def test_the_example_of_a_build(
    folder: Path, whole: Whole, config: api.BuildConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    # A run that is trained already.
    shutil.copytree(f"{whole.bundle}.run", folder / "mine.run")
    example = runpy.run_path(str(ROOT / "examples/build_bundle.py"))
    example["main"](str(folder / "all.toml"), str(folder / "mine"))
    lines = capsys.readouterr().out.splitlines()
    assert {line.partition(":")[0] for line in lines[:2]} == {"alpha", "beta"}
    subsets = [line.partition(": ")[0] for line in lines[2:5]]
    assert subsets == ["members (0,)", "members (1,)", "members (0, 1)"]
    mine = Bundle.open(folder / "mine")
    assert lines[5] == f"{mine.path}: 3 classes, digest {mine.digest[:12]}"
