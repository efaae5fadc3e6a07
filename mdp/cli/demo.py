"""`mdp demo`: the whole life of a small fleet on one machine, by the commands a user would type.

Nothing is simulated: the bundle is trained, the agents are processes that listen on loopback, one
of them is killed with SIGKILL, and every claim at the end was checked against what came back.
"""

import json as json_codec
import math
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

from mdp.cli.bench import overhead_ms, percentiles, some_pictures
from mdp.client.sync import Client
from mdp.errors import InputError, MDPError
from mdp.extras import GATEWAY, PARTITION, install, missing
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.pictures.crop import Picture
from mdp.requests.prediction import Prediction

DEADLINE_MS = 250.0
PICTURES_AFTER_KILL = 20
READY_TIMEOUT_S = 30.0
BACK_TIMEOUT_S = 15.0

#: Handwritten digits, a teacher that trains in a minute, and three boards that differ. The target
#: lies between what the slowest board needs for anything, 1.36 ms, and what the fastest needs for
#: the teacher itself, 1.42 ms. A digit fills its picture, so that a part of it would be no digit.
BUILD = (
    "--data digits --teacher vit_tiny_patch16_224"
    " --teacher-arg img_size=24 patch_size=4 embed_dim=96 depth=6 num_heads=3"
    " --teacher-epochs 12 --epochs 10 --latency-ms 1.4 --whole-picture"
    " --profiles laptop-cpu n100 raspberry-pi-5 --name digits"
)


class DemoFailed(MDPError):
    """A step of the demo did not happen as promised."""

    exit_code = 3


@dataclass(slots=True)
class _Seen:
    """What was observed; `claims` maps each promise to whether it held."""

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
        if not pictures.exists():  # what an earlier demo has written is whole, as is its bundle
            data = ["--data", "digits", "--split", "test", "--out", str(pictures)]
            _show_and_run(out, ["mdp-partition", "data", *data])
        measured = _show_and_read(out, ["mdp-partition", "evaluate", "--bundle", str(bundle)])
    else:
        measured = {}
    opened = Bundle.open(bundle)
    labelled = _labelled_pictures(pictures, opened)
    _print_accuracy(out, opened, measured, seen)
    addresses = {a.device: _free_address() for a in opened.manifest.plan.assignments}
    fleet = work / "fleet.toml"
    with _agents(out, work, bundle, addresses) as agents:
        _wait_ready(out, agents, bundle, fleet, addresses)
        with Client.connect(fleet) as client:
            _classify_all(out, client, labelled, seen)
            _kill_and_restart(out, client, agents, labelled, seen)
        seen.facts["seconds"] = time.monotonic() - started_s
        _print_claims(out, seen)
        if report is not None:
            ok = all(seen.claims.values())
            write_json(report, {**seen.facts, "claims": seen.claims, "ok": ok})
        if page:
            with suppress(KeyboardInterrupt):
                subprocess.run(_show(out, ["mdp", "gateway", "--fleet", str(fleet)]), check=False)
    return all(seen.claims.values())


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


