"""The end-to-end benchmark's network: what it makes, and that nothing of it stays."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.end_to_end.devices import CLIENT, DEVICES, check_cores, groups
from benchmarks.end_to_end.namespaces import PREFIX, remove_remains, run
from benchmarks.end_to_end.processes import ProgramError, machines
from mdp.errors import InputError

SAY = "import time; print('READY', flush=True); time.sleep(60)"


def possible() -> bool:
    """Whether this machine lets namespaces and groups be made."""
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc") and shutil.which("taskset")):
        return False
    name = f"{PREFIX}{os.getpid()}-possible"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    try:
        check_cores()
    except InputError:
        return False
    writable = any(os.access(p, os.W_OK) for p in Path("/sys/fs/cgroup").glob("cpu*"))
    return made.returncode == 0 and writable


@pytest.fixture(autouse=True, scope="module")
def _only_where_possible() -> None:
    if not possible():
        pytest.skip("needs root, iproute2, two cores and control groups")


def left() -> list[object]:
    own = f"{PREFIX}{os.getpid()}-"
    namespaces = [line for line in run("ip", "netns", "list").splitlines() if own in line]
    return [*namespaces, *groups(own)]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    interfaces = sorted(path.name for path in Path("/sys/class/net").iterdir())
    seen = []

    def interrupted() -> None:
        with machines(tmp_path) as (network, programs):
            network.set_rate(100e6)
            assert len(left()) == 2 * (1 + len(DEVICES)) + 1
            words = [sys.executable, "-c", SAY]
            with programs.running(DEVICES[0], "say", words, ready="READY") as process:
                seen.append(process)
                assert os.sched_getaffinity(process.process.pid) == {DEVICES[0].core}
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert left() == []
    assert seen[0].process.returncode is not None
    assert sorted(path.name for path in Path("/sys/class/net").iterdir()) == interfaces


def test_machines_reach_each_other_and_what_they_send_is_counted(tmp_path: Path) -> None:
    serve = (
        f"import socket; s = socket.create_server(('{DEVICES[1].address}', 7000));"
        "print('READY', flush=True); c, _ = s.accept(); c.makefile('rb').read(); c.close()"
    )
    send = (
        "import socket; print('READY', flush=True);"
        f"c = socket.create_connection(('{DEVICES[1].address}', 7000)); c.sendall(bytes(100_000));"
        "c.shutdown(socket.SHUT_WR); print('SENT', len(c.recv(1)), flush=True)"
    )
    with machines(tmp_path) as (network, programs):
        network.set_rate(100e6)

        def sent() -> list[int]:
            told = subprocess.run(network.counting(), capture_output=True, text=True, check=True)
            return [int(line) for line in told.stdout.split()]

        words = [sys.executable, "-c"]
        with programs.running(DEVICES[1], "serve", [*words, serve], ready="READY"):
            before = sent()
            with programs.running(CLIENT, "send", [*words, send], ready="READY") as process:
                assert process.line() == "SENT 0"
        client, _, middle, _ = (after - was for after, was in zip(sent(), before, strict=True))
    # Headers of 70 packets, and a few without content.
    assert 100_000 < client < 112_000
    assert 0 < middle < 10_000


def test_a_program_that_ends_too_soon_is_named_with_its_last_words(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "raise SystemExit('no such thing')"]
    with (
        machines(tmp_path) as (_, programs),
        pytest.raises(
            ProgramError, match="odd on slow: expected READY, ended with 1: no such thing"
        ),
        programs.running(DEVICES[2], "odd", words, ready="READY"),
    ):
        raise AssertionError


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"{PREFIX}{gone.pid}-switch"
    run("ip", "netns", "add", name)
    assert name in run("ip", "netns", "list")
    remove_remains()
    assert name not in run("ip", "netns", "list")
