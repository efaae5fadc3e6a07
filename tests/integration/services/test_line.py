"""`mdp watch --trigger`: items before real agents, with a real broker and over HTTP."""

import http.client
import json
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mdp.cli.main import main
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import new_fleet
from mdp.line.kept import list_kept
from mdp.testing.bundles import DEVICES, write_bundle
from mdp.testing.processes import PATIENCE_S, LineProcess, until
from tests.support.command_lines import run_here
from tests.support.faults.stage import Stage, with_cameras
from tests.support.fleet import BIN, PLENTY_MS, Fleet
from tests.support.mqtt.mosquitto import Mosquitto, require_program

pytestmark = pytest.mark.usefixtures("no_leaks")

#: An agent that predates rests: their kinds are none of its.
OLD_AGENT = (
    "import mdp.protocol.messages as wire;"
    "[wire._BY_PREAMBLE.pop(wire._PREAMBLES[kind]) or wire._KINDS.pop(kind) for kind in (16, 17)];"
    "from devices.cli.main import main; main()"
)


class Line:
    """Three agents with cameras that may be recorded, and what they see."""

    def __init__(self, fleet: Fleet, stage: Stage) -> None:
        self.fleet, self.stage = fleet, stage

    def put(self, label: str, **other: str) -> None:
        """Put an item before all cameras, and wait until each has seen it."""
        self.stage.show({**dict.fromkeys(DEVICES, label), **other})
        with self.fleet.client() as client:
            self.stage.wait_for_frames(client)

    @contextmanager
    def watch(
        self, folder: Path, *options: object, log: str = "watch.log"
    ) -> Iterator[LineProcess]:
        """`mdp watch` of this line, until the block ends."""
        with LineProcess("mdp watch", self.command(*options), folder / log) as process:
            yield process

    def command(self, *options: object) -> list[object]:
        return [
            BIN / "mdp", "watch", "--fleet", self.fleet.folder / "fleet.toml", "--json",
            "--deadline-ms", PLENTY_MS, "--verdict-ms", PLENTY_MS, "--within-ms", PLENTY_MS,
            *options,
        ]  # fmt: skip


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    require_program("mosquitto")
    folder = tmp_path_factory.mktemp("line")
    bundle = with_cameras(write_bundle(folder / "bundle", bag_scale=12.0))
    stage = Stage(folder, DEVICES)
    stage.show_all("red")
    (folder / "client.limits").write_text("record = true\n")
    with Fleet(folder, bundle, keys=True) as fleet:
        for device in DEVICES:
            allowed = () if device == "gamma" else ("--allow-record",)
            fleet.start(device, *stage.source(device), *allowed, wait_for=None)
        for device in DEVICES:
            fleet.agents[device].wait_for("READY")
        fleet.write()
        yield Line(fleet, stage)


def next_record(process: LineProcess) -> Any:
    return json.loads(process.line("a record"))


def publish(broker: Mosquitto, payload: str, *options: str) -> None:
    command = [
        require_program("mosquitto_pub"), "-h", "127.0.0.1", "-p", str(broker.port), "-u", "fleet",
        "-P", "s3cret", "-q", "1", "-t", "belt/item", "-m", payload, *options,
    ]  # fmt: skip
    subprocess.run(command, check=True)


def next_message(process: LineProcess, topic: str = "mdp/belt/items") -> Any:
    return json.loads(process.line_with(f" {topic} ").split(" ", 2)[2])


