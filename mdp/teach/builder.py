"""Runs `mdp-partition build` on the taught scenes as a process of its own.

Nothing of the partitioner is loaded here: the process's standard error is read line by line, and
its report is the JSON on its standard output.
"""

import asyncio
import os
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

from mdp.errors import InputError, MDPError
from mdp.extras import INSPECT, PARTITION, install, missing
from mdp.files import read_toml
from mdp.formats.bundle import Confusion
from mdp.formats.profile import profiles_in_package

PROGRAM = "mdp-partition"
#: Lines of a build that are kept, and characters of one.
KEPT_LINES, MAX_LINE = 200, 400
#: Of the report.
MAX_REPORT_BYTES = 16 * 2**20
#: Seconds for a build that was told to end.
END_S = 10.0
_STARTING_S = 0.02
#: Milliseconds of an answer where neither a settings file nor a served bundle says any.
DEFAULT_LATENCY_MS = 40.0
#: Bundles that are kept beside those that are served.
KEPT_BUNDLES = 3

CANCELLED = "what is served goes on"
BuildState = Literal["none", "running", "done", "failed", "cancelled"]
_NUMBERED = re.compile(r"(.+)-([0-9]+)")
_PROGRESS = re.compile(r"(.*): ([0-9]{1,3})%(?:, (.*))?")
_SO_FAR = re.compile(r"(.*): ([0-9]+ s so far)")


class _RunSettings(Struct, frozen=True):
    labels: str = "one"


class _BuildSettings(Struct, frozen=True):
    """The part that is read of a file of a build's settings."""

    run: _RunSettings = _RunSettings()


class BuildReport(Struct, frozen=True, kw_only=True):
    """A build's report of its bundle."""

    #: Name of the bundle's folder, and the bundle's digest.
    bundle: str
    digest: str
    #: Shares of scenes that all together are right on: as predicted with an interval, and measured.
    predicted: float | None
    low: float | None
    high: float | None
    measured: float | None
    #: Scenes of the test split that this was measured on.
    scenes: int
    #: Device -> share of these that it is right on alone.
    alone: dict[str, float]
    #: Pairs of classes that all together take for each other, the most frequent first.
    confusions: tuple[Confusion, ...] = ()
    seconds: float = 0.0


class HeadsReport(Struct, frozen=True, kw_only=True):
    """A report of anomaly heads that were fitted to good scenes."""

    #: Name of the bundle's folder, and the bundle's digest.
    bundle: str
    digest: str
    #: Good scenes, and the rate of further ones that are called different.
    good: int
    rate: float
    seconds: float = 0.0


class _Together(Struct, frozen=True):
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None


class _Pilot(Struct, frozen=True):
    together: _Together = _Together()


class _Subset(Struct, frozen=True):
    members: list[int]
    stacked: float | None
    bagged: float | None


class _BuiltMember(Struct, frozen=True):
    device: str
    accuracy: float


class _Printed(Struct, frozen=True):
    """The part that is read of what `mdp-partition build --json` prints."""

    digest: str
    subsets: list[_Subset]
    pictures: int
    members: list[_BuiltMember]
    pilot: _Pilot | None = None
    confusions: tuple[Confusion, ...] = ()


class _FittedHeads(Struct, frozen=True):
    good: int
    default: float


class _PrintedHeads(Struct, frozen=True):
    """The part that is read of what `mdp-partition inspect --json` prints."""

    digest: str
    anomaly: _FittedHeads


Report = BuildReport | HeadsReport
ReadReport = Callable[[Path, bytes, float], Report]


class BuildProgress(Struct, kw_only=True):
    """A build as the page shows it."""

    state: BuildState = "none"
    started_s: float = 0.0
    ended_s: float = 0.0
    #: The step that is under way, its share, and what it says besides.
    step: str = ""
    share: float | None = None
    rest: str = ""
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    #: The last line of a build that failed.
    error: str = ""
    report: Report | None = None

    def hear(self, line: str) -> None:
        """Take in one line of the build's standard error."""
        line = "".join(c if c.isprintable() else "?" for c in line.strip())[:MAX_LINE]
        if not line:
            return
        if found := _PROGRESS.fullmatch(line):
            self.step, self.share = found[1], min(100, int(found[2])) / 100
            self.rest = found[3] or ""
            return
        if found := _SO_FAR.fullmatch(line):
            self.step, self.share, self.rest = found[1], None, found[2]
            return
        self.step, self.share, self.rest = line, None, ""
        self.lines.append(line)


