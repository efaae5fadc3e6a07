"""Candidates are tried by real trainers, by the commands that a person types."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from mdp.files import read_toml, toml_bytes, write_toml  # noqa: E402
from mdp.testing.processes import until  # noqa: E402
from partitioner.cli.main import main  # noqa: E402
from partitioner.crew.planning.syncplan import NetworkSync, read_plan  # noqa: E402
from partitioner.crew.planning.tuning import TRIALS, Tuned  # noqa: E402
from partitioner.data.datasets import DIGITS  # noqa: E402
from tests.integration.crew.test_training_together import NAMES, PATIENCE_S, Crew  # noqa: E402
from tests.support.models.crew_run import deeper_plan  # noqa: E402
from tests.support.models.forked import Forked, command  # noqa: E402

pytestmark = pytest.mark.torch

CONFIG = """
[run]
data = "digits"
threads = 1
[teacher_schedule]
epochs = 1
batch_size = 8
[schedule]
epochs = 1
batch_size = 8
"""
OF_CREW = ["--config", "build.toml", "--plan", "plan.toml", "--crew", "crew"]


class TunedCrew(Crew):
    """A coordinator that tunes, and trainers that join it."""

    def __init__(self, path: Path, *networks: NetworkSync, names: tuple[str, ...] = NAMES) -> None:
        super().__init__(path, Path(DIGITS), *networks, names=names)
        (path / "build.toml").write_text(CONFIG)
        write_toml(path / "plan.toml", deeper_plan(path))
        self.printed = path / "printed"

    def tune(self, *words: str) -> Forked:
        process = Forked(
            command, main, "mdp-partition", "crew", "tune", *OF_CREW, *words,
            stdout=self.printed, stderr=self.log_of("coordinator"), folder=self.path,
        )  # fmt: skip
        self.started.append(process)
        return process

    @property
    def last_line(self) -> str:
        """The last line on the coordinator's stderr."""
        return self.log_of("coordinator").read_text().splitlines()[-1]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """No process outlives its test."""
    yield
    for process in Crew.started:
        process.kill()
        process.wait()
    Crew.started.clear()


def networks(
    by: tuple[str, ...] = NAMES, teacher: tuple[str, ...] = NAMES[:1]
) -> list[NetworkSync]:
    """A teacher of some, a member of all, and one of the coordinator."""
    return [
        NetworkSync(name="teacher", by=teacher),
        NetworkSync(name="member-0", by=by),
        NetworkSync(name="member-1", by=NAMES[:1]),
    ]


def test_the_quickest_of_what_was_tried_is_kept(tmp_path: Path) -> None:
    crew = TunedCrew(tmp_path, *networks(teacher=NAMES[:2]))
    before = crew.folder.plan_file.read_bytes()
    processes = {"coordinator": crew.tune("--json")}
    processes |= {name: crew.start(name) for name in NAMES[1:]}
    for name, process in processes.items():
        crew.ends(name, process)
    tuned = read_toml(crew.folder.tuned_file, Tuned)
    assert (
        json.loads(crew.printed.read_text())["facts"] == tuned.facts == crew.folder.facts().digest
    )
    plan = read_plan(crew.folder.plan_file, crew.folder.facts())
    assert toml_bytes(plan, empty=False) != before
    for name, members in (("teacher", 2), ("member-0", 3)):
        rows = [row for row in tuned.tried if row.networks == (name,)]
        assert 1 < len(rows) <= TRIALS
        assert {row.sync.what for row in rows} == {"gradients", "parameters"}
        assert [row.predicted_s for row in rows] == sorted(row.predicted_s for row in rows)
        kept = [row for row in rows if row.kept]
        assert [row.measured_s for row in kept] == [min(row.measured_s for row in rows)]
        assert plan.of(name) == kept[0].sync
        assert plan.of(name).by == NAMES[:members]
    assert plan.of("member-1") == NetworkSync(name="member-1", by=("coordinator",))
    # Each trial was one of all the network's trainers, after the one before it.
    began = [network for network, _ in crew.starts() if network != "end"]
    expected = [f"trial-{i}" for i, row in enumerate(tuned.tried) for _ in row.sync.by]
    assert began == expected
    told = [action for _, actions in crew.log() for action in actions]
    means = {a["network"] for a in told if a["kind"] == "commit"}
    assert means == set(expected)
    # Nothing of what was trained is kept.
    assert not [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("checkpoint*")]


def test_a_trainer_that_is_lost_leaves_the_former_plan(tmp_path: Path) -> None:
    crew = TunedCrew(tmp_path, *networks())
    before = crew.folder.plan_file.read_bytes()
    processes = {name: crew.start(name) for name in NAMES[1:]}
    processes["coordinator"] = crew.tune()

    def is_trying() -> bool:
        if not crew.folder.log.exists():
            return False
        return any(network == "trial-1" for network, _ in crew.starts())

    until(is_trying, "the second trial", PATIENCE_S)
    processes["nuc"].kill()
    assert processes["nuc"].wait() == -signal.SIGKILL
    assert processes["coordinator"].wait(PATIENCE_S) == 3
    assert processes["tower"].wait(PATIENCE_S) == 3
    assert crew.last_line == "mdp-partition: nuc: lost; crew/crew.toml is as it was"
    assert "Traceback" not in crew.log_of("tower").read_text()
    assert crew.log_of("tower").read_text().splitlines()[-1] == "nuc: lost"
    assert crew.folder.plan_file.read_bytes() == before
    assert not crew.folder.tuned_file.exists()


def test_trainers_that_do_not_come(tmp_path: Path) -> None:
    crew = TunedCrew(tmp_path, *networks())
    before = crew.folder.plan_file.read_bytes()
    coordinator = crew.tune("--wait", "1")
    assert coordinator.wait(PATIENCE_S) == 3
    assert crew.last_line == (
        "mdp-partition: nuc, tower: not there in time; crew/crew.toml is as it was"
    )
    assert crew.printed.read_text() == ""
    assert crew.folder.plan_file.read_bytes() == before
    assert not crew.folder.tuned_file.exists()


def test_a_plan_that_cannot_be_written(tmp_path: Path) -> None:
    crew = TunedCrew(tmp_path, *networks(NAMES[:2]), names=NAMES[:2])
    tower, coordinator = crew.start("tower"), crew.tune("--exact")
    until(lambda: crew.folder.log.exists() and bool(crew.starts()), "a trial", PATIENCE_S)
    crew.folder.plan_file.unlink()
    crew.folder.plan_file.mkdir()
    assert coordinator.wait(PATIENCE_S) == 2
    assert crew.last_line.startswith("mdp-partition: crew/crew.toml: cannot be written: ")
    crew.ends("tower", tower)
    assert not crew.folder.tuned_file.exists()
    assert not [*crew.folder.path.glob(".*partial")]
