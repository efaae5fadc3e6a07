"""`make fuzz`: every target under atheris in turn; says what came of it.

A finding ends the run: the input that led to it lies in the work folder, to be read again by
`python -m tests.fuzz.replay TARGET FILE`, and to be kept in the corpus once it is understood. The
figures of every target's last run come to lie in figures.json there, and `python -m benchmarks.keep
fuzz` puts them into the results and the page.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdp.files import write_json
from tests.fuzz.target import CORPUS, Target
from tests.fuzz.targets import TARGETS

#: Seconds after which an input counts as a hang; generous, as others may use the machine.
HANG_S = 60
_PROGRESS = re.compile(
    r"^#\d+\s+(INITED|DONE|NEW|REDUCE|pulse)\s+cov: (\d+) ft: (\d+)", re.MULTILINE
)


def prepare(target: Target, work: Path) -> list[Path]:
    """The folders that libFuzzer reads: the one that it also writes to comes first."""
    seeds, new = work / "seeds", work / "new"
    for folder in (seeds, new):
        folder.mkdir(parents=True, exist_ok=True)
    for name, data in target.seeds().items():
        (seeds / name).write_bytes(data)
    words = ["".join(f"\\x{byte:02x}" for byte in word) for word in target.words]
    (work / "words").write_text("".join(f'"{word}"\n' for word in words))
    kept = CORPUS / target.name
    return [new, seeds, *([kept] if kept.is_dir() else [])]


def fuzz(target: Target, work: Path, *, inputs: int, seconds: float, seed: int) -> dict[str, Any]:
    """Run one target; returns its figures, with `finding` where one ended it."""
    folders = prepare(target, work)
    options = [
        f"-runs={inputs}", f"-max_total_time={int(seconds)}", f"-max_len={target.max_bytes}",
        f"-timeout={HANG_S}", f"-seed={seed}", f"-artifact_prefix={work}/", f"-dict={work}/words",
        # Memory is watched by the child itself, per input.
        "-rss_limit_mb=0", "-print_final_stats=1", "-len_control=0",
    ]  # fmt: skip
    samples, log = work / "samples.jsonl", work / "log"
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() else None
    with log.open("wb") as output, tempfile.TemporaryDirectory(dir=where) as scratch:
        done = subprocess.run(
            [sys.executable, "-m", "tests.fuzz.child", target.name, str(samples), *options,
             *map(str, folders)],
            stdout=output, stderr=subprocess.STDOUT, check=False,
            env=os.environ | {"TMPDIR": scratch},
        )  # fmt: skip
    text = log.read_text(errors="replace")
    figures = summary(target, _lines(samples), text)
    if done.returncode:
        figures["finding"] = _finding(work, text)
    (work / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    return figures


def _lines(samples: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in samples.read_text().splitlines()]


def _finding(work: Path, text: str) -> str:
    made = sorted(work.glob("crash-*")) + sorted(work.glob("timeout-*"))
    words = [line.strip() for line in text.splitlines() if "Error" in line or "ALARM" in line]
    return f"{made[-1] if made else work / 'log'}: {words[-1] if words else 'see the log'}"


def summary(target: Target, samples: Sequence[Mapping[str, Any]], text: str) -> dict[str, Any]:
    """One target's figures from its samples and from what libFuzzer said."""
    progress = [(int(cov), int(ft)) for _, cov, ft in _PROGRESS.findall(text)]
    told = re.search(r"stat::number_of_executed_units:\s*(\d+)", text)
    last = samples[-1] if samples else {}
    inputs = int(told[1]) if told else int(last.get("inputs", 0))
    seconds = float(last.get("seconds", 0.0))
    return {
        "target": target.name,
        "inputs": inputs,
        "accepted_share": last.get("accepted", 0) / max(1, last.get("inputs", 0)),
        "seconds": round(seconds, 1),
        "processor_s": round(float(last.get("processor_s", 0.0)), 1),
        "branches_before": progress[0][0] if progress else 0,
        "branches": progress[-1][0] if progress else 0,
        "features_before": progress[0][1] if progress else 0,
        "features": progress[-1][1] if progress else 0,
        "slowest_input_ms": round(1e3 * float(last.get("slowest_s", 0.0)), 1),
        "peak_mib": round(last.get("peak_bytes", 0) / 2**20, 1),
        "growth_kib_per_million": _slope_kib(samples),
        "finding": None,
    }


def _slope_kib(samples: Sequence[Mapping[str, Any]]) -> float | None:
    """KiB of resident memory that a million inputs add, over the second half of a run."""
    half = samples[len(samples) // 2 :]
    inputs = np.array([sample["inputs"] for sample in half], dtype=float)
    if len(half) < 5 or np.ptp(inputs) == 0:
        return None
    rss = np.array([sample["rss_bytes"] for sample in half], dtype=float)
    return round(float(np.polyfit(inputs, rss, 1)[0]) * 1e6 / 1024, 1)


def read_figures(work: Path) -> list[dict[str, Any]]:
    """The figures of the last run of every target."""
    return [
        json.loads(path.read_text())
        for name in TARGETS
        if (path := work / name / "figures.json").is_file()
    ]


def main() -> int:
    """Fuzz and print; 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--runs", type=int, default=1_000_000, help="inputs of all targets")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="at most, per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("runs/fuzz"))
    options = parser.parse_args()
    chosen = [TARGETS[name] for name in options.targets]
    total = sum(target.share for target in chosen)
    found = False
    for target in chosen:
        figures = fuzz(
            target,
            options.work / target.name,
            inputs=round(options.runs * target.share / total),
            seconds=options.seconds,
            seed=options.seed,
        )
        print(json.dumps(figures), flush=True)
        found = found or figures["finding"] is not None
    write_json(options.work / "figures.json", read_figures(options.work))
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
