"""The end-to-end benchmark: a teacher in pieces computes what the whole one does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.end_to_end.rivals.pieces import dealt, write_stages  # noqa: E402
from benchmarks.end_to_end.rivals.stage import FP16, FP32, RAW, Stage  # noqa: E402
from partitioner.networks.teacher import build_teacher, teacher_spec  # noqa: E402

pytestmark = pytest.mark.torch
ARGS: dict[str, Any] = {
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 48,
    "depth": 2,
    "num_heads": 3,
}


@pytest.mark.parametrize(("between", "error"), [(FP32, 1e-4), (FP16, 1e-2)])
def test_stages_one_after_another_are_the_teacher(
    tmp_path: Path, between: bytes, error: float
) -> None:
    torch.manual_seed(0)
    teacher = build_teacher(teacher_spec("vit_tiny_patch16_224", ARGS), 5, pretrained=False).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            # Fresh ones are so small that a forgotten bias or block would hardly show.
            parameter.add_(0.1 * torch.randn_like(parameter))
        pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
        logits = teacher(torch.from_numpy(pixels).permute(0, 3, 1, 2).float()).numpy()
    assert np.abs(logits).max() > 0.5
    frames = [RAW, between, pixels.tobytes()]
    for number, model in enumerate(write_stages(teacher, (1.0, 1.0), tmp_path)):
        frames = Stage(model, last=number == 1).answer(frames)
    assert np.abs(np.frombuffer(frames[-1], np.float32) - logits).max() < error


@pytest.mark.parametrize("speeds", [(1.0,), (0.6, 0.45, 0.3), (5.0, 0.1, 0.4)])
def test_no_device_could_be_done_sooner_with_other_parts(speeds: tuple[float, ...]) -> None:
    counts: Any = dealt(12, speeds)
    assert sum(counts) == 12
    slowest = max(count / speed for count, speed in zip(counts, speeds, strict=True))
    for count, speed in zip(counts, speeds, strict=True):
        assert (count + 1) / speed >= slowest
