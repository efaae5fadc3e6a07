"""The figures of docs/results/inspection.md."""

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import format_machine, read_result
from benchmarks.harness.tables import table

#: Ways of scoring and fusing, in words.
WAYS = (
    (("fused", "chosen"), "MDP, as `inspect` chose"),
    (("fused", "maximum"), "the same scores, maximum of surprises"),
    (("fused", "mean"), "the same scores, mean of surprises"),
    (("padim_maximum",), "PaDiM, maximum of plain scores"),
    (("patchcore_maximum",), "PatchCore, maximum of plain scores"),
)
#: Changes of good items, in words.
CHANGES = {
    "light": "28 % more or less light",
    "background": "another belt",
    "pose": "turned and moved four times as much",
}


def _products() -> dict[str, Any]:
    found: dict[str, Any] = read_result("inspection")["products"]
    return found


def _figures(keys: Sequence[str]) -> list[dict[str, Any]]:
    found = []
    for one in _products().values():
        value = one
        for key in keys:
            value = value[key]
        found.append(value)
    return found


def ways() -> str:
    """Defects found by one to four cameras, and the area under the curve."""
    rows = []
    for keys, words in WAYS:
        each = _figures(keys)
        row: dict[str, Any] = {"words": words}
        for count in "1234":
            row[f"found{count}"] = 100 * mean(one[count]["found"] for one in each)
            row[f"auc{count}"] = mean(one[count]["auc"] for one in each)
        rows.append(row)
    return table(
        rows,
        ("", "{words}"),
        *(
            (f"{count} of 4" if count < "4" else "all 4", f"{{found{count}:.1f}}")
            for count in "1234"
        ),
        *((f"AUC, {count}", f"{{auc{count}:.3f}}") for count in "14"),
    )


def draws() -> str:
    """Good items called different and defects found, over draws of those that calibrate."""
    each = [one["resampled"] for one in _products().values()]
    rows = []
    for name, words in (
        ("fitted", "MDP: a shared tail, thresholds by it"),
        ("plain", "plain maximum, the largest good one as threshold"),
    ):
        row: dict[str, Any] = {"words": words}
        for count in "1234":
            for key in ("rejected", "found"):
                row[key + count] = 100 * mean(one[count][name][key] for one in each)
        rows.append(row)
    whole = table(
        rows,
        ("", "{words}"),
        *((f"good called different, {count}", f"{{rejected{count}:.2f}}") for count in "14"),
        *((f"found by {count}", f"{{found{count}:.1f}}") for count in "1234"),
    )
    stated = 100 * mean(one["stated"] for one in each)
    return f"Stated: {stated:.2f} % of good items.\n\n{whole}"


#: Ways of making scores comparable, in words.
TAILS = {"own": "of each camera", "shared": "shared", "none": "none: plain maximum"}


def tails() -> str:
    """Tails and thresholds, over draws of good scenes that calibrate: the mean of products."""
    products: dict[str, Any] = read_result("inspection-tails")["products"]

    def average(units: str, count: str, *keys: str) -> float:
        found: list[float] = []
        for one in products.values():
            value = one[units][count]
            for key in keys:
                value = value[key]
            found.append(value)
        return mean(found)

    rows = []
    for name, words in TAILS.items():
        for threshold, called in (("largest", "largest good scene"), ("tail", "by the tail")):
            row: dict[str, Any] = {"words": words, "threshold": called}
            for count in ("120", "40"):
                row[f"auc{count}"] = average("alike", count, name, "auc")
                for key in ("rejected", "found"):
                    share = average("alike", count, name, f"{threshold}_{key}")
                    row[f"{key}{count}"] = 100 * share
            row["other"] = average("other units", "120", name, "auc")
            rows.append(row)
    stated = {count: 100 * average("alike", count, "stated") for count in ("120", "40")}
    columns = []
    for count in ("120", "40"):
        columns += [
            (f"AUC, {count} scenes", f"{{auc{count}:.4f}}"),
            (f"rejected, stated {stated[count]:.2f}", f"{{rejected{count}:.2f}}"),
            ("found", f"{{found{count}:.1f}}"),
        ]
    return table(
        rows,
        ("tail", "{words}"),
        ("threshold", "{threshold}"),
        *columns,
        ("AUC, other units, 120", "{other:.4f}"),
    )


