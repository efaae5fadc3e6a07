"""The end-to-end benchmark: a teacher in pieces computes what the whole one does."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.end_to_end.check import in_parts, in_stages, run_one  # noqa: E402
from benchmarks.end_to_end.rivals.pieces import (  # noqa: E402
    check_splittable,
    write_parts,
    write_stages,
)
from mdp.errors import InputError  # noqa: E402
from partitioner.networks.teacher import Teacher, build_teacher, teacher_spec  # noqa: E402

pytestmark = pytest.mark.torch
ARGS = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
SPEEDS = (2.0, 1.0)
CLASSES = 5


def small_teacher(**more: bool | float) -> Teacher:
    torch.manual_seed(0)
    spec = teacher_spec("vit_tiny_patch16_224", {**ARGS, **more})
    teacher = build_teacher(spec, CLASSES, pretrained=False).eval()
    with torch.no_grad():
        for parameter in teacher.parameters():
            # Fresh ones are so small that a forgotten bias or block would hardly show.
            parameter.add_(0.1 * torch.randn_like(parameter))
    return teacher


def picture_and_logits(teacher: Teacher) -> tuple[np.ndarray, np.ndarray]:
    pixels = np.random.default_rng(0).integers(0, 256, (1, 32, 32, 3), dtype=np.uint8)
    with torch.no_grad():
        logits = teacher(torch.from_numpy(pixels).permute(0, 3, 1, 2).float()).numpy()
    assert np.abs(logits).max() > 0.5
    return pixels, logits


def test_stages_one_after_another_are_the_teacher(tmp_path: Path) -> None:
    teacher = small_teacher()
    pixels, logits = picture_and_logits(teacher)
    stages = write_stages(teacher, (1.0, 1.0), tmp_path)
    assert len(stages) == 2
    assert np.abs(in_stages(stages, pixels) - logits).max() < 1e-4
    assert run_one(stages[0], pixels).shape == (1, 17, 48)


def test_parts_of_layers_summed_over_devices_are_the_teacher(tmp_path: Path) -> None:
    teacher = small_teacher(init_values=0.5)
    pixels, logits = picture_and_logits(teacher)
    folders = write_parts(teacher, SPEEDS, tmp_path)
    assert np.abs(in_parts(folders, pixels) - logits).max() < 1e-4
    # One of them alone is not: something is really split.
    assert np.abs(in_parts(folders[:1], pixels) - logits).max() > 1e-2
    layers = [sorted(path.name for path in folder.glob("layer-*.onnx")) for folder in folders]
    assert layers[0] == layers[1] == ["layer-00.onnx", "layer-01.onnx", "layer-02.onnx",
                                      "layer-03.onnx"]  # fmt: skip
    sizes = [sum((folder / name).stat().st_size for name in layers[0]) for folder in folders]
    assert sizes[0] > 1.4 * sizes[1]


def test_teachers_whose_parts_do_not_add_up_are_refused() -> None:
    with pytest.raises(InputError, match="expected one without norms inside attention or MLP"):
        check_splittable(small_teacher(qk_norm=True), 2)
    with pytest.raises(InputError, match="expected at least 4 heads and 4 blocks"):
        check_splittable(small_teacher(), 4)
