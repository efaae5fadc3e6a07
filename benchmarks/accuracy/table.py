"""accuracy.json as tables, for a terminal or for the documents."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.accuracy.methods import ABLATIONS, METHODS, OURS
from benchmarks.accuracy.numbers import (
    Figure,
    Spread,
    aims,
    all_in,
    best_alone,
    one_in,
    one_missing,
    over_seeds,
    paired,
    runs_of,
    spread,
    two_in,
    worst_missing,
)
from benchmarks.accuracy.results import Results, Run
from benchmarks.accuracy.shapes import shape_name
from benchmarks.harness.page import write_figures
from mdp.files import read_json

_FIGURES: tuple[tuple[str, Figure], ...] = (
    ("all in", all_in),
    ("one missing", one_missing),
    ("worst one missing", worst_missing),
    ("two in", two_in),
    ("one in", one_in),
    ("best one in", best_alone),
)
#: Columns that a document does without.
_LEFT_OUT = ("seeds", "worst one missing", "best one in")


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def show(path: Path, *, markdown: bool) -> None:
    """Print everything that `path` tells."""
    results = read_json(path, Results)
    for sheet in sheets(results):
        if not sheet.rows:
            continue
        if markdown:
            print(as_markdown(sheet))
        else:
            Console().print(as_rich(sheet))


def write_page(page: Path, results: Results, longer: Results | None) -> None:
    """Put the figures that people read first into the document `page`; raises InputError.

    `longer` are the same methods with more epochs, as far as they were run.
    """
    methods, subsets, latency, _, reached = sheets(results)
    shown = [_without(methods, _LEFT_OUT), subsets, latency, reached]
    if longer is not None:
        epochs = longer.configuration["epochs"]
        sheet = _without(_methods(longer), _LEFT_OUT)
        shown.append(Sheet(f"With {epochs} epochs instead of {results.configuration['epochs']}",
                           sheet.columns, sheet.rows))  # fmt: skip
    write_figures(page, "benchmarks.accuracy", "\n".join(map(as_markdown, shown)))


def _without(sheet: Sheet, columns: Collection[str]) -> Sheet:
    """The sheet without these columns."""
    kept = [number for number, name in enumerate(sheet.columns) if name not in columns]
    rows = [[row[number] for number in kept] for row in sheet.rows]
    return Sheet(sheet.title, [sheet.columns[number] for number in kept], rows)


def sheets(results: Results) -> list[Sheet]:
    """Methods, every subset of ours, latency, tuning, and the aims."""
    return [
        _methods(results),
        _subsets(results),
        _latency(results),
        _tuning(results),
        Sheet(
            "Aims",
            ("aim", "figure", "holds"),
            [(a.aim, a.figure, {True: "yes", False: "NO", None: "?"}[a.holds])
             for a in aims(results)],
        ),
    ]  # fmt: skip


def as_markdown(sheet: Sheet) -> str:
    """A title and a table."""
    lines = [sheet.columns, ["---"] * len(sheet.columns), *sheet.rows]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    return f"### {sheet.title}\n\n{table}\n"


def as_rich(sheet: Sheet) -> Table:
    """The same for a terminal."""
    table = Table(title=sheet.title, title_justify="left")
    for number, column in enumerate(sheet.columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*map(escape, row))
    return table


def _methods(results: Results) -> Sheet:
    columns = ["method", "rule", "seeds", *(name for name, _ in _FIGURES)]
    columns += ["all in, against ours", "training, CPU s", "cost ratio"]
    rows = []
    if results.teacher is not None:
        blank = [""] * (len(columns) - 4)
        rows.append(["teacher", "", "1", f"{results.teacher.accuracy * 100:.1f}", *blank])
    ours = runs_of(results, OURS)
    for method in METHODS:
        runs = runs_of(results, method)
        for rule in _rules(method, runs):
            rows.append(_method(method, rule, runs, ours))
    return Sheet(
        "Accuracy on the test split, %: mean ± sample standard deviation over seeds", columns, rows
    )


def _rules(method: str, runs: Sequence[Run]) -> list[str]:
    """The rules to show: of a variation of ours the headline alone."""
    if not runs:
        return []
    headline = runs[0].headline
    if method in ABLATIONS and method != OURS:
        return [headline]
    return [headline, *(rule for rule in runs[0].subsets[0].accuracy if rule != headline)]


def _method(method: str, rule: str, runs: Sequence[Run], ours: Sequence[Run]) -> list[str]:
    figures = [_percent(over_seeds(runs, rule, figure)) for _, figure in _FIGURES]
    is_ours = method == OURS and rule == "stacked"
    less = None if is_ours else paired(runs, rule, ours, "stacked")
    cpu_s = spread([run.train_cpu_s for run in runs]).mean
    ratios = [run.cost_ratio for run in runs if run.cost_ratio is not None]
    ratio = f"{spread(ratios).mean:.2f}" if ratios else ""
    return [method, rule, str(len(runs)), *figures, _percent(less, "+.2f"), f"{cpu_s:.0f}", ratio]


def _percent(value: Spread | None, form: str = ".1f") -> str:
    if value is None:
        return ""
    mean = format(value.mean * 100, form)
    return mean if value.seeds == 1 else f"{mean} ± {value.deviation * 100:{form.strip('+')}}"


def _subsets(results: Results) -> Sheet:
    runs = runs_of(results, OURS)
    rules = ("stacked", "boosted", "bagged")
    rows = []
    for subset in runs[0].subsets if runs else []:
        names = " + ".join(f"{k}: {shape_name(runs[0].members[k])}" for k in subset.members)
        same = [s for run in runs for s in run.subsets if s.members == subset.members]
        row = [names, *(_percent(spread([s.accuracy[rule] for s in same])) for rule in rules)]
        errors = [s.ece["stacked"] for s in same if "stacked" in s.ece]
        rows.append([*row, _percent(spread(errors)) if errors else ""])
    columns = ("members in", *rules, "calibration error, stacked")
    return Sheet("Every arrival subset of ours, %", columns, rows)


def _latency(results: Results) -> Sheet:
    latency = results.latency
    rows = []
    if latency is not None:
        rows.append(["teacher", f"{latency.teacher_ms:.2f}", "1.00"])
        for name, value_ms in sorted(latency.shapes_ms.items(), key=lambda item: -item[1]):
            rows.append([name, f"{value_ms:.2f}", f"{value_ms / latency.teacher_ms:.2f}"])
    title = "Latency of one picture, onnxruntime, one thread"
    return Sheet(title, ("shape", "ms", "of the teacher's"), rows)


def _tuning(results: Results) -> Sheet:
    rows = []
    for tuning in results.tuning:
        for trial in tuning.trials:
            choice = trial.choice
            chosen = "chosen" if choice == tuning.chosen else ""
            cells = (f"{choice.learning_rate:g}", str(choice.candidate))
            rows.append([tuning.method, *cells, f"{trial.calibration * 100:.1f}", chosen])
    columns = ("method", "step size", "candidate", "calibration, all in, %", "")
    return Sheet("Tuning, seed 0", columns, rows)
