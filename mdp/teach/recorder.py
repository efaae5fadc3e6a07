"""The cameras of a fleet while somebody teaches: pictures to look at, scenes to keep, masks.

Connections are made when they are needed, and closed when nothing was for a while: an agent tells
its owner that it is being recorded.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

from msgspec import Struct, field

from mdp.client.base import Options
from mdp.client.cameras import WITHIN_MS, FleetCameras
from mdp.client.scenes import Scene, SceneFolder, Suspicions, Tally
from mdp.errors import InputError, MDPError
from mdp.formats.fleet import Fleet, read_devices
from mdp.formats.mask import CameraMask
from mdp.protocol.masking import MaskReply
from mdp.protocol.recording import PICTURES_PER_S

#: Longest side of pictures that are only looked at: agents give many of these.
PREVIEW_SIDE = 480
#: A younger preview is given again.
FRESH_S = 0.4
#: After so long without use the connections are closed.
IDLE_S = 30.0
#: How long a camera's agent may take to be connected.
CONNECT_S = 2.0
LEAST_EVERY_S = 1 / PICTURES_PER_S
MOST_SCENES, MOST_COUNTDOWN_S, MOST_EVERY_S = 1000, 60.0, 60.0
_TICK_S = 0.1

RecordState = Literal["countdown", "recording", "done", "stopped", "failed"]
T = TypeVar("T")


class BusyError(InputError):
    """Something else that is under way forbids it."""


class RecordRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A recording that somebody wants."""

    label: str
    count: int = 20
    every_s: float = 1.0
    #: Until the first scene.
    countdown_s: float = 3.0

    def check(self) -> None:
        """Raise InputError for numbers out of bounds."""
        for name, value, least, most in (
            ("count", self.count, 1, MOST_SCENES),
            ("every_s", self.every_s, LEAST_EVERY_S, MOST_EVERY_S),
            ("countdown_s", self.countdown_s, 0, MOST_COUNTDOWN_S),
        ):
            # False for NaN too.
            if not least <= value <= most:
                raise InputError(f"{name}: expected {least:g} to {most:g}, got {value:g}")


class RecordProgress(Struct, kw_only=True):
    """A recording as the page shows it."""

    label: str
    wanted: int
    state: RecordState = "countdown"
    #: Until the first scene.
    left_s: float = 0.0
    scenes: int = 0
    #: Moments of too few cameras.
    left_out: int = 0
    #: Device -> moments without its picture, and why the newest one has none.
    missing: dict[str, int] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    #: Cameras that give another's picture, or stand still.
    warnings: list[str] = field(default_factory=list)
    error: str = ""

    @property
    def under_way(self) -> bool:
        """Tell whether it has not ended."""
        return self.state in ("countdown", "recording")


