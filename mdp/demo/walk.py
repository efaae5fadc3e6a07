"""The demo in text: every step as a user's command, and each claim checked against the answers.

Four cameras look at an item from four sides. Their devices are agent processes on loopback, folders
of pictures play the cameras. Items of no class come by, an agent is killed with SIGKILL and started
again, a camera is covered. Other bundles are shown with pictures that are sent to them.
"""

import math
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mdp.cli.bench import noise_picture, overhead_ms, percentiles
from mdp.client.sync import Client
from mdp.console import say_count
from mdp.demo.scenes import (
    PICTURES,
    Belt,
    DemoFailed,
    RepeatedCalls,
    Scenes,
    check_classes,
    picture_files,
)
from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.pictures.crop import Picture, load_picture
from mdp.requests.prediction import Prediction
from mdp.testing.agents import AgentFleet, AgentProcess
from mdp.testing.folder_cameras import FolderCameras

DEADLINE_MS = 500.0
#: Answers after a device was killed, and after a covered camera was found out.
ASKED_AFTER_KILL = 20
#: A machine that is busy with other work takes more than a minute.
READY_TIMEOUT_S = 180.0
BACK_TIMEOUT_S = 15.0
#: Boards that share this machine have one thread each.
ONE_THREAD = ("--threads", 1)
#: Looks at a covered camera, at most, until it is found out.
LOOKS_COVERED = 48
#: Of four cameras on one machine.
FRAMES_A_SECOND = 40

#: Ask for the n-th item, or picture.
Ask = Callable[[int], Prediction]


@dataclass(slots=True)
class _Seen:
    """Observations; `claims` maps each claim to whether it held."""

    #: Those of the whole demo, with their deadline.
    calls: RepeatedCalls
    facts: dict[str, Any] = field(default_factory=dict)
    claims: dict[str, bool] = field(default_factory=dict)


def walk(
    work: Path,
    *,
    bundle: Path,
    pictures: Path | None,
    report: Path | None,
    deadline_ms: float = DEADLINE_MS,
) -> bool:
    """Run every step, print as it goes; returns whether all that was promised was seen."""
    started_s = time.monotonic()
    if report is not None and not report.parent.is_dir():
        raise InputError(f"{report}: expected a file in a folder that is there (--report)")
    out, seen = Console(), _Seen(RepeatedCalls(deadline_ms))
    opened = Bundle.open(bundle)
    scenes = Scenes.of(opened, pictures) if opened.manifest.plan.cameras else None
    if pictures is None and (bundle / PICTURES).is_dir():
        pictures = bundle / PICTURES
    labelled = [] if scenes else _pictures_and_labels(pictures, opened)
    _print_accuracy(out, opened, seen)
    with AgentFleet(work, bundle, patience_s=READY_TIMEOUT_S) as fleet:
        cameras = (
            None if scenes is None else FolderCameras(work, scenes.cameras, fps=FRAMES_A_SECOND)
        )
        if cameras is not None and scenes is not None:
            cameras.put(scenes.contents(scenes.known[0][1]))
        start_agents(fleet, cameras, partial(_show_agent, out))
        path = str(work / "fleet.toml")
        # Of an earlier demo, whose agents had other ports.
        Path(path).unlink(missing_ok=True)
        devices = [f"--device={name}={agent.address}" for name, agent in fleet.agents.items()]
        _show_and_run(
            out, ["mdp", "fleet", "new", "--bundle", str(bundle), *devices, "--out", path]
        )
        _show_and_run(out, ["mdp", "status", "--fleet", path])
        with Client.connect(path, opinions=True) as client:
            if cameras is None or scenes is None:
                _classify_all(out, client, labelled, seen)
                _kill_and_restart(out, fleet, _classifying(client, labelled, seen.calls), seen)
            else:
                belt = Belt(scenes, cameras, client, seen.calls)
                _look_at_all(out, belt, seen)
                _look_at_unknown(out, belt, seen)
                _kill_and_restart(out, fleet, belt.look, seen, belt)
                _cover(out, belt, path, seen)
                belt.covered = None
    seen.facts["repeated_calls"] = seen.calls.count
    seen.facts["seconds"] = time.monotonic() - started_s
    _print_claims(out, seen)
    held = all(seen.claims.values())
    if report is not None:
        write_json(report, {**seen.facts, "claims": seen.claims, "ok": held})
    return held


