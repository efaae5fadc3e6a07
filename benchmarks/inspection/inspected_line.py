"""Good and defective items on a line of four agents that inspect, triggered over MQTT.

    python -m benchmarks.inspection.inspected_line --product inspection/Package_DIP \
        --items 1000 --every 1 --scratch FOLDER

PRODUCT is a folder that `benchmarks.inspection.render` has written: agents learn from its good
scenes, and its further good and its defective ones come by in a random order. They serve
examples/bundles/parts without its knowledge of what is no class, as the product is none of its
classes: whether an item passes is then decided by its difference from good ones alone. For the last
fifth of the items one agent is killed. Each record is compared with what the same pictures are
called by the bundle itself. Writes benchmarks/results/inspection-line.json.
"""

import json
import random
import shutil
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from benchmarks.inspection.measure import VISIBLE, score_scenes
from benchmarks.line.played import (
    FPS,
    PARTS,
    TOPIC,
    Heard,
    mosquitto,
    resident,
    subscribe,
    summarise,
    watching,
)
from mdp.client.sync import Client
from mdp.files import write_json
from mdp.formats.bundle import FUSION, MANIFEST, Bundle, file_entry
from mdp.requests.inspection import Inspector
from mdp.testing.agents import AgentFleet
from mdp.testing.folder_cameras import FolderCameras
from mdp.testing.processes import LineProcess
from partitioner.data.datasets import open_scenes
from partitioner.export.inspect_bundle import InspectRequest, inspect_bundle
from partitioner.run.progress import Progress

RESULT = RESULTS / "inspection-line.json"
#: One item of so many is defective; of the items, the share from which on one agent is gone.
DEFECTIVE, GONE_FROM = 5, 0.8


class LineScene:
    """A scene that comes by, and what the bundle itself says of it."""

    def __init__(
        self, kind: str, pictures: Mapping[str, bytes], normal: Mapping[str, bool]
    ) -> None:
        """`pictures` by device; `normal` by the part of the run: with all agents, or one gone."""
        self.kind, self.pictures, self.normal = kind, pictures, normal


def without_novelty(bundle: Path, out: Path) -> Bundle:
    """A copy of a bundle that calls nothing unknown."""
    shutil.copytree(bundle, out)
    opened = Bundle.open(bundle)
    write_json(out / FUSION, replace(opened.fusion_weights(), novelty=UNSET))
    files = {name: file_entry(out / name) for name in opened.manifest.files}
    write_json(out / MANIFEST, replace(opened.manifest, files=files))
    return Bundle.open(out)


def scenes_of(bundle: Bundle, folder: Path, cache: Path) -> dict[str, list[LineScene]]:
    """Good and visibly defective scenes of a product, with what `bundle` says of them."""
    assignments = bundle.manifest.plan.assignments
    table = bundle.fusion_weights().anomaly
    assert table
    inspector, gone = Inspector(table), assignments[-1].k
    found: dict[str, list[LineScene]] = {}
    for kind in ("test", "defects"):
        scores = score_scenes(bundle, folder / kind, cache)
        cameras = sorted({a.camera or "" for a in assignments})
        rows = found.setdefault("good" if kind == "test" else "defective", [])
        for number, name in enumerate(open_scenes(str(folder / kind), cameras).names):
            place = folder / kind / name
            if kind == "defects" and not is_visible(place):
                continue
            surprises = inspector.surprises({k: float(one[number]) for k, one in scores.items()})
            left = {k: one for k, one in surprises.items() if k != gone}
            told = {"all": inspector.difference(surprises), "gone": inspector.difference(left)}
            pictures = {a.device: (place / f"{a.camera}.jpg").read_bytes() for a in assignments}
            normal = {part: one is None or one.normal for part, one in told.items()}
            rows.append(LineScene("good" if kind == "test" else "defective", pictures, normal))
    return found


def is_visible(scene: Path) -> bool:
    """Tell whether at least one camera sees the defect of a scene."""
    shares = json.loads((scene / "visible.json").read_text()).values()
    return any(share >= VISIBLE for share in shares)


def order_of(scenes: Mapping[str, Sequence[LineScene]], items: int, seed: int) -> list[LineScene]:
    """The scenes that come by; never the same one twice in a row."""
    draw = random.Random(seed)
    order: list[LineScene] = []
    while len(order) < items:
        one = draw.choice(scenes["good" if draw.randrange(DEFECTIVE) else "defective"])
        if not order or order[-1] is not one:
            order.append(one)
    return order


def part_of(number: int, items: int) -> str:
    """The part of the run that an item is in."""
    return "all" if number < GONE_FROM * items else "gone"


