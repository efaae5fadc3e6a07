"""`mdp watch --trigger`: one record per item of a line."""

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from mdp import console
from mdp.arguments import check_number, seconds
from mdp.cli import answers, brokers
from mdp.cli.answers import say
from mdp.client.base import Options
from mdp.client.cameras import FleetCameras, FleetRests
from mdp.client.following import FollowedFiles
from mdp.client.sync import Client
from mdp.errors import InferenceError, InputError, QuorumNotMet
from mdp.extras import GATEWAY, MQTT, install, missing
from mdp.formats.fleet import FLEET_NAME_FORM, PLAIN_TEXT, is_fleet_name, read_devices
from mdp.formats.keys import is_local
from mdp.fusion.fuse import Fusion
from mdp.line.file import RecordFile
from mdp.line.items import Book, ItemBook, ItemOutcome, ItemTiming, StateBook, Trigger
from mdp.line.keeper import KeptFolder
from mdp.line.keeping import ItemKeeper
from mdp.line.record import ItemRecord, TriggerKind, to_json
from mdp.line.rests import RestWatch
from mdp.line.rules import LineRules, read_different, read_rules
from mdp.line.triggers import LineEndedError, TriggerQueue, item_of
from mdp.line.watcher import WITHIN_MS, LineWatcher
from mdp.requests.capture import DEFAULT_WITHIN_MS
from mdp.requests.deadline import check_deadline_ms

#: From one look to the next: of states, and of one item.
STATE_EVERY, ITEM_EVERY = "1s", "100ms"
LINE_BIND = "127.0.0.1:8090"
#: Between two looks at whether the fleet file has changed.
FOLLOW_S = 1.0
#: On a line that is never idle, whose next item may have to wait for that.
FOLLOW_BUSY_S = 10.0
#: How long a changed fleet's devices are waited for, while items may come.
RELOAD_S = 0.2
_TRIGGERS = "expected interval, still, mqtt:TOPIC or http"


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOptions:
    """Options of `mdp watch` with --trigger."""

    fleet: Path
    trigger: str
    every: str | None
    out: Path | None
    deadline_ms: float
    verdict_ms: float | None
    within_ms: float | None
    delay: str
    equal: int
    rest: str
    rules: Sequence[str]
    passing: Sequence[str]
    empty: str | None
    sure: float
    different: str
    keep: Path | None
    keep_mb: float
    broker: str | None
    login: Path | None
    ca: Path | None
    name: str | None
    bind: str | None
    tokens: Path | None
    certificate: Path | None
    private_key: Path | None
    fusion: Fusion
    key: Path | None
    insecure: bool
    json: bool

    @property
    def kind(self) -> TriggerKind:
        """Source of triggers; raises InputError."""
        if self.trigger.startswith("mqtt:") and self.topic:
            return "mqtt"
        if self.trigger in ("interval", "still", "http"):
            return self.trigger  # type: ignore[return-value]
        raise InputError(f"--trigger {self.trigger}: {_TRIGGERS}")

    @property
    def topic(self) -> str:
        """The topic of triggers, empty where they come from elsewhere."""
        topic = self.trigger.partition(":")[2]
        return topic if topic.isprintable() else ""

    def timing(self) -> ItemTiming:
        """Times of looks and verdicts; raises InputError."""
        every = self.every or (STATE_EVERY if self.kind == "interval" else ITEM_EVERY)
        every_s, delay_s = seconds("--every", every), seconds("--delay", self.delay)
        verdict_ms = self.verdict_ms
        if verdict_ms is None:
            # Each look may take all of its time.
            verdict_ms = self.deadline_ms + (self.equal - 1) * max(every_s * 1e3, self.deadline_ms)
        check_deadline_ms(verdict_ms, "--verdict-ms")
        return ItemTiming(
            equal=self.equal, every_s=every_s, delay_s=delay_s, verdict_s=verdict_ms / 1e3
        )

    @property
    def frame_within_ms(self) -> float:
        """Largest difference of a frame from the moment that is looked at."""
        if self.within_ms is not None:
            return self.within_ms
        return DEFAULT_WITHIN_MS if self.kind == "interval" else WITHIN_MS

    def line_rules(self) -> LineRules:
        """Rules of the line; raises InputError."""
        check_number("--sure", self.sure, "0 to 1", lambda share: 0 <= share <= 1)
        return LineRules(
            needed=read_rules(self.rules),
            passing=frozenset(self.passing) if self.passing else None,
            empty=self.empty,
            sure_from=self.sure,
            different=read_different(self.different),
        )

    def client_options(self) -> Options:
        """Those of connections beside the client's."""
        return Options(fleet=self.fleet, key=self.key, insecure=self.insecure)


