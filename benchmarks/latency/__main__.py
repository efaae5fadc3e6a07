"""Do predictions come true: latency of sub-models that no fit saw, and of whole plans.

    python -m benchmarks.latency measure [--grid] [--spin]
    python -m benchmarks.latency plans --profiles CORE-0 CORE-1
    python -m benchmarks.latency report --profile FILE

`measure` exports random sub-models as they are served, in fp32 and in dynamic int8, and times them
with one and two threads as the agent runs them, in rounds; with `--grid` also the shapes that a
probe would measure. `plans` serves what the planner makes of two profiles, each measured on a core
of its own while the other core was measured, with real agents, and asks them as a client does.
`report` fits the cost model to the profile that `mdp-agent probe` wrote, or without one to the
grid, and writes the figures and the picture into docs/. Exported models are kept in `--work`, and
what is there already is not made again. Timings need an idle machine: every row says how busy
others kept it.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from benchmarks.accuracy.table import as_markdown, as_rich
from benchmarks.harness.machine import describe_machine
from benchmarks.harness.page import write_figures
from benchmarks.latency.measure import Row, Rows, measure
from benchmarks.latency.models import export_all
from benchmarks.latency.numbers import compare, error_sheet, profile_of, worst_sheet
from benchmarks.latency.picture import draw
from benchmarks.latency.plans import PlanRows, measure_plans, plan_sheet
from benchmarks.latency.shapes import Case, grid, plannable, unseen
from mdp.errors import InputError, MDPError
from mdp.files import read_json, write_bytes, write_json
from mdp.formats.profile import DeviceProfile, read_profile

RESULTS = Path(__file__).parents[1] / "results"
ROWS, PLANS = RESULTS / "latency-rows.json", RESULTS / "latency-plans.json"
PROFILE = RESULTS / "this-machine.toml"
DOCS = Path("docs/results")


def run_measure(options: argparse.Namespace) -> None:
    """Export and time; a finished half is kept when the other is measured anew."""
    to_fit = grid() if options.grid else []
    cases = [*to_fit, *unseen(), *plannable()]
    export_all(options.work, cases, _note)
    machine = describe_machine()
    measured = measure(
        options.work,
        cases,
        rounds=options.rounds,
        seconds=options.seconds,
        spin=options.spin,
        note=_note,
    )

    def rows_of(wanted: list[Case]) -> list[Row]:
        return [row for row in measured if row.case in wanted]

    old_grid = read_json(options.out, Rows).grid if options.out.is_file() else []
    rows = Rows(
        machine=machine,
        grid=rows_of(to_fit) if options.grid else old_grid,
        unseen=rows_of(unseen()),
        plannable=rows_of(plannable()),
        spin=options.spin,
    )
    write_json(options.out, rows)
    _note(f"wrote {options.out}")


def run_plans(options: argparse.Namespace) -> None:
    """Serve random plans and ask them."""
    profiles = [read_profile(path) for path in options.profiles]
    machine = describe_machine()
    links, idle_link, rows = measure_plans(
        options.work, profiles, rounds=options.rounds, seconds=options.seconds, note=_note
    )
    write_json(options.out, PlanRows(machine=machine, links=links, idle_link=idle_link, rows=rows))
    _note(f"wrote {options.out}")


def run_report(options: argparse.Namespace) -> None:
    """Compare, print, and put tables and picture into docs/."""
    profile, rows = _profile(options), read_json(options.rows, Rows)
    if profile.spin != rows.spin:
        raise InputError(f"{options.rows}: expected `spin` {profile.spin}, as in the profile")
    plannable_ones, random_ones = compare(profile, rows.plannable), compare(profile, rows.unseen)
    compared = [*plannable_ones, *random_ones]
    plans = read_json(options.plans, PlanRows) if options.plans.is_file() else None
    tables = [
        error_sheet("Sub-models that a plan may hold, none of them fitted to", plannable_ones),
        error_sheet("Random shapes, none of them fitted to", random_ones),
        worst_sheet(compared),
    ]
    if plans is not None:
        tables.append(plan_sheet(plans))
    for table in tables:
        Console().print(as_rich(table))
    write_bytes(options.docs / "latency.svg", draw(compared, plans.rows if plans else []))
    page = options.docs / "latency.md"
    figures = "\n\n".join(as_markdown(table).strip() for table in tables)
    write_figures(page, "benchmarks.latency", figures)
    _note(f"wrote {page} and {options.docs / 'latency.svg'}")


def _profile(options: argparse.Namespace) -> DeviceProfile:
    if options.profile:
        return read_profile(str(options.profile))
    rows: list[Row] = read_json(ROWS, Rows).grid
    if not rows:
        raise InputError(f"--profile: expected a profile, as {ROWS} holds no grid to fit instead")
    return profile_of(rows)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Run one of the steps."""
    parser = argparse.ArgumentParser(description="Predicted against measured latency.")
    steps = parser.add_subparsers(required=True)
    for name, run, out, rounds, seconds in (
        ("measure", run_measure, ROWS, 8, 0.12),
        ("plans", run_plans, PLANS, 4, 2.0),
    ):
        step = steps.add_parser(name, help=run.__doc__)
        step.set_defaults(run=run)
        step.add_argument("--work", type=Path, default=Path("/tmp/mdp-latency"))
        step.add_argument("--out", type=Path, default=out)
        step.add_argument("--rounds", type=int, default=rounds)
        step.add_argument("--seconds", type=float, default=seconds, help="of one burst")
        if name == "measure":
            step.add_argument("--grid", action="store_true", help="measure what a probe would, too")
            step.add_argument("--spin", action="store_true", help="threads wait awake")
        else:
            step.add_argument("--profiles", nargs=2, required=True, help="one per core")
    report = steps.add_parser("report", help=run_report.__doc__)
    report.set_defaults(run=run_report)
    report.add_argument("--profile", help="what the probe wrote; default: the grid's rows")
    report.add_argument("--rows", type=Path, default=ROWS)
    report.add_argument("--plans", type=Path, default=PLANS)
    report.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    try:
        options.run(options)
    except MDPError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
