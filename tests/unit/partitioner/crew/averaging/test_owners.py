"""Outer steps at the owners of shards."""

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from partitioner.crew.averaging.codecs import CODECS  # noqa: E402
from partitioner.crew.averaging.mean import Segment  # noqa: E402
from partitioner.crew.averaging.owners import OuterStep  # noqa: E402

pytestmark = pytest.mark.torch
MEMBERS = (0, 1)
SHARD = [Segment(0, 2, CODECS["fp32"])]
R, MEAN = torch.tensor([1.0, -2.0]), torch.tensor([0.8, -1.9])


def stepped(
    outer: OuterStep, r: Tensor, mean: Tensor, members: tuple[int, ...] = MEMBERS
) -> Tensor:
    """The parameters after a mean that is committed."""
    found = r + outer.of(members, 2)(mean - r, SHARD)
    outer.commit(members)
    return found


def test_a_step_of_one_is_the_mean() -> None:
    assert torch.allclose(stepped(OuterStep(1.0, 0.0), R, MEAN), MEAN)
    assert torch.allclose(stepped(OuterStep(1.5, 0.0), R, MEAN), torch.tensor([0.7, -1.85]))


def test_momentum_goes_on_from_mean_to_mean() -> None:
    outer = OuterStep(0.7, 0.9)
    # A meeting that fails leaves no trace.
    outer.of(MEMBERS, 2)(torch.tensor([5.0, 5.0]), SHARD)
    first = stepped(outer, R, MEAN)
    assert torch.allclose(first, torch.tensor([0.734, -1.867]))
    second = stepped(outer, first, first - torch.tensor([0.1, 0.05]))
    assert torch.allclose(second, torch.tensor([0.4876, -1.8768]))


def test_momentum_begins_anew_with_other_members() -> None:
    outer = OuterStep(0.7, 0.9)
    stepped(outer, R, MEAN)
    assert torch.allclose(stepped(outer, R, MEAN, (0, 2)), torch.tensor([0.734, -1.867]))
    outer.commit(())
    assert torch.allclose(stepped(outer, R, MEAN, (0, 2)), torch.tensor([0.734, -1.867]))


def test_what_is_no_parameter_takes_the_mean() -> None:
    shard = [*SHARD, Segment(2, 2, CODECS["fp32"]), Segment(5, 6, CODECS["fp32"])]
    change = OuterStep(1.5, 0.0).of(MEMBERS, 2)
    assert change(torch.ones(3), shard).tolist() == [1.5, 1.5, 1.0]
    assert change(torch.ones(0), []).tolist() == []
