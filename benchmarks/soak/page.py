"""The soak as figures for its page."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, format_machine, read_result
from benchmarks.harness.tables import table

#: The name of the result of a run without faults.
CALM = "soak-calm"


def figures() -> str:
    result = read_result("soak")
    faults = "; ".join(
        f"{name}: {kinds['kill']} kills, {kinds['stop']} stops, {kinds['restart']} restarts"
        for name, kinds in result["faults"].items()
    )
    blocks = [block(result, faults)]
    if (RESULTS / f"{CALM}.json").exists():
        calm = read_result(CALM)
        load = f"Nothing killed or stopped, {calm['share']:.0%} of capacity"
        blocks.append(block(calm, load))
    return "\n\n".join(blocks)


def block(result: Mapping[str, Any], disturbed: str) -> str:
    """One run: its promises, its calls, and its processes' memory."""
    broken = "Broken: " + "; ".join(result["failures"]) if result["failures"] else ""
    clients = [
        {**client, "capacity": capacity, "counts": Counter(client["counts"])}
        for client, capacity in zip(result["clients"], result["capacity_per_s"], strict=True)
    ]
    parts = [
        f"{result['minutes']:g} minutes, seed {result['seed']}, deadline "
        f"{result['deadline_ms']:g} ms; {format_machine(result['machine'])}. "
        f"{disturbed}.",
        f"**{broken or 'Every promise held'}.**",
        table(
            clients,
            ("client", "{style}"),
            ("capacity a second", "{capacity:.0f}"),
            ("calls", "{counts[begun]:,}"),
            *((what, f"{{counts[{what}]:,}}") for what in ("complete", "partial")),
            ("errors", "{counts[error]:,}"),
            *((what, f"{{counts[{what}]:,}}") for what in ("wrong", "mixed", "unaccounted")),
            *((f"p{name} ms", f"{{p{name.replace('.', '')}_ms:.1f}}") for name in _POINTS),
            ("late", "{counts[late]:,}"),
            ("latest after deadline, ms", "{overshoot_ms:.1f}"),
        ),
        table(
            result["trends"],
            ("process", "{process}"),
            ("watched s", "{seconds}"),
            ("MiB at first", "{first_mib:.1f}"),
            ("at last", "{last_mib:.1f}"),
            ("MiB an hour, 95 % interval", "{mib_per_hour:+.2f} ± {mib_per_hour_margin:.2f}"),
        ),
    ]  # fmt: skip
    return "\n\n".join(parts)


_POINTS = ("50", "99", "99.9")
PAGE = Page("benchmarks.soak", figures)
