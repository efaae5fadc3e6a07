"""Plans of the shipped profiles, with their predictions: what the page on planning shows.

    python -m benchmarks planning

Nothing is measured here. Plans follow from the shipped profiles and the shipped law, so this is run
again whenever one of them changes.
"""

import io
from functools import cache
from itertools import product

from rich.console import Console

from benchmarks.harness.page import Page
from benchmarks.harness.tables import table
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
#: What members may be of, and what that is called.
MEMBERS = {"plain ViTs": None, "every family": ["all"]}
#: The plan that is explained in full.
EXPLAINED = (TEACHERS[0], 20.0, "without both GPUs", "every family")
_WIDTH = 100


def planned(teacher: str, target_ms: float, fleet: str, members: str) -> Planned:
    names = [name for name in shipped_profiles() if name not in FLEETS[fleet]]
    return make_planned(
        teacher_spec(teacher, {}), names, PlanOptions(latency_ms=target_ms), 1000,
        families=MEMBERS[members], explained=True,
        front=(teacher, target_ms, fleet, members) == EXPLAINED,
    )  # fmt: skip


def _members(plan: Plan) -> str:
    if plan.refused:
        return f"**refused**: {plan.reason.partition(';')[0]}"
    return "; ".join(
        f"{a.device} {a.spec.words}"
        + (f", MLP x{a.submodel.mlp_ratio:g}" if a.submodel and a.submodel.mlp_ratio != 4 else "")
        + (f", {where(a.region)}" if a.region != WHOLE else "")
        + f" ({a.predicted_ms.total:.1f} ms)"
        for a in plan.assignments
    )


def _together(plan: Plan) -> str:
    accuracy = None if plan.refused else plan.accuracy
    return f"{accuracy.all_in:.1%} / {accuracy.expected:.1%}" if accuracy else ""


def _alone(plan: Plan) -> str:
    one = None if plan.refused else plan.single_device
    if one is None or one.accuracy is None:
        return ""
    return f"{one.device} {one.accuracy:.1%}, {one.spec.words}"


def explanation(shown: Planned) -> str:
    """What `mdp-partition plan --explain` prints, of the members only the first in words."""
    stream = io.StringIO()
    print_planned(shown, Console(file=stream, width=_WIDTH))
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    second = next(n for n, line in enumerate(lines) if line.endswith("(member 1)"))
    pareto = next(n for n, line in enumerate(lines) if n > second and line.startswith("┏")) - 1
    return "\n".join([*lines[:second], "...", *lines[pareto:]])


@cache
def _plans() -> dict[tuple[str, float, str, str], Planned]:
    cases = list(product(TEACHERS, TARGETS_MS, FLEETS, MEMBERS))
    return {case: planned(*case) for case in cases}


def figures() -> str:
    plans = table(
        [(*case, found.plan) for case, found in _plans().items()],
        ("teacher", "{0[0]}"),
        ("target ms", "{0[1]:g}"),
        ("fleet", "{0[2]}"),
        ("members of", "{0[3]}"),
        ("plan", lambda row: _members(row[4])),
        ("all in / expected", lambda row: _together(row[4])),
        ("one device", lambda row: _alone(row[4])),
        title="Plans",
    )
    return (
        f"{plans}\n\n`mdp-partition plan --families all --explain` for `{EXPLAINED[0]}`, "
        f"{EXPLAINED[2]}, at {EXPLAINED[1]:g} ms:\n\n```\n{explanation(_plans()[EXPLAINED])}\n```"
    )


def picture() -> bytes:
    explained = _plans()[EXPLAINED]
    return draw_plan(explained.plan, explained.pareto, "svg")


PAGE = Page("benchmarks.planning.plans", figures, picture)
