"""Later sub-models that need the first one alone: any order, any process, the same weights."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from mdp.formats.plan import Plan  # noqa: E402
from partitioner.data.datasets import open_dataset  # noqa: E402
from partitioner.run.folder import RunFolder  # noqa: E402
from partitioner.run.settings import MemberSchedule  # noqa: E402
from partitioner.training.context import TrainingContext  # noqa: E402
from partitioner.training.members import train_members  # noqa: E402
from partitioner.training.teacher import ensure_targets, ensure_teacher  # noqa: E402
from tests.support.models.runs import CHAINED, QUIET, config_of, spec, tiny_plan  # noqa: E402
from tests.support.models.training import train  # noqa: E402
from tests.support.models.trees import write_tree  # noqa: E402

pytestmark = pytest.mark.torch

STAR = CHAINED | {"chain": "star"}


def three() -> Plan:
    """Three members, of which the last is cut from either of the others."""
    made = tiny_plan()
    first, second = made.assignments
    third = msgspec.structs.replace(first, k=2, device="gamma", submodel=spec(8, 8))
    return msgspec.structs.replace(made, assignments=[first, second, third])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tree(tmp_path_factory.mktemp("star") / "tree", each=12)


def train_star(tree: Path, run: Path, **schedule: Any) -> TrainingContext:
    options = config_of(tree, epochs=1, schedule=schedule)
    return train(RunFolder(run), three(), open_dataset(str(tree)), options, QUIET)


def weights(work: TrainingContext) -> list[bytes]:
    return [work.run.member(k).read_bytes() for k in range(3)]


def test_a_star_with_bag_heads_alone_is_what_a_strict_chain_is(tree: Path, tmp_path: Path) -> None:
    star = train_star(tree, tmp_path / "star", chain="star")
    assert weights(star) == weights(train_star(tree, tmp_path / "strict"))


def test_a_later_member_of_a_star_needs_the_first_alone(tree: Path, tmp_path: Path) -> None:
    work = train_star(tree, tmp_path / "whole", **STAR)
    assert {path.name for path in work.run.predecessors.iterdir()} == {
        "sum-0-0.npy", "feature-0-0.npy",
    }  # fmt: skip
    wanted = weights(work)
    shutil.rmtree(work.run.predecessors)
    for k in (1, 2):
        work.run.member(k).unlink()
    teacher = ensure_teacher(work, None)
    for k in (2, 1):
        train_members(work, teacher, ensure_targets(work, teacher), only=[k])
    assert weights(work) == wanted
    strict = train_star(tree, tmp_path / "strict", **CHAINED)
    assert weights(strict)[:2] == wanted[:2]
    assert weights(strict)[2] != wanted[2]


def test_predecessors() -> None:
    star = MemberSchedule(chain="star")
    assert [list(star.predecessors(k)) for k in range(3)] == [[], [0], [0]]
    assert [list(MemberSchedule().predecessors(k)) for k in range(3)] == [[], [0], [0, 1]]
