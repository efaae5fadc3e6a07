"""A day of a line, 86,400 items, played fast: memory of the watcher's parts, and what is kept.

    python -m benchmarks.line.day --items 86400 --keep-mb 50 --scratch FOLDER

Triggers, looks, rules, records, their file and the folder of kept items are those of `mdp watch`;
the client is one that answers at once, the clock one that is moved on. A tenth of the items is
unknown, unsure or in disagreement and kept, with four pictures of 30 kB. Writes
benchmarks/results/line-day.json.
"""

import gc
import itertools
import json
import math
import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.options import arguments
from benchmarks.harness.results import RESULTS
from mdp.client.scenes import Scene
from mdp.files import write_json
from mdp.line.file import RecordFile
from mdp.line.items import ItemBook, ItemOutcome, ItemTiming
from mdp.line.keeper import KeptFolder
from mdp.line.keeping import ItemKeeper
from mdp.line.record import ItemRecord, to_json
from mdp.line.rules import LineRules
from mdp.line.triggers import TriggerQueue
from mdp.line.watcher import LineWatcher
from mdp.requests.capture import Moment
from mdp.requests.prediction import MemberTiming, Prediction

RESULT = RESULTS / "line-day.json"
DEVICES = tuple(f"raspberry-pi-5-{number}" for number in range(1, 5))
LABELS = ("hex_nut", "square_nut", "cap_nut")
PICTURE_BYTES, KEPT_SHARE = 30_000, 0.1
#: So often is memory looked at.
POINTS = 24


class FastClient:
    """Answers at once; a share of the answers is worth being kept."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def look(self, *, deadline_ms: float, at: Moment, within_ms: float) -> Prediction:
        draw, label = self._random, self._random.choice(LABELS)
        odd = draw.random() < KEPT_SHARE
        why = draw.choice(("unknown", "unsure", "disagreement")) if odd else ""
        own = [label] * len(DEVICES)
        if why == "disagreement":
            own[0] = next(other for other in LABELS if other != label)
        members = tuple(
            MemberTiming(
                device=device, k=k, queue_ms=0.1, compute_ms=8.0, network_ms=0.5, label=own[k],
                probability=0.8, frame=1, frame_age_ms=40.0,
            )
            for k, device in enumerate(DEVICES)
        )  # fmt: skip
        probability = 0.3 if why == "unsure" else 0.9
        novelty = 0.5 if why == "unknown" else -2.0
        return Prediction(
            label=label, probability=probability, top=((label, probability),), mode="stacked",
            used=DEVICES, missing={}, expected_accuracy=0.857, latency_ms=10.0, deadline_ms=100.0,
            members=members, frame_spread_ms=20.0, known=novelty <= 0, novelty=novelty,
        )  # fmt: skip


class FastCameras:
    """Give pictures at once."""

    def __init__(self) -> None:
        self._picture = b"\xff\xd8" + os.urandom(PICTURE_BYTES)

    def take(self) -> Scene:
        return Scene(pictures=dict.fromkeys(DEVICES, self._picture), missing={})

    def wait(self, until_s: float) -> None:
        """Nothing to tend."""

    def close(self) -> None:
        """Nothing is open."""


def main() -> None:
    options = arguments(__doc__, items=86_400, keep_mb=50.0, scratch=Path, seed=1)
    machine = describe_machine()
    folder: Path = options.scratch / "line-day"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    clock = itertools.count()
    now_s = [0.0]
    timing, triggers = ItemTiming(equal=1, verdict_s=0.5), TriggerQueue()
    published = 0
    process, points = psutil.Process(), []
    kept_folder = KeptFolder(folder / "kept", int(options.keep_mb * 1e6))
    began_s = time.monotonic()
    most_kept = 0
    with (
        RecordFile(folder / "items.jsonl") as file,
        ItemKeeper(
            kept_folder, FastCameras, lambda _: math.inf, lambda text: print(text), within_s=0.25
        ) as keeper,
    ):

        def publish(record: ItemRecord, outcome: ItemOutcome) -> None:
            nonlocal published
            published += 1
            file.append(to_json(record))
            if record.why_kept is not None:
                wanted = keeper.kept + keeper.left_out + 1
                keeper.put(record, outcome.due_from_s)
                # A real line has a second for it.
                while keeper.kept + keeper.left_out < wanted:
                    time.sleep(0.0002)

        watcher = LineWatcher(
            FastClient(options.seed), ItemBook(timing), triggers,
            LineRules(needed={"cap_nut": 2}), kind="mqtt", timing=timing, deadline_ms=100.0,
            within_ms=250.0, cameras=lambda: len(DEVICES), prefix="day-", publish=publish,
            utc=lambda: f"2026-11-25T{next(clock):012}", clock=lambda: now_s[0],
        )  # fmt: skip
        for number in range(options.items):
            now_s[0] = float(number)
            triggers.add(str(number), now_s[0], f"{number:012}")
            for _ in range(3):
                watcher.turn(0.0)
            most_kept = max(most_kept, kept_folder.total_bytes)
            if number % (options.items // POINTS) == options.items // POINTS - 1:
                gc.collect()
                points.append(round(process.memory_info().rss / 2**20, 1))
    took_s = time.monotonic() - began_s
    with (folder / "items.jsonl").open() as lines:
        items = [json.loads(line)["item"] for line in lines]
    kept_files = [one for one in (folder / "kept").rglob("*") if one.is_file()]
    on_disk = sum(-(-one.stat().st_size // 4096) * 4096 for one in kept_files)
    row: dict[str, Any] = {
        "machine": machine,
        "items": options.items,
        "seed": options.seed,
        "took_s": round(took_s, 1),
        "records": published,
        "lost_or_twice": options.items - len(set(items)) + len(items) - len(set(items)),
        "in_order": items == [str(number) for number in range(options.items)],
        "kept": keeper.kept,
        "left_out": keeper.left_out,
        "kept_now": len(list((folder / "kept").glob("*/record.json"))),
        "bytes_now": on_disk,
        "most_bytes": most_kept,
        "bound_bytes": int(options.keep_mb * 1e6),
        "memory_mib": points,
    }
    write_json(RESULT, row)
    print(json.dumps({**row, "machine": ""}, indent=1))
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
