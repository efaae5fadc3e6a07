"""A build as a process: what is heard of it, its report, and its end."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from mdp.errors import InputError
from mdp.formats.bundle import Confusion
from mdp.teach import builder as builder_module
from mdp.teach.builder import (
    CANCELLED,
    KEPT_BUNDLES,
    Builder,
    BuildProgress,
    build_words,
    profiles_of,
    read_report,
)
from mdp.testing.processes import PATIENCE_S, until

REPORT = {
    "digest": "ab" * 32,
    "pilot": {"together": {"accuracy": 0.9, "low": 0.8, "high": 0.95}},
    "subsets": [
        {"members": [0], "stacked": 0.5, "bagged": 0.5},
        {"members": [0, 1], "stacked": 0.85, "bagged": 0.8},
    ],
    "pictures": 24,
    "members": [{"device": "n100", "accuracy": 0.5}, {"device": "pi", "accuracy": 0.6}],
}


def test_what_is_heard() -> None:
    progress = BuildProgress(state="running")
    for line in ("cutting 10 pictures", "measuring 6 candidates: 68%, about 5 s left", ""):
        progress.hear(line)
    assert (progress.step, progress.share, progress.rest) == (
        "measuring 6 candidates", 0.68, "about 5 s left",
    )  # fmt: skip
    progress.hear("measuring 6 candidates: done in 25.1 s")
    assert (progress.share, progress.step) == (None, "measuring 6 candidates: done in 25.1 s")
    progress.hear("build: 12 s so far")
    assert (progress.share, progress.step, progress.rest) == (None, "build", "12 s so far")
    progress.hear("\x1b[2Jmarked\x07 " + "x" * 500)
    assert progress.lines[-1].startswith("?[2Jmarked? x")
    assert len(progress.lines[-1]) == 400
    assert list(progress.lines)[:2] == [
        "cutting 10 pictures",
        "measuring 6 candidates: done in 25.1 s",
    ]


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["n100"], ["n100"]),
        (["raspberry-pi-5-1", "n100", "raspberry-pi-5-2"], ["raspberry-pi-5*2", "n100"]),
        (["n100-2", "n100-1"], ["n100*2"]),
        (["laptop-cpu-1"], ["laptop-cpu*1"]),
        (["raspberry-pi-5", "raspberry-pi-5-1"], ["raspberry-pi-5", "raspberry-pi-5*1"]),
    ],
)
def test_devices_are_called_like_their_profiles(devices: list[str], words: list[str]) -> None:
    assert profiles_of(devices) == words


@pytest.mark.parametrize("devices", [["kitchen"], ["n100-2"], ["n100-1", "n100-3"]])
def test_devices_with_other_names_need_a_file(devices: list[str]) -> None:
    with pytest.raises(InputError, match=r"expected --teach-config FILE with plan\.profiles"):
        profiles_of(devices)


def test_the_words_of_a_build() -> None:
    words = build_words(
        scenes=Path("scenes"), out=Path("b/1"), name="parts", minutes=0.0, latency_ms=40.0,
        profiles=["n100*2"], config=Path("run.toml"),
    )  # fmt: skip
    assert " ".join(words) == (
        "build --json --data scenes --out b/1 --name parts --run b/1.run --minutes 0 "
        "--config run.toml --latency-ms 40 --profiles n100*2"
    )


def test_the_report() -> None:
    report = read_report(Path("b/1"), json.dumps(REPORT).encode(), 61.23)
    assert (report.bundle, report.predicted, report.measured, report.scenes) == ("1", 0.9, 0.85, 24)
    assert (report.alone, report.seconds) == ({"n100": 0.5, "pi": 0.6}, 61.2)
    assert report.confusions == ()
    pair = {"labels": ["nut", "cap nut"], "pictures": 10, "confused": 4}
    confused = read_report(Path("b"), json.dumps({**REPORT, "confusions": [pair]}).encode(), 0.0)
    assert confused.confusions == (Confusion(("nut", "cap nut"), 10, 4),)
    for content in (b"", b"{}", b"\xff", b"[]", json.dumps({**REPORT, "subsets": []}).encode()):
        with pytest.raises(InputError, match="printed no report"):
            read_report(Path("b/1"), content, 0.0)


def ran(folder: Path, program: str, after: Callable[[Builder], object] = lambda _: None) -> Builder:
    """A builder whose build was this Python program."""

    async def run() -> Builder:
        builder = Builder(folder, lambda: None)
        builder.start([sys.executable, "-c", program], folder / "1")
        waits = after(builder)
        if asyncio.iscoroutine(waits):
            await waits
        assert builder._task is not None
        await builder._task
        return builder

    return asyncio.run(run())


def test_a_build_that_is_done(tmp_path: Path) -> None:
    program = f"import sys; print('step: 5%', file=sys.stderr); print({json.dumps(REPORT)!r})"
    builder = ran(tmp_path / "builds", program)
    assert (builder.progress.state, builder.running) == ("done", False)
    assert builder.progress.report is not None


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import sys; print('a\\rb: 7%\\nthe last\\n', file=sys.stderr); sys.exit(3)",
         "the last (exit code 3)"),
        ("import sys; sys.exit(1)", "it printed nothing (exit code 1)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
         "it printed nothing (exit code -9)"),
        ("print('nonsense')", "mdp-partition build printed no report"),
        ("print('[' * 2_000_000)", "mdp-partition build printed no report"),
    ],
)  # fmt: skip
def test_a_build_that_fails(tmp_path: Path, program: str, error: str) -> None:
    (tmp_path / "builds" / "1.run").mkdir(parents=True)
    builder = ran(tmp_path / "builds", program)
    assert builder.progress.state == "failed"
    assert builder.progress.error.startswith(error)
    assert not list((tmp_path / "builds").iterdir())


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    async def run() -> Builder:
        builder = Builder(tmp_path, lambda: None)
        builder.start([str(tmp_path / "nothing")], tmp_path / "1")
        assert builder._task is not None
        await builder._task
        return builder

    assert "No such file" in asyncio.run(run()).progress.error


def test_a_build_is_cancelled_before_it_has_begun(tmp_path: Path) -> None:
    program = "import time; time.sleep(600)"
    builder = ran(tmp_path, program, lambda builder: builder.cancel())
    assert (builder.progress.state, builder.running) == ("cancelled", False)


def test_a_build_is_cancelled_with_all_that_it_started(tmp_path: Path) -> None:
    program = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(f'child {child.pid}', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )

    async def cancel(builder: Builder) -> None:
        while not builder.progress.lines:
            await asyncio.sleep(0.01)
        await builder.cancel()

    builder = ran(tmp_path, program, cancel)
    assert builder.progress.state == "cancelled"
    assert builder.progress.error == CANCELLED
    child = int(builder.progress.lines[0].removeprefix("child "))
    until(lambda: not runs(child), "the child has ended")


def test_a_build_that_is_done_stays_so_when_it_is_cancelled_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing, cancelled = threading.Event(), threading.Event()

    def remove(*_: object) -> None:
        removing.set()
        assert cancelled.wait(PATIENCE_S)

    monkeypatch.setattr(builder_module, "shutil", SimpleNamespace(rmtree=remove))

    async def cancel(builder: Builder) -> None:
        assert await asyncio.to_thread(removing.wait, PATIENCE_S)
        cancelling = asyncio.create_task(builder.cancel())
        await asyncio.sleep(0)
        cancelled.set()
        await cancelling

    builder = ran(tmp_path, f"print({json.dumps(REPORT)!r})", cancel)
    assert (builder.progress.state, builder.progress.error) == ("done", "")


def runs(pid: int) -> bool:
    """Tell whether a process runs, and is no zombie that nobody has waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_old_bundles_are_removed_but_those_that_are_served(tmp_path: Path) -> None:
    for number in range(KEPT_BUNDLES + 3):
        (tmp_path / f"{number}").mkdir()
    Builder(tmp_path, lambda: None).tidy([tmp_path / "1"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3", "4", "5"]