def why_no_build() -> str:
    """Reason why this machine cannot build; empty where it can."""
    if module := missing(PARTITION):
        return f"{module} is not installed here; builds need it: {install('partition')}"
    return _why_no_program()


def why_no_heads() -> str:
    """Reason why this machine cannot fit anomaly heads, which takes less than a build."""
    if module := missing(INSPECT):
        return f"{module} is not installed here; good items need it: {install('inspect')}"
    return _why_no_program()


def _why_no_program() -> str:
    return "" if program() else f"{PROGRAM}: not found beside this Python, nor in PATH"


def program() -> str | None:
    """The path of `mdp-partition`."""
    beside = Path(sys.executable).with_name(PROGRAM)
    return str(beside) if beside.is_file() else shutil.which(PROGRAM)


def check_one_label(config: Path) -> None:
    """Raise InputError for a build's settings by which several labels may hold of one item."""
    try:
        labels = read_toml(config, _BuildSettings).run.labels
    except MDPError:
        # The build itself says what is wrong with its settings.
        return
    if labels != "one":
        raise InputError(
            f"{config}: key `run.labels`: expected one label an item, as scenes teach, got {labels}"
        )


def profiles_of(devices: Sequence[str]) -> list[str]:
    """The shipped profiles that devices are named after, as `--profiles` takes them.

    `n100`, and `raspberry-pi-5-1` to `raspberry-pi-5-4` as `raspberry-pi-5*4`. Raises InputError.
    """
    shipped = profiles_in_package()
    words: list[str] = []
    left = list(devices)
    while left:
        name = left[0]
        base = found[1] if (found := _NUMBERED.fullmatch(name)) else ""
        if name in shipped:
            words.append(name)
            left.remove(name)
            continue
        boards = [one for one in left if (m := _NUMBERED.fullmatch(one)) and m[1] == base]
        if base not in shipped or set(boards) != {f"{base}-{i + 1}" for i in range(len(boards))}:
            raise InputError(
                f"device {name!r} is called like no shipped profile ({', '.join(shipped)}): "
                "expected --teach-config FILE with plan.profiles"
            )
        words.append(f"{base}*{len(boards)}")
        left = [one for one in left if one not in boards]
    return words


def build_words(
    *,
    scenes: Path,
    out: Path,
    name: str,
    minutes: float,
    latency_ms: float | None,
    profiles: Sequence[str],
    config: Path | None,
    good: Sequence[str] = (),
) -> list[str]:
    """The options of a build; `config` says what is None or empty here, `good` names scenes."""
    words = ["build", "--json", "--data", str(scenes), "--out", str(out), "--name", name]
    words += ["--run", f"{out}.run", "--minutes", f"{minutes:g}"]
    if config is not None:
        words += ["--config", str(config)]
    if latency_ms is not None:
        words += ["--latency-ms", f"{latency_ms:g}"]
    if profiles:
        words += ["--profiles", *profiles]
    return [*words, *good]


def heads_words(bundle: Path, out: Path, good: Sequence[str]) -> list[str]:
    """The options by which a bundle's anomaly heads are fitted anew; `good` names scenes."""
    return ["inspect", "--json", "--bundle", str(bundle), "--out", str(out), *good]


def read_report(out: Path, content: bytes, seconds: float) -> BuildReport:
    """The report in a build's standard output; raises InputError."""
    try:
        printed = msgspec.json.decode(content, type=_Printed)
        whole = max(printed.subsets, key=lambda subset: len(subset.members))
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"{PROGRAM} build printed no report: {error}") from error
    together = _Together() if printed.pilot is None else printed.pilot.together
    return BuildReport(
        bundle=out.name,
        digest=printed.digest,
        predicted=together.accuracy,
        low=together.low,
        high=together.high,
        measured=whole.bagged if whole.stacked is None else whole.stacked,
        scenes=printed.pictures,
        alone={member.device: member.accuracy for member in printed.members},
        confusions=printed.confusions,
        seconds=round(seconds, 1),
    )


