"""The soak as figures for its page."""

from collections import Counter

from benchmarks.harness.page import Page
from benchmarks.harness.results import format_machine, read_result
from benchmarks.harness.tables import table


def figures() -> str:
    result = read_result("soak")
    faults = "; ".join(
        f"{name}: {kinds['kill']} kills, {kinds['stop']} stops, {kinds['restart']} restarts"
        for name, kinds in result["faults"].items()
    )
    broken = "Broken: " + "; ".join(result["failures"]) if result["failures"] else ""
    clients = [
        {**client, "capacity": capacity, "counts": Counter(client["counts"])}
        for client, capacity in zip(result["clients"], result["capacity_per_s"], strict=True)
    ]
    parts = [
        f"{result['minutes']:g} minutes, seed {result['seed']}, deadline "
        f"{result['deadline_ms']:g} ms; {format_machine(result['machine'])}. "
        f"{faults}.",
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
