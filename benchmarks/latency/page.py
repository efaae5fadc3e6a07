"""Errors of predicted latencies of sub-models that no fit saw, as figures for their page.

python -m benchmarks latency

Random sub-models, and those that a plan may hold, were exported as agents serve them and timed in
rounds, every one in a short burst in each; the profile is of another run.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS
from benchmarks.harness.tables import table
from mdp.files import Record, read_json
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Precision,
    read_profile,
)
from partitioner.estimates.latency import Estimate, Way, fit_latency

ROWS = RESULTS / "latency-rows.json"


class Case(Record, frozen=True):
    spec: SubModelSpec
    num_classes: PositiveInt


class Row(Record, frozen=True):
    """One model run one way: the median over rounds of each round's median."""

    case: Case
    precision: Precision
    threads: PositiveInt
    latency_ms: PositiveFloat
    #: 10th and 90th percentile of all runs.
    p10_ms: PositiveFloat
    p90_ms: PositiveFloat
    rounds: PositiveInt
    runs: PositiveInt
    #: Processor cores that other processes kept busy.
    others_cores: NonNegativeFloat


class Rows(Record, frozen=True):
    """`unseen` are random shapes, `plannable` shapes that a plan may hold; no fit sees either."""

    machine: dict[str, Any]
    unseen: list[Row]
    plannable: list[Row]


def predicted(rows: Sequence[Row]) -> list[Estimate]:
    """Predict every row from the kept profile's points of its way; raises InputError."""
    profile = read_profile(str(RESULTS / "this-machine.toml"))
    ways = [Way(precision=r.precision, provider=profile.provider, threads=r.threads) for r in rows]
    models = {way: fit_latency(profile, way) for way in dict.fromkeys(ways)}
    return [
        models[way].estimate(
            structs.replace(row.case.spec, precision=row.precision), row.case.num_classes
        )
        for row, way in zip(rows, ways, strict=True)
    ]


def figures() -> str:
    kept = read_json(ROWS, Rows)
    pairs, random = (
        list(zip(rows, predicted(rows), strict=True)) for rows in (kept.plannable, kept.unseen)
    )
    groups = {
        "that a plan may hold": pairs,
        "of these, within what was measured": [pair for pair in pairs if not pair[1].outside],
        "outside of it": [pair for pair in pairs if pair[1].outside],
        "of random shapes": random,
        "of these, outside": [pair for pair in random if pair[1].outside],
    }
    found = [
        {
            "name": name,
            "error": np.array([estimate.ms / row.latency_ms - 1 for row, estimate in group]),
            "inside": [e.low_ms <= row.latency_ms <= e.high_ms for row, e in group],
        }
        for name, group in groups.items()
    ]
    return table(
        found,
        ("sub-models", "{name}"),
        ("models", "{error.size}"),
        ("median error", lambda row: f"{np.median(np.abs(row['error'])):.1%}"),
        ("95th percentile", lambda row: f"{np.percentile(np.abs(row['error']), 95):.1%}"),
        ("largest", lambda row: f"{np.abs(row['error']).max():.1%}"),
        ("mean", lambda row: f"{row['error'].mean():+.1%}"),
        ("in the stated range", lambda row: f"{np.mean(row['inside']):.0%}"),
    )


PAGE = Page("benchmarks.latency", figures)
