"""Teachers that are accepted, and what their checkpoints have to be."""

import contextlib
import fnmatch
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.config import parse_arguments  # noqa: E402
from partitioner.export.write import ServedTeacher, check_parity, to_onnx  # noqa: E402
from partitioner.networks.submodel import init_weights  # noqa: E402
from partitioner.networks.teacher import FAMILIES, Teacher, build_teacher, teacher_spec  # noqa: E402
from partitioner.networks.teacher_weights import (  # noqa: E402
    classifiers,
    count_classes,
    load_checkpoint,
    load_teacher,
)
from partitioner.torchvision_shim import import_timm  # noqa: E402

pytestmark = pytest.mark.torch
ARGS: dict[str, bool | int | float | str] = {
    "img_size": 12,
    "patch_size": 4,
    "embed_dim": 24,
    "depth": 1,
    "num_heads": 2,
}
NAME = "vit_tiny_patch16_224"


def test_unfetched_weights_name_alternatives(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    spec = teacher_spec(NAME, {})
    monkeypatch.setattr(import_timm(), "create_model", offline)
    with pytest.raises(InputError) as raised:
        build_teacher(spec, 3, pretrained=True)
    assert str(raised.value) == (
        f"--pretrained: timm's weights of {NAME!r} cannot be fetched: no route to host; "
        "where there is no network, give them as a file: --teacher-checkpoint FILE"
    )


def test_arguments_are_typed() -> None:
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
def test_arguments_that_are_refused(pairs: list[str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_arguments(pairs)


def test_the_shape_is_read_off_the_model() -> None:
    shape = teacher_spec("vit_base_patch16_224", {}).shape
    assert (shape.image_size, shape.patch_size, shape.embed_dim) == (224, 16, 768)
    assert (shape.depth, shape.num_heads, shape.mlp_ratio) == (12, 12, 4.0)
    small = teacher_spec(NAME, ARGS).shape
    assert (small.image_size, small.patch_size, small.embed_dim, small.depth) == (12, 4, 24, 1)


def test_a_gated_mlp_counts_as_the_plain_one_with_as_many_weights() -> None:
    # Three matrices instead of two, so that 2/3 of the hidden units make as many weights.
    assert teacher_spec("vit_giant_patch14_reg4_dinov2", {"depth": 1}).shape.mlp_ratio == 4.0
    args = ARGS | {"mlp_ratio": 2.0}
    assert teacher_spec("aimv2_1b_patch14_224", args).shape.mlp_ratio == 3.0


def plain_models() -> list[str]:
    """Every model that timm registers in the modules of the plain encoder."""
    timm = import_timm()
    return [n for module in ("vision_transformer", "deit") for n in timm.list_models(module=module)]


def test_every_model_of_timm_s_is_taken_or_refused_by_name() -> None:
    refused = {}
    for name in plain_models():
        try:
            # One block is enough, for all of a model's blocks are of one kind.
            teacher_spec(name, {"depth": 1})
        except InputError as error:
            refused[name] = str(error)
            continue
        assert any(fnmatch.fnmatch(name, family) for family in FAMILIES), name
    others = {name: reason for name, reason in refused.items() if "works: timm's" not in reason}
    assert set(refused) - set(others) == {
        "vit_base_patch16_18x2_224",
        "vit_base_patch16_rpn_224",
        "vit_base_patch16_xp_224",
        "vit_dlittle_patch16_reg1_gap_256",
        "vit_dpwee_patch16_reg1_gap_256",
        "vit_dwee_patch16_reg1_gap_256",
        "vit_huge_patch14_xp_224",
        "vit_large_patch14_xp_224",
        "vit_pwee_patch16_reg1_gap_256",
        "vit_small_patch16_18x2_224",
    }
    # Their pictures are no whole number of patches.
    assert set(others) == {"vit_so400m_patch14_siglip_384", "vit_so400m_patch14_siglip_gap_384"}
    assert all("has to be a multiple of `patch_size` 14" in text for text in others.values())


def test_every_family_named_has_models() -> None:
    for family in FAMILIES:
        assert fnmatch.filter(plain_models(), family), family


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("vit_tiny_patch16_225", {}, "timm has no model .*; close to it: .*vit_tiny_patch16_224"),
        ("nonsense", {}, "timm has no model 'nonsense'; works: timm's plain"),
        ("vit_base_patch16_18x2_224", {}, "its blocks are ParallelThingsBlock"),
        ("vit_base_patch16_rpn_224", {}, "its blocks are ResPostBlock"),
        ("vit_dwee_patch16_reg1_gap_256", {}, "its attention is a DiffAttention"),
        ("deit_tiny_distilled_patch16_224", {"no_embed_class": True}, "cannot run: "),
        (NAME, {"depth": 0}, "it has no blocks"),
        (NAME, {"global_pool": ""}, r"gives \[1, 197, 2\] numbers for one picture, expected one"),
        (NAME, {"img_size": 30}, "`image_size` 30 has to be a multiple of `patch_size` 16"),
        (NAME, {"colour": 3}, "cannot be built .*colour"),
        (NAME, {"embed_dim": 25, "num_heads": 2}, "cannot be built"),
    ],
)
def test_teachers_that_are_refused(name: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        teacher_spec(name, args)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "module"),
    [("resnet18", "resnet"), ("vit_base_r50_s16_224", "vision_transformer_hybrid")],
)
def test_other_architectures_are_refused_with_what_works(name: str, module: str) -> None:
    expected = (
        rf"'{name}' cannot be decomposed: it comes from timm\.models\.{module}; works: timm's "
        r"plain vision transformers \(vit_\*, deit_\*, deit3_\*, .*register"
    )
    with pytest.raises(InputError, match=expected):
        teacher_spec(name, {})


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("deit_tiny_distilled_patch16_224", {}),
        ("deit3_small_patch16_224", {}),
        ("vit_base_patch14_reg4_dinov2", {}),
        ("vit_giant_patch14_reg4_dinov2", {}),
        ("vit_base_patch16_reg4_gap_256", {}),
        ("vit_base_patch16_siglip_224", {}),
        ("vit_base_patch16_clip_quickgelu_224", {}),
        ("aimv2_1b_patch14_224", {}),
        ("beit3_base_patch16_224", {}),
        (NAME, {"qk_norm": True}),
    ],
)
def test_every_kind_learns(name: str, args: dict[str, Any]) -> None:
    torch.manual_seed(0)
    network = build_teacher(teacher_spec(name, ARGS | args), 3, pretrained=False)
    init_weights(network.network)
    pixels, targets = 255 * torch.rand(4, 3, 12, 12), torch.tensor([0, 1, 2, 0])
    optimizer = torch.optim.AdamW(network.parameters(), 1e-3)
    first = torch.nn.functional.cross_entropy(network.train()(pixels), targets)
    first.backward()
    assert [key for key, value in network.named_parameters() if value.grad is None] == []
    optimizer.step()
    second = torch.nn.functional.cross_entropy(network.eval()(pixels), targets)
    assert second < first


