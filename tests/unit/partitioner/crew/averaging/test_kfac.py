"""K-FAC: curvature, the limit of a step, owners of layers, and one trainer's steps."""

import copy

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.crew.averaging import kfac as curvatures  # noqa: E402
from partitioner.crew.averaging.kfac import Curvature, Kfac, KfacSettings, limit_change  # noqa: E402
from partitioner.crew.averaging.layer_owners import owners_of  # noqa: E402
from partitioner.crew.averaging.mean import Means  # noqa: E402
from tests.support.gloo import in_threads, meeting_of_equals, vector  # noqa: E402

pytestmark = pytest.mark.torch

SETTINGS = KfacSettings(step=1.0, damping=0.003)
#: Two outputs and two inputs with a bias, of four pictures.
INPUTS = [[1.0, 2.0, 1.0], [0.0, 1.0, 1.0], [2.0, -1.0, 1.0], [1.0, 0.0, 1.0]]
GRADIENTS = [[0.5, -0.5], [1.0, 0.0], [-0.5, 0.5], [0.0, 1.0]]


def factors() -> tuple[Tensor, Tensor, Tensor]:
    """G, A and the mean gradient of these pictures."""
    a, g = torch.tensor(INPUTS).double(), torch.tensor(GRADIENTS).double()
    return g.T @ g / 4, a.T @ a / 4, g.T @ a / 4


def test_the_step_is_the_damped_inverse_times_the_gradient() -> None:
    outputs, inputs, gradient = factors()
    assert outputs.tolist() == [[0.375, -0.125], [-0.125, 0.375]]
    assert inputs.tolist() == [[1.5, 0.0, 1.0], [0.0, 1.5, 0.5], [1.0, 0.5, 1.0]]
    assert gradient.tolist() == [[-0.125, 0.625, 0.25], [0.375, -0.375, 0.25]]
    found = Curvature.of(outputs, inputs).precondition(gradient, 0.01)
    expected = torch.tensor([[-1.463279, 0.253066, 2.246871], [-0.805385, -1.062723, 2.246871]])
    assert torch.allclose(found.float(), expected, atol=1e-6)
    whole = torch.kron(outputs, inputs) + 0.01 * torch.eye(6)
    solved = torch.linalg.solve(whole, gradient.flatten())
    assert torch.allclose(found.flatten(), solved)
    assert limit_change(0.1, float((found * gradient).sum()), 0.001) == pytest.approx(
        0.253103, abs=1e-6
    )


def test_a_small_step_is_not_limited() -> None:
    assert limit_change(0.1, 0.5) == 1.0
    assert limit_change(0.1, -4.0) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0], [0, 1, 2, 2, 0, 1, 0]),
        # Cubes of both sides of the layers of a block that is 96 wide.
        ([1002385.0, 24800545.0, 1797409.0, 57535777.0, 57951361.0], [2, 2, 2, 1, 0]),
        ([], []),
    ],
)
def test_owners_by_computing_alone(costs: list[float], expected: list[int]) -> None:
    assert owners_of([(cost, 0.0) for cost in costs], 3) == expected


def test_owners_by_what_they_receive() -> None:
    # Two that compute long and two that receive much are one of each at either.
    assert owners_of([(4.0, 0.0), (3.0, 0.0), (0.0, 4.0), (0.0, 3.0)], 2) == [0, 1, 0, 1]
    assert owners_of([(1.0, 9.0), (1.0, 1.0), (1.0, 1.0)], 2) == [0, 1, 1]


class Classifier(nn.Module):
    """A layer that sees tokens, a norm, and a head without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[B, T, 3]` -> `[B, C]`."""
        found: Tensor = self.head(self.norm(self.trunk(x).relu()).mean(dim=1))
        return found


PICTURES = 14
LABELS = torch.arange(PICTURES) % 4


