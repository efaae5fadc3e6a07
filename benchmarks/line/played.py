"""A line played by four agents on folders, watched by `mdp watch`, with faults on the way.

    python -m benchmarks.line.played --items 1000 --every 1 --scratch FOLDER

The items are the scenes of examples/bundles/parts, put before the cameras one after another. The
watcher publishes its records to a file, to a mosquitto broker and over HTTP, all of which are read
here. By shares of the items: all well (0 to 20 %); an agent stopped for 0.7 s at every fourth item
(to 35 %); the first camera covered (to 60 %); the second board killed (to 80 %), and started again.
The result is added to benchmarks/results/line-played.json in place of an earlier one of the same
trigger.
"""

import http.client
import json
import queue
import random
import shutil
import signal
import socket
import sys
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from paho.mqtt.client import Client as Paho
from paho.mqtt.client import MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion
from PIL import Image

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from mdp.client.sync import Client
from mdp.files import write_json
from mdp.formats.bundle import Bundle
from mdp.testing.agents import AgentFleet
from mdp.testing.folder_cameras import FolderCameras
from mdp.testing.processes import LineProcess, until

RESULT = RESULTS / "line-played.json"
ROOT = Path(__file__).parents[2]
PARTS = ROOT / "examples" / "bundles" / "parts"
TOPIC, NAME = "line/trigger", "belt"
#: Shares of the items from which on something is wrong.
STOPPED, COVERED, KILLED, BACK = 0.2, 0.35, 0.6, 0.8
#: Frames a second of each folder; a trigger's moment is so much later than the item's coming.
FPS, DELAY_S = 20, 0.25
STOPPED_S, STOP_EVERY = 0.7, 4
#: How long an item has rested when it is found, and of how many records the first one is timed.
REST_S, TIMED = 0.3, 20
#: From the item's moment to its verdict.
VERDICT_MS, DEADLINE_MS = 700.0, 500.0
KEEP_MB = 20.0


def scenes() -> list[tuple[str, dict[str, bytes]]]:
    """Class, or `unknown`, and a picture for each device, of every scene."""
    plan = Bundle.open(PARTS).manifest.plan
    cameras = {one.device: one.camera or one.device for one in plan.assignments}
    found = []
    for scene in sorted((PARTS / "scenes").glob("*/*")):
        pictures = {
            device: (scene / f"{camera}.jpg").read_bytes() for device, camera in cameras.items()
        }
        found.append((scene.parent.name, pictures))
    return found


def cover(picture: bytes, folder: Path) -> bytes:
    """A black picture of the same kind."""
    path = folder / "covered.jpg"
    if not path.exists():
        Image.new("RGB", (160, 160)).save(path)
    return path.read_bytes()


@contextmanager
def mosquitto(folder: Path) -> Iterator[int]:
    """A broker that lets in everybody on this machine; its port."""
    program = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin")
    assert program is not None, "expected mosquitto"
    with socket.create_server(("127.0.0.1", 0)) as place:
        port = int(place.getsockname()[1])
    config = folder / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nuser root\n")

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with LineProcess("mosquitto", [program, "-c", config], folder / "mosquitto.log"):
        until(listens, "mosquitto listens")
        yield port