def _labelled_pictures(folder: Path | None, bundle: Bundle) -> list[tuple[str | None, Picture]]:
    """(label, picture) of a class-per-folder tree; else a folder's pictures or photographs."""
    if folder is None or (plain := sorted(file for file in folder.glob("*") if file.is_file())):
        unlabelled = plain if folder else some_pictures(bundle.manifest.plan.finest_px)
        return [(None, picture) for picture in unlabelled * math.ceil(100 / len(unlabelled))]
    labelled: list[tuple[str | None, Picture]] = [
        (file.parent.name, file) for file in sorted(folder.glob("*/*")) if file.is_file()
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
    """The teacher, every sub-model and every arrival subset, as measured when it was built.

    `measured` is what `evaluate` printed, with the computing time of teacher and members on one
    thread of this machine; a subset computes as long as its slowest member.
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


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class _Agents:
    """The agent processes of the demo, by device; each writes to a log file of its own."""

    def __init__(
        self, out: Console, work: Path, bundle: Path, addresses: Mapping[str, str]
    ) -> None:
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._out, self._work, self._bundle, self._addresses = out, work, bundle, addresses
        self._logs: list[IO[bytes]] = []

    def start(self, device: str) -> None:
        """Start the agent of `device`; three boards share this machine, so one thread each."""
        serve = ["--bundle", str(self._bundle), "--device", device]
        address = ["--bind", self._addresses[device], "--threads", "1"]
        command = _show(self._out, ["mdp-agent", "run", *serve, *address])
        log = (self._work / f"{device}.log").open("ab")
        self._logs.append(log)
        self.processes[device] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, device: str) -> None:
        """SIGKILL: no goodbye, no clean-up, as when the power is cut."""
        process = self.processes.pop(device)
        self._out.print(f"\n[bold]$ kill -KILL {process.pid}[/bold]   # {device}", highlight=False)
        process.send_signal(signal.SIGKILL)
        process.wait()

    def log_of(self, device: str) -> str:
        """What the agent has said so far."""
        return (self._work / f"{device}.log").read_text(errors="replace").strip()

    def close(self) -> None:
        """Ask every agent to stop, and make sure that it does."""
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()


@contextmanager
def _agents(
    out: Console, work: Path, bundle: Path, addresses: Mapping[str, str]
) -> Iterator[_Agents]:
    agents = _Agents(out, work, bundle, addresses)
    try:
        for device in addresses:
            (work / f"{device}.log").unlink(missing_ok=True)
            agents.start(device)
        yield agents
    finally:
        agents.close()


def _wait_ready(
    out: Console, agents: _Agents, bundle: Path, fleet: Path, addresses: Mapping[str, str]
) -> None:
    devices: list[str] = []
    for device, address in addresses.items():
        devices += ["--device", f"{device}={address}"]
    _show_and_run(
        out, ["mdp", "fleet", "new", "--bundle", str(bundle), *devices, "--out", str(fleet)]
    )
    until_s = time.monotonic() + READY_TIMEOUT_S
    with Client.connect(fleet) as client:
        while not all(status.usable for status in client.status(timeout_s=0.5)):
            for device, process in agents.processes.items():
                if process.poll() is not None:
                    raise DemoFailed(f"the agent of {device} ended: {agents.log_of(device)}")
            if time.monotonic() > until_s:
                raise DemoFailed(f"not every agent was READY after {READY_TIMEOUT_S:g} s")
            time.sleep(0.05)
    _show_and_run(out, ["mdp", "status", "--fleet", str(fleet)])


def _classify_all(
    out: Console,
    client: Client,
    labelled: Sequence[tuple[str | None, Picture]],
    seen: _Seen,
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
    table = Table("", "p50 ms", "p99 ms", title="latency of the agents, as the client saw it")
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
    """How far the share of right answers to some `pictures` may be from the measured one.

    A few may miss the deadline on a busy machine, which is labelled and not wrong. Where it is not
    all pictures that were measured, three standard errors of a share of so many are added.
    """
    measured = bundle.manifest.evaluation
    missed = 0.01
    if measured is None or pictures == measured.pictures:
        return missed
    return missed + 3 * math.sqrt(expected * (1 - expected) / pictures)


def _add_latency(table: Table, name: str, values: Sequence[float]) -> dict[str, float]:
    summary = percentiles(values, (50, 99))
    table.add_row(name, *(f"{value:.2f}" for value in summary.values()))
    return summary


def _kill_and_restart(
    out: Console,
    client: Client,
    agents: _Agents,
    labelled: Sequence[tuple[str | None, Picture]],
    seen: _Seen,
) -> None:
    victim = client.bundle.manifest.plan.assignments[len(agents.processes) // 2].device
    pictures = [picture for _, picture in labelled]
    agents.kill(victim)
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
    agents.start(victim)
    started_s = time.monotonic()
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


def _print_claims(out: Console, seen: _Seen) -> None:
    out.print()
    for claim, held in seen.claims.items():
        out.print(f"{'[green]seen    [/green]' if held else '[red]NOT SEEN[/red]'} {claim}")
    out.print(f"{seen.facts['seconds']:.0f} s in all; --page (PAGE=1) shows the fleet in a browser")