def train(
    counts: tuple[int, ...], steps: int = 12, rate: float = 5e-5, settings: KfacSettings = SETTINGS
) -> list[tuple[Classifier, int]]:
    """Steps of the same batch, of which each trainer has so many pictures; with 0 one of none.

    The trainers begin with unlike layers, and take the first one's.
    """
    store = HashStore()
    torch.manual_seed(1)
    module = Classifier()

    def trainer(rank: int) -> tuple[Classifier, int]:
        own = copy.deepcopy(module)
        if rank:
            nn.init.zeros_(own.head.weight)
        kfac, meeting = Kfac(own, Means(route="two_phase"), settings), None
        if len(counts) > 1:
            meeting = meeting_of_equals(store, rank, len(counts))
            kfac.share_weights(meeting)
        optimiser = torch.optim.AdamW(own.parameters(), lr=rate, weight_decay=0.05)
        pictures = vector(PICTURES * 12, 5).view(PICTURES, 4, 3)
        start = sum(counts[:rank])
        rows = slice(start, start + counts[rank]) if counts[rank] else slice(1)
        part = counts[rank] / PICTURES * len(counts)
        for _ in range(steps):
            optimiser.zero_grad()
            with torch.no_grad():
                own(pictures)  # a validation, say: nothing is noted
            loss = nn.functional.cross_entropy(own(pictures[rows]), LABELS[rows])
            torch.autograd.backward(loss * part)
            # The norm is not averaged here, and not trained.
            own.norm.weight.grad = own.norm.bias.grad = None
            assert kfac.take_step(optimiser, counts, meeting)
            optimiser.step()
        return own, kfac.sent_bytes

    return in_threads(len(counts), trainer)


@pytest.mark.parametrize("counts", [(7, 7), (8, 4, 2), (9, 0, 5)])
def test_several_trainers_take_the_steps_of_one(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...]
) -> None:
    # Factors are updated and decomposed twice.
    monkeypatch.setattr(curvatures, "DECOMPOSE_EVERY", curvatures.UPDATE_EVERY)
    (alone, none_sent), *_ = train((PICTURES,))
    assert none_sent == 0
    found = train(counts)
    for own, _ in found:
        for name, one in own.state_dict().items():
            other = alone.state_dict()[name]
            assert float((one - other).norm()) < 1e-5 * (1 + float(other.norm())), name
            assert torch.equal(one, found[0][0].state_dict()[name])


def test_the_loss_falls() -> None:
    pictures = vector(PICTURES * 12, 5).view(PICTURES, 4, 3)
    losses = []
    for steps in (1, 60):
        ((own, _),) = train((PICTURES,), steps, 0.01, KfacSettings(step=3.0, damping=10.0))
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(own(pictures), LABELS)))
    assert losses[1] < 0.75 * losses[0]


def test_half_of_a_factor_travels_and_no_inverse() -> None:
    # Each of two layers has an owner of its own.
    found = train((7, 7), steps=1)
    trunk, head = 6 * 4, 4 * 6
    triangles = {"trunk": 21 + 10, "head": 10 + 21}
    # Either sends the other's gradient and factors, and the own step with its change.
    expected = {
        4 * (trunk + triangles["trunk"] + head + 1),
        4 * (head + triangles["head"] + trunk + 1),
    }
    assert {sent for _, sent in found} <= expected
    # A step without an update of factors sends gradients and steps alone.
    more = train((7, 7), steps=2)
    for (_, first), (_, second) in zip(found, more, strict=True):
        assert second - first == 4 * (trunk + head + 1)


def test_what_is_not_finite_changes_nothing() -> None:
    module = Classifier()
    before = copy.deepcopy(module.state_dict())
    kfac = Kfac(module, Means(), SETTINGS)
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.01)
    (module(torch.full((2, 4, 3), torch.inf)).sum()).backward()
    assert not kfac.take_step(optimiser, [2], None)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_a_network_without_dense_layers_is_refused() -> None:
    with pytest.raises(InputError, match=r'owner = "kfac": expected a network with dense layers'):
        Kfac(nn.Sequential(nn.Conv2d(3, 4, 3)), Means(), SETTINGS)


def test_a_layer_that_took_no_part_in_the_loss() -> None:
    module = Classifier()
    kfac = Kfac(module, Means(), SETTINGS)
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.01)
    with pytest.raises(RuntimeError, match=r"trunk: took no part in the loss of a step"):
        kfac.take_step(optimiser, [2], None)