def play(options: Namespace, folder: Path) -> dict[str, Any]:
    """Run the line, and say what came of it."""
    plain, by_mqtt = without_novelty(PARTS, folder / "plain"), Heard()
    cache = folder / "cache"
    cache.mkdir()
    request = InspectRequest(good=str(options.product / "good"))
    bundle = inspect_bundle(plain, folder / "bundle", request, cache, Progress())
    scenes = scenes_of(bundle, options.product, cache)
    order = order_of(scenes, options.items, options.seed)
    devices = [one.device for one in bundle.manifest.plan.assignments]
    cameras = FolderCameras(folder, devices, fps=FPS)
    cameras.put(order[-1].pictures)
    without = folder / "without"
    without.mkdir()
    with AgentFleet(without, plain.path, keys=True) as fleet:
        start(fleet, cameras)
        memory = {"agents_without_heads": _agents(fleet)}
    with ExitStack() as stack:
        port = stack.enter_context(mosquitto(folder))
        fleet = stack.enter_context(AgentFleet(folder, bundle.path, keys=True))
        start(fleet, cameras)
        memory["agents_start"] = _agents(fleet)
        command, out, keep = watching(
            folder, fleet.write(), Namespace(trigger="mqtt", every=options.every), port
        )
        watcher = stack.enter_context(LineProcess("mdp watch", command, folder / "watch.log"))
        watcher.line("its URL")
        threading.Thread(target=lambda: [None for _ in watcher.rest()], daemon=True).start()
        publisher = stack.enter_context(subscribe(port, by_mqtt))
        # The watcher's subscription.
        time.sleep(2)
        memory["watcher_start"] = resident(watcher.process.pid)
        began_s = time.monotonic()
        for number, scene in enumerate(order):
            time.sleep(max(0.0, began_s + number * options.every - time.monotonic()))
            if part_of(number, options.items) == "gone" and "agents_end" not in memory:
                memory["agents_end"] = _agents(fleet)
                fleet.agents[devices[-1]].kill()
            cameras.put(scene.pictures)
            publisher.publish(TOPIC, str(number), qos=1)
        time.sleep(max(2.0, options.every))
        memory["watcher_end"] = resident(watcher.process.pid)
        took_s = time.monotonic() - began_s
        assert watcher.terminate() == 0, watcher.stderr
        by_mqtt.settle()
        records = [json.loads(line) for line in out.read_text().splitlines()]
        kept = [json.loads(file.read_text()) for file in keep.glob("*/record.json")]
    heard = Counter(record["item"] for record in by_mqtt.records)
    return {
        "product": options.product.name,
        "scenes": {name: len(rows) for name, rows in scenes.items()},
        "every_s": options.every,
        "seed": options.seed,
        "took_s": round(took_s, 1),
        **tally(records, order),
        "over_mqtt": {
            "records": len(by_mqtt.records),
            "lost": len({one["item"] for one in records} - heard.keys()),
            "twice": sum(count > 1 for count in heard.values()),
        },
        "kept": dict(Counter(str(one["why_kept"]) for one in kept)),
        "memory_mib": {name: round(value, 1) for name, value in memory.items()},
    }


def start(fleet: AgentFleet, cameras: FolderCameras) -> None:
    """Start an agent for each camera, and wait until all are ready and have shown a picture."""
    (fleet.folder / "client.limits").write_text("record = true\n")
    for device in cameras.folders:
        options = (*cameras.source(device), "--allow-record", "--threads", 1)
        fleet.start(device, *options, wait_for=None)
    for device in cameras.folders:
        fleet.agents[device].wait_for("READY")
    with Client.connect(fleet.write(), timeout_s=30) as client:
        cameras.wait_for_frames(client)
        client.look(deadline_ms=5000)


def _agents(fleet: AgentFleet) -> float:
    alive = [agent.process for agent in fleet.agents.values() if agent.process.poll() is None]
    return sum(resident(process.pid) for process in alive)


def tally(records: Sequence[Mapping[str, Any]], order: Sequence[LineScene]) -> dict[str, Any]:
    """Compare the records of a run with the items that came.

    An answer is `whole` where every agent of that part of the run is in it. `as_bundle` of these
    were called as the bundle itself calls the pictures, and `right` passed just where they are
    normal.
    """
    ids = Counter(int(record["item"]) for record in records)
    parts: dict[str, Counter[str]] = {}
    for record in records:
        number, answer = int(record["item"]), record["answer"]
        scene, part = order[number], part_of(number, len(order))
        counts = parts.setdefault(part, Counter())
        whole = len(answer["used"]) == (4 if part == "all" else 3) and not answer["suspects"]
        counts["records"] += 1
        counts["in_time"] += record["latency_ms"] <= record["deadline_ms"]
        counts[f"decided_{record['decision']}"] += 1
        counts["whole"] += whole
        counts["named_blind"] += bool(answer["blind_sides"])
        counts["as_bundle"] += whole and answer["normal"] == scene.normal[part]
        counts["right"] += record["passed"] == (answer["normal"] is True)
        counts[scene.kind] += 1
        counts[f"{scene.kind}_different"] += answer["normal"] is False
        counts[f"{scene.kind}_passed"] += record["passed"]
        counts[f"{scene.kind}_expected_different"] += not scene.normal[part]
    return summarise(len(order), records, len(ids), parts)


def main() -> None:
    options = arguments(__doc__, product=Path, items=1000, every=1.0, scratch=Path, seed=1)
    machine = describe_machine()
    folder = options.scratch / "inspected-line"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    told = {**play(options, folder), "machine": machine}
    write_json(RESULT, told)
    print(json.dumps({**told, "machine": ""}, indent=1), flush=True)


if __name__ == "__main__":
    main()
