"""Weights with foreign names under timm's: what is paired, and what is refused."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from mdp.errors import InputError  # noqa: E402
from partitioner.networks.convert import convert, pair  # noqa: E402
from partitioner.networks.families import Backbone, create  # noqa: E402

pytestmark = pytest.mark.torch
NAME, SIDE = "test_efficientnet", 160
OWN = {"stem.weight": (4, 3), "stem.bias": (4,), "bn.weight": (4,), "bn.running_var": (4,)}
FOREIGN = dict(zip(["c.weight", "c.bias", "n.weight", "n.running_var"], OWN.values(), strict=True))


def test_foreign_names_are_paired_in_order() -> None:
    steps = {"n.num_batches_tracked": ()}
    found = pair(OWN, FOREIGN | steps, "x.pth")
    assert found.names == dict(zip(FOREIGN, OWN, strict=True))
    assert not found.by_name
    assert found.agreeing == 0
    some = {"stem.weight": (4, 3)} | {name: FOREIGN[name] for name in list(FOREIGN)[1:]}
    assert pair(OWN, some, "x.pth").agreeing == 1
    # Names of no known meaning are taken on their shapes' word.
    gamma = {{"n.weight": "n.gamma"}.get(name, name): shape for name, shape in FOREIGN.items()}
    assert pair(OWN, gamma, "x.pth").names["n.gamma"] == "bn.weight"


def test_names_that_agree_but_for_a_prefix_need_no_order() -> None:
    mixed = {f"net.trunk.{name}": OWN[name] for name in sorted(OWN)}
    found = pair(OWN, mixed, "x.safetensors")
    assert found.by_name
    assert found.names == {name: name.removeprefix("net.trunk.") for name in mixed}
    assert pair(OWN, {name: OWN[name] for name in sorted(OWN)}, "x").agreeing == len(OWN)


@pytest.mark.parametrize(
    ("foreign", "said"),
    [
        (
            FOREIGN | {"c.bias": (5,)},
            r"^x: tensor 2, 'c.bias', is \[5\], expected \[4\] as of 'stem.bias'$",
        ),
        (
            {name: FOREIGN[name] for name in ("c.weight", "c.bias", "n.running_var", "n.weight")},
            "tensor 3, 'n.running_var', stands where 'bn.weight' is expected: .* take the .pth",
        ),
        (
            {"c.weight": (4, 3), "bn.weight": (4,), "x": (4,), "y": (4,)},
            "tensor 2, 'bn.weight', stands where 'stem.bias'",
        ),
        (
            {"c.weight": (4, 3), "d": (4,), "bn.weight": (4,), "stem.bias": (4,)},
            "tensor 4, 'stem.bias', stands where 'bn.running_var'",
        ),
        (
            {name: FOREIGN[name] for name in list(FOREIGN)[:3]},
            "expected 4 tensors, found 3: the first missing one is 'bn.running_var'",
        ),
        (FOREIGN | {"h": (9,)}, "expected 4 tensors, found 5: the first unknown one is 'h'"),
        (
            {"c.weight": (4, 3), "h": (9,)},
            r"tensor 2, 'h', is \[9\], expected \[4\] as of 'stem.bias' \(2 tensors, not 4\)",
        ),
    ],
)
def test_other_tensors_are_refused_by_name(foreign: dict[str, tuple[int, ...]], said: str) -> None:
    with pytest.raises(InputError, match=said):
        pair(OWN, foreign, "x")


def foreign_weights(path: Path, classes: int = 7, name: str = NAME) -> dict[str, Tensor]:
    """timm's tensors of a network, with names of another project in a .pth."""
    torch.manual_seed(3)
    own: dict[str, Tensor] = create(Backbone(name, SIDE), classes).state_dict()
    kept = {key: value for key, value in own.items() if not key.endswith("num_batches_tracked")}
    foreign = {
        f"_{n}.{key.rpartition('.')[2]}": value for n, (key, value) in enumerate(kept.items())
    }
    torch.save({"state_dict": foreign}, path)
    return own


@pytest.mark.parametrize("classes", [7, 0])
def test_a_file_is_converted_and_serves(tmp_path: Path, classes: int) -> None:
    own = foreign_weights(tmp_path / "x.pth", classes)
    done = convert(NAME, tmp_path / "x.pth", tmp_path / "new" / f"{NAME}.safetensors")
    assert done.classes == classes
    assert not done.pairing.by_name
    written = load_file(tmp_path / "new" / f"{NAME}.safetensors")
    assert written.keys() == own.keys()
    assert all(torch.equal(written[key], value) for key, value in own.items())
    backbone = Backbone(NAME, SIDE)
    create(backbone, classes, tmp_path / "new" / f"{NAME}.safetensors", own_classes=True)


def test_tensors_that_lie_channel_after_channel_are_written_too(tmp_path: Path) -> None:
    own = create(Backbone(NAME, SIDE), 7).to(memory_format=torch.channels_last).state_dict()
    torch.save(own, tmp_path / "x.pth")
    done = convert(NAME, tmp_path / "x.pth", tmp_path / "out.safetensors")
    assert done.pairing.by_name
    assert done.pairing.agreeing == len(done.pairing.names)
    stem = load_file(tmp_path / "out.safetensors")["conv_stem.weight"]
    assert torch.equal(stem, own["conv_stem.weight"])


def test_refused_weights_leave_nothing_behind(tmp_path: Path) -> None:
    source, out = tmp_path / "x.pth", tmp_path / "out.safetensors"
    foreign_weights(source)
    broken = torch.load(source, weights_only=True)["state_dict"]
    first = next(iter(broken))
    for content, name, said in (
        (broken, "test_vit", r"x.pth: tensor 1, .* \(\d+ tensors, not \d+\)"),
        (broken | {first: broken[first] * float("inf")}, NAME, "x.pth: expected finite numbers"),
        ({"a": 1}, NAME, "x.pth: expected tensors by their names"),
        ({}, NAME, "x.pth: expected tensors by their names"),
        (broken, "no_such_net", "timm .* has no such model"),
    ):
        torch.save(content, source)
        with pytest.raises(InputError, match=said):
            convert(name, source, out)
    torch.save(broken, source)
    with pytest.raises(InputError, match=r"expected a name that ends in .safetensors"):
        convert(NAME, source, tmp_path / "out.pth")
    with pytest.raises(InputError, match=r"y.pth: expected a file of weights, found none"):
        convert(NAME, tmp_path / "y.pth", out)
    # A .safetensors sorts foreign names: their order is lost.
    save_file({f"n{key}": value for key, value in broken.items()}, tmp_path / "x.safetensors")
    with pytest.raises(InputError, match=r"x.safetensors: tensor "):
        convert(NAME, tmp_path / "x.safetensors", out)
    assert {path.name for path in tmp_path.iterdir()} == {"x.pth", "x.safetensors"}