def watch_line(asked: LineOptions) -> None:
    """Watch a line until told to end; raises what a client raises."""
    check_deadline_ms(asked.deadline_ms, "--deadline-ms")
    kind, timing, rules = asked.kind, asked.timing(), asked.line_rules()
    _check(asked)
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    with (
        answers.open_client(
            asked.fleet, asked.key, asked.insecure, asked.fusion, opinions=True
        ) as client,
        console.until_reader_leaves(),
        ExitStack() as stack,
    ):
        _check_cameras(client)
        _check_rules(rules, client)
        triggers = TriggerQueue()
        line = _Line(asked, client, triggers, timing, stack)
        book: Book
        if kind == "interval":
            book = StateBook(timing, time.monotonic())
        else:
            book = ItemBook(timing, skip_empty=kind == "still")
        watcher = LineWatcher(
            client,
            book,
            triggers,
            rules,
            kind=kind,
            timing=timing,
            deadline_ms=asked.deadline_ms,
            within_ms=asked.frame_within_ms,
            cameras=lambda: _cameras(client),
            prefix=_prefix(answers.utc_now()),
            publish=line.publish,
            utc=answers.utc_now,
        )
        follower = _Follower(asked, client, rules, line, book)
        while not over.is_set():
            line.check()
            idle = not watcher.turn()
            if idle:
                # Keeps connections, and finds devices that have come back.
                with suppress(InferenceError):
                    client.status(timeout_s=0.0)
            follower.follow(idle=idle)
        watcher.finish()


def _check(asked: LineOptions) -> None:
    """Raise InputError for options that do not go together, before anything is connected."""
    kind = asked.kind
    if kind == "mqtt" and asked.broker is None:
        raise InputError(f"--trigger {asked.trigger}: expected --broker HOST too")
    if asked.empty is not None and asked.empty in asked.passing:
        raise InputError(f"--empty {asked.empty}: expected a class that is not in --pass")
    if asked.name is not None and not is_fleet_name(asked.name):
        raise InputError(f"--name {asked.name}: expected {FLEET_NAME_FORM}")
    if (asked.certificate is None) != (asked.private_key is None):
        raise InputError("--certificate and --private-key: expected both, or neither for HTTP")
    seconds("--rest", asked.rest)
    check_number("--keep-mb", asked.keep_mb, "more than 0", lambda value: value > 0)
    for needs, wanted, extra in (
        (MQTT, asked.broker is not None, "mqtt"),
        (GATEWAY, asked.bind is not None or kind == "http", "gateway"),
    ):
        if wanted and (module := missing(needs)):
            raise InputError(
                f"{module} is not installed; this way of mdp watch needs it: {install(extra)}"
            )


def _prefix(now: str) -> str:
    """The beginning of counted ids, from the time that the watcher starts at in UTC."""
    day, _, clock = now.partition("T")
    return f"{day.replace('-', '')}T{clock[:8].replace(':', '')}Z-"


def _cameras(client: Client) -> int:
    return len({entry.k for entry in client.fleet.devices})