def _classifying(
    client: Client, labelled: Sequence[tuple[str | None, Picture]], calls: RepeatedCalls
) -> Ask:
    """Ask by pictures that are sent."""

    def classify(number: int) -> Prediction:
        picture = labelled[number % len(labelled)][1]
        return calls.answer(lambda: client.classify(picture, deadline_ms=calls.deadline_ms))

    return classify


def _show(out: Console, command: Sequence[str]) -> list[str]:
    """Print a command as a user types it; returns it with the program's full path."""
    out.print(f"\n[bold]$ {shlex.join(command)}[/bold]", highlight=False, soft_wrap=True)
    beside = Path(sys.executable).parent / command[0]
    program = str(beside) if beside.exists() else shutil.which(command[0])
    if program is None:
        raise DemoFailed(f"{command[0]}: not found beside Python nor in PATH")
    return [program, *command[1:]]


def _show_and_run(out: Console, command: Sequence[str]) -> None:
    code = subprocess.run(_show(out, command), check=False).returncode
    if code:
        raise DemoFailed(f"{command[0]} {command[1]} ended with exit code {code}")


def _photographs(side: int) -> list[Picture]:
    """The photographs that scikit-learn ships, decoded, else noise of `side` pixels."""
    found = find_spec("sklearn")
    folders = found.submodule_search_locations if found else None
    files = [
        file for folder in folders or () for file in Path(folder).glob("datasets/images/*.jpg")
    ]
    decoded: list[Picture] = [load_picture(file, smallest_side=side) for file in sorted(files)]
    return decoded or [noise_picture(side)]


def _pictures_and_labels(folder: Path | None, bundle: Bundle) -> list[tuple[str | None, Picture]]:
    """(label, picture) of a class-per-folder tree; else a folder's pictures or photographs."""
    if folder is None or (plain := picture_files(folder, "*")):
        unlabelled = plain if folder else _photographs(bundle.manifest.plan.finest_px)
        return [(None, picture) for picture in unlabelled * math.ceil(100 / len(unlabelled))]
    labelled: list[tuple[str | None, Picture]] = [
        (file.parent.name, file) for file in picture_files(folder, "*/*")
    ]
    if not labelled:
        raise InputError(f"{folder}: expected pictures, or a folder per class with some")
    check_classes(folder, {str(label) for label, _ in labelled}, bundle)
    return labelled


def _print_accuracy(out: Console, bundle: Bundle, seen: _Seen) -> None:
    """The measured accuracy of every sub-model, of all but one and of all together."""
    evaluation = bundle.manifest.evaluation
    if evaluation is None:
        raise InputError(
            f"{bundle.path}: never evaluated; run mdp-partition evaluate --write first"
        )
    devices = {a.k: a.device for a in bundle.manifest.plan.assignments}
    table = Table(
        "arrived", "accuracy",
        title=f"measured on {evaluation.pictures} held-out pictures of {evaluation.data}",
    )  # fmt: skip
    for member in evaluation.members:
        part = bundle.manifest.plan.assignments[member.k]
        what = f"{part.spec.image_size} px, {part.spec.outline}"
        sees = f"camera {part.camera}" if part.camera else what
        table.add_row(f"{member.device} alone ({sees})", f"{member.accuracy:.2%}")
    table.add_section()
    for subset in evaluation.subsets:
        absent = [device for k, device in devices.items() if k not in subset.members]
        if len(absent) <= 1 < len(subset.members):
            names = f"all but {absent[0]}" if absent else "all"
            table.add_row(names, f"{subset.stacked:.2%}")
    out.print()
    out.print(table)
    seen.facts["evaluation"] = evaluation


def agent_options(device: str, cameras: FolderCameras | None) -> list[object]:
    """Options of an agent on a machine that others share, with its camera if there are cameras."""
    return [*ONE_THREAD, *(() if cameras is None else cameras.source(device))]


def start_agents(
    fleet: AgentFleet, cameras: FolderCameras | None, begun: Callable[[AgentProcess], None]
) -> None:
    """Start an agent for each device, side by side; raises DemoFailed with what one said last.

    `begun` is told each once it was started.
    """
    for assignment in Bundle.open(fleet.bundle).manifest.plan.assignments:
        (fleet.folder / f"{assignment.device}.log").unlink(missing_ok=True)
        device = assignment.device
        begun(fleet.start(device, *agent_options(device, cameras), wait_for=None))
    for device, agent in fleet.agents.items():
        try:
            agent.wait_for("READY")
        except AssertionError as error:
            if agent.process.poll() is None:
                raise DemoFailed(
                    f"the agent of {device} was not ready within {agent.patience_s:g} s: expected "
                    "a machine that is less busy, or try again"
                ) from error
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
        f"\n[bold]>>> client.classify(picture, deadline_ms={seen.calls.deadline_ms:g})[/bold]"
        f"   # {len(labelled)} pictures",
        highlight=False,
    )
    ask = _classifying(client, labelled, seen.calls)
    answers = [(label, ask(number)) for number, (label, _) in enumerate(labelled)]
    _summarise(out, client.bundle, answers, seen)