def read_heads(out: Path, content: bytes, seconds: float) -> HeadsReport:
    """The report in the standard output of `mdp-partition inspect`; raises InputError."""
    try:
        printed = msgspec.json.decode(content, type=_PrintedHeads)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{PROGRAM} inspect printed no report: {error}") from error
    return HeadsReport(
        bundle=out.name,
        digest=printed.digest,
        good=printed.anomaly.good,
        rate=printed.anomaly.default,
        seconds=round(seconds, 1),
    )


class Builder:
    """One build at a time, or one fit of anomaly heads."""

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        """Bundles are written into `folder`; `changed` is called whenever the progress does."""
        self.folder = folder
        self.progress = BuildProgress()
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Tell whether a build is under way."""
        return self._task is not None and not self._task.done()

    def start(self, command: Sequence[str], out: Path, read: ReadReport = read_report) -> None:
        """Run `command`, which writes the bundle `out`; in the running event loop.

        `read` makes the report of `out`, what was printed and the seconds; raises InputError.
        """
        self.progress = BuildProgress(state="running", started_s=time.monotonic())
        self._task = asyncio.create_task(self._run(command, out, read))
        self._changed()

    async def _run(self, command: Sequence[str], out: Path, read: ReadReport) -> None:
        progress = self.progress
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # A session of its own: it ends with all that it has started.
            process = self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            assert process.stdout is not None
            assert process.stderr is not None
            content, _ = await asyncio.gather(
                _read_most(process.stdout, MAX_REPORT_BYTES), self._hear(process.stderr, progress)
            )
            code = await process.wait()
            if progress.state == "cancelled":
                return
            if code != 0:
                last = progress.lines[-1] if progress.lines else "it printed nothing"
                progress.state, progress.error = "failed", f"{last} (exit code {code})"
            else:
                seconds = time.monotonic() - progress.started_s
                progress.report = read(out, content, seconds)
                progress.state = "done"
        except (OSError, InputError) as error:
            progress.state, progress.error = "failed", str(error)
        finally:
            self._process = None
            if progress.state == "running":
                progress.state, progress.error = "failed", "the gateway has ended"
            progress.ended_s = time.monotonic()
            progress.step, progress.share, progress.rest = "", None, ""
            # What is measured there holds for these scenes alone.
            await asyncio.to_thread(shutil.rmtree, f"{out}.run", True)
            self._changed()

    async def _hear(self, stream: asyncio.StreamReader, progress: BuildProgress) -> None:
        rest = ""
        while piece := await stream.read(65536):
            # A progress line ends with a carriage return where it is written over.
            *lines, rest = re.split(r"[\r\n]+", rest + piece.decode(errors="replace"))
            for line in lines:
                progress.hear(line)
            rest = rest[-MAX_LINE:]
            self._changed()
        progress.hear(rest)

    async def cancel(self) -> None:
        """Have the build end, and wait until it has."""
        task = self._task
        if task is None or task.done():
            return
        if self.progress.state != "running":
            # It has ended, and what it leaves is being removed.
            await asyncio.wait([task])
            return
        self.progress.state, self.progress.error = "cancelled", CANCELLED
        self._changed()
        while self._process is None and not task.done():
            # It is being started.
            await asyncio.sleep(_STARTING_S)
        process = self._process
        if process is None:
            return
        _signal(process.pid, signal.SIGINT)
        done, _ = await asyncio.wait([task], timeout=END_S)
        if not done:
            _signal(process.pid, signal.SIGKILL)
            await asyncio.wait([task])

    async def close(self) -> None:
        """Leave no process behind."""
        await self.cancel()

    def tidy(self, served: Sequence[Path]) -> None:
        """Remove bundles but the newest few and those that are `served`."""
        kept = {path.resolve() for path in served}
        with suppress(OSError):
            bundles = sorted(path for path in self.folder.iterdir() if path.is_dir())
            for path in bundles[:-KEPT_BUNDLES]:
                if path.resolve() not in kept:
                    shutil.rmtree(path, ignore_errors=True)


async def _read_most(stream: asyncio.StreamReader, most_bytes: int) -> bytes:
    """Read all of `stream`, and return its first `most_bytes`: what writes it can end."""
    content = bytearray()
    while piece := await stream.read(65536):
        content += piece[: most_bytes - len(content)]
    return bytes(content)


def _signal(pid: int, number: int) -> None:
    """Signal a process and all of its session."""
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
