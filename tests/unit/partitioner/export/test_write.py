"""Exported models compute what torch computes, also after onnxruntime has optimised them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from partitioner.export.write import ParityError, check_parity, to_onnx

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


class ScaledMean(nn.Module):
    """Means of colours, times a factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, images: Tensor) -> tuple[Tensor]:
        return (images.float().mean(dim=(1, 2)) * self.factor,)


def _exported(tmp_path: Path, factor: float) -> tuple[Path, np.ndarray]:
    model = tmp_path / "model.onnx"
    model.write_bytes(to_onnx(ScaledMean(factor), 4, ["means"], {}))
    return model, np.random.default_rng(0).integers(0, 256, (8, 4, 4, 3), dtype=np.uint8)


def test_large_logits_may_differ_by_a_share_of_them(tmp_path: Path) -> None:
    model, pixels = _exported(tmp_path, 1000.0)
    assert check_parity(model, ScaledMean(1000.01), pixels, ["means"]) > 1e-3
    with pytest.raises(ParityError, match=r"on 8 pictures, expected at most"):
        check_parity(model, ScaledMean(1001.0), pixels, ["means"])


def test_an_answer_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    model, pixels = _exported(tmp_path, 1.0)
    with pytest.raises(ParityError, match="differs from torch by nan"):
        check_parity(model, ScaledMean(float("nan")), pixels, ["means"])
