"""Decompose a vision transformer on handwritten digits, end to end, and say where the time goes.

python -m tools.demo_build --work demo-build      (make demo-build)

Each step is a command as a user types it, which is shown: this device is probed, held-out pictures
are written, a teacher and three sub-models are planned, trained, exported and measured, and `mdp
demo` serves them by three agents, one of which is killed. Ends with exit code 3 where a step fails.
"""

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "examples/configs/minutes.toml"
DATA = "digits"
#: Shipped profiles, which are estimates; one's own boards are probed.
PROFILES = ("laptop-cpu", "n100", "raspberry-pi-5")
LATENCY_MS = "1.4"
#: Options of a build that shows in half a minute that everything fits, and teaches little.
REHEARSAL = ("--limit-train", "200", "--teacher-epochs", "1", "--epochs", "1")
FAILED = 3


@dataclass(frozen=True, slots=True)
class Step:
    """A command, and what it does in a few words."""

    does: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds that a step took, and seconds of processor time of all its processes."""

    step: Step
    seconds: float
    processor_s: float


#: Runs a command; its exit code.
Run = Callable[[Sequence[str]], int]


def steps(work: Path, *, rehearsal: bool) -> list[Step]:
    """The commands, in their order; files go into the folder `work`."""
    known = ("--config", CONFIG, "--data", DATA, "--profiles", *PROFILES)
    planned = (*known, "--latency-ms", LATENCY_MS)
    bundle, pictures = str(work / "bundle"), str(work / "pictures")
    shown = ("--bundle", bundle, "--pictures", pictures, "--work", str(work / "agents"))
    # A rehearsal is for tests, on machines that are busy with others.
    patient = ("--deadline-ms", "10000") if rehearsal else ()
    trained = REHEARSAL if rehearsal else ()
    return [
        Step(
            "probe this machine, with three encoders",
            ("mdp-agent", "probe", "--shapes", "3", "--out", str(work / "here.toml")),
        ),
        Step(
            "write the held-out pictures",
            ("mdp-partition", "data", "--data", DATA, "--split", "test", "--out", pictures),
        ),
        Step("plan for three devices", ("mdp-partition", "plan", *planned, "--explain")),
        Step(
            "train teacher and sub-models, export, measure",
            ("mdp-partition", "build", *planned, *trained, "--out", bundle),
        ),
        Step(
            "serve by three agents, kill one",
            ("mdp", "demo", "--text", *shown, *patient, "--report", str(work / "seen.json")),
        ),
    ]


def table(spent: Sequence[Spent]) -> str:
    """Table of the time, a line for each step and one for all."""
    rows = [(one.step.does, one.seconds, one.processor_s) for one in spent]
    rows.append(("all", sum(one.seconds for one in spent), sum(one.processor_s for one in spent)))
    wide = max(len(does) for does, *_ in rows)
    lines = [f"{'':{wide}}  seconds  of processor time"]
    return "\n".join([*lines, *(f"{d:{wide}}  {s:7.1f}  {p:7.1f}" for d, s, p in rows)])


def follow(
    some: Sequence[Step], run: Run, now_s: Callable[[], float], processor_s: Callable[[], float]
) -> tuple[list[Spent], int]:
    """Run the steps until one fails; what each took, and the exit code."""
    spent: list[Spent] = []
    for step in some:
        print(f"\n$ {shlex.join(step.words)}", flush=True)
        began_s, before_s = now_s(), processor_s()
        code = run(step.words)
        spent.append(Spent(step, now_s() - began_s, processor_s() - before_s))
        if code:
            print(f"make demo-build: {step.words[0]} ended with exit code {code}", file=sys.stderr)
            return spent, code if code == 130 else FAILED
    return spent, 0


def _run(words: Sequence[str]) -> int:
    program = str(Path(sys.executable).parent / words[0])
    return subprocess.run([program, *words[1:]], check=False).returncode


def _processor_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


def main(words: Sequence[str]) -> int:
    """The exit code: 0, 3 where a step failed, 130 where it was interrupted."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo_build")
    parser.add_argument("--work", type=Path, default=Path("demo-build"), help="folder for files")
    parser.add_argument("--rehearsal", action="store_true", help="train next to nothing")
    options = parser.parse_args(words)
    # Paths on the command lines are those that a reader can type, from the checkout.
    os.chdir(ROOT)
    spent, code = follow(
        steps(options.work, rehearsal=options.rehearsal), _run, time.monotonic, _processor_s
    )
    print(f"\n{table(spent)}")
    return code


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
