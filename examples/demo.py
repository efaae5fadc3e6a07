"""Build, serve, classify, kill and restart on one machine, by a user's commands: `make demo`.

The bundle is trained, the agents are processes on loopback, one of them is killed with SIGKILL, and
every claim at the end is checked against the answers.
"""

import json as json_codec
import math
import mimetypes
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from mdp import console
from mdp.cli.bench import noise_picture, overhead_ms, percentiles
from mdp.client.sync import Client
from mdp.errors import InputError, MDPError
from mdp.extras import GATEWAY, PARTITION, install, missing
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.pictures.crop import Picture, load_picture
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentFleet, AgentProcess

DEADLINE_MS = 250.0
PICTURES_AFTER_KILL = 20
READY_TIMEOUT_S = 60.0
BACK_TIMEOUT_S = 15.0
ONE_THREAD = ("--threads", 1)

#: Handwritten digits, a teacher that trains in a minute, and three different boards. The target is
#: between the least latency of the slowest board, 1.36 ms, and the teacher's on the fastest, 1.42.
#: Members see whole pictures, as a part of a digit is no digit.
BUILD = (
    "--data digits --teacher vit_tiny_patch16_224"
    " --teacher-arg img_size=24 patch_size=4 embed_dim=96 depth=6 num_heads=3"
    " --teacher-epochs 12 --epochs 10 --latency-ms 1.4"
    " --profiles laptop-cpu n100 raspberry-pi-5 --name digits"
)


class DemoFailed(MDPError):
    """A step of the demo failed."""

    exit_code = 3


@dataclass(slots=True)
class _Seen:
    """Observations; `claims` maps each claim to whether it held."""

    facts: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, bool] = field(default_factory=dict)


def run_demo(
    work: Path, *, bundle: Path | None, pictures: Path | None, report: Path | None, page: bool
) -> bool:
    """Run every step, print as it goes; returns whether all that was promised was seen.

    With `page`, the gateway serves the fleet in the end, until Ctrl-C.
    """
    if page and (module := missing(GATEWAY)):
        raise InputError(f"{module} is not installed; the page needs it: {install('gateway')}")
    if bundle is None and (module := missing(PARTITION)):
        raise InputError(
            f"{module} is not installed; building a bundle needs it: {install('partition')}; "
            "or serve one that is there: --bundle examples/bundles/cifar10"
        )
    started_s = time.monotonic()
    out, seen = Console(), _Seen()
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{work}: cannot be made: {error.strerror or error}") from error
    if bundle is None:
        bundle, pictures = work / "bundle", work / "digits-test"
        _show_and_run(out, ["mdp-partition", "build", *shlex.split(BUILD), "--out", str(bundle)])
        if not pictures.exists():  # of an earlier demo, written atomically
            data = ["--data", "digits", "--split", "test", "--out", str(pictures)]
            _show_and_run(out, ["mdp-partition", "data", *data])
        measured = _show_and_read(out, ["mdp-partition", "evaluate", "--bundle", str(bundle)])
    else:
        measured = {}
    opened = Bundle.open(bundle)
    labelled = _labelled_pictures(pictures, opened)
    _print_accuracy(out, opened, measured, seen)
    with AgentFleet(work, bundle, patience_s=READY_TIMEOUT_S) as fleet:
        _start(out, fleet)
        path = str(work / "fleet.toml")
        # Of an earlier demo, whose agents had other ports.
        Path(path).unlink(missing_ok=True)
        devices = [f"--device={name}={agent.address}" for name, agent in fleet.agents.items()]
        _show_and_run(
            out, ["mdp", "fleet", "new", "--bundle", str(bundle), *devices, "--out", path]
        )
        _show_and_run(out, ["mdp", "status", "--fleet", path])
        with Client.connect(path) as client:
            _classify_all(out, client, labelled, seen)
            _kill_and_restart(out, client, fleet, labelled, seen)
        seen.facts["seconds"] = time.monotonic() - started_s
        _print_claims(out, seen, page=page)
        held = all(seen.claims.values())
        if report is not None:
            write_json(report, {**seen.facts, "claims": seen.claims, "ok": held})
        if page:
            with suppress(KeyboardInterrupt):
                subprocess.run(_show(out, ["mdp", "gateway", "--fleet", path]), check=False)
    return held


