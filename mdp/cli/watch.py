"""`mdp look` and `mdp watch`: what the fleet's own cameras see, once or as a live table or file."""

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdp import console
from mdp.arguments import seconds
from mdp.cli import brokers
from mdp.cli.answer_file import ANSWER_COLUMNS, answer_writer
from mdp.cli.answers import (
    PICTURES,
    Cascade,
    Certificate,
    DeadlineMs,
    FleetFile,
    FusionChoice,
    Insecure,
    Json,
    KeyFile,
    PrivateKey,
    TokenFile,
    describe,
    evaluation_items,
    failure,
    open_client,
    say,
    summary,
    utc_now,
)
from mdp.cli.line import ITEM_EVERY, LINE_BIND, STATE_EVERY, LineOptions, watch_line
from mdp.client.base import DEFAULT_DEADLINE_MS
from mdp.client.following import FollowedFiles
from mdp.client.status import DeviceStatus
from mdp.client.sync import Client
from mdp.errors import InferenceError, InputError
from mdp.fusion.fuse import Fusion
from mdp.line.rules import SURE_FROM
from mdp.line.still import REST_MS
from mdp.line.watcher import WITHIN_MS
from mdp.logs import quiet_libraries
from mdp.requests.capture import DEFAULT_EVERY_MS, DEFAULT_WITHIN_MS, Moment, check_every_ms
from mdp.requests.deadline import check_deadline_ms
from mdp.requests.prediction import Prediction
from mdp.requests.reason import SUSPECT

if TYPE_CHECKING:
    from rich.console import RenderableType

watch_app = console.new_app("")

#: Changes of the label that the table keeps.
KEPT_CHANGES = 6
#: Hours, minutes and seconds in a time of `utc_now`.
_CLOCK = slice(11, 19)
COLUMNS = ("time", *ANSWER_COLUMNS)
#: Of options that need --trigger, what they are without being given.
NO_DELAY, REST, KEEP_MB = "0ms", f"{REST_MS:g}ms", 500.0

Seen = Prediction | InferenceError


def look(
    fleet: FleetFile,
    deadline_ms: DeadlineMs = DEFAULT_DEADLINE_MS,
    ago_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Age of the frames; 0 for the newest.")
    ] = 0.0,
    within_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="Largest difference of a frame from that age.")
    ] = DEFAULT_WITHIN_MS,
    count: Annotated[int, typer.Option(min=1, max=1_000_000_000, help="Number of calls.")] = 1,
    every_ms: Annotated[
        float, typer.Option(min=0, max=1e9, help="With --count: from one call to the next.")
    ] = DEFAULT_EVERY_MS,
    fusion: FusionChoice = "stacked",
    cascade: Cascade = False,
    maps: Annotated[
        bool,
        typer.Option(
            "--maps",
            help="Of a bundle with anomaly heads: also where each picture differs from good ones.",
        ),
    ] = False,
    key: KeyFile = None,
    insecure: Insecure = False,
    json: Json = False,
) -> None:
    """Classify what the devices' own cameras see (`mdp-agent run --source`); no picture is sent.

    Example: mdp look --fleet fleet.toml --deadline-ms 80

    Exit codes: 0 fine, 2 bad input, 3 the fleet could not answer, 1 unforeseen.
    """
    quiet_libraries()
    check_deadline_ms(deadline_ms, "--deadline-ms")
    check_every_ms(every_ms)
    exit_code = 0
    with (
        open_client(fleet, key, insecure, fusion, cascade) as client,
        console.until_reader_leaves(),
    ):
        for number in range(count):
            started_s = time.monotonic()
            at: Moment = started_s - ago_ms / 1e3 if ago_ms else "latest"
            try:
                prediction = client.look(
                    deadline_ms=deadline_ms, at=at, within_ms=within_ms, maps=maps
                )
            except InferenceError as error:
                print(f"mdp: {console.one_line(error)}", file=sys.stderr)
                if json:
                    console.print_json({"path": None, **failure(error)})
                exit_code = exit_code or error.exit_code
            else:
                if json:
                    console.print_json({"path": None, **prediction.to_dict()})
                else:
                    print(describe("look", prediction, evaluation_items(client.bundle)), flush=True)
            if number + 1 < count:
                time.sleep(max(0.0, started_s + every_ms / 1e3 - time.monotonic()))
    raise typer.Exit(exit_code)


