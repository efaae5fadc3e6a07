"""The soak as figures for its page, and as a picture."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.harness import figure
from benchmarks.harness.page import Page
from benchmarks.harness.results import kept, measured_on
from benchmarks.harness.tables import table

_FAULTS = {"kill": figure.RED, "stop": figure.ORANGE, "restart": figure.BLUE}
_ANSWERS = {"complete": figure.GREEN, "partial": figure.ORANGE, "errors": figure.RED}


def markdown(result: Mapping[str, Any]) -> str:
    kills, stops, restarts = result["faults"]
    broken = "Broken: " + "; ".join(result["failures"]) if result["failures"] else ""
    clients = [
        {**client, "capacity": capacity, "counts": Counter(client["counts"])}
        for client, capacity in zip(result["clients"], result["capacity_per_s"], strict=True)
    ]
    held = [
        (who, before, defaultdict(str, result["after"].get(who, {})))
        for who, before in result["before"].items()
    ]
    parts = [
        f"{result['minutes']:g} minutes, seed {result['seed']}, deadline "
        f"{result['deadline_ms']:g} ms; {measured_on(result['machine'])}. "
        f"{kills} kills, {stops} stops, {restarts} restarts.",
        f"**{broken or 'Every promise held'}.**",
        "![the soak](soak.svg)",
        table(
            clients,
            ("client", "{style}"),
            ("capacity a second", "{capacity:.0f}"),
            ("calls", "{counts[begun]:,}"),
            *((what, f"{{counts[{what}]:,}}") for what in ("held back", "complete", "partial")),
            ("errors", "{counts[error]:,}"),
            ("wrong", "{counts[wrong]:,}"),
            ("p50 ms", "{p50_ms:.1f}"),
            ("p99 ms", "{p99_ms:.1f}"),
            ("p99.9 ms", "{p999_ms:.1f}"),
            ("latest after deadline, ms", "{overshoot_ms:.1f}"),
            ("late replies", "{counters[late]:,}"),
            ("duplicates", "{counters[duplicate]:,}"),
        ),
        table(
            result["trends"],
            ("process", "{who}"),
            ("watched s", "{seconds}"),
            ("MiB at first", "{first_mib:.1f}"),
            ("at last", "{last_mib:.1f}"),
            ("MiB an hour, 95 % interval", "{mib_per_hour:+.2f} ± {mib_per_hour_margin:.2f}"),
        ),
        table(
            held,
            ("process", "{0[0]}"),
            *((f"{what} before, after", f"{{0[1][{what}]}}, {{0[2][{what}]}}")
              for what in ("files", "sockets", "threads")),
        ),
    ]  # fmt: skip
    return "\n\n".join(parts)


def draw(result: Mapping[str, Any]) -> bytes:
    def panels(canvas: "figure.Figure") -> None:
        answers, memory, held = canvas.subplots(3, 1, sharex=True)
        _draw_answers(answers, result)
        for name, rows in result["series"].items():
            if name.endswith(" held"):
                at, mib, files, threads = np.array(rows, dtype=float).T
                (line,) = memory.plot(at, mib, label=name.removesuffix(" held"), linewidth=0.9)
                for values, style in ((files, "-"), (threads, ":")):
                    held.plot(at, values, color=line.get_color(), linewidth=0.9, linestyle=style)
        memory.set_ylabel("resident memory, MiB")
        figure.name_lines(memory)
        held.set_ylabel("files; dotted: threads")
        held.set_xlabel("seconds of load")

    return figure.drawn(10.0, 8.0, panels)


def _draw_answers(axes: "figure.Axes", result: Mapping[str, Any]) -> None:
    calls = [rows for name, rows in result["series"].items() if name.endswith(" calls")]
    at = np.arange(0.0, min(rows[-1][0] for rows in calls), result["minutes"] * 60 / 120)
    rates = [_rate(calls, at, column) for column in (1, 2, 3)]
    axes.stackplot(at[1:], *rates, labels=list(_ANSWERS), colors=list(_ANSWERS.values()))
    axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1))
    for row, (kind, colour) in enumerate(_FAULTS.items(), start=1):
        times = [moment for moment, _, what in result["happened"] if what == kind]
        below = -row * axes.get_ylim()[1] / 20
        axes.plot(times, [below] * len(times), "|", color=colour, markersize=5, label=kind)
    axes.set_ylabel("answers a second")
    axes.margins(x=0)
    figure.name_lines(axes)


def _rate(calls: Sequence[Sequence[Sequence[float]]], at: np.ndarray, column: int) -> np.ndarray:
    """Counts a second of all clients between the times `at`."""
    total = np.zeros(len(at))
    for rows in calls:
        sampled = np.array(rows, dtype=float)
        total += np.interp(at, sampled[:, 0], sampled[:, column], left=0.0)
    return np.diff(total) / np.diff(at)


PAGE = Page("benchmarks.soak", lambda: markdown(kept("soak")), lambda: draw(kept("soak")))
