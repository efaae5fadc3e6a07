"""Rank of a process among torchrun's, its share of a batch, and one process alone."""

from pathlib import Path

import numpy as np
import pytest

from mdp.errors import InputError
from partitioner.training.distributed import (
    all_agree,
    all_exist,
    barrier,
    common_error,
    first_then_others,
    from_first,
    is_first,
    join_group,
    share_of,
    together,
)
from partitioner.training.world import World, world

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}


def test_without_torchrun_there_is_one_process() -> None:
    assert world({}) == World(rank=0, size=1, local_rank=0, local_size=1)
    assert is_first()


def test_torchrun_says_who_this_is() -> None:
    assert world(TORCHRUN) == World(rank=5, size=8, local_rank=1, local_size=4)


def test_the_first_process_is_the_one_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert not is_first()
    monkeypatch.setenv("RANK", "0")
    assert is_first()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", "8", "from 0 to 7"),
        ("RANK", "-1", "from 0 to 7"),
        ("LOCAL_RANK", "four", "from 0 to 3"),
        ("WORLD_SIZE", "0", "from 1 to"),
        ("LOCAL_WORLD_SIZE", "", "from 1 to"),
    ],
)
def test_odd_variables_are_named(name: str, value: str, expected: str) -> None:
    with pytest.raises(InputError, match=f"variable {name}: expected a number {expected}.*{value}"):
        world({**TORCHRUN, name: value})


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("pictures", [1, 4, 7, 10])
def test_shares_make_up_the_batch(pictures: int, size: int) -> None:
    batch = np.arange(100, 100 + pictures)
    shares = [share_of(batch, World(rank=rank, size=size)) for rank in range(size)]
    assert sum(part for _, part in shares) == pytest.approx(1)
    counted = [share for share, part in shares if part]
    assert np.concatenate(counted).tolist() == batch.tolist()
    for share, part in shares:
        assert len(share) > 0
        assert part in (0.0, len(share) / pictures)
    lengths = {len(share) for share in counted}
    assert max(lengths) - min(lengths) <= 1


def test_one_process_waits_for_nobody() -> None:
    barrier()
    ran = []
    with join_group() as here:
        assert here == World()
        with first_then_others():
            ran.append("once")
    assert ran == ["once"]
    assert all_agree(3)
    assert from_first(lambda: 0.5) == 0.5


def test_finished_is_what_is_all_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    assert all_exist(tmp_path / "a")
    assert not all_exist(tmp_path / "a", tmp_path / "b")


def test_the_errors_of_one_process_are_its_own() -> None:
    error = InputError("no room")
    assert common_error(error) is error
    for wait in (together, first_then_others):
        with pytest.raises(InputError, match="no room") as caught, wait():
            raise error
        assert caught.value is error