def _check_rules(rules: LineRules, client: Client) -> None:
    """Raise InputError for rules that do not fit the client's bundle and fleet."""
    manifest = client.bundle.manifest
    rules.check(
        manifest.labels,
        _cameras(client),
        inspects=bool(manifest.inspection),
        several=manifest.several,
    )


def _check_cameras(client: Client) -> None:
    """Raise QuorumNotMet where every device says that it has no source."""
    statuses = client.status()
    if all(status.bundle is not None and not status.source for status in statuses):
        why = "no source (--source)"
        raise QuorumNotMet(
            "no agent has a camera: expected one with --source",
            {status.device: why for status in statuses},
        )


class _Line:
    """Everywhere that triggers come from, and that records go to."""

    def __init__(
        self,
        asked: LineOptions,
        client: Client,
        triggers: TriggerQueue,
        timing: ItemTiming,
        stack: ExitStack,
    ) -> None:
        """Open what `asked` names, to be closed with `stack`; raises MDPError."""
        self._asked, self._client, self._triggers = asked, client, triggers
        # Imported below where they are wanted, hence these types.
        self._sinks: list[Callable[[ItemRecord, bytes, ItemOutcome], None]] = []
        self._checks: list[Callable[[], None]] = []
        self._renewals: list[Callable[[], None]] = []
        self._keeper: ItemKeeper | None = None
        if asked.out is not None:
            file = stack.enter_context(RecordFile(asked.out))
            self._sinks.append(lambda record, content, outcome: file.append(content))
        if asked.keep is not None:
            self._keep(asked.keep, timing, stack)
        if asked.broker is not None:
            self._open_broker(asked.broker, stack)
        if asked.bind is not None or asked.kind == "http":
            self._open_http(timing, stack)
        if asked.kind == "still":
            rest_ms = seconds("--rest", asked.rest) * 1e3
            watch = RestWatch(
                lambda: FleetRests(read_devices(asked.fleet), asked.client_options()),
                rest_ms,
                self._on_rest,
                say,
            )
            stack.enter_context(watch)
            self._renewals.append(watch.renew)

    def _begin(self, item: str | None) -> Trigger:
        """Begin an item now; any thread. Raises DuplicateItemError."""
        return self._triggers.add(item, time.monotonic(), answers.utc_now())

    def _on_rest(self, moment_s: float) -> None:
        """Begin an item of a scene that rested at `moment_s`."""
        with suppress(LineEndedError):
            self._triggers.add(None, moment_s, answers.utc_now(), time.monotonic())

    def _on_trigger(self, payload: bytes) -> None:
        """Take in a trigger that a broker has sent."""
        try:
            self._begin(item_of(payload))
        except InputError as error:
            say(f"{self._asked.topic}: {error}")

    def _keep(self, folder: Path, timing: ItemTiming, stack: ExitStack) -> None:
        asked = self._asked
        self._keeper = ItemKeeper(
            KeptFolder(folder, int(asked.keep_mb * 1e6)),
            lambda: FleetCameras(read_devices(asked.fleet), asked.client_options()),
            lambda moment_s: self._triggers.next_after(moment_s - timing.delay_s) + timing.delay_s,
            say,
            within_s=asked.frame_within_ms / 1e3,
        )
        stack.enter_context(self._keeper)
        self._renewals.append(self._keeper.renew)

    def _open_broker(self, address: str, stack: ExitStack) -> None:
        # Loading paho takes a while, which no other way needs.
        from mdp.mqtt.broker import Place
        from mdp.mqtt.line import LineBroker

        asked = self._asked
        host, port = brokers.broker_address(address, brokers.usual_port(asked.ca))
        place = Place(host=host, port=port, login=brokers.read_login(asked.login), ca=asked.ca)
        if asked.ca is None and not is_local(host):
            say(f"WARNING: broker {place} is {PLAIN_TEXT}")
        name = asked.name or self._client.bundle.manifest.name
        topic = asked.topic if asked.kind == "mqtt" else None
        line = LineBroker(place, name, topic=topic, trigger=self._on_trigger, report=say)
        stack.enter_context(line.broker)
        self._sinks.append(lambda record, content, outcome: line.publish(content))
        self._checks.append(line.broker.check)

    def _open_http(self, timing: ItemTiming, stack: ExitStack) -> None:
        # Loading starlette and uvicorn takes a third of a second, which no other way needs.
        from mdp.gateway.access import FollowedTokens, Tokens, check_exposure
        from mdp.gateway.line import ServedLine
        from mdp.gateway.server import Listening, serving_line

        asked, bind = self._asked, self._asked.bind or LINE_BIND
        risk = check_exposure(
            bind,
            tokens=asked.tokens is not None,
            encrypted=asked.certificate is not None,
            insecure=asked.insecure,
        )
        if risk:
            say(f"WARNING: {risk}")
        allowed = Tokens([]) if asked.tokens is None else FollowedTokens(asked.tokens)
        trigger = self._begin if asked.kind == "http" else None
        served = ServedLine(trigger, timing.delay_s + timing.verdict_s)
        listening = Listening(bind, allowed, asked.certificate, asked.private_key)
        url = stack.enter_context(serving_line(served, listening))
        if asked.json:
            console.print_json({"event": "listening", "url": url})
        else:
            print(f"{url} serves items; Ctrl-C ends it", flush=True)

        def publish(record: ItemRecord, content: bytes, outcome: ItemOutcome) -> None:
            served.publish(record.number, content, outcome.trigger.ticket)

        self._sinks.append(publish)

    def publish(self, record: ItemRecord, outcome: ItemOutcome) -> None:
        """Publish a record everywhere, once.

        Raises InputError where it cannot be written, after the others have got it.
        """
        content = to_json(record)
        unwritten: InputError | None = None
        for sink in self._sinks:
            try:
                sink(record, content, outcome)
            except InputError as error:
                unwritten = error
        if record.why_kept is not None and self._keeper is not None:
            self._keeper.put(record, outcome.due_from_s)
        if self._asked.json:
            console.print_json(record)
        else:
            _show(record)
        if unwritten is not None:
            raise unwritten

    def check(self) -> None:
        """Raise ConfigError where a broker has refused this client."""
        for check in self._checks:
            check()

    def renew(self) -> None:
        """Have everything connect anew: the fleet file has changed."""
        for renewal in self._renewals:
            renewal()


