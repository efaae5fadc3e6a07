"""How far predictions are from what was measured: errors per way of running. Plain functions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.accuracy.table import Sheet
from benchmarks.latency.measure import Row, point_of
from benchmarks.latency.shapes import describe, with_precision
from mdp.formats.profile import DeviceProfile, Link, Provenance
from partitioner.estimates.latency import Estimate, Way, fit_latency

PROVIDER = "CPUExecutionProvider"


@dataclass(frozen=True, slots=True)
class Compared:
    """One measured row beside its prediction."""

    row: Row
    way: Way
    estimate: Estimate

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.estimate.ms / self.row.latency_ms - 1


def profile_of(rows: Sequence[Row]) -> DeviceProfile:
    """Rows as a profile, for a fit without a probe's; the link is of no account."""
    here = Provenance(method="measured", source="python -m benchmarks.latency measure")
    numbers = ("threads", "memory_bytes", "link", "latency", "availability")
    return DeviceProfile(
        name="this-machine",
        kind="cpu",
        provider=PROVIDER,
        threads=1,
        memory_bytes=2**33,
        link=Link(bandwidth_bps=1e9, round_trip_s=0.0),
        latency=[point_of(row) for row in rows],
        provenance=dict.fromkeys(numbers, here),
    )


def compare(profile: DeviceProfile, rows: Sequence[Row]) -> list[Compared]:
    """Predict every row from the profile's points of its way; raises InputError."""
    found = []
    models = {}
    for row in rows:
        way = Way(precision=row.precision, provider=profile.provider, threads=row.threads)
        if way not in models:
            models[way] = fit_latency(profile, way)
        spec = with_precision(row.case, row.precision)
        found.append(Compared(row, way, models[way].estimate(spec, row.case.num_classes)))
    return found


def short(way: Way) -> str:
    """A way without what all of them share here."""
    return f"{way.precision}, {way.threads} thread{'s' * (way.threads > 1)}"


def error_sheet(title: str, compared: Sequence[Compared]) -> Sheet:
    """Errors per way, of all, and of those inside and outside what the profile measured."""
    groups = [("all", list(compared))]
    for way in sorted({one.way for one in compared}):
        groups.append((short(way), [one for one in compared if one.way == way]))
    groups.append(
        ("within what was measured", [one for one in compared if not one.estimate.outside])
    )
    groups.append(("outside of it", [one for one in compared if one.estimate.outside]))
    return Sheet(
        title,
        ("way of running", "models", "median error", "95th percentile", "largest", "mean",
         "in the stated range"),
        [(name, *_figures(group)) for name, group in groups if group],
    )  # fmt: skip


def _figures(group: Sequence[Compared]) -> tuple[str, ...]:
    errors = np.array([one.error for one in group])
    inside = [one.estimate.low_ms <= one.row.latency_ms <= one.estimate.high_ms for one in group]
    return (
        str(len(group)),
        f"{np.median(np.abs(errors)):.1%}",
        f"{np.percentile(np.abs(errors), 95):.1%}",
        f"{np.abs(errors).max():.1%}",
        f"{errors.mean():+.1%}",
        f"{np.mean(inside):.0%}",
    )


def worst_sheet(compared: Sequence[Compared], count: int = 8) -> Sheet:
    """The predictions that are farthest off."""
    worst = sorted(compared, key=lambda one: -abs(one.error))[:count]
    return Sheet(
        "The predictions that are farthest off",
        ("sub-model", "way of running", "measured ms", "predicted ms", "error", "outside"),
        [
            (
                describe(one.row.case),
                short(one.way),
                f"{one.row.latency_ms:.3g}",
                f"{one.estimate.ms:.3g} ({one.estimate.low_ms:.3g} to {one.estimate.high_ms:.3g})",
                f"{one.error:+.0%}",
                one.estimate.outside or "-",
            )
            for one in worst
        ],
    )