class Heard:
    """Records from one place, with when each came."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self._new: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def add(self, content: bytes | str) -> None:
        self._new.put(json.loads(content))

    def settle(self) -> None:
        while not self._new.empty():
            self.records.append(self._new.get())


@contextmanager
def subscribe(port: int, heard: Heard) -> Iterator[Paho]:
    """A client of the broker that hears all records, and may publish triggers."""
    ready = threading.Event()
    client = Paho(CallbackAPIVersion.VERSION2)

    def on_message(client: Paho, userdata: object, message: MQTTMessage) -> None:
        heard.add(bytes(message.payload))

    client.on_message = on_message
    client.on_subscribe = lambda *_: ready.set()
    client.connect("127.0.0.1", port)
    client.loop_start()
    client.subscribe(f"mdp/{NAME}/items", qos=1)
    assert ready.wait(10), "expected to be subscribed"
    try:
        yield client
    finally:
        client.loop_stop()
        client.disconnect()


@contextmanager
def reading_events(host: str, heard: Heard) -> Iterator[None]:
    """Read the events of items in a thread."""
    connection = http.client.HTTPConnection(host, timeout=30)
    connection.request("GET", "/items")
    response = connection.getresponse()
    assert response.status == 200, response.read()

    def read() -> None:
        try:
            for line in response:
                if line.startswith(b"data: "):
                    heard.add(line.removeprefix(b"data: "))
        except (OSError, ValueError, AttributeError):
            return

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
        thread.join(10)
        connection.close()


def post_trigger(host: str, item: str) -> None:
    connection = http.client.HTTPConnection(host, timeout=10)
    try:
        connection.request("POST", "/trigger", json.dumps({"item": item}))
        response = connection.getresponse()
        body = response.read()
        assert response.status == 202, body
    finally:
        connection.close()


def resident(pid: int) -> float:
    """MiB that a process holds."""
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def share_of(number: int, items: int) -> str:
    """The part of the run that an item is in."""
    share = number / items
    parts = ((STOPPED, "well"), (COVERED, "stragglers"), (KILLED, "covered"), (BACK, "killed"))
    return next((name for until_share, name in parts if share < until_share), "back")


def watching(
    folder: Path, fleet_file: Path, options: Namespace, port: int
) -> tuple[list[object], Path, Path]:
    """The watcher's command, the file of its records, and the folder of kept items."""
    out, keep = folder / "items.jsonl", folder / "kept"
    trigger = f"mqtt:{TOPIC}" if options.trigger == "mqtt" else options.trigger
    delay = "0ms" if options.trigger == "still" else f"{DELAY_S * 1e3:g}ms"
    return (
        [
            Path(sys.executable).parent / "mdp", "watch", "--fleet", fleet_file, "--json",
            "--trigger", trigger, "--delay", delay, "--deadline-ms", DEADLINE_MS,
            "--verdict-ms", VERDICT_MS, "--out", out, "--keep", keep, "--keep-mb", KEEP_MB,
            "--broker", f"127.0.0.1:{port}", "--name", NAME, "--bind", "127.0.0.1:0",
        ],
        out,
        keep,
    )  # fmt: skip


class Faults:
    """Faults of a played line, item by item."""

    def __init__(self, fleet: AgentFleet, cameras: FolderCameras, items: int) -> None:
        self._fleet, self._cameras, self._items = fleet, cameras, items
        self._devices = list(cameras.folders)
        self._killed = self._restarted = False
        self._timers: list[threading.Timer] = []

    @property
    def covered(self) -> str:
        return self._devices[0]

    @property
    def killed(self) -> str:
        return self._devices[1]

    def before(self, number: int) -> None:
        """Do what is due before an item comes."""
        part = share_of(number, self._items)
        if part == "stragglers" and number % STOP_EVERY == 0:
            agent = self._fleet.agents[self._devices[2]]
            agent.signal(signal.SIGSTOP)
            timer = threading.Timer(STOPPED_S, agent.signal, (signal.SIGCONT,))
            timer.start()
            self._timers.append(timer)
        if part == "killed" and not self._killed:
            self._killed = True
            self._fleet.agents[self.killed].kill()
        if part == "back" and not self._restarted:
            self._restarted = True
            agent = self._fleet.agents[self.killed]
            options = (*self._cameras.source(self.killed), "--allow-record")
            self._fleet.start(self.killed, *options, bind=agent.address, wait_for=None)

    def end(self) -> None:
        for timer in self._timers:
            timer.join()


