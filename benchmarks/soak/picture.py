"""The soak as figures for docs/results/soak.md, and as a picture."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.page import write_figures

_COUNTED = ("begun", "held back", "complete", "partial", "error", "wrong")
_COLOURS = {"kill": "tab:red", "stop": "tab:orange", "restart": "tab:purple"}


def put_figures(page: Path, result: Mapping[str, Any]) -> None:
    """Write what was measured between the marks of `page`."""
    write_figures(page, "benchmarks.soak", markdown(result))


def markdown(result: Mapping[str, Any]) -> str:
    """The run in words and tables."""
    machine = result["machine"]
    kills, stops, restarts = result["faults"]
    text = (
        f"{result['minutes']:g} minutes, seed {result['seed']}, deadline "
        f"{result['deadline_ms']:g} ms; {machine['cores']} virtual cores, {machine['processor']}, "
        f"load {machine['load_before']} before the run, {machine['date']}. "
        f"{kills} kills, {stops} stops, {restarts} restarts.\n\n"
        f"**{_verdict(result)}**\n\n![the soak](soak.svg)\n\n"
        "| client | capacity a second | calls | held back | complete | partial | errors | wrong "
        "| p50 ms | p99 ms | p99.9 ms | latest after deadline, ms | late replies | duplicates |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    )
    for client, capacity in zip(result["clients"], result["capacity_per_s"], strict=True):
        text += _client_row(client, capacity)
    text += (
        "\n| process | watched s | MiB at first | at last | MiB an hour, 95 % interval |\n"
        "|---|---|---|---|---|\n"
    )
    text += "".join(
        f"| {row['who']} | {row['seconds']} | {row['first_mib']:.1f} | {row['last_mib']:.1f} "
        f"| {row['mib_per_hour']:+.2f} ± {row['mib_per_hour_margin']:.2f} |\n"
        for row in result["trends"]
    )
    text += (
        "\n| process | files before | after | sockets before | after | threads before | after |\n"
        "|---|---|---|---|---|---|---|\n"
    )
    for who, before in result["before"].items():
        after = result["after"].get(who, {})
        cells = [
            f"{held.get(what, '')}"
            for what in ("files", "sockets", "threads")
            for held in (before, after)
        ]
        text += f"| {who} | " + " | ".join(cells) + " |\n"
    return text


def _verdict(result: Mapping[str, Any]) -> str:
    if not result["failures"]:
        return "Every promise held."
    return "Broken: " + "; ".join(result["failures"]) + "."


def _client_row(client: Mapping[str, Any], capacity: float) -> str:
    counts, counters = client["counts"], client["counters"]
    cells = [
        client["style"],
        f"{capacity:.0f}",
        *(f"{counts.get(kind, 0):,}" for kind in _COUNTED),
        *(f"{client[point]:.1f}" for point in ("p50_ms", "p99_ms", "p999_ms")),
        f"{client['overshoot_ms']:.1f}",
        f"{counters['late']:,}",
        f"{counters['duplicate']:,}",
    ]
    return "| " + " | ".join(cells) + " |\n"


def draw(result: Mapping[str, Any]) -> bytes:
    """An SVG: answers a second, memory, and files with threads, over the time of the load."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "mdp", "svg.fonttype": "none"}):
        figure = Figure(figsize=(10.0, 8.0), layout="constrained")
        FigureCanvasSVG(figure)
        answers, memory, held = figure.subplots(3, 1, sharex=True)
        _draw_answers(answers, result)
        for name, rows in result["series"].items():
            if name.endswith(" held"):
                at, mib, files, threads = np.array(rows, dtype=float).T
                (line,) = memory.plot(at, mib, label=name.removesuffix(" held"), linewidth=0.9)
                held.plot(at, files, color=line.get_color(), linewidth=0.9)
                held.plot(at, threads, color=line.get_color(), linewidth=0.9, linestyle=":")
        memory.set_ylabel("resident memory, MiB")
        memory.legend(ncols=3, fontsize="small")
        held.set_ylabel("files; dotted: threads")
        held.set_xlabel("seconds of load")
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _draw_answers(axes: Any, result: Mapping[str, Any]) -> None:
    calls = [rows for name, rows in result["series"].items() if name.endswith(" calls")]
    at = np.arange(0.0, min(rows[-1][0] for rows in calls), result["minutes"] * 60 / 120)
    rates = [_rate(calls, at, column) for column in (1, 2, 3)]
    axes.stackplot(
        at[1:],
        *rates,
        labels=["complete", "partial", "errors"],
        colors=["tab:green", "tab:olive", "tab:red"],
    )
    for kind, colour in _COLOURS.items():
        times = [moment for moment, _, what in result["happened"] if what == kind]
        axes.plot(times, [0] * len(times), "|", color=colour, markersize=10, label=kind)
    axes.set_ylabel("answers a second")
    axes.legend(ncols=6, fontsize="small")


def _rate(calls: Sequence[Sequence[Sequence[float]]], at: np.ndarray, column: int) -> np.ndarray:
    """Counts a second of all clients between the times `at`."""
    total = np.zeros(len(at))
    for rows in calls:
        table = np.array(rows, dtype=float)
        total += np.interp(at, table[:, 0], table[:, column], left=0.0)
    return np.diff(total) / np.diff(at)
