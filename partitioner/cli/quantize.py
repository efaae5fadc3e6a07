"""`mdp-partition quantize`: serve members in a lower precision where that is measured to pay."""

from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
import typer

from mdp import console
from mdp.errors import InputError
from mdp.formats.bundle import Bundle
from mdp.formats.packaged import bundle_by_name
from mdp.formats.profile import Precision, read_profiles
from partitioner.cli.common import JsonOption, OwnRunOption, interruptible, share_of
from partitioner.export.quantize import WAYS
from partitioner.export.try_precision import MAX_LOSS, QuantizeRequest
from partitioner.run.progress import Progress


def add_to(app: typer.Typer) -> None:
    """Give `app` this command."""
    lists = console.list_options("--profiles", "--here", "--precision")
    app.command(cls=lists)(quantize)


def quantize(
    *,
    bundle: Annotated[
        Path,
        typer.Option(
            callback=bundle_by_name,
            help="Trained and evaluated bundle in fp32, or a name of MDP's.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option(help="Pictures, as for train; default: the run's own.")
    ] = None,
    run: OwnRunOption = None,
    profiles: Annotated[
        list[str] | None, typer.Option(help="Measured profiles of the bundle's devices.")
    ] = None,
    here: Annotated[
        list[str] | None, typer.Option(help="Devices that are timed on this machine instead.")
    ] = None,
    max_loss: Annotated[
        float, typer.Option(help="Percentage points that the fused answer may lose.")
    ] = 100 * MAX_LOSS,
    precision: Annotated[
        list[str] | None,
        typer.Option(help=f"Only these: {', '.join(get_args(Precision))}; default: all."),
    ] = None,
    limit_train: Annotated[
        int | None, typer.Option(help="As in the training that made the bundle.", min=1)
    ] = None,
    limit_test: Annotated[
        int | None, typer.Option(help="Use only so many test pictures.", min=1)
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Bundle folder to write; default: in place.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Serve members in bf16, fp16 or int8 where that is measured faster and loses little.

    What the fused answer loses is decided on the calibration pictures and then measured on the
    test pictures. Every attempt and its numbers go into the manifest.

    Example: mdp-partition quantize --bundle bundle/ --data photos/ --profiles a.toml b.toml
    --out bundle-int8/
    """
    lost = share_of("--max-loss", max_loss)
    known = get_args(Precision)
    for name in precision or []:
        if name not in known:
            raise InputError(f"--precision: expected some of {', '.join(known)}, got {name!r}")
    target = out or bundle
    with interruptible(f"{target} is as it was"):
        from partitioner.build.steps import inputs_of
        from partitioner.export.quantize_bundle import quantize_bundle
        from partitioner.run.target import check_target

        opened = Bundle.open(bundle)
        check_target(target)
        request = QuantizeRequest(
            max_loss=lost,
            profiles=read_profiles(profiles or []),
            here=here or [],
            ways=[way for way in WAYS[1:] if way[0] in (precision or known)],
        )
        limits = {"limit_train": limit_train, "limit_test": limit_test}
        with inputs_of(opened, run, data, **limits) as inputs:
            report = quantize_bundle(
                opened, inputs.data, inputs.run, request, target, inputs.cache, Progress()
            )
    written = Bundle.open(target)
    if json:
        console.print_json(_as_json(written, report))
    else:
        from partitioner.cli import tables

        tables.print_quantization(written)


def _as_json(bundle: Bundle, report: Any) -> dict[str, Any]:
    value = {
        "bundle": str(bundle.path),
        "digest": bundle.digest,
        "assignments": [
            {
                "k": a.k,
                "device": a.device,
                "precision": a.spec.precision,
                "runtime": a.runtime,
                "predicted_ms": msgspec.to_builtins(a.predicted_ms),
            }
            for a in bundle.manifest.plan.assignments
        ],
        "quantisation": msgspec.to_builtins(bundle.manifest.quantisation),
    }
    return value if report is None else {**value, "evaluation": report.as_json(bundle)}
