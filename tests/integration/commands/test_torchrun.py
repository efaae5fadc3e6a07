"""Two processes train what one would: real processes that speak gloo, one run under torchrun."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from mdp.files import write_toml  # noqa: E402
from partitioner.cli.main import main  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.run.progress import Advance, Progress  # noqa: E402
from tests.integration.crew.test_training_together import free_port  # noqa: E402
from tests.support.chart_job import pod_arguments  # noqa: E402
from tests.support.models import fitted  # noqa: E402
from tests.support.models.fitted import Net, cases, stage, stop_at, train_and_write  # noqa: E402
from tests.support.models.forked import Forked, command  # noqa: E402
from tests.support.models.runs import QUIET, config_of, tiny_plan  # noqa: E402
from tests.support.models.training import train  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch
PATIENCE_S = 180.0
#: Largest relative difference of the weights, as one vector, in fp32. Measured here: 0 to 4e-8.
#: Sums in another order are rounded otherwise, and AdamW makes more of that with every step.
TOLERANCE = 1e-5


def torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    """Run `args` in two processes of this machine."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return subprocess.run(
        [*launcher, "--nproc-per-node", "2", *args],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        check=False,
    )


def by_two(
    main: Callable[..., object], *args: object, folder: Path
) -> list[tuple[int | None, str]]:
    """Exit codes and stderr of `main(*args)` in two processes that have torchrun's variables."""
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    world["MASTER_PORT"] = str(free_port())
    told = [folder / f"{rank}.stderr" for rank in (0, 1)]
    started = [
        Forked(
            main, *args,
            stderr=path, variables={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank, path in enumerate(told)
    ]  # fmt: skip
    try:
        codes = [process.wait(PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(code, path.read_text()) for code, path in zip(codes, told, strict=True)]


def weights(out: Path, rank: int = 0) -> Any:
    """All weights of one process as one vector."""
    state = torch.load(out / f"weights-{rank}.pt", weights_only=True)
    return torch.cat([value.flatten() for value in state.values()])


def report(out: Path, rank: int = 0) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / f"report-{rank}.json").read_bytes())
    return content


def difference(ours: Any, theirs: Any) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what every case leaves behind, trained by one process and then by two."""
    made = tmp_path_factory.mktemp("fitted")
    with pytest.raises(KeyboardInterrupt):
        train_and_write(made / "resumed", stage(made / "resumed"), stop_at(1))
    for case in ("damaged/1", "damaged/2"):
        (made / case).mkdir(parents=True)
        (made / case / "checkpoint.pt").write_bytes(b"damaged")
    for name, run in cases(made).items():
        if name != "resumed":
            run()
    for code, said in by_two(fitted.main, made, folder=made):
        assert code == 0, said
        assert "FutureWarning" not in said
    return made


@pytest.mark.parametrize("case", ["plain", "empty"])
def test_two_processes_end_with_the_weights_of_one(folder: Path, case: str) -> None:
    one, two = folder / case / "1", folder / case / "2"
    assert torch.equal(weights(two, 0), weights(two, 1))
    assert difference(weights(two), weights(one)) < TOLERANCE
    start = torch.cat([value.flatten() for value in Net().state_dict().values()])
    assert difference(weights(one), start) > 0.05, "nothing was learnt"
    for ours, theirs in zip(report(two)["curve"], report(one)["curve"], strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=TOLERANCE)
    assert report(two, 0)["curve"][-1]["loss"] == report(two, 1)["curve"][-1]["loss"]


def test_two_processes_end_with_the_same_running_statistics(folder: Path) -> None:
    one, two = folder / "normed" / "1", folder / "normed" / "2"
    assert torch.equal(weights(two, 0), weights(two, 1))
    ours, theirs = (
        torch.load(out / "weights-0.pt", weights_only=True)["norm.running_mean"]
        for out in (two, one)
    )
    # Those of the pictures themselves, whatever each process saw of them in training.
    assert torch.allclose(ours, theirs)
    assert ours.abs().max() > 0.1
    said = report(folder / "alone" / "2")
    assert (said["kind"], said["code"]) == ("InputError", 2)
    assert "expected batches of at least 2 pictures for each process" in said["error"]
    assert report(folder / "alone" / "1")["error"] == ""


def test_two_processes_go_on_where_one_was_stopped(folder: Path) -> None:
    assert len(report(folder / "resumed")["curve"]) == 4
    assert difference(weights(folder / "resumed"), weights(folder / "plain" / "1")) < TOLERANCE


def test_all_stop_early_together_with_the_best_weights(folder: Path) -> None:
    one, two = folder / "early" / "1", folder / "early" / "2"
    for rank in (0, 1):
        found = [epoch["validation"] for epoch in report(two, rank)["curve"]]
        assert found == [3.0, 1.0, 2.0, 1.0]
    assert torch.equal(weights(two, 0), weights(two, 1))
    assert difference(weights(two), weights(one)) < TOLERANCE


def test_a_loss_that_one_process_finds_broken_stops_all_in_the_same_step(folder: Path) -> None:
    one, two = folder / "broken" / "1", folder / "broken" / "2"
    first, other = report(two, 0), report(two, 1)
    assert first["kind"] == "TrainingDiverged"
    assert first["error"].startswith("fitting: the loss became nan in epoch 3, step ")
    assert first["error"].replace("/2/", "/1/") == report(one)["error"]
    assert (other["kind"], other["error"]) == ("StoppedElsewhere", first["error"])
    kept = torch.load(two / "checkpoint.pt", weights_only=True)
    assert len(kept["curve"]) == 2
    assert all(value.isfinite().all() for value in kept["module"].values())


def test_a_broken_checkpoint_is_named_once(folder: Path) -> None:
    two = folder / "damaged" / "2"
    assert report(two, 0)["error"].endswith(
        "checkpoint.pt: not a checkpoint of this run; remove it to start over"
    )
    assert (report(two, 1)["kind"], report(two, 1)["code"]) == ("StoppedElsewhere", 0)


def test_the_first_process_prepares_and_the_failing_one_reports(folder: Path) -> None:
    first, other = (json.loads((folder / f"said-{rank}.json").read_bytes()) for rank in (0, 1))
    assert first == [
        "wrote",
        "InputError: only 0 knows",
        "StoppedElsewhere: process 1 of 2 stopped",
        "ran",
        "InputError: no room, 2",
        "0.25",
    ]
    assert other == [
        "read written",
        "StoppedElsewhere: process 0 of 2 stopped",
        "InputError: only 1 knows",
        "StoppedElsewhere: process 0 of 2 stopped, 0",
        "0.25",
    ]


#: Like TOLERANCE, for a whole run. Measured here: 1e-5 for a teacher trained by two, 2e-5 to 8e-5
#: for sub-models, which learn from answers that are kept in half precision.
RUN_TOLERANCE = 1e-3


class StoppedAt(Progress):
    """Presses Ctrl-C as soon as a file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__(io.StringIO())
        self.file = file

    @contextmanager
    def task(self, what: str, total: int, *, done: int = 0) -> Iterator[Advance]:
        """Follow nothing."""

        def advance(more: int, said: str) -> None:
            if self.file.exists():
                raise KeyboardInterrupt

        yield advance


@dataclass(frozen=True)
class Runs:
    """A run by one process, and the same one finished by two, with what they printed."""

    one: RunFolder
    two: RunFolder
    words: list[str]
    done: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """One process trains to the end; another is stopped in its fourth epoch, and two go on."""
    folder = tmp_path_factory.mktemp("runs")
    tree, plan_file = folder / "tree", folder / "plan.toml"
    write_tree(tree, each=40)
    write_toml(plan_file, tiny_plan())
    wanted = config_of(tree)
    wanted = msgspec.structs.replace(
        wanted, teacher_schedule=msgspec.structs.replace(wanted.teacher_schedule, epochs=2)
    )
    one, two = RunFolder(folder / "one"), RunFolder(folder / "two")
    data = open_dataset(wanted.options.data)
    train(one, tiny_plan(), data, wanted, QUIET)
    with pytest.raises(KeyboardInterrupt):
        train(two, tiny_plan(), data, wanted, StoppedAt(two.checkpoint("member-0")))
    assert one.member(1).exists()
    assert two.teacher.exists()
    assert not two.member(0).exists()
    config = folder / "run.toml"
    write_toml(config, wanted)
    where = ["--plan", str(plan_file), "--run", str(two.path), "--config", str(config)]
    words = [str(Path(sys.executable).parent / "mdp-partition"), "train", *where, "--threads", "1"]
    # torchrun takes --run for one of its own options, unless -- ends them.
    return Runs(one, two, words, torchrun("--no-python", "--", *words, "--json"))


def test_a_run_that_one_process_began_is_finished_by_two(runs: Runs) -> None:
    assert runs.done.returncode == 0, runs.done.stderr
    assert json.loads(runs.done.stdout) == {"run": str(runs.two.path), "members": 2}
    names = sorted(path.name for path in runs.one.path.iterdir() if path.name != ".lock")
    assert sorted(path.name for path in runs.two.path.iterdir() if path.name != ".lock") == names
    for name in (name for name in names if name.endswith(".safetensors")):
        ours, theirs = (load_file(run.path / name) for run in (runs.two, runs.one))
        assert ours.keys() == theirs.keys()
        vectors = [torch.cat([s[key].flatten() for key in sorted(s)]) for s in (ours, theirs)]
        assert difference(*vectors) < RUN_TOLERANCE, name
    curves = [json.loads(run.curves.read_bytes()) for run in (runs.two, runs.one)]
    assert {name: len(curve) for name, curve in curves[0].items()} == {
        "teacher": 2, "member-0": 3, "member-1": 2,
    }  # fmt: skip
    for name, curve in curves[1].items():
        assert curves[0][name][-1]["loss"] == pytest.approx(curve[-1]["loss"], rel=RUN_TOLERANCE)


def test_pods_of_the_chart_train_one_network(runs: Runs, tmp_path: Path) -> None:
    """Two launchers, as on two machines that share the run folder."""
    shared = RunFolder(tmp_path / "shared")
    shutil.copytree(runs.two.path, shared.path)
    shared.member(1).unlink()
    given = [str(shared.path) if word == str(runs.two.path) else word for word in runs.words]
    place = ("127.0.0.1", free_port())
    launcher = [sys.executable, "-m", "torch.distributed.run"]
    started = [
        subprocess.Popen(
            [*launcher, *pod_arguments(rank, given, place), "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    assert json.loads(said[0][0]) == {"run": str(shared.path), "members": 2}
    assert said[1][0] == ""
    ours, theirs = (load_file(run.member(1)) for run in (shared, runs.one))
    vectors = [torch.cat([s[key].flatten() for key in sorted(s)]) for s in (ours, theirs)]
    assert difference(*vectors) < RUN_TOLERANCE


def test_the_first_process_alone_reports(runs: Runs) -> None:
    # A slow machine brings lines in between.
    between = re.compile(r": \d+%, about | s so far$")
    said = [line for line in runs.done.stderr.splitlines() if not between.search(line)]
    lines = [line.split(":")[0] for line in said]
    assert lines.count("training sub-model 0 for alpha") == 1
    assert lines.count("sub-model 1 for beta") == 1
    assert "training the teacher" not in lines


def test_a_refusal_is_one_line_by_one_process(runs: Runs, tmp_path: Path) -> None:
    (code, first), other = by_two(command, main, *runs.words, "--epochs", "9", folder=tmp_path)
    assert code == 2
    (line,) = first.splitlines()
    assert line.startswith("mdp-partition")
    assert "schedule.epochs was 3, is now 9" in line
    assert other == (0, "")
