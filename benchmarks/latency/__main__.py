"""Do predictions come true: latency of sub-models that no fit saw, and of whole plans.

    python -m benchmarks.latency measure
    python -m benchmarks.latency plans --profiles CORE-0 CORE-1

`measure` exports random sub-models as they are served, in fp32 and in dynamic int8, and times them
with one and two threads as the agent runs them, in rounds. `plans` serves what the planner makes of
two profiles, each measured on a core of its own while the other core was measured, with real
agents, and asks them as a client does. `python -m benchmarks latency` compares both with the
predictions of the profile that `mdp-agent probe --out benchmarks/results/this-machine.toml` wrote.
Exported models are kept in `--work`, and what is there already is not made again. Timings need an
idle machine: every row says how busy others kept it.
"""

import argparse
import sys
from pathlib import Path

from benchmarks.harness.machine import describe_machine
from benchmarks.latency.measure import Rows, export_all, measure
from benchmarks.latency.page import PLANS, ROWS
from benchmarks.latency.plans import measure_plans
from benchmarks.latency.shapes import plannable, unseen
from mdp import console
from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.profile import read_profile


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured latency.")
    parser.add_argument("what", choices=("measure", "plans"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/mdp-latency"))
    parser.add_argument("--profiles", nargs=2, help="for plans, one per core")
    options = parser.parse_args()
    machine = describe_machine()
    if options.what == "plans":
        if options.profiles is None:
            raise InputError("plans: expected --profiles and one profile for each of two cores")
        profiles = [read_profile(path) for path in options.profiles]
        write_json(PLANS, measure_plans(machine, options.work, profiles, _note))
        return
    cases = [*unseen(), *plannable()]
    export_all(options.work, cases, _note)
    rows = measure(options.work, cases, rounds=8, seconds=0.12)
    unseen_, plannable_ = ([r for r in rows if r.case in some] for some in (unseen(), plannable()))
    write_json(ROWS, Rows(machine=machine, unseen=unseen_, plannable=plannable_))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    console.run(main, "benchmarks.latency")
