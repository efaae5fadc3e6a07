"""The figures of docs/results/lines.md."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import format_machine, read_result
from benchmarks.harness.tables import table

#: Parts of a played run, in their order.
PARTS = {
    "well": "all well",
    "stragglers": "one agent stopped for 0.7 s at every fourth",
    "covered": "one camera covered",
    "killed": "one board killed",
    "back": "started again",
}


def tabulate_runs() -> str:
    """Runs of played lines, by trigger and by part."""
    runs = read_result("line-played")["runs"]
    rows = [
        {
            **run,
            "median": run["latency_ms"]["median"],
            "p99": run["latency_ms"]["p99"],
            "late": run["records"] - sum(part["in_time"] for part in run["parts"].values()),
            "mqtt": _elsewhere(run["over_mqtt"]),
            "http": _elsewhere(run["over_http"]),
            "memory": f"{run['memory_mib']['watcher_tenth']:.0f}, "
            f"{run['memory_mib']['watcher_end']:.0f}",
            "load": run["machine"]["load_before"],
        }
        for run in runs
    ]
    whole = table(
        rows,
        ("trigger", "{trigger}"),
        ("items", "{items}"),
        ("records", "{records}"),
        ("lost", "{lost}"),
        ("twice", "{twice}"),
        ("the same over MQTT, over HTTP", "{mqtt}, {http}"),
        ("verdict ms, median, p99", "{median:.0f}, {p99:.0f}"),
        ("late", "{late}"),
        ("watcher MiB, at a tenth, at the end", "{memory}"),
        ("kept", "{kept[items]}"),
        ("load before", "{load:g}"),
    )
    parts = []
    for name, words in PARTS.items():
        sums: dict[str, int] = {}
        for run in runs:
            for key, value in run["parts"].get(name, {}).items():
                sums[key] = sums.get(key, 0) + value
        known = sums["records"] - sums.get("of_no_class", 0)
        parts.append({"words": words, **sums, "known": known})
    by_part = table(
        parts,
        ("items", "{words}"),
        ("records", "{records}"),
        ("in time", "{in_time}"),
        ("with a suspect", "{with_suspects}"),
        ("with all four cameras", "{whole}"),
        ("of these, class as the scene has alone", "{whole_as_alone}"),
        ("right, of a class", "{right} of {known}"),
        ("called unknown, of no class", "{called_unknown} of {of_no_class}"),
    )
    on = format_machine(runs[0]["machine"])
    every = f"{on}; an item every {runs[0]['every_s']:g} s."
    return f"{every}\n\n{whole}\n\nAll runs by part:\n\n{by_part}"


def _elsewhere(told: Mapping[str, int]) -> str:
    return f"{told['records']}"


def rules() -> str:
    """Ways to tell the right part from others, with all cameras and with each lost."""
    told = read_result("line-rules")
    by_way: dict[str, list[Mapping[str, Any]]] = {}
    for row in told["rows"]:
        by_way.setdefault(row["way"], []).append(row)
    rows = []
    for way, found in by_way.items():
        whole = next(row for row in found if row["lost"] == "none")
        lost = [row for row in found if row["lost"] != "none"]
        passed = [_share([row], "right") for row in lost]
        stopped = (_share([whole], "right"), mean(passed), min(passed))
        row = {"way": way, "stops": ", ".join(f"{100 - share:.1f}" for share in stopped)}
        for kind in ("twin", "other", "unknown"):
            row[kind] = f"{_share([whole], kind):.1f}, {_share(lost, kind):.1f}"
        rows.append(row)
    words = (
        "Per cent of items, with four cameras, and with one lost (mean; of stops also the worst): "
        f"{told['scenes']} scenes of 12 classes, each in turn the right part, and "
        f"{told['unknown']} of no class.\n\n"
    )
    return words + table(
        rows,
        ("passes by", "{way}"),
        ("right part stopped", "{stops}"),
        ("its twin passed", "{twin}"),
        ("another class passed", "{other}"),
        ("of no class, passed", "{unknown}"),
    )


def _share(rows: Sequence[Mapping[str, Any]], kind: str) -> float:
    return float(100 * mean(row.get(f"{kind}_passed", 0) / row[kind] for row in rows))


def day() -> str:
    """A day that is played fast."""
    told = read_result("line-day")
    memory, bytes_ = told["memory_mib"], ("bytes_now", "most_bytes", "bound_bytes")
    some = [memory[0], memory[len(memory) // 2], memory[-1]]
    rows = [
        ("items, records", [told["items"], told["records"]]),
        ("lost or twice, out of order", [told["lost_or_twice"], 0 if told["in_order"] else 1]),
        ("resident MiB after 1/24, 1/2 and all", some),
        ("kept in all, left out, there at the end",
         [told["kept"], told["left_out"], told["kept_now"]]),
        ("bytes at the end, at most, bound", [told[key] for key in bytes_]),
        ("seconds", [told["took_s"]]),
    ]  # fmt: skip
    cells = [(what, "; ".join(f"{value:,}" for value in values)) for what, values in rows]
    return table(cells, ("a day", "{0[0]}"), ("", "{0[1]}"))


def second_pass() -> str:
    """Points gained by kept items that were put right, by the order in which they were."""
    result = read_result("line-second-pass")
    by_way: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        by_way.setdefault((row["each"], row["way"]), []).append(row)
    rows = []
    for (each, way), found in by_way.items():
        gains = [100 * (row["after"] - row["before"]) for row in found]
        rows.append({
            "each": each, "way": way, "draws": len(found),
            "before": 100 * mean(row["before"] for row in found),
            "wrong": mean(row["wrong"] for row in found), "gain": mean(gains),
            "error": stdev(gains) / len(gains) ** 0.5,
        })  # fmt: skip
    words = (
        f"{result['mended']} of {result['line']} items of {result['classes']} classes put right; "
        "means of draws, of the gain with its standard error.\n\n"
    )
    return words + table(
        rows,
        ("scenes taught of a class", "{each}"),
        ("put right", "{way}"),
        ("draws", "{draws}"),
        ("right before, %", "{before:.1f}"),
        ("of these, wrongly answered", "{wrong:.1f}"),
        ("points gained", "{gain:+.1f} ± {error:.1f}"),
    )


def figures() -> str:
    """All of the page's figures."""
    parts = {
        "Played": tabulate_runs(),
        "Rules": rules(),
        "A second pass": second_pass(),
        "A day": day(),
    }
    return "\n\n".join(f"### {title}\n\n{part}" for title, part in parts.items())


PAGE = Page("benchmarks.line", figures)
