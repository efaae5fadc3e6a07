"""Means that come during the next forward pass: whose steps wait, and a member that is lost."""

from collections.abc import Callable
from typing import Any, cast

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402
from torch.distributed import ProcessGroup  # noqa: E402

from partitioner.crew.averaging import next_forward  # noqa: E402
from partitioner.crew.averaging.gradients import Gradients  # noqa: E402
from partitioner.crew.averaging.mean import Means  # noqa: E402
from partitioner.crew.averaging.next_forward import NextForwardGradients  # noqa: E402
from partitioner.training.distributed import Crew  # noqa: E402
from tests.support.gloo import PlainGroups, in_threads  # noqa: E402

pytestmark = pytest.mark.torch


class Layers(nn.Module):
    """Two layers, of which the second one's weights may be used without it."""

    def __init__(self, *, around: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second, self._around = nn.Linear(4, 4), nn.Linear(4, 2), around

    def forward(self, x: Tensor) -> Tensor:
        """`[B, 4]` -> `[B, 2]`."""
        x = self.first(x)
        if self._around:
            return nn.functional.linear(x, self.second.weight, self.second.bias)
        logits: Tensor = self.second(x)
        return logits


class Member:
    """A trainer of two."""

    def __init__(self, store: HashStore, place: int, module: Layers, kind: type[Gradients]) -> None:
        group = cast(ProcessGroup, PlainGroups(store, place).of("net", 0, (0, 1)))
        self.gradients = kind(
            Crew(place, 2, group), Means(route="two_phase"), lambda name: "fp32", bucket_bytes=4
        )
        self.module, self.place = module, place
        self.optimiser = torch.optim.AdamW(module.parameters(), lr=0.1)
        self.network = self.gradients.wrap(module, self.optimiser, torch.device("cpu"))

    def take_steps(self, count: int = 1) -> None:
        """Steps on pictures of one's own."""
        for _ in range(count):
            self.optimiser.zero_grad(set_to_none=True)
            generator = torch.Generator().manual_seed(self.place)
            self.network(torch.randn(3, 4, generator=generator)).square().mean().backward()
            self.gradients.update(self.optimiser)
            self.gradients.after_step(3)


def by_two(
    run: Callable[[Member], Any],
    *,
    around: bool = False,
    kind: type[Gradients] = NextForwardGradients,
) -> list[Any]:
    store = HashStore()

    def trained(place: int) -> Any:
        # Drawn with one seed, of which threads share the state.
        return run(Member(store, place, modules[place], kind))

    modules = [Layers(around=around) for _ in range(2)]
    return in_threads(2, trained)


def test_layers_take_their_steps_as_they_run() -> None:
    def run(member: Member) -> Any:
        before = member.module.first.weight.detach().clone()
        member.take_steps()
        # The means are on their way, and nothing has changed.
        assert torch.equal(member.module.first.weight, before)
        member.optimiser.param_groups[0]["lr"] = 0.0
        member.take_steps()
        # With the step size of the first step, and of none of the gradients that came since.
        after = member.module.first.weight.detach().clone()
        assert float((after - before).abs().max()) == pytest.approx(0.1, rel=0.02)
        member.gradients.settle(torch.zeros(1))
        assert torch.equal(member.module.first.weight, after)
        return after

    first, second = by_two(run)
    assert torch.equal(first, second)


@pytest.mark.parametrize("around", [False, True])
def test_weights_that_are_used_without_their_layer_are_waited_for(around: bool) -> None:
    def run(member: Member) -> tuple[Tensor, Tensor]:
        # From the second step on each parameter has a bucket of its own.
        member.take_steps(4)
        member.gradients.settle(torch.zeros(1))
        return member.module.first.weight.detach(), member.module.second.weight.detach()

    found = by_two(run, around=around)
    expected = by_two(run, kind=Gradients)
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert torch.allclose(one, other, atol=1e-6)


def test_a_member_lost_between_the_phases_fails_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(collected: object) -> Tensor:
        raise RuntimeError("connection closed by peer")

    def run(member: Member) -> str:
        member.take_steps()
        with pytest.raises(RuntimeError, match="connection closed by peer"):
            member.take_steps()
        # The next crew trains the same network.
        member.module(torch.zeros(1, 4))
        return "failed"

    monkeypatch.setattr(next_forward._Collected, "spread", fail)
    assert by_two(run) == ["failed", "failed"]