def test_items_by_mqtt_have_one_record_each(line: Line, tmp_path: Path) -> None:
    broker = Mosquitto(tmp_path / "broker")
    keep, out = tmp_path / "kept", tmp_path / "items.jsonl"
    options = (
        "--trigger", "mqtt:belt/item", "--broker", broker.address, "--login", broker.login,
        "--name", "belt", "--rule", "green=any", "blue=2", "--pass", "red", "--sure", "0.6",
        "--keep", keep, "--out", out,
    )  # fmt: skip
    with line.watch(tmp_path, *options) as process:
        with broker.running():
            # What was retained is of before.
            broker.publish("belt/item", "of before")
            with broker.hear() as listener:
                while listener.line_with(" mdp/belt/line ").split()[2] != "online":
                    pass
                line.put("red")
                publish(broker, "17")
                first = next_record(process)
                assert (first["item"], first["class"], first["passed"]) == ("17", "red", True)
                assert next_message(listener) == first
                assert first["trigger"] == "mqtt"
                assert first["latency_ms"] <= first["deadline_ms"]
                assert set(first["answer"]["devices"]) == set(DEVICES)
                # One camera that sees green is enough.
                line.put("red", beta="green")
                publish(broker, "17")
                publish(broker, '{"item": "18"}')
                second = next_record(process)
                assert (second["item"], second["class"], second["decision"]) == (
                    "18",
                    "green",
                    "rule",
                )
                assert second["rules"]["green"]["seen"] == ["beta"]
                assert second["passed"] is False
                assert second["why_kept"] == "disagreement"
                # Nobody can tell which; and the id is counted.
                line.put("red+blue")
                publish(broker, "a\tb")
                publish(broker, "")
                third = next_record(process)
                assert third["item"].endswith("-3")
                assert (third["sure"], third["why_kept"]) == (False, "unsure")
                assert [next_message(listener), next_message(listener)] == [second, third]
        said = process.stderr
        assert "mdp: belt/item: item 17 came twice: it has one record\n" in said
        assert "belt/item: a trigger: expected an id of 1 to 128 printable characters" in said
        no_picture = "no picture of gamma is kept: no_frame: this agent's camera is not recorded"
        until(lambda: no_picture in process.stderr, "gamma's owner does not allow it")
        until(lambda: len(list_kept(keep)) == 2, "both items are kept")
        until(lambda: "trying again" in process.stderr, "the broker is missed")
        # Its records wait for the broker.
        with broker.running(), broker.hear() as listener:
            until(lambda: _triggers(broker, process), "the topic is heard again")
            item = next_message(listener)["item"]
            # What the broker had not acknowledged when it went comes again.
            assert (next_message(listener)["item"] if item == third["item"] else item) == "back"
            assert process.terminate() == 0
            assert listener.line_with(" mdp/belt/line ").endswith("offline")
    by_item = {one.record.item: one for one in list_kept(keep)}
    assert set(by_item["18"].pictures) == {"alpha", "beta"}
    stored = json.loads((by_item["18"].folder / "record.json").read_text())
    assert stored.items() >= second.items()
    records = [json.loads(text) for text in out.read_text().splitlines()]
    assert records[:3] == [first, second, third]
    assert len(records) == 4


def _triggers(broker: Mosquitto, process: LineProcess) -> bool:
    """Tell whether an item that is published now has a record; it has one id, however often."""
    publish(broker, "back")
    try:
        return bool(next_record_within(process, 0.5)["item"] == "back")
    except AssertionError:
        return False


def next_record_within(process: LineProcess, timeout_s: float) -> Any:
    return json.loads(process.line("a record", timeout_s))


def ask(host: str, path: str, body: bytes) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    try:
        connection.request("POST", path, body)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def events(host: str, last: str = "", ids: list[str] | None = None) -> Generator[Any, None, None]:
    """Items as they come; their events' ids are added to `ids`."""
    connection = http.client.HTTPConnection(host, timeout=PATIENCE_S)
    try:
        connection.request("GET", "/items", headers={"last-event-id": last} if last else {})
        for text in connection.getresponse():
            if text.startswith(b"data: "):
                yield json.loads(text.removeprefix(b"data: "))
            elif text == b":\n":
                yield None
            elif text.startswith(b"id: ") and ids is not None:
                ids.append(text.removeprefix(b"id: ").decode().strip())
    finally:
        connection.close()


def test_items_over_http(line: Line, tmp_path: Path) -> None:
    line.put("blue")
    with line.watch(tmp_path, "--trigger", "http", "--bind", "127.0.0.1:0") as process:
        host = next_record(process)["url"].removeprefix("http://")
        ids: list[str] = []
        stream = events(host, ids=ids)
        assert next(stream) is None
        status, record = ask(host, "/trigger?wait=1", b'{"item": "a/1"}')
        assert (status, record["item"], record["class"]) == (200, "a/1", "blue")
        assert next(stream) == record == next_record(process)
        status, taken = ask(host, "/trigger", b"")
        assert (status, taken["item"]) == (202, None)
        counted = next(stream)
        assert counted["number"] == 2
        assert ask(host, "/trigger", b"a/1") == (
            409, {"error": "item a/1 came twice: it has one record"},
        )  # fmt: skip
        assert ask(host, "/trigger", b"\xff")[0] == 400
        assert ask(host, "/trigger?wait=2", b"")[0] == 400
        # A reader who comes back gets what it has missed.
        again = events(host, ids[0])
        assert [next(again), next(again)] == [None, counted]
        # One of an earlier run of the watcher has missed all.
        earlier = events(host, "1")
        assert [next(earlier), next(earlier), next(earlier)] == [None, record, counted]
        for one in (stream, again, earlier):
            one.close()
        assert process.terminate() == 0


def test_a_state_has_a_record_when_it_changes(line: Line, tmp_path: Path) -> None:
    line.put("red")
    options = ("--trigger", "interval", "--every", "20ms", "--equal", "3")
    with line.watch(tmp_path, *options) as process:
        first = next_record(process)
        assert (first["class"], first["looks"]) == ("red", 3)
        line.put("blue")
        assert next_record(process)["class"] == "blue"
        assert process.terminate() == 0


