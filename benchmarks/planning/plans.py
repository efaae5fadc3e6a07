"""Plans of the shipped profiles with their predictions, for the page on planning.

    python -m benchmarks planning

Nothing is measured: plans follow from the shipped profiles and the shipped law, which is taken to
hold for a converged training of 1,000 classes, though none is on file.
"""

from dataclasses import replace
from functools import cache
from itertools import product

from benchmarks.harness.page import Page
from benchmarks.harness.tables import table
from mdp.formats.plan import Plan
from mdp.formats.profile import profiles_in_package, read_profiles
from partitioner.cli.plan_plot import draw_plan
from partitioner.estimates.accuracy import predictor_for, read_shipped_law
from partitioner.networks.teacher import teacher_spec
from partitioner.planner.families import families_of
from partitioner.planner.make_plan import Planned
from partitioner.planner.problem import make_problem
from partitioner.planner.search import plan_within
from partitioner.planner.targets import pareto

CLASSES = 1000
TEACHERS = ("vit_base_patch16_224",)
TARGETS_MS = (20.0, 50.0, 100.0)
#: Fleet -> those of the five shipped profiles that it lacks.
FLEETS = {
    "all five": (),
    "without desktop-gpu": ("desktop-gpu",),
    "without both GPUs": ("desktop-gpu", "jetson-orin-nano"),
}
#: Column -> families of members.
MEMBERS = {"plain ViTs": None, "every family": ["all"]}
#: The plan whose picture is drawn.
DRAWN = (TEACHERS[0], 20.0, "without both GPUs", "every family")


def make_planned(teacher: str, target_ms: float, fleet: str, members: str) -> Planned:
    names = [name for name in profiles_in_package() if name not in FLEETS[fleet]]
    spec = teacher_spec(teacher, {})
    predictor = predictor_for(read_shipped_law(), spec.shape, num_classes=CLASSES)
    problem = make_problem(
        spec,
        read_profiles(names),
        num_classes=CLASSES,
        predictor=replace(predictor, assumed=False, unknown=""),
        families=families_of(MEMBERS[members], None, spec.shape, CLASSES),
    )
    solution = plan_within(problem, target_ms)
    drawn = (teacher, target_ms, fleet, members) == DRAWN
    return Planned(
        plan=solution.plan,
        placements=solution.placements,
        problem=problem,
        pareto=pareto(problem, target_ms) if drawn else [],
    )


def _together(plan: Plan) -> str:
    accuracy = plan.accuracy
    if plan.refused or accuracy is None or accuracy.all_in is None or accuracy.expected is None:
        return "refused"
    return f"{accuracy.all_in:.1%} / {accuracy.expected:.1%}"


def _alone(plan: Plan) -> str:
    one = plan.single_device
    if one is None or one.accuracy is None:
        return ""
    return f"{one.device}, {one.spec.words}, {one.accuracy:.1%}"


@cache
def _plans() -> dict[tuple[str, float, str, str], Planned]:
    cases = list(product(TEACHERS, TARGETS_MS, FLEETS, MEMBERS))
    return {case: make_planned(*case) for case in cases}


def figures() -> str:
    return table(
        product(TEACHERS, TARGETS_MS, FLEETS),
        ("target ms", "{0[1]:g}"),
        ("fleet", "{0[2]}"),
        ("one device", lambda case: _alone(_plans()[*case, "every family"].plan)),
        *(
            (name, lambda case, name=name: _together(_plans()[*case, name].plan))
            for name in MEMBERS
        ),
    )


def picture() -> bytes:
    drawn = _plans()[DRAWN]
    return draw_plan(drawn.plan, drawn.pareto, "svg")


PAGE = Page("benchmarks.planning.plans", figures, picture)