def play(options: Namespace, folder: Path) -> dict[str, Any]:
    """Run the line, and say what came of it."""
    known = scenes()
    draw = random.Random(options.seed)
    order = [draw.randrange(len(known)) for _ in range(options.items)]
    # Two of the same in a row would be one picture for `still`.
    for place in range(1, len(order)):
        if order[place] == order[place - 1]:
            order[place] = (order[place] + 1) % len(known)
    by_mqtt, by_http = Heard(), Heard()
    with ExitStack() as stack:
        port = stack.enter_context(mosquitto(folder))
        fleet = stack.enter_context(AgentFleet(folder, PARTS, keys=True))
        (folder / "client.limits").write_text("record = true\n")
        devices = [one.device for one in Bundle.open(PARTS).manifest.plan.assignments]
        cameras = FolderCameras(folder, devices, fps=FPS)
        cameras.put(known[order[-1]][1])
        for device in devices:
            arguments_of = (*cameras.source(device), "--allow-record", "--threads", 1)
            fleet.start(device, *arguments_of, wait_for=None)
        for device in devices:
            fleet.agents[device].wait_for("READY")
        fleet_file = fleet.write()
        with Client.connect(fleet_file, opinions=True, timeout_s=30) as client:
            alone = [client.classify(_by_camera(one), deadline_ms=5000).label for _, one in known]
        command, out, keep = watching(folder, fleet_file, options, port)
        watcher = stack.enter_context(LineProcess("mdp watch", command, folder / "watch.log"))
        url = json.loads(watcher.line("its URL"))["url"]
        host = url.removeprefix("http://")
        threading.Thread(target=lambda: [None for _ in watcher.rest()], daemon=True).start()
        publisher = stack.enter_context(subscribe(port, by_mqtt))
        stack.enter_context(reading_events(host, by_http))
        triggers: Mapping[str, Callable[[str], object]] = {
            "mqtt": lambda item: publisher.publish(TOPIC, item, qos=1),
            "http": lambda item: post_trigger(host, item),
            "still": lambda item: None,
        }
        # The watcher's subscription, and the cameras' rest before the first item.
        time.sleep(2)
        faults = Faults(fleet, cameras, options.items)
        memory = {"watcher_start": resident(watcher.process.pid)}
        began_s = time.monotonic()
        came: list[str] = []
        for number, place in enumerate(order):
            due_s = began_s + number * options.every
            time.sleep(max(0.0, due_s - time.monotonic()))
            faults.before(number)
            pictures = dict(known[place][1])
            if share_of(number, options.items) == "covered":
                pictures[faults.covered] = cover(pictures[faults.covered], folder)
            came.append(time.strftime("%H:%M:%S", time.gmtime()))
            cameras.put(pictures)
            triggers[options.trigger](str(number))
            if number == options.items // 10:
                memory["watcher_tenth"] = resident(watcher.process.pid)
                memory["agents_tenth"] = _agents(fleet)
        faults.end()
        time.sleep(max(2.0, options.every))
        memory["watcher_end"] = resident(watcher.process.pid)
        memory["agents_end"] = _agents(fleet)
        took_s = time.monotonic() - began_s
        assert watcher.terminate() == 0, watcher.stderr
        for heard in (by_mqtt, by_http):
            heard.settle()
        records = [json.loads(line) for line in out.read_text().splitlines()]
        kept_bytes = sum(file.stat().st_size for file in keep.rglob("*") if file.is_file())
        kept = len(list(keep.glob("*/record.json")))
        log = watcher.stderr
    told = tally(options, records, [known[place][0] for place in order],
                 [alone[place] for place in order])  # fmt: skip
    for name, heard in (("mqtt", by_mqtt), ("http", by_http)):
        items = Counter(record["item"] for record in heard.records)
        told[f"over_{name}"] = {
            "records": len(heard.records),
            "lost": len({one["item"] for one in records} - items.keys()),
            "twice": sum(count > 1 for count in items.values()),
        }
    return {
        "trigger": options.trigger,
        "every_s": options.every,
        "seed": options.seed,
        "took_s": round(took_s, 1),
        "verdict_ms": VERDICT_MS,
        **told,
        "kept": {"items": kept, "bytes": kept_bytes, "bound_bytes": int(KEEP_MB * 1e6)},
        "memory_mib": {name: round(value, 1) for name, value in memory.items()},
        # Without where on this machine it was played.
        "said": log.replace(f"{folder}/", "").splitlines()[:20],
    }


