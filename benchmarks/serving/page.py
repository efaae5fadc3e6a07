"""Every part of the benchmark that was ever run, as figures for its page."""

from benchmarks.harness.page import Page
from benchmarks.harness.results import RESULTS, kept, measured_on
from benchmarks.harness.tables import table
from benchmarks.serving import dead_device, gateway, many_agents, overhead, overshoot, stream_rate

PARTS = {
    part.NAME: part
    for part in (overhead, dead_device, overshoot, stream_rate, many_agents, gateway)
}


def figures() -> str:
    blocks = []
    for name, part in PARTS.items():
        if (RESULTS / f"serving-{name}.json").is_file():
            outcome = kept(f"serving-{name}")
            said = measured_on(outcome["machine"])
            blocks.append(f"**{name}** ({said})\n\n{table(outcome['rows'], *part.COLUMNS)}")
    return "\n\n".join(blocks)


PAGE = Page("benchmarks.serving", figures)
