"""Exported models compute what torch computes, also after onnxruntime has optimised them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partitioner.export.write import check_parity, replace_tensors, to_onnx
from partitioner.networks.feature_distance import attach_distance

pytestmark = pytest.mark.torch


class PaddedMaximum(nn.Module):
    """The stem of HGNetV2: zero padding, then a maximum, here of negative numbers."""

    def forward(self, images: Tensor) -> tuple[Tensor]:
        negative = -1 - images.permute(0, 3, 1, 2).float()
        padded = nn.functional.pad(negative, (0, 1, 0, 1))
        return (nn.functional.max_pool2d(padded, 2, 1).flatten(1),)


def test_zero_padding_before_a_maximum_counts(tmp_path: Path) -> None:
    module, model = PaddedMaximum(), tmp_path / "model.onnx"
    model.write_bytes(to_onnx(module, 4, ["maxima"], {}))
    pixels = np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), dtype=np.uint8)
    assert check_parity(model, module, pixels, ["maxima"]) < 1e-6
    with torch.inference_mode():
        assert module(torch.from_numpy(pixels))[0].max() == 0


class Classified(nn.Module):
    """A classifier of the colours of a row of pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.top = nn.Linear(3 * width, 2)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        found: Tensor = self.top(images.float().mean(dim=1).flatten(1))
        return (found,)


def carrying(width: int, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A classifier with the distance from features of a seed, and its tensors."""
    torch.manual_seed(0)
    module = Classified(width)
    features = torch.rand(100, 3 * width, generator=torch.Generator().manual_seed(seed))
    return module, attach_distance(module, "top", features)


@pytest.mark.parametrize("width", [4, 200])
def test_a_model_with_other_values_is_the_one_that_would_be_exported(width: int) -> None:
    """Of a small matrix the exporter keeps the transposed one too."""
    (first, _), (second, tensors) = carrying(width, 1), carrying(width, 2)
    assert set(tensors) == {f"top.{name}" for name in ("mean", "scale", "directions", "typical")}
    exported = to_onnx(first, width, ["bag"], {})
    assert replace_tensors(exported, tensors) == to_onnx(second, width, ["bag"], {}) != exported
    assert replace_tensors(exported, {"top.other": torch.zeros(3)}) is None
    assert replace_tensors(exported, {"top.mean": torch.zeros(5)}) is None