def test_a_teacher_with_registers_is_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec = teacher_spec("vit_base_patch14_reg4_dinov2", ARGS)
    network = build_teacher(spec, 3, pretrained=False)
    init_weights(network.network)
    with torch.no_grad():
        # As timm draws it, LayerScale lets next to nothing of a block through.
        blocks: Any = network.network.blocks
        for block in blocks:
            block.ls1.gamma.fill_(1.0)
            block.ls2.gamma.fill_(1.0)
    served, path = ServedTeacher(network), tmp_path / "teacher.onnx"
    path.write_bytes(to_onnx(served, 12, ["logits"], {}))
    views = (255 * torch.rand(9, 12, 12, 3)).byte().numpy()
    assert check_parity(path, served, views, ["logits"]) < 1e-5
    assert np.ptp(served(torch.from_numpy(views))[0].detach().numpy(), axis=0).max() > 0.01


SPEC = teacher_spec(NAME, ARGS)


def teacher(classes: int = 3) -> Teacher:
    return build_teacher(SPEC, classes, pretrained=False)


@pytest.mark.parametrize("file", ["t.safetensors", "t.pth", "nested.pth", "run.safetensors"])
def test_checkpoints_are_loaded(tmp_path: Path, file: str) -> None:
    source, target = teacher(), teacher()
    state, path = source.network.state_dict(), tmp_path / file
    if path.suffix == ".safetensors":
        save_file(source.state_dict() if file == "run.safetensors" else state, path)
    else:
        torch.save({"model": state} if file == "nested.pth" else state, path)
    load_checkpoint(target, path)
    for key, value in target.network.state_dict().items():
        assert torch.equal(value, state[key])


