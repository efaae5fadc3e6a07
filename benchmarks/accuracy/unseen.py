"""Predicted against measured accuracy of trainings that the shipped law has not seen.

    python -m benchmarks.accuracy.unseen
    python -m benchmarks.accuracy.unseen --refit    (would these runs improve the law?)

Reads benchmarks/results/network-subsets.json, predicts every network and every whole fleet of it
as a plan does, and writes benchmarks/results/accuracy-unseen.json and the law's page. To be run
before the law is fitted to those runs.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.accuracy.compare import FLEETS
from benchmarks.accuracy.predictor import gather
from benchmarks.accuracy.subsets import RESULT as RUNS
from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from benchmarks.law.errors import cross_validate
from benchmarks.law.runs import as_members
from mdp.files import read_json, write_json
from partitioner.estimates.accuracy import FittedLaw, predictor_for, read_shipped_law
from partitioner.estimates.accuracy_law import capabilities, together
from partitioner.estimates.accuracy_records import RecordedRun, RecordedSubset, Records

RESULT = RESULTS / "accuracy-unseen.json"


def predict(fitted: FittedLaw, run: RecordedRun, subset: RecordedSubset) -> dict[str, Any]:
    """Accuracy that a plan with these members would state, and the measured one."""
    trainings = [run.members[k].training for k in subset.members]
    predictors = [
        predictor_for(
            fitted, run.teacher, num_classes=run.num_classes,
            teacher_accuracy=run.teacher_accuracy, training=training,
        )
        for training in trainings
        if training != "untouched"
    ]  # fmt: skip
    widest = max(predictors, key=lambda one: one.spread)
    values = capabilities(
        fitted.law.alone, run.task,
        [m.spec for m in run.members], [m.region for m in run.members],
        [m.training for m in run.members], capped=widest.has_networks,
    )  # fmt: skip
    capability = dict(enumerate(values.tolist()))
    members = as_members(run, capability, subset.members)
    accuracy = widest.accuracy(min(together(fitted.law, members), widest.most))
    low, high = widest.interval(accuracy)
    return {
        "run": run.name,
        "members": [run.members[k].spec.words for k in subset.members],
        "epochs": [run.members[k].training.epochs for k in subset.members],  # type: ignore[union-attr]
        "starts": [run.members[k].training.start for k in subset.members],  # type: ignore[union-attr]
        "measured": subset.accuracy,
        "predicted": accuracy,
        "low": low,
        "high": high,
        "unknown": any(
            fitted.on_file.unlike(one.training, run.num_classes)
            for one in predictors
            if one.training is not None
        ),
    }


def refit() -> None:
    """Print how far the law is off the former trainings, fitted with and without the new runs."""
    former, new = gather(), read_json(RUNS, Records).runs
    keys: dict[str, Callable[[RecordedRun], str]] = {"source": lambda r: r.source, "data": _data_of}
    for left, key in keys.items():
        for what, runs in (("without", former), ("with", [*former, *new])):
            offs = [
                100 * abs(one.off)
                for one in cross_validate(runs, key)
                if one.how != "published" and one.run not in new
            ]
            print(
                f"fitted {what} the new runs, {left} left out: median {np.median(offs):.2f}, "
                f"mean {np.mean(offs):.2f} points"
            )


def _data_of(run: RecordedRun) -> str:
    """The data set, whatever the recipe."""
    return next((name for name in FLEETS if name in f"{run.source} {run.name}"), run.source)


def main() -> None:
    """Predict, keep, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.unseen")
    parser.add_argument("--refit", action="store_true")
    if parser.parse_args().refit:
        refit()
        return
    fitted = read_shipped_law()
    rows = []
    for run in read_json(RUNS, Records).runs:
        sets = [set(subset.members) for subset in run.subsets]
        rows += [
            predict(fitted, run, subset)
            for subset in run.subsets
            if len(subset.members) == 1 or not any(set(subset.members) < other for other in sets)
        ]
    write_json(RESULT, {"law": {"runs": fitted.runs, "sources": fitted.sources}, "rows": rows})
    PAGE.write()


def figures(found: Mapping[str, Any]) -> str:
    """Those off by more than 2 points, the mean of their seeds; and what all of them say."""
    rows = found["rows"]
    grouped: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        members = sorted(zip(row["members"], row["epochs"], row["starts"], strict=True))
        key = (row["run"], *(str(member) for member in members))
        grouped.setdefault(key, []).append(row)
    told = [row for row in map(_summarise, grouped.values()) if abs(row["off"]) > 2]
    alone = [row for row in rows if len(row["members"]) == 1]
    lines = [
        _summary("Networks", alone),
        _summary("Fleets", [row for row in rows if len(row["members"]) > 1]),
        _summary("All", rows),
    ]
    shown = table(
        told,
        ("data", "{data}"),
        ("members", "{members}"),
        ("epochs", "{epochs}"),
        ("trainings", "{count}"),
        ("measured", "{measured:.1f}"),
        ("predicted", "{predicted:.1f}"),
        ("off", "{off:+.1f}"),
        ("interval", "{interval}"),
        ("inside", "{inside}"),
    )
    return shown + "\n\n" + "\n".join(lines)


def _summary(what: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return f"- {what}: none."
    offs = [100 * (row["predicted"] - row["measured"]) for row in rows]
    return (
        f"- **{what}**: {len(rows)}, median error {np.median(np.abs(offs)):.1f} points, "
        f"{sum(map(_inside, rows))} inside the interval, {np.mean(offs):+.1f} on average with sign."
    )


def _inside(row: Mapping[str, Any]) -> bool:
    return bool(row["low"] <= row["measured"] <= row["high"])


def _summarise(same: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = same[0]
    measured, made = (100 * float(np.mean([r[k] for r in same])) for k in ("measured", "predicted"))
    scratch = [", from nothing" * (start == "scratch") for start in first["starts"]]
    names = [name + note for name, note in zip(first["members"], scratch, strict=True)]
    return {
        "data": first["run"].rpartition(" ")[2],
        "members": " + ".join(names),
        "epochs": ", ".join(f"{epochs:g}" for epochs in first["epochs"]),
        "count": len(same),
        "measured": measured,
        "predicted": made,
        "off": made - measured,
        "interval": f"{100 * first['low']:.1f} to {100 * first['high']:.1f}"
        + ", unknown" * first["unknown"],
        "inside": f"{sum(map(_inside, same))} of {len(same)}",
    }


PAGE = Page("benchmarks.accuracy.unseen", lambda: figures(read_result(RESULT.stem)))

if __name__ == "__main__":
    main()
