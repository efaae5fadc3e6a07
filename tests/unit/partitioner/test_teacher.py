"""Which teachers are accepted, and what their checkpoints have to be."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.teacher import (  # noqa: E402
    build_teacher,
    load_checkpoint,
    parse_arguments,
    teacher_spec,
)

pytestmark = pytest.mark.torch
ARGS = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2}
NAME = "vit_tiny_patch16_224"


def test_arguments_are_typed():
    pairs = ["img_size=24", "mlp_ratio=2.5", "qkv_bias=False", "global_pool=avg"]
    parsed = parse_arguments(pairs)
    assert parsed == {"img_size": 24, "mlp_ratio": 2.5, "qkv_bias": False, "global_pool": "avg"}
    assert [type(value) for value in parsed.values()] == [int, float, bool, str]


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["img_size"], "expected key=value, got 'img_size'"),
        (["=3"], "expected key=value, got '=3'"),
        (["depth=2", "depth=3"], "'depth' is given twice"),
        (["num_classes=3"], "'num_classes' is set by mdp-partition itself"),
    ],
)
def test_arguments_that_are_refused(pairs: list[str], message: str):
    with pytest.raises(InputError, match=message):
        parse_arguments(pairs)


def test_the_shape_is_read_off_the_model():
    shape = teacher_spec("vit_base_patch16_224", {}).shape
    assert (shape.image_size, shape.patch_size, shape.embed_dim) == (224, 16, 768)
    assert (shape.depth, shape.num_heads, shape.mlp_ratio) == (12, 12, 4.0)
    small = teacher_spec(NAME, ARGS).shape
    assert (small.image_size, small.patch_size, small.embed_dim, small.depth) == (12, 4, 24, 1)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("vit_tiny_patch16_225", {}, "timm has no model .*; close to it: .*vit_tiny_patch16_224"),
        ("resnet18", {}, "'resnet18' cannot be decomposed: expected timm's plain vision transf"),
        ("swin_tiny_patch4_window7_224", {}, "cannot be decomposed: expected timm's plain"),
        ("deit_tiny_distilled_patch16_224", {}, "cannot be decomposed"),
        ("vit_base_patch14_reg4_dinov2", {}, "because of its register tokens"),
        ("vit_giant_patch14_dinov2", {}, "because of its blocks"),
        (NAME, {"colour": 3}, "cannot be built .*colour"),
        (NAME, {"embed_dim": 25, "num_heads": 2}, "cannot be built"),
    ],
)
def test_teachers_that_are_refused(name: str, args: dict, message: str):
    with pytest.raises(InputError, match=message) as caught:
        teacher_spec(name, args)
    assert "\n" not in str(caught.value)


def teacher(classes: int = 3):
    return build_teacher(teacher_spec(NAME, ARGS), classes, pretrained=False)


@pytest.mark.parametrize("file", ["t.safetensors", "t.pth", "nested.pth"])
def test_checkpoints_are_loaded(tmp_path: Path, file: str):
    source, target = teacher(), teacher()
    state, path = source.network.state_dict(), tmp_path / file
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save({"model": state} if file == "nested.pth" else state, path)
    load_checkpoint(target, path)
    for key, value in target.network.state_dict().items():
        assert torch.equal(value, state[key])


def test_a_run_s_own_teacher_is_a_checkpoint(tmp_path: Path):
    source, target = teacher(), teacher()
    save_file(source.state_dict(), tmp_path / "teacher.safetensors")
    load_checkpoint(target, tmp_path / "teacher.safetensors")
    pixels = torch.full((1, 3, 12, 12), 100.0)
    assert torch.equal(source(pixels), target(pixels))


def test_a_checkpoint_for_other_classes(tmp_path: Path):
    save_file(teacher(5).network.state_dict(), tmp_path / "t.safetensors")
    with pytest.raises(InputError, match=r"'head.weight' has shape \[5, 24\], .* need \[3, 24\]"):
        load_checkpoint(teacher(3), tmp_path / "t.safetensors")


def test_a_checkpoint_of_another_model(tmp_path: Path):
    save_file({"weight": torch.zeros(3)}, tmp_path / "t.safetensors")
    with pytest.raises(InputError, match="not a checkpoint of this teacher: it lacks"):
        load_checkpoint(teacher(), tmp_path / "t.safetensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("content", [b"", b"garbage that is no checkpoint", b"\x80\x02}q\x00."])
def test_broken_checkpoints(tmp_path: Path, suffix: str, content: bytes):
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"broken{suffix}: ") as caught:
        load_checkpoint(teacher(), path)
    assert "\n" not in str(caught.value)


def test_a_pickle_is_not_executed(tmp_path: Path):
    torch.save({"weight": Path("/tmp")}, tmp_path / "evil.pth")
    with pytest.raises(InputError, match=r"evil\.pth: not a readable checkpoint"):
        load_checkpoint(teacher(), tmp_path / "evil.pth")


def test_a_missing_checkpoint(tmp_path: Path):
    with pytest.raises(
        InputError, match=r"none\.pth: expected a teacher checkpoint, found no file"
    ):
        load_checkpoint(teacher(), tmp_path / "none.pth")
