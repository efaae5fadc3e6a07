"""Everything that is taught through a gateway's page, and what forbids what meanwhile."""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from msgspec import Struct, field
from msgspec.structs import asdict

from mdp.client.scenes import Scene, SceneFolder
from mdp.errors import InputError, MDPError
from mdp.files import write_bytes
from mdp.formats.bundle import Bundle
from mdp.formats.fleet import read_devices, read_fleet
from mdp.formats.mask import CameraMask
from mdp.fusion.anomaly_table import DEFAULT_GOOD_RATE
from mdp.line.kept import KeptItem
from mdp.requests.reason import Suspicion
from mdp.teach import builder
from mdp.teach.builder import Builder, BuildProgress
from mdp.teach.good import GOOD, cameras_of, data_words, good_pictures, require_heads
from mdp.teach.recorder import BusyError, CameraRecorder, RecordRequest
from mdp.teach.review import GoneError, Move, Review
from mdp.teach.rollout import FleetRollout
from mdp.teach.taught import TaughtClass, class_folder, count_classes, remove_scenes

#: Kept items that the page gets at a time.
MOST_SHOWN = 60
#: Between two looks at what was kept, and at the classes; at least, where something was recorded.
SCAN_S, LEAST_SCAN_S = 3.0, 0.5
MOST_MINUTES = 24 * 60.0
#: From the latest good item until anomaly heads learn from it: more may follow.
QUIET_S = 5.0
#: In the folder of builds: the bundles that the fleet file has named, one a line.
SERVED = "served.txt"
#: The same: an empty file as long as good items wait to be learnt from.
WAITING = "good-items-wait"