#: Options beside `--trigger still`, unless they name another one, and what is said of them.
WRONG = (
    ("--trigger sometimes", "--trigger sometimes: expected interval, still, mqtt:TOPIC or http"),
    ("--trigger mqtt:", "--trigger mqtt:: expected interval, still, mqtt:TOPIC or http"),
    ("--trigger mqtt:a", "--trigger mqtt:a: expected --broker HOST too"),
    ("--rule red=0", "--rule red=0: expected CLASS=any, CLASS=fused or CLASS=2"),
    ("--rule x=any", "--rule x: expected a class of the bundle: blue, green, red"),
    ("--rule red=4", "--rule red=4: expected at most 3, the cameras of the fleet"),
    ("--pass x", "--pass x: expected a class of the bundle"),
    ("--empty x", "--empty x: expected a class of the bundle"),
    ("--pass red --empty red", "--empty red: expected a class that is not in --pass"),
    ("--sure 2", "--sure: expected 0 to 1, got 2"),
    ("--keep-mb 0", "--keep-mb: expected more than 0, got 0"),
    ("--delay soon", "--delay: expected a time such as 0.5s or 200ms, got 'soon'"),
    ("--verdict-ms 0", "--verdict-ms: expected more than 0"),
    ("--cascade", "--cascade: expected none with --trigger, as rules count all cameras"),
    ("--name a/b", "--name a/b: expected 1 to 64 letters"),
    ("--out items.csv", "--out items.csv: expected a file that ends in .jsonl, for records"),
    ("--trigger http --bind 0.0.0.0:0", "--bind 0.0.0.0:0 is not on this machine alone"),
    ("--certificate a.pem", "--certificate and --private-key: expected both, or neither"),
)


def test_what_is_asked_wrongly_is_one_line(line: Line, tmp_path: Path) -> None:
    fleet = ("--fleet", line.fleet.folder / "fleet.toml")

    def stderr_of(*options: object) -> str:
        done = run_here(main, "mdp", "watch", *fleet, *options)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        return done.stderr

    for options, expected in WRONG:
        words = options.split()
        trigger = () if "--trigger" in words else ("--trigger", "still")
        assert stderr_of(*trigger, *words).startswith(f"mdp: {expected}")
    about_items = "mdp: --keep: expected --trigger too, as it is about items\n"
    assert stderr_of("--keep", "kept") == about_items
    for asked in ("--equal 2", "--delay 5ms", "--verdict-ms 0", "--sure 0.9", "--tokens t"):
        option = asked.split()[0]
        assert stderr_of(*asked.split()) == about_items.replace("--keep", option)
    file = tmp_path / "file"
    file.touch()
    assert stderr_of("--trigger", "still", "--keep", file) == (
        f"mdp: {file}: expected a folder or nothing, found a file\n"
    )
    plain = tmp_path / "plain.toml"
    new_fleet(Bundle.open(line.fleet.bundle), ["alpha=tcp://127.0.0.1:9"], plain)
    assert stderr_of(
        "--fleet", plain, "--trigger", "http", "--bind", "127.0.0.1:0", "--keep", "k"
    ) == (f"mdp: {plain}: no `key` in the fleet file: pictures are sent with keys only\n")


def test_what_rests_is_an_item_and_a_board_that_comes_back_is_none(
    line: Line, tmp_path: Path
) -> None:
    fleet, stage = line.fleet, line.stage
    line.put("red")
    program = (sys.executable, "-c", OLD_AGENT, "run", "--json")
    with line.watch(tmp_path, "--trigger", "still", "--rest", "100ms", "--empty", "red") as process:
        # Until it has asked them all, what changes is where it begins.
        until(lambda: _rests(line, process, "green"), "a first item")
        for label in ("blue", "red", "green"):
            stage.show_all(label)
            if label != "red":
                record = next_record(process)
                assert (record["class"], record["trigger"]) == (label, "still")
        fleet.agents["beta"].kill()
        stage.show_all("blue")
        record = next_record(process)
        assert (record["class"], list(record["answer"]["missing"])) == ("blue", ["beta"])
        fleet.restart("beta", *stage.source("beta"), "--allow-record", program=program)
        log = "beta: its mdp-agent cannot tell whether its picture rests: expected a newer one"
        until(lambda: log in process.stderr, "what an old agent lacks")
        with fleet.client() as client:
            stage.wait_for_frames(client)
        stage.show_all("green")
        record = next_record(process)
        assert record["class"] == "green"
        numbers = record["number"]
        assert process.terminate() == 0
        assert list(process.rest()) == []
    assert numbers == 5


def _rests(line: Line, process: LineProcess, label: str) -> bool:
    """Tell whether a first item has a record; if not, it goes away for a moment."""
    line.put(label)
    try:
        return bool(next_record_within(process, 2.0)["class"] == label)
    except AssertionError:
        line.put("red")
        return False
