"""Exported models compute what torch computes, also after onnxruntime has optimised them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partitioner.export.write import check_parity, to_onnx

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
