"""Errors of predicted latencies of sub-models that no fit saw, as figures for their page.

python -m benchmarks latency

Random sub-models, and those that a plan may hold, were exported as agents serve them and timed in
rounds, every one in a short burst in each; the profile is of another run.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from msgspec import convert

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, read_result
from benchmarks.harness.tables import table
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import read_profile
from partitioner.estimates.latency import Estimate, Way, fit_latency

Row = dict[str, Any]


def predict(rows: Sequence[Row]) -> list[tuple[Row, Estimate]]:
    """Predict every row from the kept profile's points of its way; raises InputError."""
    profile = read_profile(str(RESULTS / "this-machine.toml"))
    fit = cache(lambda way: fit_latency(profile, way))
    found = []
    for row in rows:
        way = Way(precision=row["precision"], provider=profile.provider, threads=row["threads"])
        spec = convert(row["case"]["spec"] | {"precision": way.precision}, SubModelSpec)
        found.append((row, fit(way).estimate(spec, row["case"]["num_classes"])))
    return found


def figures() -> str:
    rows = read_result("latency-rows")
    pairs, random = predict(rows["plannable"]), predict(rows["unseen"])
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
            "error": np.array([estimate.ms / row["latency_ms"] - 1 for row, estimate in group]),
            "inside": [e.low_ms <= row["latency_ms"] <= e.high_ms for row, e in group],
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
        ("in the stated range", lambda row: f"{np.mean(row['inside']):.0%}"),
    )


PAGE = Page("benchmarks.latency", figures)