def _show(record: ItemRecord) -> None:
    """One item for people."""
    item, verdict = console.printable(record.item), console.printable(record.verdict)
    print(f"item {item}: {verdict}, {record.latency_ms:.0f} ms", flush=True)
    for device, reason in record.answer.missing.items():
        print(f"  without {device}: {console.printable(reason)}", flush=True)


class _Follower:
    """Follows a fleet file or bundle that has changed, between items."""

    def __init__(
        self, asked: LineOptions, client: Client, rules: LineRules, line: _Line, book: Book
    ) -> None:
        self._client, self._rules, self._line, self._book = client, rules, line, book
        self._files = FollowedFiles(asked.fleet, client, say)
        self._due_s = time.monotonic() + FOLLOW_S

    def follow(self, *, idle: bool) -> None:
        """Use changed files from the next item on; `idle` is whether nothing is due."""
        due_s = self._due_s if idle else self._due_s + FOLLOW_BUSY_S - FOLLOW_S
        # Equal looks at an item are by one bundle.
        if time.monotonic() < due_s or not self._book.between_items:
            return
        self._due_s = time.monotonic() + FOLLOW_S
        with self._files.following() as changed:
            if not changed:
                return
            # Devices that are away are taken in as they come; items are waiting.
            self._client.reload(timeout_s=RELOAD_S)
            self._book.renew()
            self._line.renew()
            try:
                _check_rules(self._rules, self._client)
            except InputError as error:
                say(f"{error}; it is never seen")
