"""The plan step: from settings and files to a plan, its predictions and its explanation."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from mdp.errors import PlanRefused
from mdp.formats.plan import Plan, TeacherSpec
from mdp.formats.profile import DeviceProfile, read_profiles
from partitioner.estimates.accuracy import fit_views, predictor_for, read_shipped_law, seeing
from partitioner.estimates.accuracy_law import Training
from partitioner.estimates.accuracy_records import read_runs, read_scenes
from partitioner.planner.deadline import DECODING_MS
from partitioner.planner.explain import Explanation, explain
from partitioner.planner.families import families_of
from partitioner.planner.placement import Placements
from partitioner.planner.problem import Problem, Solution, make_problem
from partitioner.planner.search import plan_within
from partitioner.planner.targets import ParetoPoint, nearest_target_ms, pareto, plan_with_accuracy
from partitioner.run.plan_settings import PlanSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and the problem that it solves."""

    plan: Plan
    placements: Placements
    problem: Problem
    #: The nearest target with a plan; None unless the plan is refused and one was found.
    nearest_ms: float | None = None
    pareto: list[ParetoPoint] = field(default_factory=list)
    explanations: list[Explanation] = field(default_factory=list)

    def check(self) -> None:
        """Raise PlanRefused, with the alternatives, if the plan is refused."""
        if not self.plan.refused:
            return
        text = f"plan refused: {self.plan.reason}"
        if self.nearest_ms is not None:
            text += f"; the nearest target with a plan is {self.nearest_ms:g} ms"
        text += "; --anyway makes this plan all the same"
        if self.plan.single_device is not None:
            device = self.plan.single_device.device
            text += f"; the profile of {device} alone gets a plan of one sub-model for it"
        raise PlanRefused(text)

    def as_json(self) -> dict[str, Any]:
        """The plan's keys, and those of predictor, Pareto front and explanations."""
        value: dict[str, Any] = dict(msgspec.to_builtins(self.plan))
        predictor = self.problem.predictor
        value["predictor"] = {
            "teacher_accuracy": None if predictor.assumed else predictor.teacher_accuracy,
            "views": predictor.views,
        }
        value["decoding_ms"] = DECODING_MS
        if self.nearest_ms is not None:
            value["nearest_target_ms"] = self.nearest_ms
        if self.pareto:
            value["pareto"] = msgspec.to_builtins(self.pareto)
        if self.explanations:
            value["explanations"] = msgspec.to_builtins(self.explanations)
        return value


def make_planned(
    teacher: TeacherSpec,
    settings: PlanSettings,
    num_classes: int,
    *,
    training: Training | None = None,
    rows: Collection[str] = (),
    profiles: Sequence[DeviceProfile] | None = None,
    weights: Mapping[str, Path] | None = None,
    explained: bool = False,
    front: bool = False,
) -> Planned:
    """Read runs, and search; raises ConfigError, InputError and PlanRefused.

    `teacher` is that of the settings, and so are `profiles`, read here by default. `training` is
    that of the members, by default a converged one; `weights` are files of pretrained weights by
    timm's name, None without a folder; `rows` names the networks whose classifiers have the data's
    classes.
    """
    known = None if weights is None else set(weights)
    families = families_of(settings.families, known, teacher.shape, num_classes)
    runs = [Path(run) for run in settings.runs]
    predictor = predictor_for(
        read_shipped_law(),
        teacher.shape,
        num_classes=num_classes,
        teacher_accuracy=settings.teacher_accuracy,
        own=read_runs(runs),
        training=training,
    )
    if settings.cameras:
        predictor = seeing(predictor, fit_views(read_scenes(runs)))
    problem = make_problem(
        teacher,
        read_profiles(settings.profiles) if profiles is None else profiles,
        num_classes=num_classes,
        predictor=replace(predictor, pretrained=frozenset(known or ()), rows=frozenset(rows)),
        precisions=settings.precisions(),
        max_energy_j=settings.max_energy_j,
        percentile=settings.percentile,
        client_bps=None if settings.client_mbit is None else 1e6 * settings.client_mbit,
        families=families,
        cameras=settings.cameras,
    )
    solution = _solve(problem, settings)
    plan, nearest_ms = solution.plan, None
    if plan.refused and settings.anyway:
        plan = msgspec.structs.replace(
            plan, refused=False, reason=f"made against advice: {plan.reason}"
        )
    elif plan.refused and settings.min_accuracy is None:
        nearest_ms = nearest_target_ms(problem, plan)
    return Planned(
        nearest_ms=nearest_ms,
        plan=plan,
        placements=solution.placements,
        problem=problem,
        pareto=pareto(problem, settings.latency_ms) if front else [],
        explanations=explain(problem, solution) if explained else [],
    )


def _solve(problem: Problem, settings: PlanSettings) -> Solution:
    if settings.min_accuracy is not None:
        return plan_with_accuracy(problem, settings.min_accuracy, settings.latency_ms)
    assert settings.latency_ms is not None
    return plan_within(problem, settings.latency_ms)
