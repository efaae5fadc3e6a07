"""Do predictions come true: latency of sub-models that no fit saw, and of whole plans.

    python -m benchmarks.latency measure [--spin]
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
from benchmarks.latency.measure import Row, Rows, measure
from benchmarks.latency.models import export_all
from benchmarks.latency.page import PLANS, ROWS
from benchmarks.latency.plans import PlanRows, measure_plans
from benchmarks.latency.shapes import Case, plannable, unseen
from mdp.errors import MDPError
from mdp.files import write_json
from mdp.formats.profile import read_profile


def run_measure(options: argparse.Namespace) -> None:
    """Export and time sub-models."""
    cases = [*unseen(), *plannable()]
    export_all(options.work, cases, _note)
    machine = describe_machine()
    measured = measure(options.work, cases, rounds=8, seconds=0.12, spin=options.spin, note=_note)

    def rows_of(wanted: list[Case]) -> list[Row]:
        return [row for row in measured if row.case in wanted]

    rows = Rows(
        machine=machine,
        unseen=rows_of(unseen()),
        plannable=rows_of(plannable()),
        spin=options.spin,
    )
    write_json(ROWS, rows)


def run_plans(options: argparse.Namespace) -> None:
    """Serve random plans and ask them."""
    profiles = [read_profile(path) for path in options.profiles]
    machine = describe_machine()
    links, idle_link, rows = measure_plans(
        options.work, profiles, rounds=4, seconds=2.0, note=_note
    )
    write_json(PLANS, PlanRows(machine=machine, links=links, idle_link=idle_link, rows=rows))


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted against measured latency.")
    steps = parser.add_subparsers(required=True)
    for name, run in (("measure", run_measure), ("plans", run_plans)):
        step = steps.add_parser(name, help=run.__doc__)
        step.set_defaults(run=run)
        step.add_argument("--work", type=Path, default=Path("/tmp/mdp-latency"))
        if name == "measure":
            step.add_argument("--spin", action="store_true", help="threads wait awake")
        else:
            step.add_argument("--profiles", nargs=2, required=True, help="one per core")
    options = parser.parse_args()
    try:
        options.run(options)
    except MDPError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
