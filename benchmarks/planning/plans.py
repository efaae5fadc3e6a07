"""Plans of the shipped profiles, with their predictions: what docs/planning.md shows.

    python -m benchmarks.planning.plans [--docs docs]

Nothing is measured here. Plans follow from the shipped profiles and the shipped law, so this is run
again whenever one of them changes.
"""

import argparse
import io
from pathlib import Path

from rich.console import Console

from benchmarks.accuracy.table import Sheet, as_markdown
from benchmarks.harness.page import write_figures
from mdp.files import write_bytes
from mdp.formats.plan import Plan
from mdp.formats.profile import shipped_profiles
from partitioner.cli.plan_plot import draw_plan
from partitioner.cli.plan_tables import print_planned
from partitioner.estimates.accuracy_law import WHOLE
from partitioner.networks.teacher import teacher_spec
from partitioner.planner.design_space import where
from partitioner.planner.make_plan import Planned, PlanOptions, make_planned

TEACHERS = ("vit_base_patch16_224", "vit_small_patch16_224")
TARGETS_MS = (20.0, 50.0, 100.0)
#: What is left out of the five shipped profiles, and what that fleet is called.
FLEETS = {
    "all five": (),
    "without desktop-gpu": ("desktop-gpu",),
    "without both GPUs": ("desktop-gpu", "jetson-orin-nano"),
}
#: The plan that is explained in full.
EXPLAINED = (TEACHERS[0], 20.0, "without desktop-gpu")
_WIDTH = 100


def planned(teacher: str, target_ms: float, fleet: str) -> Planned:
    """A plan of shipped profiles, explained, with its Pareto list."""
    names = [name for name in shipped_profiles() if name not in FLEETS[fleet]]
    return make_planned(
        teacher_spec(teacher, {}), names, PlanOptions(latency_ms=target_ms), 1000,
        explained=True, front=(teacher, target_ms, fleet) == EXPLAINED,
    )  # fmt: skip


def row(plan: Plan, teacher: str, target_ms: float, fleet: str) -> list[str]:
    """One plan as a row of the table."""
    start = [teacher, f"{target_ms:g}", fleet]
    if plan.refused:
        return [*start, f"**refused**: {plan.reason}", "", ""]
    members = "; ".join(
        f"{a.device} {a.vit.image_size} px / {a.vit.patch_size}, "
        f"{a.vit.embed_dim} x {a.vit.depth}"
        + (f", MLP x{a.vit.mlp_ratio:g}" if a.vit.mlp_ratio != 4 else "")
        + (f", {where(a.region)}" if a.region != WHOLE else "")
        + f" ({a.predicted_ms.total:.1f} ms)"
        for a in plan.assignments
    )
    accuracy, one = plan.accuracy, plan.single_device
    together = f"{accuracy.all_in:.1%} / {accuracy.expected:.1%}" if accuracy else ""
    alone = ""
    if one and one.accuracy is not None:
        alone = f"{one.device} {one.accuracy:.1%}, {one.spec.words}"
    return [*start, members, together, alone]


def explanation(shown: Planned) -> str:
    """What `mdp-partition plan --explain` prints."""
    stream = io.StringIO()
    print_planned(shown, Console(file=stream, width=_WIDTH))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def main() -> None:
    """Plan, and write table, explanation and picture."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planning.plans", description=__doc__
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"))
    docs = parser.parse_args().docs
    cases = [(t, ms, fleet) for t in TEACHERS for ms in TARGETS_MS for fleet in FLEETS]
    found = {case: planned(*case) for case in cases}
    columns = ("teacher", "target ms", "fleet", "plan", "all in / expected", "one device")
    sheet = Sheet("Plans", columns, [row(p.plan, *case) for case, p in found.items()])
    explained = found[EXPLAINED]
    figures = (
        f"{as_markdown(sheet)}\n`mdp-partition plan --explain` for `{EXPLAINED[0]}`, "
        f"{EXPLAINED[2]}, at {EXPLAINED[1]:g} ms:\n\n```\n{explanation(explained)}\n```\n"
    )
    write_figures(docs / "planning.md", "benchmarks.planning.plans", figures)
    write_bytes(docs / "planning.svg", draw_plan(explained.plan, explained.pareto, "svg"))


if __name__ == "__main__":
    main()