@pytest.mark.parametrize("headless", [False, True])
def test_other_classes_leave_the_head(tmp_path: Path, headless: bool) -> None:
    state, target = teacher(5).network.state_dict(), teacher(3)
    if headless:
        del state["head.weight"], state["head.bias"]
    save_file(state, tmp_path / "t.safetensors")
    before = {key: value.clone() for key, value in target.network.state_dict().items()}
    load_checkpoint(target, tmp_path / "t.safetensors")
    for key, value in target.network.state_dict().items():
        assert torch.equal(value, (before if key.startswith("head.") else state)[key]), key
    assert count_classes(SPEC, tmp_path / "t.safetensors") == (0 if headless else 5)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"head.bias": None}, r"not a checkpoint of this teacher: it lacks 'head.bias'"),
        ({"pos_embed": torch.zeros(1, 8, 24)}, "its positions or patches cannot be resampled: "),
        (
            {"norm.weight": torch.zeros(32)},
            r"'norm.weight' has shape \[32\], this teacher needs \[24",
        ),
        (None, "not a checkpoint of this teacher: it lacks"),
    ],
)
def test_another_teacher(tmp_path: Path, change: dict[str, Any] | None, expected: str) -> None:
    changed = {"weight": torch.zeros(3)}
    if change is not None:
        changed = {**teacher().network.state_dict(), **change}
    save_file({k: v for k, v in changed.items() if v is not None}, tmp_path / "t.safetensors")
    with pytest.raises(InputError, match=expected) as told:
        load_checkpoint(teacher(), tmp_path / "t.safetensors")
    assert "\n" not in str(told.value)


def test_a_checkpoint_whose_two_heads_differ(tmp_path: Path) -> None:
    spec = teacher_spec("deit_tiny_distilled_patch16_224", ARGS)
    state = build_teacher(spec, 3, pretrained=False).network.state_dict()
    state["head_dist.weight"] = torch.zeros(7, 24)
    save_file(state, tmp_path / "t.safetensors")
    with pytest.raises(InputError, match=r"not one number of classes: .*'head_dist.weight' has 7 "):
        load_checkpoint(build_teacher(spec, 3, pretrained=False), tmp_path / "t.safetensors")


@pytest.mark.parametrize("name", [NAME, "deit_tiny_distilled_patch16_224"])
def test_rows_of_the_classifier_are_cut_in_the_data_s_order(tmp_path: Path, name: str) -> None:
    spec = teacher_spec(name, ARGS)
    source = build_teacher(spec, 5, pretrained=False).eval()
    with torch.no_grad():
        for head in classifiers(source.network):
            for weights in source.network.get_submodule(head).parameters():
                weights.normal_()
    save_file(source.network.state_dict(), tmp_path / "t.safetensors")
    cut = load_teacher(spec, 3, tmp_path / "t.safetensors", [4, 0, 3]).eval()
    pixels = 255 * torch.rand(4, 3, 12, 12)
    assert torch.allclose(cut(pixels), source(pixels)[:, [4, 0, 3]], atol=1e-5)