def kinds() -> str:
    """Defects found by all four cameras at the stated rate, by kind, and by how many see them."""
    rows = []
    for name, title in (("by_kind", "{}"), ("by_seen", "visible to {}")):
        sums: dict[str, list[int]] = {}
        for one in _products().values():
            for key, (found, of) in one[name].items():
                known = sums.setdefault(key, [0, 0])
                known[0] += found
                known[1] += of
        rows += [
            {"what": title.format(key.replace("_", " ")), "found": found, "of": of}
            for key, (found, of) in sums.items()
        ]
    return table(rows, ("defects", "{what}"), ("found", "{found} of {of}"))


def rates() -> str:
    """Good items called different: as stated, in the test, and after changes."""
    rows = []
    for name, one in _products().items():
        everyone = max(one["rejected"], key=len)
        alone = [value for key, value in one["rejected"].items() if "+" not in key]
        row = {
            "name": name,
            "stated": 100 * one["rate"],
            "test": 100 * one["rejected"][everyone],
            "alone": 100 * mean(alone),
            "moved": one["moved_after"]["looks"] or "never",
            "before": len(one["moved_after"]["before"]),
        }
        row |= {key: 100 * one["changed"][key][everyone] for key in CHANGES}
        rows.append(row)
    return table(
        rows,
        ("product", "{name}"),
        ("stated, %", "{stated:.2f}"),
        ("by all four", "{test:.1f}"),
        ("by one, mean", "{alone:.1f}"),
        *((words, f"{{{key}:.0f}}") for key, words in CHANGES.items()),
        ("moved camera named after looks", "{moved}"),
        ("wrongly before", "{before}"),
    )


def blind() -> str:
    """The share of defects that pass without one camera: stated by one half, true by the other."""
    apart, rows = [], []
    for name, one in _products().items():
        sides = one["blind_sides"].values()
        apart += [abs(side["stated"] - side["true"]) for side in sides]
        stated, true = (100 * mean(side[key] for side in sides) for key in ("stated", "true"))
        rows.append({"name": name, "stated": stated, "true": true})
    whole = table(
        rows, ("product", "{name}"), ("stated, %", "{stated:.1f}"), ("true, %", "{true:.1f}")
    )
    near = sum(one <= 0.05 for one in apart)
    return (
        f"{whole}\n\nOf {len(apart)} single sides {near} are within 5 points; they are "
        f"{100 * mean(apart):.1f} apart on average."
    )


def costs() -> str:
    """Time and memory, beside PatchCore's."""
    rows = [
        {
            "name": name,
            "learning": one["learning_s"],
            "good": one["good"],
            "ratio": median(one["time_ratio"]),
            "most": max(one["time_ratio"]),
            "added": one["added_bytes"] / 1e3,
            "search": one["patchcore_search_ms"],
            "memory": one["patchcore_bytes"] / 1e3,
        }
        for name, one in _products().items()
    ]
    return table(
        rows,
        ("product", "{name}"),
        ("good scenes", "{good}"),
        ("learning four cameras, s of one core", "{learning:.0f}"),
        (
            "time of a member with its head, over without: median, largest of four",
            "{ratio:.2f}, {most:.2f}",
        ),
        ("added kB", "{added:.0f}"),
        ("PatchCore: search, ms", "{search:.1f}"),
        ("its memory, kB", "{memory:.0f}"),
    )


def figures() -> str:
    """All of them."""
    parts = (
        ("Defects found at 1 % of good items rejected, %", ways),
        ("At a stated rate, over 40 draws of 100 good scenes that calibrate, %", draws),
        ("Tails and thresholds: six products, all four cameras, 30 draws, %", tails),
        ("Kinds of defects", kinds),
        ("Good items called different, %", rates),
        ("Blind sides", blind),
        ("Cost", costs),
    )
    on = format_machine(read_result("inspection")["machine"])
    return "\n\n".join([f"{on}.", *(f"### {title}\n\n{part()}" for title, part in parts)])


PAGE = Page("benchmarks.inspection", figures)