def _look_at_all(out: Console, belt: Belt, seen: _Seen) -> None:
    """Every item of a class, seen by all cameras."""
    known = belt.scenes.known
    out.print(
        f"\n[bold]>>> client.look(deadline_ms={seen.calls.deadline_ms:g})[/bold]"
        f"   # {len(known)} items",
        highlight=False,
    )
    answers = [(label, belt.look_at(scene)) for label, scene in known]
    _summarise(out, belt.client.bundle, answers, seen)
    alone = Counter(
        {
            device: sum(
                each.label == label
                for label, answer in answers
                for each in answer.members
                if each.device == device
            )
            for device in belt.scenes.cameras
        }
    )
    (best, right), together = alone.most_common(1)[0], seen.facts["live"]["accuracy"]
    seen.facts["live"]["alone"] = {one: count / len(known) for one, count in alone.items()}
    out.print(
        f"of {len(known)} items right: "
        + ", ".join(f"{belt.scenes.cameras[one]} alone {n}" for one, n in alone.items())
        + f", together {round(together * len(known))}"
    )
    seen.claims[
        f"together the cameras are right more often than {belt.scenes.cameras[best]} alone"
    ] = together > right / len(known)
    rejected = sum(answer.known is False for _, answer in answers) / len(known)
    expected = max((answer.known_rejected or 0.0 for _, answer in answers), default=0.0)
    seen.facts["live"] |= {"known_rejected": rejected, "known_rejected_expected": expected}


def _look_at_unknown(out: Console, belt: Belt, seen: _Seen) -> None:
    """Items of no class."""
    scenes = belt.scenes.unknown
    if not scenes or not belt.client.bundle.fusion_weights().novelty:
        return
    out.print(
        f"\n[bold]>>> client.look(deadline_ms={seen.calls.deadline_ms:g})[/bold]"
        f"   # {len(scenes)} items of no class",
        highlight=False,
    )
    answers = [belt.look_at(scene) for scene in scenes]
    _print_answers(out, answers)
    found = sum(answer.known is False for answer in answers)
    seen.facts["unknown"] = {"items": len(answers), "found": found}
    live = seen.facts["live"]
    out.print(
        f"called unknown: {found} of {len(answers)} items of no class, "
        f"{live['known_rejected']:.0%} of those of a class"
    )
    seen.claims["most items that are none of the classes are called unknown"] = (
        found > len(answers) / 2
    )
    expected, items = live["known_rejected_expected"], len(belt.scenes.known)
    seen.claims["items of a class are called so as seldom as was measured"] = live[
        "known_rejected"
    ] - expected < _tolerance(belt.client.bundle, expected, items)