@watch_app.command("watch", cls=console.list_options("--rule", "--pass"))
def watch(
    fleet: FleetFile,
    every: Annotated[
        str | None,
        typer.Option(
            help=f"From one look to the next: 1s, 200ms. By default {STATE_EVERY}; of looks at one "
            f"item, {ITEM_EVERY}."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Also append every answer to this .csv or .jsonl file; with --trigger, every "
            "item's record to this .jsonl file."
        ),
    ] = None,
    deadline_ms: DeadlineMs = DEFAULT_DEADLINE_MS,
    trigger: Annotated[
        str | None,
        typer.Option(
            metavar="interval|still|mqtt:TOPIC|http",
            help="Publish one record per item. An item is: a state that N looks agree on; what "
            "rests after the scene has changed; what is there at a message, or a request.",
        ),
    ] = None,
    equal: Annotated[
        int, typer.Option(min=1, max=1000, help="Looks in a row that have to agree on an item.")
    ] = 1,
    delay: Annotated[str, typer.Option(help="From the trigger to the item's moment.")] = NO_DELAY,
    verdict_ms: Annotated[
        float | None,
        typer.Option(
            help="From the item's moment to its verdict, at most; by default what --equal looks "
            "may take."
        ),
    ] = None,
    within_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1e9,
            help="Largest difference of a frame from the item's moment, or age of one that is "
            f"looked at: by default {WITHIN_MS:g}, of states and looks {DEFAULT_WITHIN_MS:g}.",
        ),
    ] = None,
    rest: Annotated[
        str, typer.Option(help="Of --trigger still: how long the scene has to rest.")
    ] = REST,
    rule: Annotated[
        list[str],
        typer.Option(
            metavar="CLASS=any|K|fused",
            help="See a class once any, or K, of the cameras say it alone, instead of by the fused "
            "answer.",
        ),
    ] = [],  # noqa: B006
    passing: Annotated[
        list[str], typer.Option("--pass", help="Classes whose items pass; by default all.")
    ] = [],  # noqa: B006
    empty: Annotated[str | None, typer.Option(help="The class of a scene without an item.")] = None,
    sure: Annotated[
        float, typer.Option(help="Probability from which on an answer is sure.")
    ] = SURE_FROM,
    different: Annotated[
        str,
        typer.Option(
            metavar="fused|any|K|off",
            help="Of a bundle with anomaly heads: stop items that differ from the good ones, by "
            "the fused score or once any, or K, of the cameras say it alone.",
        ),
    ] = "fused",
    keep: Annotated[
        Path | None,
        typer.Option(
            help="Folder for pictures and records of items that are unknown, different or unsure, "
            "or of which cameras disagree; of agents that allow this client to record."
        ),
    ] = None,
    keep_mb: Annotated[
        float, typer.Option(help="Megabytes in that folder; the oldest items make room.")
    ] = KEEP_MB,
    broker: Annotated[
        str | None, typer.Option(help=f"MQTT broker for records: {brokers.ADDRESS}")
    ] = None,
    login: brokers.Login = None,
    ca: brokers.Authority = None,
    name: Annotated[
        str | None, typer.Option(help="The line's name in topics; by default its bundle's.")
    ] = None,
    bind: Annotated[
        str | None,
        typer.Option(help=f"HOST:PORT for records over HTTP; {LINE_BIND} with --trigger http."),
    ] = None,
    tokens: TokenFile = None,
    certificate: Certificate = None,
    private_key: PrivateKey = None,
    fusion: FusionChoice = "stacked",
    cascade: Cascade = False,
    key: KeyFile = None,
    insecure: Insecure = False,
    json: Json = False,
) -> None:
    """Show what the devices' own cameras see, until Ctrl-C: a table, or lines to a pipe or file.

    A fleet that cannot answer is shown, and watched on, unless no agent has a camera. With
    --trigger, each item has one record, in --out, at --broker, and over HTTP (--bind).

    Example: mdp watch --fleet fleet.toml --out seen.csv

    Exit codes: 0 the reader of the lines has left, or told to end, 2 bad input or a full disk, 3 no
    agent has a camera, 5 the broker refuses the login, 130 interrupted, 1 unforeseen.
    """
    quiet_libraries()
    check_deadline_ms(deadline_ms, "--deadline-ms")
    if trigger is None:
        given = {
            "--rule": rule, "--pass": passing, "--empty": empty, "--keep": keep, "--bind": bind,
            "--broker": broker, "--verdict-ms": verdict_ms is not None, "--equal": equal != 1,
            "--different": different != "fused", "--delay": delay != NO_DELAY,
            "--rest": rest != REST, "--sure": sure != SURE_FROM, "--keep-mb": keep_mb != KEEP_MB,
            "--login": login, "--ca": ca, "--name": name, "--tokens": tokens,
            "--certificate": certificate, "--private-key": private_key,
        }  # fmt: skip
        for option, value in given.items():
            if value:
                raise InputError(f"{option}: expected --trigger too, as it is about items")
        _watch_looks(
            fleet, seconds("--every", every or STATE_EVERY), out, deadline_ms,
            DEFAULT_WITHIN_MS if within_ms is None else within_ms, fusion, cascade, key,
            insecure, json,
        )  # fmt: skip
        return
    if cascade:
        raise InputError("--cascade: expected none with --trigger, as rules count all cameras")
    asked = LineOptions(
        fleet=fleet,
        trigger=trigger,
        every=every,
        out=out,
        deadline_ms=deadline_ms,
        verdict_ms=verdict_ms,
        within_ms=within_ms,
        delay=delay,
        equal=equal,
        rest=rest,
        rules=rule,
        passing=passing,
        empty=empty,
        sure=sure,
        different=different,
        keep=keep,
        keep_mb=keep_mb,
        broker=broker,
        login=login,
        ca=ca,
        name=name,
        bind=bind,
        tokens=tokens,
        certificate=certificate,
        private_key=private_key,
        fusion=fusion,
        key=key,
        insecure=insecure,
        json=json,
    )
    watch_line(asked)


