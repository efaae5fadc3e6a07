"""`mdp-agent probe`: measure this device and write its profile."""

import datetime
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from devices.machine import Machine, NvidiaMachine, free_disk_bytes, usable_cores
from devices.probe.encoders import extract, read_index
from devices.probe.link import measure_link, peer_keys
from devices.probe.profile import MIN_POINTS, SystemReport, profile_of
from devices.probe.report import report, warnings
from devices.probe.run import EncoderModels, Probe, ProbeOptions, ProbeResult
from devices.probe.schedule import fitting, thread_counts
from devices.probe.share import rows_to_share
from devices.probe.worker import ProbeWorker
from mdp import console
from mdp.console import Interrupted
from mdp.errors import InputError
from mdp.files import explain, write_bytes, write_toml
from mdp.formats.profile import DeviceName
from mdp.runtimes.cuda import ON_CUDA

#: Seconds per point, rounds, seconds of sustained load and for repeating disturbed points.
THOROUGH, QUICK = (0.2, 4, 5.0, 60.0), (0.1, 1, 2.0, 5.0)


def add_to(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("probe")(probe)


def probe(
    out: Annotated[Path, typer.Option(help="Profile to write; its stem is the device's name.")],
    name: Annotated[
        str | None, typer.Option(help="The device's name; the profile's stem if not given.")
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, max=1024, help="Thread counts, instead of 1, 2, 4 .. all cores."),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=3, max=600, help="Sustained load at the end, to see throttling."),
    ] = None,
    peer: Annotated[
        str | None, typer.Option(help="tcp://HOST:PORT of a running agent: measures the link.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="With --peer: this device's or a client's secret key file.")
    ] = None,
    peer_key: Annotated[
        Path | None, typer.Option(help="With --peer: the agent's public key file.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="With --peer: plain text over a network.")
    ] = False,
    quick: Annotated[
        bool, typer.Option(help="Fewer encoders and networks, in about a minute.")
    ] = False,
    shapes: Annotated[
        int | None,
        typer.Option(min=1, max=12, help="Only so many of the quick encoders, to try it."),
    ] = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="Other processes on this machine are meant to be busy.")
    ] = False,
    spin: Annotated[
        bool,
        typer.Option(
            "--spin",
            help="Threads spin while they wait for each other: for cores that nothing else uses.",
        ),
    ] = False,
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Write rows for docs/results/boards.md into NAME.md beside --out, too."
        ),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="The profile as JSON on stdout.")] = False,
) -> None:
    """Measure this device and write its profile, for mdp-partition plan.

    Example: mdp-agent probe --name mybox --out profiles/mybox.toml --peer tcp://10.0.0.5:7500
    --key keys/mybox.secret --peer-key keys/n100.public

    Exit codes: 0 fine, 2 bad input or no runtime, 130 interrupted (the points are
    kept and marked incomplete), 1 unforeseen.
    """
    name = _check_name(name, out)
    if share and shapes is not None:
        raise InputError("--share: expected no --shapes: rows are compared, and need all of them")
    point_s, rounds, load_s, again_s = QUICK if quick or shapes else THOROUGH
    options = ProbeOptions(
        threads=sorted(set(threads or thread_counts(usable_cores()))),
        quick=quick,
        shapes=shapes,
        point_s=point_s,
        rounds=rounds,
        load_s=load_s if minutes is None else 60 * minutes,
        again_s=again_s,
        shared=shared,
        spin=spin,
    )
    keys = peer_keys(key, peer_key)
    link = None if peer is None else measure_link(peer, keys, insecure=insecure)
    board = Machine().board()
    result, device, interrupted = _measure(name, options)
    if interrupted and len(result.measured) < MIN_POINTS:
        raise Interrupted(f"interrupted before {MIN_POINTS} points were measured: none is written")
    profile = profile_of(result, device, link)
    points = len(profile.latency) + len(profile.networks)
    write_toml(out, profile)
    if json:
        console.print_json({"path": str(out), **msgspec.to_builtins(profile)})
    else:
        for line in report(profile):
            print(line)
    for line in warnings(profile):
        print(f"mdp-agent: {line}", file=sys.stderr)
    if interrupted:
        raise Interrupted(
            f"interrupted: {points} of {result.planned} points are kept in {out}, marked incomplete"
        )
    print(f"mdp-agent: {out}: {points} points", file=sys.stderr)
    if share:
        rows = out.with_suffix(".md")
        write_bytes(rows, "".join(f"{r}\n" for r in rows_to_share(profile, board)).encode())
        print(f"mdp-agent: {rows}: for docs/results/boards.md, nothing personal", file=sys.stderr)


def _check_name(name: str | None, out: Path) -> str:
    """The device's name; raises InputError for it or for --out."""
    if out.suffix != ".toml":
        raise InputError(f"--out: expected a file NAME.toml, got {str(out)!r}")
    try:
        msgspec.convert(name or out.stem, DeviceName)
    except msgspec.ValidationError as error:
        raise InputError(f"--name {name or out.stem!r}: {explain(error)}") from error
    if name is not None and name != out.stem:
        raise InputError(f"--name: expected {out.stem!r}, the stem of --out, got {name!r}")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError(f"--out {out}: {folder} is no folder that can be written to")
    return out.stem


def _measure(name: str, options: ProbeOptions) -> tuple[ProbeResult, SystemReport, bool]:
    """The measurements, and whether they were interrupted."""
    machine = Machine()
    gpu_idle_c = NvidiaMachine().temperature_c()
    index = read_index()
    device = SystemReport(
        name=name,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        processor=machine.processor(),
        virtual=machine.is_virtual(),
        cores=usable_cores(),
        available_bytes=machine.available_bytes(),
        idle_temperature_c=machine.temperature_c(),
    )
    # SIGTERM, as service managers send it, keeps the points as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="mdp-probe-") as temporary, ProbeWorker() as worker:
        folder = Path(temporary)
        extract(folder)
        encoders, large = fitting(index.encoders, device.available_bytes, free_disk_bytes(folder))
        run = Probe(worker.request, EncoderModels(folder), time.monotonic, _progress)
        run.result.dropped |= {e.name: "too large for this device's memory or disk" for e in large}
        try:
            run.run(encoders, index.num_classes, options)
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        finally:
            _clear()
    if any(point.provider in ON_CUDA for point in run.result.points):
        device = replace(device, processor=NvidiaMachine().processor())
    load = run.result.load_run
    if load is not None and load.provider in ON_CUDA:
        # Before and under load by one thermometer.
        device = replace(device, idle_temperature_c=gpu_idle_c)
    return run.result, device, interrupted


def _progress(done: int, planned: int, step: str) -> None:
    """One line that is overwritten; in a file, a line for every tenth point."""
    if sys.stderr.isatty():
        _clear()
        print(f"{done}/{planned} {step}", end="", file=sys.stderr, flush=True)
    elif done % 10 == 0:
        print(f"{done}/{planned} {step}", file=sys.stderr, flush=True)


def _clear() -> None:
    """Empty the terminal's line."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)