def _agents(fleet: AgentFleet) -> float:
    alive = [agent.process for agent in fleet.agents.values() if agent.process.poll() is None]
    return sum(resident(process.pid) for process in alive)


def _by_camera(pictures: Mapping[str, bytes]) -> dict[str, bytes]:
    plan = Bundle.open(PARTS).manifest.plan
    return {one.camera or one.device: pictures[one.device] for one in plan.assignments}


def tally(
    options: Namespace,
    records: Sequence[Mapping[str, Any]],
    truths: Sequence[str],
    alone: Sequence[str],
) -> dict[str, Any]:
    """Compare the records of a run with the items that came."""
    numbers = numbers_of(options, records)
    ids = Counter(number for number in numbers if 0 <= number < len(truths))
    parts: dict[str, Counter[str]] = {}
    for number, record in zip(numbers, records, strict=True):
        if number not in ids:
            continue
        counts = parts.setdefault(share_of(number, options.items), Counter())
        answer = record["answer"]
        counts["records"] += 1
        counts["in_time"] += record["latency_ms"] <= record["deadline_ms"]
        counts["missed"] += record["decision"] == "missed"
        whole = bool(answer["used"]) and not answer["missing"]
        counts["whole"] += whole
        counts["with_suspects"] += bool(answer["suspects"])
        counts["as_alone"] += answer["class"] == alone[number]
        counts["whole_as_alone"] += whole and answer["class"] == alone[number]
        counts["passed"] += record["passed"]
        if truths[number] == "unknown":
            counts["of_no_class"] += 1
            counts["called_unknown"] += answer["known"] is False
        else:
            counts["right"] += answer["class"] == truths[number]
        if record["why_kept"] is not None:
            counts[f"kept_{record['why_kept']}"] += 1
    return summarise(options.items, records, len(ids), parts)


def summarise(
    items: int,
    records: Sequence[Mapping[str, Any]],
    recorded: int,
    parts: Mapping[str, Counter[str]],
) -> dict[str, Any]:
    """Records against items, of which so many are `recorded`, with latencies and counts by part."""
    latencies = sorted(record["latency_ms"] for record in records)
    return {
        "items": items,
        "records": len(records),
        "lost": items - recorded,
        "twice": len(records) - recorded,
        "latency_ms": {
            "median": latencies[len(latencies) // 2],
            "p99": latencies[int(0.99 * len(latencies))],
            "most": latencies[-1],
        },
        "parts": {name: dict(counts) for name, counts in parts.items()},
    }


def numbers_of(options: Namespace, records: Sequence[Mapping[str, Any]]) -> list[int]:
    """The item of each record.

    Triggers name their items. What rests is told by the time: it has rested before the next item
    came, at a steady rate. The earliest records but for that rate say when the first item came.
    """
    if options.trigger != "still":
        return [int(record["item"]) for record in records]
    times_s = [datetime.fromisoformat(record["time"]).timestamp() for record in records]
    began_s = min(time_s - place * options.every for place, time_s in enumerate(times_s[:TIMED]))
    return [int((time_s - began_s + REST_S) // options.every) for time_s in times_s]


def main() -> None:
    options = arguments(
        __doc__, trigger=("mqtt", "http", "still"), items=1000, every=1.0, scratch=Path, seed=1
    )
    for trigger in options.trigger:
        machine = describe_machine()
        folder = options.scratch / f"line-{trigger}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        one = Namespace(**{**vars(options), "trigger": trigger})
        row = {**play(one, folder), "machine": machine}
        former = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
        rows = [other for other in former if other["trigger"] != trigger]
        write_json(RESULT, {"runs": sorted([*rows, row], key=lambda each: str(each["trigger"]))})
        print(json.dumps({**row, "machine": ""}, indent=1), flush=True)


if __name__ == "__main__":
    main()
