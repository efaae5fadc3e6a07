"""Errors of predicted latencies, as figures for their page and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS
from benchmarks.harness.tables import table
from benchmarks.latency.rows import ROWS, Row, Rows
from mdp.files import read_json
from mdp.formats.profile import read_profile
from partitioner.estimates.latency import Estimate, Way, fit_latency


@dataclass(frozen=True, slots=True)
class Compared:
    row: Row
    way: Way
    estimate: Estimate

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.estimate.ms / self.row.latency_ms - 1

    @property
    def name(self) -> str:
        """Precision and threads, as the figures name them."""
        return f"{self.way.precision}, {self.way.threads} thread{'s' * (self.way.threads > 1)}"


def compare(rows: Sequence[Row]) -> list[Compared]:
    """Predict every row from the kept profile's points of its way; raises InputError."""
    profile = read_profile(str(RESULTS / "this-machine.toml"))
    ways = [Way(precision=r.precision, provider=profile.provider, threads=r.threads) for r in rows]
    models = {way: fit_latency(profile, way) for way in dict.fromkeys(ways)}
    return [
        Compared(row, way, models[way].estimate(
            structs.replace(row.case.spec, precision=row.precision), row.case.num_classes))
        for row, way in zip(rows, ways, strict=True)
    ]  # fmt: skip


def error_table(compared: Sequence[Compared], random: Sequence[Compared], title: str) -> str:
    """Errors per way, of all, of those inside and outside what was measured, and of `random`."""
    groups = {"all": list(compared)}
    for one in sorted(compared, key=lambda one: one.way):
        groups.setdefault(one.name, []).append(one)
    groups["within what was measured"] = [one for one in compared if not one.estimate.outside]
    groups["outside of it"] = [one for one in compared if one.estimate.outside]
    groups["random shapes"] = list(random)
    groups["random shapes, outside"] = [one for one in random if one.estimate.outside]
    rows = []
    for name, group in groups.items():
        errors = np.array([one.error for one in group])
        inside = [one.estimate.low_ms <= one.row.latency_ms <= one.estimate.high_ms
                  for one in group]  # fmt: skip
        if group:
            rows.append({"name": name, "e": errors, "off": np.abs(errors), "inside": inside})
    return table(
        rows,
        ("way of running", "{name}"),
        ("models", "{e.size}"),
        ("median error", lambda row: f"{np.median(row['off']):.1%}"),
        ("95th percentile", lambda row: f"{np.percentile(row['off'], 95):.1%}"),
        ("largest", lambda row: f"{row['off'].max():.1%}"),
        ("mean", lambda row: f"{row['e'].mean():+.1%}"),
        ("in the stated range", lambda row: f"{np.mean(row['inside']):.0%}"),
        title=title,
    )


def _kept() -> tuple[list[Compared], list[Compared]]:
    """Sub-models that a plan may hold, and random ones; raises InputError."""
    rows = read_json(ROWS, Rows)
    return compare(rows.plannable), compare(rows.unseen)


def figures() -> str:
    title = "Sub-models that a plan may hold, none of them fitted to"
    return error_table(*_kept(), title)


PAGE = Page("benchmarks.latency", figures)
