"""Factors of dense layers' gradients over gloo: values, bytes, and what is refused."""

import copy
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402
from torch.distributed import ProcessGroup  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.crew.averaging.factors import Factors  # noqa: E402
from partitioner.crew.averaging.gradients import Gradients  # noqa: E402
from partitioner.crew.averaging.mean import Means, Meeting  # noqa: E402
from partitioner.crew.coordinator.sizes import factors_ratio  # noqa: E402
from partitioner.training.distributed import Crew  # noqa: E402
from tests.support.gloo import PlainGroups, in_threads, vector  # noqa: E402

pytestmark = pytest.mark.torch
WAYS = {"ring": Means(), "two_phase": Means(route="two_phase")}


class Classifier(nn.Module):
    """A trunk that sees tokens, and a head that sees each picture `passes` times."""

    def __init__(self, inputs: int, outputs: int, passes: int = 1) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, inputs)
        self.head = nn.Linear(inputs, outputs)
        self.passes = passes

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 3]` -> `[B, C]`."""
        feature = self.trunk(x).relu().mean(dim=1)
        total: Tensor = sum(self.head(feature / (1 + i)) for i in range(self.passes))
        return total


class Averaged(NamedTuple):
    """The end of one trainer: its weights and bytes."""

    weight: Tensor
    gradient: Tensor
    sent_bytes: int


def of_heads(name: str) -> bool:
    return name.startswith("head.")


def average(module: Classifier, means: Means, counts: Sequence[int]) -> list[Averaged]:
    """One step on pictures `0, 1, ..` of which each trainer has so many; with 0, one of no weight.

    The trainers begin with unlike heads.
    """
    members, store = tuple(range(len(counts))), HashStore()
    pictures = vector(sum(counts) * 12, 5).view(-1, 4, 3)

    def trainer(rank: int) -> Averaged:
        own = copy.deepcopy(module)
        if rank:
            nn.init.zeros_(own.head.weight)
        group = cast(ProcessGroup, PlainGroups(store, rank).of("net", 0, members))
        meeting = Meeting(group=group, members=members, weights=(1.0,) * len(counts), rank=rank)
        factors = Factors(own, of_heads, means)
        factors.share_weights(meeting)
        start = sum(counts[:rank])
        seen = pictures[start : start + counts[rank]] if counts[rank] else pictures[:1]
        with torch.no_grad():
            own(seen)  # a validation, say: nothing is noted
        part = counts[rank] / sum(counts)
        (own(seen).square().mean() * part * len(counts)).backward()
        factors.average(meeting, counts)
        assert own.head.weight.grad is not None
        return Averaged(own.head.weight.detach(), own.head.weight.grad, factors.sent_bytes)

    return in_threads(len(counts), trainer)


def gradient_of_one(module: Classifier, pictures: int) -> Tensor:
    """The head's gradient of the whole batch in one process."""
    alone = copy.deepcopy(module)
    alone(vector(pictures * 12, 5).view(-1, 4, 3)).square().mean().backward()
    assert alone.head.weight.grad is not None
    return alone.head.weight.grad


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("counts", [(2, 2), (4, 2, 1), (3, 0, 1, 2)])
@pytest.mark.parametrize(
    ("inputs", "outputs", "passes"), [(40, 60, 1), (40, 60, 2), (3, 4, 1)], ids=str
)
def test_the_gradient_is_that_of_one_process(
    way: str, counts: tuple[int, ...], inputs: int, outputs: int, passes: int
) -> None:
    torch.manual_seed(3)
    module = Classifier(inputs, outputs, passes)
    found = average(module, WAYS[way], counts)
    expected = gradient_of_one(module, sum(counts))
    for one in found:
        assert torch.equal(one.weight, module.head.weight)
        assert torch.equal(one.gradient, found[0].gradient)
        assert float((one.gradient - expected).norm() / expected.norm()) < 1e-5


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("inputs", "outputs", "pictures"), [(96, 10, 16), (96, 1_000, 16), (640, 1_000, 16)]
)
def test_each_layer_travels_in_the_fewer_bytes(
    way: str, inputs: int, outputs: int, pictures: int
) -> None:
    trainers = 4
    found = average(Classifier(inputs, outputs), WAYS[way], (pictures,) * trainers)
    dense = 4 * 2 * (trainers - 1) / trainers * inputs * outputs
    expected = dense * min(1.0, factors_ratio(outputs, inputs, trainers * pictures))
    assert [one.sent_bytes for one in found] == [pytest.approx(expected)] * trainers


def begin(module: Classifier, wanted: Callable[[str], bool]) -> None:
    """Set factors up, and see one picture of 4 tokens."""
    Factors(module, wanted, Means())
    module(vector(12, 5).view(-1, 4, 3))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (lambda name: name == "trunk.weight", r"trunk.weight sees tokens: \[1, 4, 3\]"),
        (lambda name: name == "scale", "found scale"),
        (lambda name: False, "found none that match"),
        (lambda name: name.endswith("bias"), "found none that match"),
    ],
)
def test_what_is_no_head_is_refused(wanted: Callable[[str], bool], message: str) -> None:
    module = Classifier(8, 4)
    module.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(InputError, match=f'codec = "factors": expected dense .*{message}') as no:
        begin(module, wanted)
    assert "\n" not in str(no.value)


def test_weights_that_drift_apart_are_those_of_the_first_after_an_epoch() -> None:
    def trainer(rank: int) -> list[Tensor]:
        group = cast(ProcessGroup, PlainGroups(store, rank).of("net", 0, (0, 1)))
        gradients = Gradients(
            Crew(rank, 2, group), Means(), lambda name: "fp32", bucket_bytes=2**20,
            is_factored=of_heads,
        )  # fmt: skip
        module = Classifier(8, 4)
        optimiser = torch.optim.AdamW(module.parameters())
        gradients.wrap(module, optimiser, torch.device("cpu"))
        with torch.no_grad():
            module.head.weight.add_(rank)
        own = module.head.weight.detach().clone()
        assert gradients.settle(torch.ones(1)).tolist() == [1.0]
        return [own, module.head.weight.detach()]

    store = HashStore()
    (first, settled), (drifted, same) = in_threads(2, trainer)
    assert not torch.equal(first, drifted)
    assert torch.equal(first, settled)
    assert torch.equal(first, same)


def test_rows_that_are_no_pictures_are_refused() -> None:
    def trainer(rank: int) -> str:
        module, members = Classifier(8, 4), (0, 1)
        group = cast(ProcessGroup, PlainGroups(store, rank).of("net", 0, members))
        meeting = Meeting(group=group, members=members, weights=(1.0, 1.0), rank=rank)
        factors = Factors(module, of_heads, Means())
        with pytest.raises(RuntimeError, match=r"head.weight: took no part in the loss"):
            factors.average(meeting, (2, 2))
        module(vector(36, 5).view(-1, 4, 3)).sum().backward()
        with pytest.raises(InputError) as refused:
            factors.average(meeting, (2, 2))
        return str(refused.value)

    store = HashStore()
    assert all(said.endswith("has 3 rows of 2 pictures") for said in in_threads(2, trainer))