def _summarise(
    out: Console, bundle: Bundle, answers: Sequence[tuple[str | None, Prediction]], seen: _Seen
) -> None:
    """Accuracy and latency of all devices' answers."""
    predictions = [prediction for _, prediction in answers]
    devices = [a.device for a in bundle.manifest.plan.assignments]
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
        ) < _tolerance(bundle, expected, len(answers))
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
    out: Console, fleet: AgentFleet, ask: Ask, seen: _Seen, belt: Belt | None = None
) -> None:
    """Kill the agent of one device, ask without it, and start it again."""
    assignments = Bundle.open(fleet.bundle).manifest.plan.assignments
    victim = assignments[len(assignments) // 2].device
    # SIGKILL: no goodbye and no clean-up, as when the power is cut.
    pid = fleet.agents[victim].process.pid
    out.print(f"\n[bold]$ kill -KILL {pid}[/bold]   # {victim}", highlight=False)
    fleet.agents[victim].kill()
    if belt is not None:
        belt.gone = victim
    before = seen.calls.count
    after = [ask(number) for number in range(ASKED_AFTER_KILL)]
    _print_answers(out, after)
    late = seen.calls.count - before
    slowest_ms = max(prediction.latency_ms for prediction in after)
    seen.facts["killed"] = {
        "device": victim, "answers": len(after), "slowest_ms": slowest_ms, "late": late,
    }  # fmt: skip
    claim = "every answer came within the deadline"
    if late:
        claim = f"all but {late} of {len(after) + late} calls were answered within the deadline"
    # A call or two that are late on a machine with other work are no fault of a board that is gone.
    seen.claims[f"without {victim}, {claim}"] = (
        slowest_ms <= seen.calls.deadline_ms and late <= len(after) // 10
    )
    seen.claims["each of them says that it is partial, and names the missing device"] = all(
        victim in prediction.missing and victim not in prediction.used for prediction in after
    )
    started_s = time.monotonic()
    cameras = None if belt is None else belt.cameras
    _show_agent(out, fleet.restart(victim, *agent_options(victim, cameras)))
    if belt is not None:
        belt.gone = None
    until_s = started_s + BACK_TIMEOUT_S
    prediction = ask(0)
    while victim not in prediction.used and time.monotonic() < until_s:
        time.sleep(0.05)
        prediction = ask(0)
    back_s = time.monotonic() - started_s
    _print_answer(out, prediction)
    seen.facts["restarted"] = {"device": victim, "back_after_s": back_s}
    seen.claims[f"{victim} takes part again, and the client was not restarted"] = (
        victim in prediction.used
    )


def _cover(out: Console, belt: Belt, fleet_file: str, seen: _Seen) -> None:
    """Cover the first camera, until it is found out; then ask as somebody who has just begun."""
    belt.covered, camera = next(iter(belt.scenes.cameras.items()))
    out.print(f"\n[bold]# camera {camera} is covered[/bold]", highlight=False)
    answers = [belt.look(0)]
    while belt.covered not in answers[-1].suspects and len(answers) < LOOKS_COVERED:
        answers.append(belt.look(len(answers)))
    looks = len(answers)
    _print_answer(out, answers[-1])
    answers += [belt.look(looks + number) for number in range(ASKED_AFTER_KILL)]
    right = sum(one.label == belt.label(number) for number, one in enumerate(answers))
    out.print(f"found out in look {looks}; right with it covered: {right} of {len(answers)} items")
    after = answers[looks - 1 :]
    seen.facts["covered"] = {
        "device": belt.covered, "looks": looks, "items": len(answers), "right": right,
    }  # fmt: skip
    seen.claims[f"camera {camera} was covered, and is the only suspect"] = all(
        one.suspects.keys() == {belt.covered} for one in after
    )
    seen.claims["while it is one, no accuracy is promised"] = all(
        one.expected_accuracy is None for one in after
    )
    with Client.connect(fleet_file) as other:
        first = seen.calls.answer(lambda: other.look(deadline_ms=seen.calls.deadline_ms))
    seen.claims["a client that has just begun is told of it"] = belt.covered in first.suspects


def _print_answers(out: Console, answers: Sequence[Prediction]) -> None:
    """The first three, and how many more there are."""
    for prediction in answers[:3]:
        _print_answer(out, prediction)
    if len(answers) > 3:
        out.print(f"... and {len(answers) - 3} more")


def _print_answer(out: Console, prediction: Prediction) -> None:
    missing = "; ".join(f"{device}: {reason}" for device, reason in prediction.missing.items())
    expected, pictures = prediction.expected_accuracy, prediction.expected_accuracy_pictures
    worth = "" if expected is None else f", expected accuracy {expected:.2%} on {pictures} pictures"
    out.print(
        f"{prediction.verdict} {prediction.mode} from "
        f"{' + '.join(prediction.used)} in {prediction.latency_ms:.1f} ms{worth}"
        + (f", missing {missing}" if missing else ", complete")
        + "".join(f", suspect {device}: {why}" for device, why in prediction.suspects.items()),
        highlight=False,
        markup=False,
    )


def _print_claims(out: Console, seen: _Seen) -> None:
    out.print()
    for claim, held in seen.claims.items():
        out.print(f"{'[green]seen    [/green]' if held else '[red]NOT SEEN[/red]'} {claim}")
    if seen.calls.count:
        out.print(
            f"{say_count(seen.calls.count, 'call')} without an answer within "
            f"{seen.calls.deadline_ms:g} ms, made again: perhaps this machine has other work"
        )
    out.print(f"{seen.facts['seconds']:.0f} s in all")