def test_positions_are_resampled_to_another_picture_size(tmp_path: Path) -> None:
    state = teacher().network.state_dict()
    old = state["pos_embed"].normal_()[0]
    save_file(state, tmp_path / "t.safetensors")
    spec = teacher_spec(NAME, ARGS | {"img_size": 24})
    new = load_teacher(spec, 3, tmp_path / "t.safetensors").network.state_dict()["pos_embed"][0]
    assert (len(old), len(new)) == (1 + 3 * 3, 1 + 6 * 6)
    assert torch.equal(new[0], old[0])
    assert (new[1] - old[1]).norm() < (new[1] - old[-1]).norm()
    assert (new[-1] - old[-1]).norm() < (new[-1] - old[1]).norm()
    with pytest.raises(InputError, match="`image_size` 25 has to be a multiple of `patch_size` 4"):
        teacher_spec(NAME, ARGS | {"img_size": 25})


def test_a_norm_on_the_other_side_of_the_pooling_names_the_argument(tmp_path: Path) -> None:
    pooled = teacher_spec(NAME, ARGS | {"global_pool": "avg"})
    for made, wanted, hint in ((pooled, SPEC, "avg"), (SPEC, pooled, "token")):
        save_file(
            build_teacher(made, 3, pretrained=False).network.state_dict(),
            tmp_path / "t.safetensors",
        )
        with pytest.raises(InputError, match=rf"pooling: --teacher-arg global_pool={hint} has it"):
            count_classes(wanted, tmp_path / "t.safetensors")


def test_the_normalisation_of_a_recipe_that_is_not_timm_s() -> None:
    args = parse_arguments(["mean=0.1,0.2,0.3", "std=0.5", *(f"{k}={v}" for k, v in ARGS.items())])
    spec = teacher_spec(NAME, args)
    normalise = build_teacher(spec, 3, pretrained=False).normalise
    seen = normalise(torch.full((1, 3, 1, 1), 255.0)).flatten()
    assert torch.allclose(seen, torch.tensor([1.8, 1.6, 1.4]))
    for pair in ("mean=0.1,0.2", "std=0", "mean=grey"):
        with pytest.raises(InputError, match=f"--teacher-arg: {pair.partition('=')[0]} expected"):
            teacher_spec(NAME, ARGS | parse_arguments([pair]))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("content", [b"", b"garbage that is no checkpoint", b"\x80\x02}q\x00."])
def test_broken_checkpoints(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"broken{suffix}"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"broken{suffix}: ") as caught:
        load_checkpoint(teacher(), path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, zipped: bool) -> None:
    """Of 300 in each format, some 11 and some 30 raised what their reader happened to raise."""
    path, target = tmp_path / "damaged.pth", teacher()
    torch.save(target.network.state_dict(), path, _use_new_zipfile_serialization=zipped)
    whole, chance = path.read_bytes(), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(chance.choice((1, 2, 8))):
            damaged[chance.randrange(3000)] = chance.randrange(256)
        path.write_bytes(damaged)
        with contextlib.suppress(InputError):
            load_checkpoint(target, path)


def test_files_that_hold_no_weights_are_refused(tmp_path: Path) -> None:
    torch.save({1: torch.zeros(3)}, tmp_path / "numbers.pth")
    # A pickle is not executed.
    torch.save({"weight": Path("/tmp")}, tmp_path / "evil.pth")
    for name, expected in (
        ("numbers", "expected a state dict"),
        ("evil", "not a readable checkpoint"),
        ("none", "expected a teacher checkpoint, found no file"),
    ):
        with pytest.raises(InputError, match=rf"{name}\.pth: {expected}"):
            load_checkpoint(teacher(), tmp_path / f"{name}.pth")
