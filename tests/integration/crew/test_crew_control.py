"""Trainers as real processes that are killed, hang and come late: the others go on without a stop.

Each batch of every epoch has to be in the result exactly once, whatever happens.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from partitioner.crew.bus.control import replay
from tests.support.crew.counting import machine

pytestmark = [pytest.mark.torch]

BATCHES, EPOCHS = 400, 2


def wait_for(path: Path, lines: int) -> None:
    """Until the log has so many lines."""
    while not path.exists() or path.read_bytes().count(b"\n") < lines:
        time.sleep(0.005)


def test_a_crew_goes_on_without_those_it_loses(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    moments = random.Random(24)
    command = [sys.executable, "-m", "tests.support.crew.counting", str(log)]
    with subprocess.Popen(
        [*command, str(moments.randint(50, 300)), str(BATCHES), str(EPOCHS)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as crew:
        assert crew.stdout
        assert crew.stderr
        pids = json.loads(crew.stdout.readline())
        try:
            wait_for(log, moments.randint(60, 300))
            os.kill(pids["t1"], signal.SIGKILL)
            wait_for(log, moments.randint(300, 500))
            os.kill(pids["t2"], signal.SIGSTOP)
            told = [json.loads(crew.stdout.readline()) for _ in ("coordinator", "t3", "late")]
            while not _has_ended(pids["coordinator"]):
                time.sleep(0.01)
        finally:
            os.kill(pids["t2"], signal.SIGCONT)
        codes = json.loads(crew.stdout.readline())
        errors = crew.stderr.read()

    assert {one["name"] for one in told} == {"coordinator", "t3", "late"}
    for one in told:
        assert one["counted"] == [1.0], f"batches were lost or done twice: {one}"
    assert codes == {"coordinator": 0, "t2": 3, "t3": 0, "late": 0} | dict.fromkeys(
        ("fails", "t1"), -9
    )
    # What the one that hung says of a coordinator that is not there any more: one line.
    assert errors.count("\n") == 1
    assert "coordinator" in errors
    assert b'"kind":"failed"' in log.read_bytes()
    replayed = list(replay(log, machine(BATCHES, EPOCHS)))
    assert len(replayed) > 2 * BATCHES
    assert all(then == now for then, now in replayed)


def _has_ended(pid: int) -> bool:
    """Tell whether a process that is no child of this one has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z"
    except FileNotFoundError:
        return True