#: Classes, kept items, what is wrong with them, and of the served bundle its classes, its target in
#: milliseconds and whether it has anomaly heads; how many good items there are, and the fleet's
#: devices.
Scanned = tuple[
    list[TaughtClass], list[KeptItem], str, list[str], float | None, bool, int, list[str]
]
RolloutState = Literal["none", "pushing", "rolling back", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeachOptions:
    """Folders that a gateway's page teaches into, and settings of its builds."""

    fleet: Path
    scenes: Path
    #: What `mdp watch --keep` keeps; None: nothing is looked through.
    kept: Path | None = None
    #: A file of `mdp-partition build`'s settings.
    config: Path | None = None
    #: Good items that anomaly heads learn from, and defective ones; None: heads stay as they are.
    inspect: Path | None = None
    #: The client's secret key file, instead of the fleet file's.
    key: Path | None = None
    #: Of a first bundle.
    name: str = "taught"

    @property
    def builds(self) -> Path:
        """Folder that bundles are written to."""
        resolved = self.scenes.resolve()
        # `.` and `..` say no name.
        place = resolved if self.scenes.name in ("", "..") else self.scenes
        return place.with_name(f"{resolved.name}.builds")


class BuildRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A build that somebody wants."""

    #: 0 trains nothing.
    minutes: float = 0.0
    #: Of one answer; None: as the settings file or the served bundle says.
    latency_ms: float | None = None

    def check(self) -> None:
        """Raise InputError for numbers out of bounds."""
        # False for NaN too.
        if not 0 <= self.minutes <= MOST_MINUTES:
            raise InputError(f"minutes: expected 0 to {MOST_MINUTES:g}, got {self.minutes:g}")
        if self.latency_ms is not None and not 0 < self.latency_ms <= 60_000:
            raise InputError(f"latency_ms: expected more than 0, got {self.latency_ms:g}")


class Rollout(Struct, kw_only=True):
    """A push or a rollback as the page shows it."""

    state: RolloutState = "none"
    #: The device that is under way, and the share of its bytes that are there.
    device: str = ""
    share: float = 0.0
    #: Devices that serve it already.
    done: list[str] = field(default_factory=list)
    #: The bundle, by folder or name.
    bundle: str = ""
    error: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def under_way(self) -> bool:
        """Tell whether it has not ended."""
        return self.state in ("pushing", "rolling back")


class FleetTeacher:
    """Teaches one fleet; for one event loop."""

    def __init__(self, options: TeachOptions) -> None:
        """Raises ConfigError or InputError for files that cannot be used."""
        self.options = options
        #: Called when something has changed that the page shows.
        self.changed: Callable[[], None] = lambda: None
        #: Devices whose cameras are suspected now.
        self.suspected: Callable[[], Mapping[str, Suspicion]] = dict
        self._check_one_label()
        self.devices = [entry.device for entry in read_devices(options.fleet).devices]
        self._recorder = CameraRecorder(options.fleet, options.key, self._note_recording)
        self._scan_soon = asyncio.Event()
        self._builder = Builder(options.builds, self._wake)
        self._heads = Builder(options.builds, self._note_heads)
        #: When anomaly heads are to learn, by the monotonic clock; None: they have learnt all.
        self._learn_s: float | None = None
        #: The digest of the bundle whose heads learn, until they are pushed.
        self._learns_for = ""
        if options.inspect is not None and (options.builds / WAITING).exists():
            self._learn_s = time.monotonic()
        self._review = None if options.kept is None else Review(options.kept, options.scenes)
        self._classes: list[TaughtClass] = []
        #: The classes of the served bundle, none without one, and the target of its plan.
        self._labels: list[str] = []
        self._inspects = False
        self._good = 0
        self._target_ms: float | None = builder.DEFAULT_LATENCY_MS
        self._kept: list[KeptItem] = []
        self._problem = ""
        #: All of these at the last look at them.
        self._scanned: Scanned | None = None
        self._scanning = asyncio.Lock()
        self.rollout = Rollout()
        self._rollout_task: asyncio.Task[None] | None = None
        self._why_no_build = builder.why_no_build()
        self._why_no_heads = builder.why_no_heads()

    def _check_one_label(self) -> None:
        """Raise InputError where several labels may hold of one item: scenes teach one each.

        Another bundle, or other settings of builds, may come while this runs.
        """
        if self.options.config is not None:
            builder.check_one_label(self.options.config)
        try:
            bundle = read_fleet(self.options.fleet)[1]
        except MDPError:
            # A fleet may have no bundle yet.
            return
        bundle.require_one_label("--teach")

    def _wake(self) -> None:
        self.changed()

    def _note_recording(self) -> None:
        self._scan_soon.set()
        self._wake()

    def _note_heads(self) -> None:
        if self._heads.progress.state != "running":
            self._scan_soon.set()
        self._wake()

    # What there is.

    async def watch(self) -> None:
        """Count scenes and kept items, over and over."""
        while True:
            self._scan_soon.clear()
            await self.scan()
            self._tend_heads()
            await asyncio.sleep(LEAST_SCAN_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(SCAN_S - LEAST_SCAN_S):
                    await self._scan_soon.wait()

    async def scan(self) -> None:
        """Count scenes and kept items again.

        One scan ends before the next begins: of two, the one that began first would show what the
        other has seen to be gone.
        """
        async with self._scanning:
            found = await self._look_around()
            if found != self._scanned:
                self._scanned = found
                self._classes, self._kept, self._problem, self._labels, self._target_ms = found[:5]
                self._inspects, self._good, self.devices = found[5:]
                self._wake()

    async def _look_around(self) -> Scanned:
        """Read what there is in the folders and in the served bundle."""
        try:
            classes = await asyncio.to_thread(count_classes, self.options.scenes)
            kept = [] if self._review is None else await asyncio.to_thread(self._review.items)
            await asyncio.to_thread(self._check_one_label)
            problem = ""
        except MDPError as error:
            classes, kept, problem = self._classes, [], str(error)
        served = await asyncio.to_thread(self._read_served)
        good = await asyncio.to_thread(self._count_good)
        devices = await asyncio.to_thread(self._read_devices)
        return (classes, kept, problem, *served, good, devices)

    def _read_devices(self) -> list[str]:
        """The devices of the fleet file; those of the last good one while it is edited."""
        try:
            return [entry.device for entry in read_devices(self.options.fleet).devices]
        except MDPError:
            return self.devices

    def _read_served(self) -> tuple[list[str], float | None, bool]:
        """The served bundle's classes, its plan's target in ms, and whether it has heads."""
        try:
            manifest = read_fleet(self.options.fleet)[1].manifest
        except MDPError:
            return [], builder.DEFAULT_LATENCY_MS, False
        return list(manifest.labels), manifest.plan.target_ms, bool(manifest.inspection)

    def _count_good(self) -> int:
        folder = self.options.inspect
        if folder is None:
            return 0
        return sum(one.scenes for one in count_classes(folder) if one.label == GOOD)

    def snapshot(self) -> dict[str, Any]:
        """Everything that the page shows, for msgspec to encode."""
        recording, build = self._recorder.recording, self._builder.progress
        ended = recording is not None and not recording.under_way
        reasons: dict[str, int] = {}
        for item in self._kept:
            reasons[item.record.why_kept] = reasons.get(item.record.why_kept, 0) + 1
        last = None if self._review is None else self._review.last
        return {
            "cameras": self.devices,
            "scenes": self.options.scenes.name,
            "classes": self._classes,
            "served": self._labels,
            "problem": self._problem,
            "recording": None if recording is None else asdict(recording),
            "removable": len(self._recorder.recorded) if ended else 0,
            "kept": {
                "looks": self._review is not None,
                "total": len(self._kept),
                # Another one where an item has gone and a new one has come.
                "digest": crc32(
                    "/".join(item.folder.name for item in self._kept).encode(errors="replace")
                ),
                "reasons": reasons,
                "undo": None
                if last is None
                else {"item": last.item, "name": last.name, "label": last.label, "good": last.good},
            },
            "build": {
                "why_not": self._why_no_build,
                "latency_ms": self._latency_ms(),
                "pushable": self._pushable() is not None,
                "running": self._builder.running,
                **asdict(build),
                "lines": list(build.lines)[-30:],
            },
            "heads": {
                "teachable": self.options.inspect is not None and self._inspects,
                "good": self._good,
                "waits": self._learn_s is not None,
                "running": self._heads.running,
                **asdict(self._heads.progress),
                "lines": list(self._heads.progress.lines)[-30:],
            },
            "rollout": asdict(self.rollout),
            "now_s": time.monotonic(),
        }

    def _latency_ms(self) -> float | None:
        """The target that a build has unless somebody says another one."""
        return None if self.options.config is not None else self._target_ms

    # Cameras.

    async def preview(self) -> Scene:
        """Pictures of the cameras; raises ConfigError."""
        return await self._recorder.preview()

    async def masks(self) -> dict[str, Any]:
        """Each camera's mask, for msgspec to encode."""
        masks, missing = await self._recorder.masks()
        return {
            "masks": {
                name: {
                    "mask": reply.mask,
                    "width": reply.width,
                    "height": reply.height,
                    "settable": reply.settable,
                }
                for name, reply in masks.items()
            },
            "missing": missing,
        }

    async def set_mask(self, device: str, mask: CameraMask | None) -> None:
        """Have an agent use another mask; raises GoneError, BusyError or WireError."""
        if device not in self.devices:
            raise GoneError(f"no device {device[:60]!r}: expected one of {', '.join(self.devices)}")
        await self._recorder.set_mask(device, mask)

    def record(self, wanted: RecordRequest) -> None:
        """Begin to record; raises InputError or BusyError."""
        self._check_one_label()
        self._refuse_while_building()
        self._refuse_while_rolling_out()
        self._recorder.record(wanted, class_folder(self.options.scenes, wanted.label))

    async def stop_recording(self) -> None:
        """End the recording that is under way; its scenes stay."""
        await self._recorder.stop()
        await self.scan()

    async def remove_recorded(self) -> int:
        """Remove the scenes of the newest recording; raises BusyError."""
        self._recorder.refuse_while_recording()
        self._refuse_while_building()
        recorded, self._recorder.recorded = self._recorder.recorded, []
        removed = await asyncio.to_thread(remove_scenes, recorded)
        await self.scan()
        return removed

    def _refuse_while_building(self) -> None:
        """Raise BusyError while scenes are read: by a build, or for anomaly heads."""
        if self._builder.running:
            raise BusyError("a build reads the scenes: expected its end first")
        if self._heads.running:
            raise BusyError("anomaly heads learn from good items: expected their end first")

    # What was kept.

    def items(self) -> dict[str, Any]:
        """The first kept items, unsure first, for msgspec to encode."""
        return {
            "total": len(self._kept),
            "items": [
                {
                    "name": item.folder.name,
                    "item": item.record.item,
                    "time": item.record.time,
                    "why": item.record.why_kept,
                    "label": item.record.answer.label,
                    "probability": item.record.answer.probability,
                    "known": item.record.answer.known,
                    "devices": {
                        name: {
                            "label": own.label,
                            "probability": own.probability,
                            "anomaly": own.anomaly,
                        }
                        for name, own in item.record.answer.devices.items()
                    },
                    "pictures": list(item.pictures),
                }
                for item in self._kept[:MOST_SHOWN]
            ],
        }

    async def picture_of_kept(self, name: str, device: str) -> tuple[bytes, str]:
        """A kept picture and its suffix; raises GoneError."""
        return await asyncio.to_thread(self._require_review().picture, name, device)

    async def put_right(self, name: str, label: str) -> Move:
        """Make a kept item a scene of a class; raises GoneError or InputError."""
        await asyncio.to_thread(self._check_one_label)
        move = await asyncio.to_thread(self._require_review().put_right, name, label)
        await self.scan()
        return move

    async def discard(self, name: str) -> None:
        """Remove a kept item; raises GoneError."""
        await asyncio.to_thread(self._require_review().discard, name)
        await self.scan()

    async def undo(self) -> Move:
        """Take the last move back; raises GoneError, InputError or BusyError."""
        self._refuse_while_building()
        move = await asyncio.to_thread(self._require_review().undo)
        if move.good:
            self._learn_soon(QUIET_S)
        await self.scan()
        return move

    def _require_review(self) -> Review:
        if self._review is None:
            raise GoneError("nothing is looked through here: expected --teach-kept DIR")
        return self._review

    # Good items.

    async def make_good(self, name: str) -> Move:
        """Make a kept item a good scene, and have anomaly heads learn from it soon.

        Raises GoneError, and InputError where the heads cannot learn from it.
        """
        folder = self._require_good()
        cameras = await asyncio.to_thread(lambda: cameras_of(*read_fleet(self.options.fleet)))
        move = await asyncio.to_thread(
            self._require_review().make_good,
            name,
            SceneFolder(folder, GOOD),
            partial(good_pictures, cameras=cameras, suspected=self.suspected()),
        )
        self._learn_soon(QUIET_S)
        await self.scan()
        return move

    def learn_again(self) -> None:
        """Have anomaly heads learn from the good items that are there; raises as `make_good`."""
        self._require_good()
        require_heads(read_fleet(self.options.fleet)[1])
        self._learn_soon(0.0)

    def _require_good(self) -> Path:
        """The folder of good items; raises GoneError without one, InputError without a program."""
        if self.options.inspect is None:
            raise GoneError("no good items are learnt from here: expected --teach-inspect DIR")
        if self._why_no_heads:
            raise InputError(self._why_no_heads)
        return self.options.inspect

    def _learn_soon(self, after_s: float) -> None:
        """Learn once nothing else came for so long, also if the gateway ends before."""
        self._learn_s = time.monotonic() + after_s
        # On a full disk they are learnt from now, and not after a restart.
        with suppress(OSError, InputError):
            self.options.builds.mkdir(parents=True, exist_ok=True)
            write_bytes(self.options.builds / WAITING, b"")
        self._scan_soon.set()
        self._wake()

    def _tend_heads(self) -> None:
        """Push heads that have learnt, or begin to learn, once nothing is under way."""
        recording = self._recorder.recording
        if (
            (recording is not None and recording.under_way)
            or self._builder.running
            or self._heads.running
            or self.rollout.under_way
        ):
            return
        report = self._heads.progress.report
        if report is not None and self._learns_for:
            wanted, self._learns_for = self._learns_for, ""
            served = self._served_bundle()
            if served is not None and served.digest == wanted:
                folder = self.options.builds / report.bundle
                self._start_rollout("pushing", folder.name, lambda: self._push(folder))
            else:
                # Another bundle is served meanwhile.
                self._learn_soon(0.0)
        elif self._learn_s is not None and self._learn_s <= time.monotonic():
            self._learn_s = None
            self._learn()

    def _learn(self) -> None:
        """Begin to fit the served bundle's anomaly heads anew."""
        out, program = self._new_folder(), builder.program()
        try:
            self._require_good()
            served = read_fleet(self.options.fleet)[1]
            require_heads(served)
        except MDPError as error:
            self._heads.progress = BuildProgress(state="failed", error=str(error))
            self._wake()
            return
        assert program is not None
        self._learns_for = served.digest
        words = builder.heads_words(served.path, out, self._good_words("--data", served))
        self._heads.start([program, *words], out, builder.read_heads)

    def _good_words(self, option: str, served: Bundle | None) -> list[str]:
        """The options that name good scenes, at the rate of the heads that are served."""
        folder = self.options.inspect
        if folder is None or not (folder / GOOD).is_dir():
            return []
        inspection = None if served is None else served.manifest.inspection
        rate = inspection.rate if inspection else DEFAULT_GOOD_RATE
        return data_words(folder, option, 100 * rate)

    # Builds.

    def _new_folder(self) -> Path:
        return self.options.builds / datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S")

    def build(self, wanted: BuildRequest) -> None:
        """Begin to build; raises InputError or BusyError."""
        wanted.check()
        if self._why_no_build:
            raise InputError(self._why_no_build)
        self._check_one_label()
        self._recorder.refuse_while_recording()
        self._refuse_while_building()
        if self.rollout.under_way:
            raise BusyError("a bundle is being rolled out: expected its end first")
        options, program = self.options, builder.program()
        assert program is not None
        config, latency_ms = options.config, wanted.latency_ms or self._latency_ms()
        profiles: list[str] = []
        if config is None:
            entries = read_devices(options.fleet).devices
            profiles = builder.profiles_of(list(dict.fromkeys(e.plan_device for e in entries)))
        out, served = self._new_folder(), self._served_bundle()
        words = builder.build_words(
            scenes=options.scenes,
            out=out,
            name=options.name if served is None else served.manifest.name,
            minutes=wanted.minutes,
            latency_ms=latency_ms,
            profiles=profiles,
            config=config,
            good=self._good_words("--inspect", served),
        )
        self._builder.start([program, *words], out)

    def _served_bundle(self) -> Bundle | None:
        """The served bundle, whose name and rate the next one has; None without any."""
        try:
            return read_fleet(self.options.fleet)[1]
        except MDPError:
            return None

    async def cancel_build(self) -> None:
        """End the build that is under way."""
        await self._builder.cancel()

    def _pushable(self) -> Path | None:
        """The bundle of the newest build that was finished."""
        report = self._builder.progress.report
        return None if report is None else self.options.builds / report.bundle

    def push(self) -> None:
        """Begin to push the newest build; raises InputError or BusyError."""
        folder = self._pushable()
        if folder is None:
            raise InputError("expected a build that is done")
        self._check_one_label()
        self._start_rollout("pushing", folder.name, lambda: self._push(folder))

    def roll_back(self) -> None:
        """Begin to roll back; raises BusyError."""
        self._start_rollout("rolling back", "", self._roll_back)

    def _refuse_while_rolling_out(self) -> None:
        if self.rollout.under_way:
            raise BusyError("a bundle is being rolled out: expected its end first")

    def _start_rollout(
        self, state: Literal["pushing", "rolling back"], bundle: str, work: Callable[[], str]
    ) -> None:
        self._refuse_while_rolling_out()
        self._refuse_while_building()
        self._recorder.refuse_while_recording()
        self.rollout = Rollout(state=state, bundle=bundle, started_s=time.monotonic())
        self._rollout_task = asyncio.create_task(self._roll_out(self.rollout, work))
        self._wake()

    async def _roll_out(self, rollout: Rollout, work: Callable[[], str]) -> None:
        ticking = asyncio.create_task(self._tick())
        try:
            rollout.bundle = await asyncio.to_thread(work)
            rollout.state, rollout.done = "done", list(self.devices)
            heads = self._heads.progress.report
            if heads is not None and rollout.bundle == heads.bundle and self._learn_s is None:
                (self.options.builds / WAITING).unlink(missing_ok=True)
        except (MDPError, OSError) as error:
            rollout.state, rollout.error = "failed", str(error)
        finally:
            ticking.cancel()
            if rollout.under_way:
                # Nothing else may wait for it for ever; what it was goes to the log.
                rollout.state, rollout.error = "failed", "unforeseen error: the log says more"
            rollout.ended_s = time.monotonic()
            self._wake()

    async def _tick(self) -> None:
        """Show the progress that a thread makes."""
        while True:
            await asyncio.sleep(0.2)
            self._wake()

    def _on_rollout(self, device: str, share: float) -> None:
        rollout = self.rollout
        if rollout.device not in ("", device) and rollout.device not in rollout.done:
            rollout.done = [*rollout.done, rollout.device]
        rollout.device, rollout.share = device, share

    def _push(self, folder: Path) -> str:
        options = self.options
        before = self._list_served()
        FleetRollout(options.fleet, options.key).push(folder, self._on_rollout)
        served = list(dict.fromkeys([*before, *self._list_served()]))[-2 * builder.KEPT_BUNDLES :]
        text = "".join(f"{path}\n" for path in served)
        write_bytes(options.builds / SERVED, text.encode())
        pushable = self._pushable()
        self._builder.tidy(served if pushable is None else [*served, pushable])
        return folder.name

    def _roll_back(self) -> str:
        options = self.options
        folders = [*reversed(self._list_served()), *self._list_builds()]
        return FleetRollout(options.fleet, options.key).roll_back(folders, self._on_rollout).name

    def _list_builds(self) -> list[Path]:
        return [path for path in self.options.builds.glob("*") if path.is_dir()]

    def _list_served(self) -> list[Path]:
        """The bundles that the fleet file has named, the present one last."""
        found: list[Path] = []
        file = self.options.builds / SERVED
        if file.is_file():
            found = [Path(line) for line in file.read_text().splitlines() if line]
        fleet = read_devices(self.options.fleet)
        if fleet.bundle:
            present = (self.options.fleet.parent / fleet.bundle).resolve()
            found = [*(path for path in found if path != present), present]
        return found

    async def close(self) -> None:
        """End recording and build, and wait for a rollout."""
        await self._recorder.close()
        await self._builder.close()
        await self._heads.close()
        if self._rollout_task is not None:
            await asyncio.wait([self._rollout_task])
