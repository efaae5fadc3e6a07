"""A network that is traced once for its structure: the models that torch exports."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mdp.runtimes.onnxruntime import import_onnxruntime  # noqa: E402
from partitioner.export.write import to_onnx  # noqa: E402
from tests.support.models import traced_once  # noqa: E402

pytestmark = pytest.mark.torch
SIDE = 4


class Net(nn.Module):
    """A linear network whose factor is no weight, and is not seen in its structure."""

    def __init__(self, seed: int, factor: float = 1.0, zero: bool = False, shifts: int = 1) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(3 * SIDE**2, 8), nn.Linear(8, 3)
        if zero:
            for layer in (self.first, self.last):
                nn.init.zeros_(layer.bias)
        self.factor = factor
        #: Not seen in the structure either.
        self.register_buffer("shift", torch.zeros(shifts, 1, 1))

    def forward(self, images: Tensor) -> tuple[Tensor]:
        hidden = torch.relu(self.first(images.flatten(1).float() / 255))
        return ((self.factor * self.last(hidden) + self.shift).sum(dim=0),)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The networks that torch has exported."""
    real, seen = traced_once._export, list[nn.Module]()

    def count(module: nn.Module, *args: Any, **how: Any) -> Any:
        seen.append(module)
        return real(module, *args, **how)

    monkeypatch.setattr(traced_once, "_export", count)
    monkeypatch.setattr(traced_once, "_known", {})
    return seen


def assert_is(model: bytes, net: Net) -> None:
    """Fail unless a model computes what a network does."""
    images = np.random.default_rng(1).integers(0, 256, (5, SIDE, SIDE, 3), dtype=np.uint8)
    session = import_onnxruntime().InferenceSession(model)
    (found,) = session.run(None, {"images": images})
    (expected,) = net(torch.from_numpy(images))
    assert found == pytest.approx(expected.detach().numpy(), abs=1e-5)


def export(net: Net) -> bytes:
    with traced_once.traced_once():
        return to_onnx(net, SIDE, ["logits"], {"whose": str(net.factor)})


def test_networks_of_one_structure_are_traced_once(exported: list[nn.Module]) -> None:
    for seed in range(3):
        net = Net(seed)
        assert_is(export(net), net)
    assert len(exported) == 1


def test_what_the_structure_does_not_show_is_traced_anew(exported: list[nn.Module]) -> None:
    for factor in (1.0, 2.0):
        net = Net(0, factor)
        assert_is(export(net), net)
    assert len(exported) == 2


def test_buffers_of_other_shapes_are_traced_anew(exported: list[nn.Module]) -> None:
    for shifts in (2, 3):
        net = Net(0, shifts=shifts)
        assert_is(export(net), net)
    assert len(exported) == 2


def test_weights_that_are_not_told_apart_are_traced_anew(exported: list[nn.Module]) -> None:
    for net in (Net(0, zero=True), Net(1), Net(2)):
        assert_is(export(net), net)
    assert len(exported) <= 2
