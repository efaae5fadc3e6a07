"""Keeps pictures of items in a thread of its own: no item waits for a disk or a picture."""

import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from mdp.client.scenes import Scene
from mdp.closing import Closing
from mdp.errors import MDPError
from mdp.line.connection import RenewedConnection, SaidOnce
from mdp.line.keeper import KeptFolder
from mdp.line.record import ItemRecord, to_json

#: Items whose pictures are still to be fetched; further ones are not kept.
MOST_WAITING = 4
#: So often are connections tended meanwhile, and for so long.
TEND_S, TENDING_S = 1.0, 0.01
#: How long the last items may take.
LEAVE_S = 5.0


class PictureSource(Protocol):
    """Interface of `mdp.client.cameras.FleetCameras`, as far as keeping needs it."""

    def take(self) -> Scene:
        """A picture of every camera."""

    def wait(self, until_s: float) -> None:
        """Keep the connections until then."""

    def close(self) -> None:
        """Close every connection."""


class _Task(Struct):
    record: ItemRecord
    moment_s: float


def pictures_of_item(
    scene: Scene, moment_s: float, next_s: float, within_s: float
) -> tuple[dict[str, bytes], dict[str, str]]:
    """The pictures by device that show the item, and why others are missing.

    Taken `within_s` before the item's moment `moment_s` at the earliest, and before the moment of
    the next item, `next_s`, which is infinite while there is none.
    """
    taken: dict[str, bytes] = {}
    missing = {**scene.missing}
    for device, content in scene.pictures.items():
        taken_s = scene.taken_s.get(device, moment_s)
        if taken_s < moment_s - within_s:
            missing[device] = "its newest picture is of before the item"
        elif taken_s >= next_s:
            missing[device] = "the next item was there already"
        else:
            taken[device] = content
    return taken, missing


class ItemKeeper(Closing):
    """Fetches and writes pictures of items that are `why_kept`."""

    def __init__(
        self,
        folder: KeptFolder,
        connect: Callable[[], PictureSource],
        next_s: Callable[[float], float],
        report: Callable[[str], None],
        *,
        within_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep items in `folder`, with pictures of what `connect` gives, here and after `renew`.

        `next_s` tells the moment of the item after that of a moment, by `clock`, infinite while
        there is none; `within_s` is how long before an item's moment its pictures may be taken.
        Raises ConfigError where the cameras cannot be asked.
        """
        self._folder, self._next_s, self._clock = folder, next_s, clock
        self._report, self._say_once = report, SaidOnce(report)
        self._within_s = within_s
        self._cameras = RenewedConnection(connect)
        self._failing = False
        #: Items kept, and those that should have been; for tests.
        self.kept = self.left_out = 0
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)
        self._thread.start()

    def put(self, record: ItemRecord, moment_s: float) -> None:
        """Keep an item soon, unless too many wait; never waits."""
        if self._tasks.qsize() >= MOST_WAITING:
            self.left_out += 1
            item = record.item
            self._say_once(f"items come faster than pictures can be kept: {item} is not kept")
        else:
            self._tasks.put(_Task(record, moment_s))

    def renew(self) -> None:
        """Connect anew before the next item: the fleet file has changed."""
        self._cameras.renew()

    def _run(self) -> None:
        while True:
            try:
                task = self._tasks.get(timeout=TEND_S)
            except queue.Empty:
                self._cameras.current.wait(self._clock() + TENDING_S)
                continue
            if task is None:
                break
            self._keep(task)
        self._cameras.close()

    def _keep(self, task: _Task) -> None:
        try:
            scene = self._cameras.latest().take()
            pictures, missing = pictures_of_item(
                scene, task.moment_s, self._next_s(task.moment_s), self._within_s
            )
            for device, reason in missing.items():
                self._say_once(f"no picture of {device} is kept: {reason}")
            if not pictures:
                self.left_out += 1
                return
            self._folder.write(task.record.item, _with_pictures(task, scene, missing), pictures)
        except (MDPError, OSError) as error:
            self.left_out += 1
            # Once, and not for each item as long as a disk is full.
            if not self._failing:
                self._report(f"{error}; going on without keeping")
            self._failing = True
            return
        self.kept += 1
        if self._failing:
            self._failing = False
            self._report(f"{self._folder.path}: items are kept again")

    def close(self) -> None:
        """Keep what is left, and end the thread."""
        self._tasks.put(None)
        self._thread.join(LEAVE_S)


def _with_pictures(task: _Task, scene: Scene, missing: Mapping[str, str]) -> bytes:
    """The record, with how long after the item's moment each picture was taken."""
    offsets_ms = {
        device: round((taken_s - task.moment_s) * 1e3, 1)
        for device, taken_s in scene.taken_s.items()
        if device not in missing
    }
    return to_json(task.record, {"picture_offset_ms": offsets_ms, "no_picture": {**missing}})