def _watch_looks(
    fleet: Path,
    every_s: float,
    out: Path | None,
    deadline_ms: float,
    within_ms: float,
    fusion: Fusion,
    cascade: bool,
    key: Path | None,
    insecure: bool,
    json: bool,
) -> None:
    """Show every look."""
    # In order: what the last lines repeat is told.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with (
        open_client(fleet, key, insecure, fusion, cascade) as client,
        answer_writer(out, COLUMNS) as write,
        console.until_reader_leaves(),
        _look_printer(client, json) as show,
    ):
        files = FollowedFiles(fleet, client, say)
        looks = client.watch(
            every_ms=every_s * 1e3, deadline_ms=deadline_ms, within_ms=within_ms, errors="yield"
        )
        for seen in looks:
            # A device that was removed, or a bundle that was pushed, counts from the next look on.
            with files.following() as changed:
                if changed:
                    client.reload()
            if (
                isinstance(seen, InferenceError)
                and {*seen.codes.values()} == {"no_frame"}
                # Where cameras have given no frame yet, one may still come.
                and have_no_camera(client.status())
            ):
                raise seen
            now = utc_now()
            write(facts(now, seen))
            show(now, seen)


def have_no_camera(statuses: Sequence[DeviceStatus]) -> bool:
    """Tell whether every device has told its status, and none has a source of pictures."""
    return all(status.bundle is not None and not status.source for status in statuses)


def facts(now: str, seen: Seen) -> dict[str, Any]:
    """One look for machines: an answer under its names, or `error`, and the `time`."""
    told = failure(seen) if isinstance(seen, InferenceError) else seen.to_dict()
    return {"time": now, **told}


