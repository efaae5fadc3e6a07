"""Plans that no crew trains."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from mdp.errors import InputError
from partitioner.crew.desk import Together
from partitioner.crew.folder import CrewFolder
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