class CameraRecorder:
    """One connection to all cameras of a fleet, one recording at a time; for one event loop."""

    def __init__(self, fleet: Path, key: Path | None, changed: Callable[[], None]) -> None:
        """`changed` is called whenever the recording's progress does."""
        self._fleet, self._key, self._changed = fleet, key, changed
        self._lock = asyncio.Lock()
        self._cameras: FleetCameras | None = None
        #: What it is connected to.
        self._devices: Fleet | None = None
        self._used_s = 0.0
        self._idle: asyncio.Task[None] | None = None
        self._scene = Scene(pictures={}, missing={})
        self._scene_s = float("-inf")
        self._task: asyncio.Task[None] | None = None
        self._stop = False
        #: The newest recording; None before a first.
        self.recording: RecordProgress | None = None
        #: Its scenes.
        self.recorded: list[Path] = []

    async def _use(self, work: Callable[[FleetCameras], T]) -> T:
        """The outcome of `work`, in a thread, while nobody else uses the connection."""
        async with self._lock:
            await self._follow()
            return await self._work(work)

    async def _follow(self) -> None:
        """Connect anew before the next work, where the fleet file has other devices by now."""
        if self._cameras is None:
            return
        with suppress(MDPError):  # it is being edited: the cameras of the last good one
            if await asyncio.to_thread(read_devices, self._fleet) != self._devices:
                self._disconnect()
                self._scene_s = float("-inf")

    async def _work(self, work: Callable[[FleetCameras], T]) -> T:
        if self._cameras is None:
            self._cameras = await asyncio.to_thread(self._connect)
        self._used_s = time.monotonic()
        if self._idle is None or self._idle.done():
            self._idle = asyncio.create_task(self._close_when_idle())
        try:
            return await asyncio.to_thread(work, self._cameras)
        finally:
            self._used_s = time.monotonic()

    def _connect(self) -> FleetCameras:
        options = Options(fleet=self._fleet, key=self._key, timeout_s=CONNECT_S)
        self._devices = read_devices(self._fleet)
        return FleetCameras(self._devices, options)

    async def _close_when_idle(self) -> None:
        while (left_s := self._used_s + IDLE_S - time.monotonic()) > 0:
            await asyncio.sleep(left_s)
        async with self._lock:
            self._disconnect()

    def _disconnect(self) -> None:
        cameras, self._cameras = self._cameras, None
        if cameras is not None:
            cameras.close()

    async def preview(self) -> Scene:
        """Pictures of the cameras, at most a moment ago; raises ConfigError."""
        # During a countdown somebody places the item by them.
        if self._is_fresh() or (self.recording is not None and self.recording.state == "recording"):
            return self._scene
        async with self._lock:
            if not self._is_fresh():
                await self._follow()
                scene = await self._work(lambda cameras: cameras.take(PREVIEW_SIDE))
                self._keep(scene)
        return self._scene

    def _is_fresh(self) -> bool:
        return time.monotonic() - self._scene_s < FRESH_S

    def _keep(self, scene: Scene) -> None:
        self._scene, self._scene_s = scene, time.monotonic()

    async def masks(self) -> tuple[Mapping[str, MaskReply], Mapping[str, str]]:
        """Each camera's mask, and why others tell none; raises BusyError during a recording."""
        self.refuse_while_recording()
        return await self._use(lambda cameras: cameras.masks())

    async def set_mask(self, device: str, mask: CameraMask | None) -> MaskReply:
        """Have an agent use another mask; raises WireError with its reason, or BusyError."""
        self.refuse_while_recording()
        reply = await self._use(lambda cameras: cameras.set_mask(device, mask))
        self._scene_s = float("-inf")
        return reply

    def refuse_while_recording(self) -> None:
        """Raise BusyError while a recording is under way."""
        now = self.recording
        if now is not None and now.under_way:
            raise BusyError(
                f"{now.label} is being recorded, {now.scenes} of {now.wanted} scenes: expected its "
                "end first"
            )

    def record(self, wanted: RecordRequest, folder: SceneFolder) -> None:
        """Begin to record; raises BusyError while another recording is under way."""
        wanted.check()
        self.refuse_while_recording()
        self._stop = False
        self.recorded = []
        self.recording = RecordProgress(
            label=wanted.label, wanted=wanted.count, left_s=wanted.countdown_s
        )
        self._task = asyncio.create_task(self._run(wanted, folder, self.recording))
        self._changed()

    async def stop(self) -> None:
        """End the recording that is under way, and wait until it has ended; its scenes stay."""
        self._stop = True
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(
        self, wanted: RecordRequest, folder: SceneFolder, progress: RecordProgress
    ) -> None:
        try:
            await self._count_down(wanted.countdown_s, progress)
            if not self._stop:
                await self._record(wanted, folder, progress)
            progress.state = "stopped" if self._stop else "done"
        except MDPError as error:
            progress.state, progress.error = "failed", str(error)
        except asyncio.CancelledError:
            progress.state = "stopped"
            raise
        finally:
            if progress.under_way:
                # Nothing else may wait for it for ever; what it was goes to the log.
                progress.state, progress.error = "failed", "unforeseen error: the log says more"
            progress.left_s = 0.0
            self._changed()

    async def _count_down(self, seconds: float, progress: RecordProgress) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0 and not self._stop:
            # Whole seconds are shown.
            if int(left_s) != int(progress.left_s):
                self._changed()
            progress.left_s = left_s
            await asyncio.sleep(min(_TICK_S, left_s))

    async def _record(
        self, wanted: RecordRequest, folder: SceneFolder, progress: RecordProgress
    ) -> None:
        progress.state = "recording"
        tally, suspicions = Tally(), Suspicions()
        async with self._lock:
            moments: list[Iterator[tuple[Path | None, Scene]]] = []

            def begin(cameras: FleetCameras) -> None:
                # No picture shows what was there before the countdown's end.
                due_s = time.monotonic() + (WITHIN_MS / 1e3 if wanted.countdown_s else 0.0)
                moments.append(
                    cameras.record(
                        folder,
                        tally,
                        lambda: datetime.now(UTC),
                        every_s=wanted.every_s,
                        count=wanted.count,
                        due_s=due_s,
                        over=lambda: self._stop,
                    )
                )

            await self._follow()
            await self._work(begin)
            while not self._stop:
                taken = await self._work(lambda _: next(moments[0], None))
                if taken is None:
                    return
                path, scene = taken
                if path is not None:
                    self.recorded.append(path)
                self._keep(scene)
                progress.scenes, progress.left_out = tally.kept, tally.left_out
                progress.missing, progress.why = dict(tally.missing), dict(scene.missing)
                progress.warnings += suspicions.of(scene.pictures)
                self._changed()

    async def close(self) -> None:
        """End everything."""
        self._stop = True
        tasks = [task for task in (self._task, self._idle) if task is not None]
        if self._idle is not None:
            self._idle.cancel()
        if tasks:
            await asyncio.wait(tasks)
        async with self._lock:
            self._disconnect()