def _show(out: Console, command: Sequence[str]) -> list[str]:
    """Print a command as a user types it; returns it with the program's full path."""
    out.print(f"\n[bold]$ {shlex.join(command)}[/bold]", highlight=False, soft_wrap=True)
    return [str(Path(sys.executable).parent / command[0]), *command[1:]]


def _show_and_run(out: Console, command: Sequence[str]) -> None:
    code = subprocess.run(_show(out, command), check=False).returncode
    if code:
        raise DemoFailed(f"{command[0]} {command[1]} ended with exit code {code}")


def _show_and_read(out: Console, command: Sequence[str]) -> dict[str, Any]:
    """Run a command with `--json`; returns what it printed."""
    done = subprocess.run(
        _show(out, [*command, "--json"]), check=False, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise DemoFailed(f"{command[0]} {command[1]} ended with exit code {done.returncode}")
    return dict(json_codec.loads(done.stdout))


def _pictures(folder: Path, pattern: str) -> list[Path]:
    """The files that are pictures by their names, which a README beside them is not."""
    kinds = ((file, mimetypes.guess_type(file.name)[0] or "") for file in folder.glob(pattern))
    return sorted(file for file, kind in kinds if kind.startswith("image/") and file.is_file())


def _photographs(side: int) -> list[Picture]:
    """The photographs that scikit-learn ships, decoded, else noise of `side` pixels."""
    found = find_spec("sklearn")
    folders = found.submodule_search_locations if found else None
    files = [
        file for folder in folders or () for file in Path(folder).glob("datasets/images/*.jpg")
    ]
    decoded: list[Picture] = [load_picture(file, smallest_side=side) for file in sorted(files)]
    return decoded or [noise_picture(side)]


def _labelled_pictures(folder: Path | None, bundle: Bundle) -> list[tuple[str | None, Picture]]:
    """(label, picture) of a class-per-folder tree; else a folder's pictures or photographs."""
    if folder is None or (plain := _pictures(folder, "*")):
        unlabelled = plain if folder else _photographs(bundle.manifest.plan.finest_px)
        return [(None, picture) for picture in unlabelled * math.ceil(100 / len(unlabelled))]
    labelled: list[tuple[str | None, Picture]] = [
        (file.parent.name, file) for file in _pictures(folder, "*/*")
    ]
    if not labelled:
        raise InputError(f"{folder}: expected pictures, or a folder per class with some")
    strange = sorted({str(label) for label, _ in labelled} - set(bundle.manifest.labels))
    if strange:
        raise InputError(
            f"{folder}: expected folders named after classes of {bundle.path}, found {strange[0]!r}"
        )
    return labelled


def _print_accuracy(out: Console, bundle: Bundle, measured: Mapping[str, Any], seen: _Seen) -> None:
    """The measured accuracy of the teacher, every sub-model and every arrival subset.

    `measured` is the output of `evaluate`, with computing times on one thread of this machine; a
    subset's is its slowest member's.
    """
    evaluation = bundle.manifest.evaluation
    if evaluation is None:
        raise InputError(
            f"{bundle.path}: never evaluated; run mdp-partition evaluate --write first"
        )
    devices = {a.k: a.device for a in bundle.manifest.plan.assignments}
    table = Table(
        "arrived", "boosted", "stacked", "bagged", "ms",
        title=f"accuracy on {evaluation.pictures} held-out pictures of {evaluation.data}, "
        "and computing time on one thread",
    )  # fmt: skip
    times_ms = {member["k"]: member["latency_ms"] for member in measured.get("members", [])}
    if evaluation.teacher is not None:
        teacher_ms = _milliseconds((measured.get("teacher") or {}).get("latency_ms"))
        accuracy = f"{evaluation.teacher.accuracy:.2%}"
        table.add_row("teacher", "", accuracy, "", teacher_ms, end_section=True)
    for member in evaluation.members:
        spec = bundle.manifest.plan.assignments[member.k].spec
        what = f"{spec.image_size} px, {spec.outline}"
        own_ms = _milliseconds(times_ms.get(member.k))
        table.add_row(f"{member.device} alone ({what})", "", "", f"{member.accuracy:.2%}", own_ms)
    table.add_section()
    for subset in evaluation.subsets:
        names = " + ".join(devices[k] for k in subset.members)
        values = (subset.boosted, subset.stacked, subset.bagged)
        slowest_ms = max(times_ms[k] for k in subset.members) if times_ms else None
        shares = ["-" if value is None else f"{value:.2%}" for value in values]
        table.add_row(names, *shares, _milliseconds(slowest_ms))
    out.print()
    out.print(table)
    seen.facts["evaluation"] = measured or evaluation


def _milliseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _start(out: Console, fleet: AgentFleet) -> None:
    """Start an agent for each device; three boards share this machine, so one thread each."""
    for assignment in Bundle.open(fleet.bundle).manifest.plan.assignments:
        (fleet.folder / f"{assignment.device}.log").unlink(missing_ok=True)
        _show_agent(out, fleet.start(assignment.device, *ONE_THREAD, wait_for=None))
    for device, agent in fleet.agents.items():
        try:
            agent.wait_for("READY")
        except AssertionError as error:
            text = agent.stderr.strip() or error
            raise DemoFailed(f"the agent of {device} ended: {text}") from error


def _show_agent(out: Console, agent: AgentProcess) -> None:
    args: Any = agent.process.args
    command = list(map(str, args))
    _show(out, [Path(command[0]).name, *command[1:]])


def _classify_all(
    out: Console, client: Client, labelled: Sequence[tuple[str | None, Picture]], seen: _Seen
) -> None:
    """Every held-out picture through the agents."""
    out.print(
        f"\n[bold]>>> client.classify(picture, deadline_ms={DEADLINE_MS:g})[/bold]"
        f"   # {len(labelled)} pictures",
        highlight=False,
    )
    answers = [
        (label, client.classify(picture, deadline_ms=DEADLINE_MS)) for label, picture in labelled
    ]
    predictions = [prediction for _, prediction in answers]
    devices = [a.device for a in client.bundle.manifest.plan.assignments]
    table = Table("", "p50 ms", "p99 ms", title="latency of the agents, at the client")
    latency = _add_latency(table, "answer", [p.latency_ms for p in predictions])
    overhead = _add_latency(
        table, "beyond the slowest member's computing", [overhead_ms(p) for p in predictions]
    )
    members = {
        device: _add_latency(
            table,
            f"{device} computing",
            [m.compute_ms for p in predictions for m in p.members if m.device == device],
        )
        for device in devices
    }
    out.print(table)
    live: dict[str, Any] = {
        "pictures": len(answers),
        "complete": sum(not p.partial for p in predictions),
        "latency_ms": latency,
        "overhead_ms": overhead,
        "compute_ms": members,
        "modes": sorted({p.mode for p in predictions}),
    }
    if answers[0][0] is not None:
        live["accuracy"] = sum(label == p.label for label, p in answers) / len(answers)
        best = max(predictions, key=lambda p: len(p.used))
        expected = best.expected_accuracy or 0.0
        out.print(
            f"accuracy through the agents {live['accuracy']:.2%}, expected {expected:.2%}, "
            f"mode {', '.join(live['modes'])}"
        )
        seen.claims["the agents are as accurate as the bundle was measured to be"] = abs(
            live["accuracy"] - expected
        ) < _tolerance(client.bundle, expected, len(answers))
    seen.claims[f"all {len(members)} devices take part"] = live["complete"] > 0.9 * len(answers)
    seen.facts["live"] = live


def _tolerance(bundle: Bundle, expected: float, pictures: int) -> float:
    """Largest difference of the accuracy on `pictures` from the measured one.

    A few may miss the deadline on a busy machine. For a sample of the measured pictures, three
    standard errors of its share are added.
    """
    measured = bundle.manifest.evaluation
    missed = 0.01
    if measured is None or pictures == measured.pictures:
        return missed
    return missed + 3 * math.sqrt(expected * (1 - expected) / pictures)


def _add_latency(table: Table, name: str, values: Sequence[float]) -> dict[str, float]:
    """A row of the 50th and 99th percentiles, `-` without a value; returns those there are."""
    summary = percentiles(values, (50, 99)) if values else {}
    table.add_row(name, *([f"{value:.2f}" for value in summary.values()] or ["-", "-"]))
    return summary


def _kill_and_restart(
    out: Console,
    client: Client,
    fleet: AgentFleet,
    labelled: Sequence[tuple[str | None, Picture]],
    seen: _Seen,
) -> None:
    victim = client.bundle.manifest.plan.assignments[len(fleet.agents) // 2].device
    pictures = [picture for _, picture in labelled]
    # SIGKILL: no goodbye and no clean-up, as when the power is cut.
    pid = fleet.agents[victim].process.pid
    out.print(f"\n[bold]$ kill -KILL {pid}[/bold]   # {victim}", highlight=False)
    fleet.agents[victim].kill()
    after = [
        client.classify(picture, deadline_ms=DEADLINE_MS)
        for picture in pictures[:PICTURES_AFTER_KILL]
    ]
    for prediction in after[:3]:
        _print_answer(out, prediction)
    out.print(f"... and {len(after) - 3} more")
    slowest_ms = max(prediction.latency_ms for prediction in after)
    seen.facts["killed"] = {"device": victim, "answers": len(after), "slowest_ms": slowest_ms}
    seen.claims[f"without {victim}, every answer came within the deadline"] = (
        slowest_ms <= DEADLINE_MS
    )
    seen.claims["each of them says that it is partial, and names the missing device"] = all(
        victim in prediction.missing and victim not in prediction.used for prediction in after
    )
    started_s = time.monotonic()
    _show_agent(out, fleet.restart(victim, *ONE_THREAD))
    until_s = started_s + BACK_TIMEOUT_S
    prediction = client.classify(pictures[0], deadline_ms=DEADLINE_MS)
    while victim not in prediction.used and time.monotonic() < until_s:
        time.sleep(0.05)
        prediction = client.classify(pictures[0], deadline_ms=DEADLINE_MS)
    back_s = time.monotonic() - started_s
    _print_answer(out, prediction)
    seen.facts["restarted"] = {"device": victim, "back_after_s": back_s}
    seen.claims[f"{victim} takes part again, and the client was not restarted"] = (
        victim in prediction.used
    )


def _print_answer(out: Console, prediction: Prediction) -> None:
    missing = "; ".join(f"{device}: {reason}" for device, reason in prediction.missing.items())
    expected, pictures = prediction.expected_accuracy, prediction.expected_accuracy_pictures
    worth = "" if expected is None else f", expected accuracy {expected:.2%} on {pictures} pictures"
    out.print(
        f"{prediction.label} ({prediction.probability:.0%}) {prediction.mode} from "
        f"{' + '.join(prediction.used)} in {prediction.latency_ms:.1f} ms{worth}"
        + (f", missing {missing}" if missing else ", complete"),
        highlight=False,
        markup=False,
    )


def _print_claims(out: Console, seen: _Seen, *, page: bool) -> None:
    out.print()
    for claim, held in seen.claims.items():
        out.print(f"{'[green]seen    [/green]' if held else '[red]NOT SEEN[/red]'} {claim}")
    hint = "" if page else "; --page (PAGE=1) shows the fleet in a browser"
    out.print(f"{seen.facts['seconds']:.0f} s in all{hint}")


app = console.new_app("MDP on one machine.")


@app.command()
def demo(
    work: Annotated[Path, typer.Option(help="Folder for the demo's files.")] = Path("demo"),
    bundle: Annotated[
        Path | None, typer.Option(help="Serve this bundle instead of building one from digits.")
    ] = None,
    pictures: Annotated[
        Path | None,
        typer.Option(help="With --bundle: pictures, or a folder per class; else photographs."),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="JSON file of the observations.")] = None,
    page: Annotated[
        bool, typer.Option("--page", help="At the end, serve the gateway's page until Ctrl-C.")
    ] = False,
) -> None:
    """Build, serve, classify, kill one agent, restart it: everything on this machine.

    Example: python examples/demo.py --report demo/seen.json

    Exit codes: 0 every claim held, 2 bad input, 3 one did not.
    """
    seen = run_demo(work, bundle=bundle, pictures=pictures, report=report, page=page)
    raise typer.Exit(0 if seen else DemoFailed.exit_code)


def main() -> None:
    """Entry point."""
    console.run(app, "demo")


if __name__ == "__main__":
    main()
