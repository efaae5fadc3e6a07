"""Muon: its step, one trainer's and several trainers' steps, and what is refused."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.crew.averaging.mean import Means  # noqa: E402
from partitioner.crew.averaging.muon import MuonSettings, MuonSteps  # noqa: E402
from tests.support.gloo import in_threads, meeting_of_equals  # noqa: E402

pytestmark = pytest.mark.torch

SETTINGS = MuonSettings(step=2.0)


class Blocks(nn.Module):
    """Three matrices in blocks, and a head."""

    def __init__(self) -> None:
        super().__init__()
        first, second = nn.Linear(3, 2), nn.Linear(2, 8)
        self.blocks = nn.ModuleList([first, second, nn.Linear(8, 4)])
        self.first, self.second = first, second
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 3]` -> `[B, 3]`."""
        for block in self.blocks:
            x = block(x).tanh()
        found: Tensor = self.head(x)
        return found


def matrices(module: Blocks) -> list[Tensor]:
    return [parameter.detach() for parameter in module.blocks.parameters() if parameter.dim() == 2]


def test_a_step_makes_singular_values_one() -> None:
    module = Blocks()
    weight = module.first.weight
    before = weight.detach().clone()
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight.grad = torch.tensor([[-0.125, 0.625, 0.25], [0.375, -0.375, 0.25]])
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
    assert MuonSteps(module, Means(), SETTINGS).take_step(optimiser, [4], None)
    # Twice the optimiser's step size, and as long as a step of AdamW's.
    size = 2 * 0.01
    step = (before * (1 - size * 0.1) - weight.detach()) / (size * 0.2 * 3**0.5)
    expected = torch.tensor([[0.0783, 0.6456, 0.5348], [0.6047, -0.2590, 0.6336]])
    assert torch.allclose(step, expected, atol=2e-2)
    assert torch.linalg.svdvals(step).tolist() == pytest.approx([0.9996, 0.7374], abs=2e-2)
    # Nothing of it is left to the optimiser, and all else is.
    assert [p.grad is None for p in module.first.parameters()] == [True, False]
    assert module.head.weight.grad is not None


def train(counts: tuple[int, ...], steps: int = 6) -> list[tuple[Blocks, int]]:
    """Steps of the same batch, of which each trainer has so many pictures."""
    store = HashStore()
    torch.manual_seed(1)
    module = Blocks()
    generator = torch.Generator().manual_seed(2)
    pictures, labels = torch.randn(sum(counts), 3, generator=generator), torch.arange(sum(counts))

    def trainer(rank: int) -> tuple[Blocks, int]:
        own = copy.deepcopy(module)
        if rank:
            nn.init.zeros_(own.first.weight)
        muon, meeting = MuonSteps(own, Means(route="two_phase"), SETTINGS), None
        if len(counts) > 1:
            meeting = meeting_of_equals(store, rank, len(counts))
            muon.share_weights(meeting)
        optimiser = torch.optim.AdamW(own.parameters(), lr=1e-3)
        start = sum(counts[:rank])
        mine = slice(start, start + counts[rank])
        for _ in range(steps):
            own.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(own(pictures[mine]), labels[mine] % 3)
            # As the loop has it: the mean over members is that over the batch's pictures.
            torch.autograd.backward(loss * (counts[rank] / sum(counts) * len(counts)))
            assert muon.take_step(optimiser, counts, meeting)
        return own, muon.sent_bytes

    return in_threads(len(counts), trainer)


@pytest.mark.parametrize("counts", [(6, 6), (7, 4, 1)])
def test_several_trainers_take_the_steps_of_one(counts: tuple[int, ...]) -> None:
    ((alone, none),) = train((12,))
    found = train(counts)
    assert none == 0
    numbers = [matrix.numel() for matrix in matrices(alone)]
    for module, _ in found:
        for ours, first, theirs in zip(
            matrices(module), matrices(found[0][0]), matrices(alone), strict=True
        ):
            assert torch.equal(ours, first)
            # Torch computes steps in bf16, of which rounding of gradients may change the last bit.
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-4
    # Of each matrix all but the owner send a gradient, and it sends all others the weights.
    sent = sum(count for _, count in found)
    assert sent == 6 * 2 * (len(counts) - 1) * 4 * sum(numbers)


def test_what_is_not_finite_changes_nothing_at_any_trainer() -> None:
    store = HashStore()
    torch.manual_seed(1)
    modules = [Blocks() for _ in range(2)]

    def trainer(rank: int) -> bool:
        meeting = meeting_of_equals(store, rank, 2)
        module = modules[rank]
        muon = MuonSteps(module, Means(), SETTINGS)
        muon.share_weights(meeting)
        before = [matrix.clone() for matrix in matrices(module)]
        optimiser = torch.optim.AdamW(module.parameters(), lr=0.1)
        torch.autograd.backward(module(torch.full((2, 3), float(rank))).square().mean())
        if rank:
            assert module.second.weight.grad is not None
            module.second.weight.grad[0, 0] = torch.nan
        finite = muon.take_step(optimiser, (2, 2), meeting)
        assert all(map(torch.equal, matrices(module), before))
        return finite

    assert in_threads(2, trainer) == [False, False]


def test_a_network_without_blocks_of_matrices_is_refused() -> None:
    with pytest.raises(InputError, match='owner = "muon": expected a network with blocks'):
        MuonSteps(nn.Sequential(nn.Linear(2, 2)), Means(), SETTINGS)
