"""Answers under chaos as figures for their page."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.harness.page import Page
from benchmarks.harness.results import format_machine, read_result
from benchmarks.harness.tables import table

#: What counts as a broken promise.
BROKEN = ("wrong", "mixed", "unaccounted")
WAYS = {
    "sync": "`classify`, 3 threads",
    "stream": "`stream`, 6 under way",
    "async": "asyncio",
    "classify": "HTTP `/classify`",
    "infer": "HTTP `/infer`",
}


def figures() -> str:
    return "\n\n".join(part for run in read_result("truth")["runs"] for part in _run(run))


def _run(result: Mapping[str, Any]) -> list[str]:
    faults, changes = result["faults"], Counter(result["changes"])
    clients = [
        {**client, "way": WAYS[client["style"]], "counts": Counter(client["counts"])}
        for client in result["clients"]
    ]
    for client in clients:
        client["answers"] = client["counts"]["complete"] + client["counts"]["partial"]
        client["late_share"] = client["counts"]["late"] / max(1, client["counts"]["ended"])
    bad = sum(client["counts"][kind] for client in clients for kind in BROKEN)
    return [
        f"**{result['label']}.** {format_machine(result['machine'])}; {result['seconds'] / 60:.0f} "
        f"minutes, seed {result['seed']}, deadline {result['deadline_ms']:g} ms. "
        f"{faults['kill']} kills, {faults['stop']} stops, {faults['restart']} restarts; "
        f"{changes['changes']} changes of the bundle, {changes['by rollback']} by rollback.",
        f"**{result['answers']:,} answers compared, {bad} wrong, mixed or with an unaccounted "
        f"device{'; broken: ' + '; '.join(result['failures']) if result['failures'] else ''}.**",
        table(
            clients,
            ("asked by", "{way}"),
            ("calls", "{counts[begun]:,}"),
            ("answers", "{answers:,}"),
            ("of all members", "{counts[complete]:,}"),
            *((kind, f"{{counts[{kind}]:,}}") for kind in BROKEN),
            ("errors", "{counts[error]:,}"),
            ("late", "{counts[late]:,}"),
            ("share", "{late_share:.2%}"),
            ("late by ms, p50", "{late_p50_ms:.1f}"),
            ("p99", "{late_p99_ms:.1f}"),
            ("most", "{overshoot_ms:.1f}"),
        ),
    ]


PAGE = Page("benchmarks.truth", figures)
