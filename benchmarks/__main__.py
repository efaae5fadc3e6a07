"""Write the figures and pictures of all documents again from benchmarks/results; measure nothing.

python -m benchmarks [NAME ...]      # all documents, or some: accuracy, soak, ...
python -m benchmarks --check         # exit code 1 where a document differs from the results
"""

import argparse
import os
import sys
from importlib import import_module

from benchmarks.harness.page import Page
from mdp import console
from mdp.errors import InputError

#: Document -> the module with its `PAGE`, or with `PAGES`, and the key.
PAGES = {
    "accuracy": "accuracy.page",
    "accuracy-law": "accuracy.unseen",
    "crew-assignment": "crew.assignment",
    "crew-factors": "crew.factors",
    "crew-frozen": "crew.frozen",
    "crew-heads": "crew.heads",
    "crew-hooks": "crew.hooks",
    "crew-lengths": "crew.lengths",
    "crew-links": "crew.links",
    "crew-meetings": "crew.meetings",
    "crew-net": "crew.net",
    "crew-next-forward": "crew.next_forward",
    "crew-pace": "crew.pace",
    "crew-parts": "crew.parts",
    "crew-second-order": "crew.second_order",
    "crew-spread": "crew.spread",
    "crew-stages": "crew.stages",
    "crew-slow-lines": "crew.slow_lines",
    "crew-stage-seconds": "crew.stage_seconds",
    "crew-tune": "crew.tune",
    "crew-star": "crew.star",
    "deployed": "deployed.page",
    "deployed-cluster": "keep.__main__:deployed-cluster",
    "depth-cuts": "pilot.depths_page",
    "first-minutes": "newcomer.page:minutes",
    "first-minutes-extras": "newcomer.page:extras",
    "fuzzing": "keep.__main__:fuzz",
    "inspection": "inspection.page",
    "latency": "latency.page",
    "line": "line.page",
    "measured-builds": "pilot.builds",
    "pilot-predictions": "pilot.predictions",
    "planning": "planning.plans",
    "platforms": "keep.__main__:arm",
    "reliability": "faults.page",
    "scenes": "scenes.__main__",
    "scenes-drift": "scenes.drift",
    "scenes-few": "scenes.few",
    "scenes-one-to-six": "scenes.one_to_six",
    "scenes-sent": "scenes.sent",
    "scenes-trained": "scenes.trained",
    "scenes-trays": "scenes.trays",
    "scenes-unknown": "scenes.unknown",
    "scenes-verdict": "scenes.verdict",
    "serving": "serving.__main__",
    "soak": "soak.page",
    "truth": "truth.page",
}


def page_of(name: str) -> Page:
    """One of `PAGES`."""
    module, _, key = PAGES[name].partition(":")
    found = import_module(f"benchmarks.{module}")
    page: Page = found.PAGES[key] if key else found.PAGE
    return page


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(PAGES)):
        raise InputError(f"expected some of {', '.join(PAGES)}, got {unknown[0]!r}")
    stale = []
    for name in options.names or PAGES:
        page = page_of(name)
        if options.check:
            stale += [p for p, new in page.files().items() if p.read_bytes() != new]
        else:
            page.write()
    for path in stale:
        print(f"{os.path.relpath(path)}: differs from benchmarks/results")
    sys.exit(1 if stale else 0)


if __name__ == "__main__":
    console.run(main, "benchmarks")
