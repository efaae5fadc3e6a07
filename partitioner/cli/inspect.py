"""`mdp-partition inspect`: teach a bundle to say that an item differs from the good ones."""

from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import msgspec
import typer

from mdp import console
from mdp.errors import InputError
from mdp.extras import INSPECT, install, missing
from mdp.formats.bundle import Bundle
from mdp.formats.packaged import bundle_by_name
from mdp.fusion.anomaly_table import DEFAULT_GOOD_RATE
from partitioner.cli.common import JsonOption, OutOption, interruptible, share_of
from partitioner.run.progress import Progress

#: Area under the ROC curve that a quantized member may lose, in points.
_MAX_LOSS = 2.0


def add_to(app: typer.Typer) -> None:
    """Give `app` this command."""
    app.command()(inspect)


def rate_of(percent: float) -> float:
    """The rate of rejected good items that `percent` is; raises InputError."""
    return share_of("--rate", percent, most=50)


def facts_of(bundle: Bundle) -> dict[str, Any]:
    """The fit of a bundle's anomaly heads, as JSON has it."""
    return {
        "inspection": msgspec.to_builtins(bundle.manifest.inspection),
        "anomaly": msgspec.to_builtins(bundle.fusion_weights().anomaly),
    }


def inspect(
    *,
    bundle: Annotated[
        Path,
        typer.Option(
            callback=bundle_by_name,
            help="Bundle whose models get anomaly heads, or a name of MDP's.",
        ),
    ],
    data: Annotated[
        str,
        typer.Option(help="Folder of good scenes, a folder each with a picture of every camera."),
    ],
    out: OutOption,
    defects: Annotated[
        str | None,
        typer.Option(help="Folder of defective scenes: choose how cameras are fused, and measure."),
    ] = None,
    rate: Annotated[
        float, typer.Option(help="Percent of good items that may be called different.")
    ] = 100 * DEFAULT_GOOD_RATE,
    fp32: Annotated[
        Path | None,
        typer.Option(help="The bundle before `quantize`: refuse members that lost too much by it."),
    ] = None,
    max_loss: Annotated[
        float,
        typer.Option(help="With --fp32: points of area under the ROC curve that may be lost."),
    ] = _MAX_LOSS,
    all_good: Annotated[
        bool, typer.Option("--all-good", help="Take good scenes for good that look defective.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Learn from good scenes alone, in minutes, what an item looks like that is all right.

    Each camera's model then says how far its picture is from good ones, and the fused answer
    whether the item differs, for every subset of cameras. Classes are answered as before. The
    bundle's digest changes: push it.

    Example: mdp-partition inspect --bundle bundle/ --data good/ --out bundle-inspect/
    """
    if module := missing(INSPECT):
        raise InputError(
            f"{module} is not installed; this command needs it: {install('inspect')}, or "
            "[partition]"
        )
    rejected, lost = rate_of(rate), share_of("--max-loss", max_loss)
    with interruptible(f"{out} is as it was"), ExitStack() as stack:
        opened = Bundle.open(bundle)
        before = None if fp32 is None else Bundle.open(fp32)
        from partitioner.export.inspect_bundle import InspectRequest, inspect_bundle
        from partitioner.run.target import check_target

        check_target(out)
        cache = Path(stack.enter_context(TemporaryDirectory(prefix="mdp-views-")))
        request = InspectRequest(
            good=data,
            defects=defects,
            rate=rejected,
            before=before,
            max_loss=lost,
            all_good=all_good,
        )
        written = inspect_bundle(opened, out, request, cache, Progress())
    if json:
        value = {"bundle": str(out), "digest": written.digest, **facts_of(written)}
        console.print_json(value)
        return
    from partitioner.cli import tables

    tables.print_inspection(written)
    print(f"{out}: digest {written.digest}")
