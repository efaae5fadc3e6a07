"""`--cpus`: which cores are meant, and who stays on them. Tying is tried in another interpreter."""

import os
import re
import subprocess
import sys

import pytest

from devices.cores import cores_in, pin_to_cores
from mdp.errors import InputError


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", {0}), ("0,2", {0, 2}), ("1-3", {1, 2, 3}), ("0, 4-5,5", {0, 4, 5}), ("7-7", {7})],
)
def test_cores_by_number_and_range(text: str, cores: set[int]) -> None:
    assert cores_in(text) == cores


@pytest.mark.parametrize(
    "text", ["", "a", "0,", "3-1", "-1", "1-", "0;1", "1--2", "٣", "1.5", "0-99999"]
)
def test_what_is_no_list_of_cores_is_refused(text: str) -> None:
    expected = f"--cpus: expected numbers of cores as in 0,2-3, got {text!r}"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        cores_in(text)


def test_a_core_that_is_not_there_is_refused() -> None:
    own = ", ".join(map(str, sorted(os.sched_getaffinity(0))))
    expected = f"--cpus 0,9999: expected some of the cores {own}"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        pin_to_cores("0,9999")


def test_a_system_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")
    expected = "^--cpus: this system cannot pin a process to cores$"
    with pytest.raises(InputError, match=expected):
        pin_to_cores("0")


def test_threads_there_are_and_threads_to_come_stay() -> None:
    core = max(os.sched_getaffinity(0))
    program = (
        "import os, threading\n"
        "from devices.cores import pin_to_cores\n"
        "gate, told = threading.Event(), []\n"
        "def early(): gate.wait(); told.append(os.sched_getaffinity(0))\n"
        "def late(): told.append(os.sched_getaffinity(0))\n"
        "first = threading.Thread(target=early); first.start()\n"
        f"assert pin_to_cores('{core}') == 1\n"
        "second = threading.Thread(target=late); second.start()\n"
        "gate.set(); first.join(); second.join()\n"
        "print(*told, os.sched_getaffinity(0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == " ".join([f"{{{core}}}"] * 3)
