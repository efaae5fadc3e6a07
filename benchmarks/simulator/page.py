"""The simulator against real fleets, as figures for its page."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import kept, measured_on
from benchmarks.harness.tables import table

AGENTS = {"computing": "Agents that compute", "waiting": "Agents that wait"}


def markdown() -> str:
    parts: list[str] = []
    for agents, title in AGENTS.items():
        found = kept(f"simulator-{agents}")
        parts += [f"**{title}** ({measured_on(found['machine'])})", reality_table(found["reality"])]
    found = kept("simulator-speed")
    speeds = table(
        found["speed"],
        ("fleet", "{fleet}"),
        ("member-requests", "{member_requests:,}"),
        ("a second of one core", "{per_s:,}"),
    )
    return "\n\n".join([*parts, f"**Speed** ({measured_on(found['machine'])})", speeds])


def reality_table(rows: Sequence[Mapping[str, Any]]) -> str:
    return table(
        rows,
        ("load", "{load}"),
        ("deadline ms", "{deadline_ms:g}"),
        ("p50 ms (simulated)", "{p50[measured]:.2f} ({p50[error]:+.0%})"),
        ("p99 ms (simulated)", "{p99[measured]:.2f} ({p99[error]:+.0%})"),
        ("complete", "{complete[measured]:.1%}"),
        ("simulated", "{complete[simulated]:.1%}"),
    )


PAGE = Page("benchmarks.simulator", markdown)
