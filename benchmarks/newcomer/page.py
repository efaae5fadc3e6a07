"""The figures of docs/results/first-minutes.md."""

from collections.abc import Callable, Mapping

from benchmarks.harness.page import Page
from benchmarks.harness.results import format_machine, read_result
from benchmarks.harness.tables import table
from benchmarks.newcomer.ways import ways


def figures() -> str:
    """A row for each way."""
    result, known = read_result("newcomer"), ways()
    rows = [
        {
            "what": known[name].what,
            **found,
            **{key[:-6]: f"{found[key] / 1e6:,.0f}" for key in found if key.endswith("_bytes")},
        }
        for name, found in result["ways"].items()
    ]
    return "\n\n".join(
        [
            f"The wheel has {result['wheel_bytes'] / 1e6:.1f} MB; "
            f"{format_machine(result['machine'])}.",
            table(
                rows,
                ("way", "{what}"),
                ("commands", "{commands}"),
                ("words of its page", lambda row: row["words"] or ""),
                ("installed after, s", "{installed_s:.0f}"),
                ("seen after, s", "{end_s:.0f}"),
                ("of processor time, s", "{processor_s:.0f}"),
                ("fetched, MB", "{fetched}"),
                ("clone, MB", "{clone}"),
                ("on disk, MB", "{disk}"),
                ("of it caches, MB", "{cache}"),
                ("load before", "{load_before:.1f}"),
            ),
        ]
    )


def tabulate_extras() -> str:
    """A row for each extra of the wheel, with each Python that tried it."""
    result = read_result("release")
    trials = {(one["extra"], one["python"]): one for one in result["trials"]}
    pythons = sorted({python for _, python in trials})

    def cell(extra: str, python: str) -> str:
        found = trials.get((extra, python))
        if found is None:
            return "not tried"
        return found["fault"] or f"{found['megabytes']:,.0f} MB, {found['seconds']:.0f} s"

    rows = [
        {"extra": f"`{extra}`" if extra else "none"} | {one: cell(extra, one) for one in pythons}
        for extra in dict.fromkeys(extra for extra, _ in trials)
    ]
    machine = f"{result['cores']} virtual cores, load {result['load']:g}, {result['date']}"
    columns = [(name.removeprefix("python"), _at(name)) for name in pythons]
    return f"{machine}.\n\n{table(rows, ('extra', '{extra}'), *columns)}"


def _at(key: str) -> Callable[[Mapping[str, str]], str]:
    return lambda row: row[key]


PAGE = Page("benchmarks.newcomer", figures)
EXTRAS = Page("tools.release", tabulate_extras)
PAGES = {"minutes": PAGE, "extras": EXTRAS}
