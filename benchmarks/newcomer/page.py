"""The figures of docs/results/first-minutes.md."""

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


PAGE = Page("benchmarks.newcomer", figures)
