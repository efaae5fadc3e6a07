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
#: Cameras in the order in which they are rendered.
CAMERAS = ("top", "left", "right", "back")
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


def _row(words: str, each: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The means of `ranked` figures."""
    row: dict[str, Any] = {"words": words}
    for count in "1234":
        row[f"found{count}"] = 100 * mean(one[count]["found"] for one in each)
        row[f"auc{count}"] = mean(one[count]["auc"] for one in each)
    return row


#: Columns of `_row`.
_FOUND = (
    *((f"{count} of 4" if count < "4" else "all 4", f"{{found{count}:.1f}}") for count in "1234"),
    *((f"AUC, {count}", f"{{auc{count}:.3f}}") for count in "14"),
)


def ways() -> str:
    """Defects found by one to four cameras, and the area under the curve."""
    return table([_row(words, _figures(keys)) for keys, words in WAYS], ("", "{words}"), *_FOUND)


def by_camera() -> str:
    """The area under the curve and the defects found of each camera, and of all together."""
    rows = []
    for name, one in _products().items():
        row: dict[str, Any] = {"product": name}
        single, fused = one["fused"]["chosen"]["1"]["found_by_set"], one["fused"]["chosen"]["4"]
        for place in range(len(CAMERAS)):
            row[f"camera{place}"] = f"{one['alone'][str(place)]:.3f}, {single[str(place)]:.1%}"
        row["together"] = f"{fused['auc']:.3f}, {fused['found']:.1%}"
        rows.append(row)
    each = ((name, f"{{camera{place}}}") for place, name in enumerate(CAMERAS))
    return table(rows, ("product", "{product}"), *each, ("all four", "{together}"))


#: anomalib's models, in words.
RIVALS = {
    "padim_100": "anomalib's PaDiM, 100 of 152 features",
    "padim_152": "anomalib's PaDiM, all 152",
    "patchcore_1": "anomalib's PatchCore, 1 % of the patches",
    "patchcore_10": "anomalib's PatchCore, 10 %",
}


def beside_anomalib() -> str:
    """Defects found by anomalib's models on the same pictures, and what each costs a camera."""
    told, ours = read_result("inspection-anomalib"), _products()
    products: dict[str, Any] = told["products"]
    rows = [
        _row("MDP, as `inspect` chose", [ours[name]["fused"]["chosen"] for name in products])
        | {
            "fit": mean(ours[name]["learning_s"] / 4 for name in products),
            "kept": mean(ours[name]["added_bytes"] for name in products) / 1e6,
            "network": mean(one["mdp_network_ms"] for one in products.values()),
            "ratio": mean(median(ours[name]["time_ratio"]) for name in products),
        }
    ]
    for name, words in RIVALS.items():
        each = [one["ways"][name] for one in products.values() if name in one["ways"]]
        if len(each) < len(products):
            continue
        costs = [one["cost"] for one in each]
        rows.append(
            _row(words, each)
            | {
                "fit": mean(one["fit_s"] for one in costs),
                "kept": mean(one["bytes"] for one in costs) / 1e6,
                "network": mean(one["network_ms"] for one in costs),
                "ratio": mean(one["whole_ms"] / one["network_ms"] for one in costs),
            }
        )
    versions = ", ".join(f"{name} {one}" for name, one in told["versions"].items())
    defects = ", ".join(f"{name} ({one['defects']} defects)" for name, one in products.items())
    whole = table(
        rows,
        ("", "{words}"),
        *_FOUND,
        ("learnt in, s", "{fit:.1f}"),
        ("kept, MB", "{kept:.1f}"),
        ("network, ms", "{network:.1f}"),
        ("with scores, over without", "{ratio:.2f}"),
    )
    return (
        f"{defects}; of a camera: processor time of one thread, and what is kept beside the "
        f"network. {versions}; {format_machine(told['machine'])}.\n\n{whole}"
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


def seen() -> str:
    """Areas under the curve by how many cameras see a defect: the mean over defects."""
    rows = []
    for number in range(1, len(CAMERAS) + 1):
        each = [
            (one["auc_by_seen"][str(number)], one["by_seen"][str(number)][1])
            for one in _products().values()
            if str(number) in one["auc_by_seen"]
        ]
        count = sum(defects for _, defects in each)
        row: dict[str, Any] = {"number": number, "defects": count}
        for key in ("alone", "all"):
            row[key] = sum(areas[key] * defects for areas, defects in each) / count
        rows.append(row)
    return table(
        rows,
        ("seen by", "{number}"),
        ("defects", "{defects}"),
        ("AUC of one camera, the mean", "{alone:.3f}"),
        ("AUC of all four", "{all:.3f}"),
    )


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
    """Tables of stated and true shares of missed defects, by number and kind of defects."""
    products: dict[str, Any] = read_result("inspection-blind")["products"]
    counts = [
        count
        for count in next(iter(products.values()))["counts"]
        if all(count in one["counts"] for one in products.values())
    ]
    rows = []
    for count in counts:
        each = [one["counts"][count] for one in products.values()]
        row: dict[str, Any] = {"count": count}
        for key in ("near", "apart", "held", "width"):
            row[key] = 100 * mean(one[key] for one in each)
        rows.append(row)
    whole = table(
        rows,
        ("defects that measured", "{count}"),
        ("sides stated within 5 points, %", "{near:.0f}"),
        ("apart on average, points", "{apart:.1f}"),
        ("truth in the range, %", "{held:.1f}"),
        ("width of the range, points", "{width:.0f}"),
    )
    kinds: dict[str, list[dict[str, float]]] = {}
    for one in products.values():
        for kind, found in one["kinds"].items():
            kinds.setdefault(kind, []).append(found)
    by_kind = table(
        [
            {
                "kind": kind.replace("_", " "),
                "defects": sum(one["defects"] for one in each),
                **{key: 100 * mean(one[key] for one in each) for key in ("stated", "true", "held")},
            }
            for kind, each in kinds.items()
        ],
        ("kind that was not measured", "{kind}"),
        ("defects", "{defects}"),
        ("stated by the others, %", "{stated:.1f}"),
        ("true, %", "{true:.1f}"),
        ("truth in the range, %", "{held:.0f}"),
    )
    sides = ", ".join(
        f"{name} {one['defects']} defects, {100 * min(one['missed'].values()):.1f} to "
        f"{100 * max(one['missed'].values()):.1f} % missed"
        for name, one in products.items()
    )
    return f"One camera missing: {sides}.\n\n{whole}\n\n{by_kind}"


#: Parts of a line of inspected items, in words.
PARTS = {"all": "all four agents", "gone": "one agent killed"}


def line() -> str:
    """Good and defective items on a line of real agents."""
    told = read_result("inspection-line")
    rows = [
        {"words": words, **told["parts"][part]}
        for part, words in PARTS.items()
        if part in told["parts"]
    ]
    scenes = told["scenes"]
    parts = table(
        rows,
        ("", "{words}"),
        ("records", "{records}"),
        ("in time", "{in_time}"),
        ("of all agents", "{whole}"),
        ("called as the bundle calls the pictures", "{as_bundle}"),
        ("passed just where normal", "{right}"),
        ("good: different, of", "{good_different} of {good}"),
        ("defective: different, of", "{defective_different} of {defective}"),
        ("with a blind side named", "{named_blind}"),
    )
    lost, late = told["over_mqtt"], told["latency_ms"]
    held = {name: f"{value:.0f}" for name, value in told["memory_mib"].items()}
    return (
        f"{told['items']:,} items, one every {told['every_s']:g} s, of {scenes['good']} good and "
        f"{scenes['defective']} defective scenes of {told['product']}: {told['lost']} lost, "
        f"{told['twice']} twice, at the broker {lost['lost']} and {lost['twice']}; verdicts after "
        f"{late['median']:.0f} ms (median), {late['p99']:.0f} (99 %), {late['most']:.0f} (most). "
        f"The four agents together hold {held['agents_without_heads']} MiB without heads, "
        f"{held['agents_start']} with them, and {held['agents_end']} before one is killed. "
        f"{format_machine(told['machine'])}.\n\n{parts}"
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


def board() -> str:
    """Table of learning with what a board has."""
    told = read_result("inspection-board")
    rows = [{"limit": limit, **one} for limit, one in told["limits"].items()]
    for row in rows:
        row["ended"] = "learnt" if row["works"] else "ended by the kernel"
    whole = table(
        rows,
        ("memory that it may take, MiB", "{limit}"),
        ("outcome", "{ended}"),
        ("processor time, s", "{processor_s:.1f}"),
        ("held at most, MiB", "{peak_mib}"),
    )
    without = " without torch" if not told["modules"]["torch"] else ""
    return (
        f"{told['product']}, {told['good']} good scenes of four cameras, the whole command on one "
        f"core, in an environment{without} of {told['installed_mb']} MB; "
        f"{format_machine(told['machine'])}.\n\n{whole}"
    )


def figures() -> str:
    """All of them."""
    parts = (
        ("Defects found at 1 % of good items rejected, %", ways),
        ("By camera: area under the curve, and defects found at 1 % of good items", by_camera),
        ("Beside anomalib: defects found at 1 % of good items rejected, %", beside_anomalib),
        ("At a stated rate, over 40 draws of 100 good scenes that calibrate, %", draws),
        ("Tails and thresholds: six products, all four cameras, 30 draws, %", tails),
        ("Kinds of defects", kinds),
        ("Defects by how many cameras see them", seen),
        ("Good items called different, %", rates),
        ("Blind sides", blind),
        ("A line of items", line),
        ("Cost", costs),
        ("Learning with what a board has", board),
    )
    on = format_machine(read_result("inspection")["machine"])
    return "\n\n".join([f"{on}.", *(f"### {title}\n\n{part()}" for title, part in parts)])


PAGE = Page("benchmarks.inspection", figures)
