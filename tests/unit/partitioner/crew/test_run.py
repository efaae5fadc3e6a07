"""Plans that no crew trains."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from mdp.errors import ConfigError, InputError
from mdp.files import write_toml
from partitioner.crew.folder import CrewFolder
from partitioner.crew.planning.facts import Facts, Trainer
from partitioner.crew.planning.syncplan import Answers, SyncPlan, write_plan
from partitioner.crew.run import Together
from partitioner.data.datasets import DIGITS, open_dataset
from tests.support.models.runs import config_of, tiny_plan

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [({"teaching": "live"}, 1, "expected run.teaching"), ({}, 2, "torchrun: expected one process")],
)
def test_what_no_crew_trains(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    processes: int,
    message: str,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    monkeypatch.setenv("RANK", "0")
    data = open_dataset(DIGITS, limit_train=20)
    with pytest.raises(InputError, match=message):
        Together.of(CrewFolder(tmp_path), tiny_plan(), config_of(DIGITS, **changes), data)


def test_a_crew_keeps_what_its_plan_says(tmp_path: Path) -> None:
    data = open_dataset(DIGITS, limit_train=20)
    trainer = Trainer(name="coordinator", address="127.0.0.1", memory_bytes=2**40)
    folder = CrewFolder(tmp_path)
    write_toml(folder.facts_file, Facts(trainer=(trainer,)))
    for keep, given, expected in ((None, None, None), (3, None, 3), (3, 4, 3), (None, 4, 4)):
        write_plan(folder.plan_file, SyncPlan(answers=Answers(keep=keep)))
        config = config_of(DIGITS, answers_keep=given)
        found = Together.of(folder, tiny_plan(), config, data)
        assert found.config.options.answers_keep == expected
    write_plan(folder.plan_file, SyncPlan(answers=Answers(keep=11)))
    with pytest.raises(ConfigError, match=r"`answers\.keep`: expected at most 10, .* found 11"):
        Together.of(folder, tiny_plan(), config_of(DIGITS), data)
