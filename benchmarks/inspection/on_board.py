"""Good items learnt with what a board has: one core, little memory, and no torch.

    python -m venv BOARD && BOARD/bin/pip install '.[inspect]'
    python -m benchmarks.inspection.on_board --good inspection/Package_DIP/good \
        --program BOARD/bin/mdp-partition

runs `mdp-partition inspect` on one core, in control groups of a board's memory (as root), and
writes benchmarks/results/inspection-board.json: whether it ended well, its seconds of processor
time and the most that it held. The core is this machine's, no board's.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness.machine import describe_machine
from benchmarks.harness.results import RESULTS
from mdp.files import write_json
from mdp.testing.machine_faults import groups_work, memory_limit

RESULT = RESULTS / "inspection-board.json"
#: MiB that it may take, the most first. Less than it holds at most would say little: of files that
#: other groups have read, as those of the programs, their groups bear the memory.
LIMITS = (512, 256)
#: A run that takes longer reads its own program again and again, as it has no room for it.
_MOST_S = 240.0
_MIB = 2**20


def run_within(command: list[str], limit_mib: int, core: int) -> dict[str, Any]:
    """One run of `command` on one core, in a control group of `limit_mib`."""

    def begin() -> None:
        os.sched_setaffinity(0, {core})
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    # It waits for a line, so that everything that it takes is taken within the group.
    waiting = ["sh", "-c", 'read go && exec "$@"', "sh", *command]
    with subprocess.Popen(
        waiting,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=begin,
    ) as process:
        with memory_limit(process.pid, limit_mib * _MIB):
            assert process.stdin
            process.stdin.write("\n")
            process.stdin.flush()
            used = wait_for(process)
        assert process.stderr
        said = process.stderr.read().splitlines()
    code = process.returncode
    if code not in (0, -signal.SIGKILL):
        raise RuntimeError(f"{command[0]} ended with {code}: {said[-1] if said else ''}")
    return {
        "works": code == 0,
        "processor_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_mib": round(used.ru_maxrss / 1024),
    }


def wait_for(process: "subprocess.Popen[str]") -> resource.struct_rusage:
    """Usage of the process until its end, which comes after `_MOST_S` at the latest."""
    end = threading.Timer(_MOST_S, process.send_signal, [signal.SIGKILL])
    end.start()
    _, status, used = os.wait4(process.pid, 0)
    end.cancel()
    process.returncode = os.waitstatus_to_exitcode(status)
    return used


def main(words: list[str]) -> int:
    """Run it with every limit, and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.inspection.on_board")
    parser.add_argument("--good", type=Path, required=True)
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--bundle", type=Path, default=Path("examples/bundles/parts"))
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args(words)
    if why := groups_work("memory"):
        parser.error(why)
    machine, found = describe_machine(), {}
    for limit in LIMITS:
        with TemporaryDirectory(prefix="mdp-board-") as scratch:
            command = [
                *(str(options.program), "inspect", "--bundle", str(options.bundle)),
                *("--data", str(options.good), "--out", f"{scratch}/bundle", "--json"),
            ]
            found[str(limit)] = run_within(command, limit, options.core)
        print(f"{limit} MiB {json.dumps(found[str(limit)])}", flush=True)
    write_json(
        options.out,
        {
            "machine": machine,
            "product": options.good.resolve().parent.name,
            "good": sum(one.is_dir() for one in options.good.iterdir()),
            "installed_mb": installed_mb(options.program),
            "modules": {name: has_module(options.program, name) for name in ("torch", "onnx")},
            "limits": found,
        },
    )
    return 0


def installed_mb(program: Path) -> float:
    """Megabytes of the environment that a program is in."""
    files = program.parent.parent.rglob("*")
    return round(sum(one.lstat().st_size for one in files if not one.is_dir()) / 1e6)


def has_module(program: Path, name: str) -> bool:
    """Tell whether the environment that a program is in has a module."""
    asked = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"
    done = subprocess.run([program.parent / "python", "-c", asked], check=False)
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