@contextmanager
def _look_printer(client: Client, json: bool) -> Iterator[Callable[[str, Seen], None]]:
    """A function that shows a look: on a terminal in place of the one before."""
    on = evaluation_items(client.bundle)
    if json:
        yield lambda now, seen: console.print_json(facts(now, seen))
    elif sys.stdout.isatty():
        from rich.live import Live

        table = Table([], on)

        def update(now: str, seen: Seen) -> None:
            # The fleet may be another one by now.
            table.devices = [entry.device for entry in client.fleet.devices]
            table.on = evaluation_items(client.bundle)
            live.update(table.after(now, seen), refresh=True)

        with Live(auto_refresh=False, transient=False) as live:
            yield update
    else:
        lines = LookLines(on)

        def show(now: str, seen: Seen) -> None:
            lines.on = evaluation_items(client.bundle)
            lines.show(now, seen)

        try:
            yield show
        finally:
            lines.end()


@dataclass(slots=True)
class LookLines:
    """Looks for a pipe or file; one failure again and again is printed once, and counted."""

    #: What accuracies are measured on.
    on: str = PICTURES
    _failure: str = ""
    _repeats: int = 0

    def show(self, now: str, seen: Seen) -> None:
        """Print one look more."""
        failure = console.one_line(seen) if isinstance(seen, InferenceError) else ""
        if failure and failure == self._failure:
            self._repeats += 1
            return
        self.end()
        self._failure = failure
        if isinstance(seen, InferenceError):
            print(f"{now}: {failure}", flush=True)
        else:
            print(describe(now, seen, self.on), flush=True)

    def end(self) -> None:
        """Print how often the latest failure was repeated."""
        if self._repeats:
            print(f"  looks with the same outcome: {self._repeats}", flush=True)
        self._repeats = 0


@dataclass(slots=True)
class Table:
    """The latest look, every device's part in it, and the latest changes of the label."""

    devices: list[str]
    #: What accuracies are measured on.
    on: str = PICTURES
    looks: int = 0
    unanswered: int = 0
    changes: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=KEPT_CHANGES))

    def after(self, now: str, seen: Seen) -> "RenderableType":
        """The table with one look more."""
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        self.looks += 1
        if isinstance(seen, InferenceError):
            self.unanswered += 1
            label = line = "no answer"
        else:
            label = "unknown" if seen.known is False else seen.label
            line = summary(seen, self.on)
        if not self.changes or self.changes[-1][1] != label:
            self.changes.append((now, label))
        table = RichTable()
        for column in ("device", "in the answer", "frame", "age ms", "took ms", "reason"):
            # Texts are no markup, as a reason may contain square brackets.
            table.add_column(column, overflow="fold")
        for row in rows(self.devices, seen):
            table.add_row(*(Text(cell) for cell in row))
        latest = [
            Text(f"  {at[_CLOCK]}  {what}", style="dim") for at, what in reversed(self.changes)
        ]
        return Group(
            Text(f"{now[_CLOCK]} UTC  {line}", style="bold"),
            table,
            Text(f"{self.looks} looks, {self.unanswered} without an answer; changes:"),
            *latest,
        )


def rows(devices: list[str], seen: Seen) -> list[list[str]]:
    """Each device's part in a look: name, whether it is in the answer, frame, times, reason."""
    if isinstance(seen, InferenceError):
        return [[device, "no", "", "", "", seen.outcomes.get(device, "")] for device in devices]
    members = {member.device: member for member in seen.members}
    found = []
    for device in devices:
        member = members.get(device)
        if member is not None:
            age = "" if member.frame_age_ms is None else f"{member.frame_age_ms:.0f}"
            doubt = SUSPECT[seen.suspects[device]] if device in seen.suspects else ""
            found.append([device, "yes", str(member.frame), age, f"{member.spent_ms:.1f}", doubt])
        else:
            # A replica beside the device that has answered is neither used nor missing.
            reason = seen.missing.get(device, "")
            found.append([device, "no" if reason else "", "", "", "", reason])
    return found
