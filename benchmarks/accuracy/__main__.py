"""Ours against what else a user could put on the same devices, and ours without each of its parts.

    python -m benchmarks.accuracy --data FOLDER --work FOLDER --tune
    python -m benchmarks.accuracy --data FOLDER --work FOLDER
    python -m benchmarks.accuracy --data FOLDER --work FOLDER --latency     (on an idle machine)
    python -m benchmarks.accuracy --table
    python -m benchmarks.accuracy --smoke --work FOLDER                     (digits, seconds)

The file of results is rewritten after every finished run, and what is in it is not run again. So a
stopped benchmark goes on with the same command, and several processes may work side by side on the
same files: a run that another one is at is left to it. How it is measured: METHODOLOGY.md.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.results import RESULTS
from mdp.errors import InputError, MDPError
from mdp.files import read_json
from partitioner.training.compute import use_threads

#: accuracy-20-epochs.json beside it is the same with --epochs 20, as far as it was run.
OUT = RESULTS / "accuracy.json"


def main(arguments: list[str] | None = None) -> int:
    return carried_out(new_parser().parse_args(arguments), _work)


def carried_out(asked: argparse.Namespace, work: Callable[[argparse.Namespace], None]) -> int:
    """Do `work` with as many threads as asked for; returns the exit status."""
    use_threads(asked.threads)
    try:
        work(asked)
    except MDPError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _at_least(least: int) -> Callable[[str], int]:
    """A whole number from `least` on, for argparse, which names the option."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, got {text!r}")
        return int(text)

    return parsed


def new_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy", description="Accuracy against rivals."
    )
    parser.add_argument("--data", help="class-per-folder tree, as for mdp-partition")
    parser.add_argument("--work", type=Path, help="folder for caches and weights; some GB")
    parser.add_argument("--limit-train", type=_at_least(1), default=12_500)
    parser.add_argument("--limit-test", type=_at_least(1))
    parser.add_argument("--epochs", type=_at_least(2), default=10, help="per member, all phases")
    parser.add_argument("--teacher-epochs", type=_at_least(1), default=20)
    parser.add_argument("--seeds", type=_at_least(0), nargs="+", default=[0, 1, 2])
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="default: all")
    parser.add_argument("--out", type=Path, help=f"default: {OUT.parent.name}/{OUT.name}")
    parser.add_argument("--threads", type=_at_least(1), default=1)
    parser.add_argument("--tune", action="store_true", help="choose by calibration, with seed 0")
    parser.add_argument("--latency", action="store_true", help="measure it, and nothing else")
    parser.add_argument("--table", action="store_true", help="print what the results tell")
    parser.add_argument("--smoke", action="store_true", help="digits and tiny shapes, in seconds")
    return parser


def _work(asked: argparse.Namespace) -> None:
    # Loaded late: torch has to find the environment that main prepares.
    from benchmarks.accuracy import latency as accuracy_latency
    from benchmarks.accuracy import runs as accuracy_runs
    from benchmarks.accuracy.page import markdown
    from benchmarks.accuracy.results import Results, ResultsFile
    from benchmarks.accuracy.shapes import REAL, SMOKE
    from benchmarks.accuracy.site import open_site
    from partitioner.run.progress import Progress
    from partitioner.run.settings import RunOptions

    if asked.table:
        print(markdown(read_json(asked.out or OUT, Results)))
        return
    if asked.work is None or (asked.data is None and not asked.smoke):
        raise InputError("expected --data FOLDER and --work FOLDER, or --smoke and --work FOLDER")
    if asked.smoke:
        options = RunOptions(data="digits", limit_train=240, limit_test=100, autocast="fp32")
        site = open_site(SMOKE, options, epochs=2, teacher_epochs=2, folder=asked.work)
    else:
        options = RunOptions(
            data=asked.data, limit_train=asked.limit_train, limit_test=asked.limit_test
        )
        site = open_site(REAL, options, asked.epochs, asked.teacher_epochs, asked.work)
    out = asked.out or (asked.work / "accuracy.json" if asked.smoke else OUT)
    file = ResultsFile(out, site.lock("results"), site.configuration())
    methods = accuracy_runs.known(asked.methods)
    file.read()
    if asked.latency:
        accuracy_runs.keep_latency(
            file, accuracy_latency.measure(site.shapes, len(site.data.labels), Progress())
        )
    elif asked.tune:
        accuracy_runs.tune(site, file, methods)
    else:
        accuracy_runs.run_all(site, file, methods, [0] if asked.smoke else asked.seeds)


if __name__ == "__main__":
    raise SystemExit(main())
