"""The plan step: what a user asks for, from files and options to a plan and its explanation."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from mdp.errors import InputError, PlanRefused
from mdp.files import Record
from mdp.formats.plan import Plan, TeacherSpec
from mdp.formats.profile import Precision, read_profiles
from partitioner.estimates.accuracy import FittedLaw, predictor_for, shipped_law
from partitioner.estimates.accuracy_law import Training
from partitioner.estimates.accuracy_records import read_runs
from partitioner.estimates.batching import with_batches
from partitioner.planner.deadline import DECODING_MS, deadline_ms
from partitioner.planner.explain import Explanation, explain
from partitioner.planner.families import families_of
from partitioner.planner.nearest import nearest_target_ms
from partitioner.planner.pareto import ParetoPoint, pareto, plan_with_accuracy
from partitioner.planner.problem import FP32, Problem, make_problem
from partitioner.planner.search import plan_within
from partitioner.run.weights import weights_in

PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class PlanOptions(Record, frozen=True):
    """What a plan has to keep, and what its accuracy is predicted from."""

    latency_ms: Annotated[
        float | None, Meta(description="Target of one answer, in milliseconds")
    ] = None
    percentile: Annotated[
        float | None,
        Meta(
            description="What percentage of the answers is to be complete within the target, for "
            "instance 95; default: each member's typical answer is within it"
        ),
    ] = None
    min_accuracy: Annotated[
        float | None,
        Meta(
            description="Look for the quickest plan whose expected accuracy is predicted to be at "
            "least this share; --latency-ms is then the most that it may take"
        ),
    ] = None
    max_energy_j: Annotated[
        float | None,
        Meta(description="Joules that one answer may take on all devices together"),
    ] = None
    teacher_accuracy: Annotated[
        float | None,
        Meta(
            description="Share of pictures that the teacher is right on; default: as measured in "
            "--runs of this teacher, else 0.8"
        ),
    ] = None
    client_mbit: Annotated[
        float | None,
        Meta(
            description="What the client's own network port carries, in Mbit/s: all crops leave "
            "through it; default: as much as the quickest of the profiles' links; inf: no limit"
        ),
    ] = None
    any_precision: Annotated[
        bool, Meta(description="Plan with every precision that a profile has measured")
    ] = False
    anyway: Annotated[
        bool, Meta(description="Keep a plan that would be refused; it says what speaks against it")
    ] = False

    def check(self) -> None:
        """Raise InputError for a value out of range, or without anything to aim at."""
        if self.latency_ms is None and self.min_accuracy is None:
            raise InputError("expected --latency-ms, --min-accuracy or both, got neither")
        for option, value in (
            ("--latency-ms", self.latency_ms),
            ("--max-energy-j", self.max_energy_j),
        ):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise InputError(f"{option}: expected a number above 0, got {value:g}")
        if self.client_mbit is not None:
            checked_client_mbit(self.client_mbit)
        if self.percentile is not None and not 50 <= self.percentile <= 99.9:
            raise InputError(
                f"--percentile: expected a number from 50 to 99.9, got {self.percentile:g}"
            )
        for option, value in (
            ("--min-accuracy", self.min_accuracy),
            ("--teacher-accuracy", self.teacher_accuracy),
        ):
            if value is not None and not 0 < value < 1:
                raise InputError(f"{option}: expected a share above 0 and below 1, got {value:g}")


def checked_client_mbit(client_mbit: float) -> float:
    """`client_mbit` if a port can carry it, infinity included; raises InputError."""
    if not client_mbit > 0:
        raise InputError(f"--client-mbit: expected a number above 0, got {client_mbit:g}")
    return client_mbit


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with the problem that it solves."""

    plan: Plan
    problem: Problem
    law: FittedLaw
    #: Of a refused plan: the nearest target for which there is a plan, where one was found.
    nearest_ms: float | None = None
    pareto: list[ParetoPoint] = field(default_factory=list)
    explanations: list[Explanation] = field(default_factory=list)

    def check(self) -> None:
        """Raise PlanRefused, with what to do instead, if the search marked the plan so."""
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
        """The plan's own keys, and what was asked for beside it."""
        value: dict[str, Any] = dict(msgspec.to_builtins(self.plan))
        predictor = self.problem.predictor
        value["predictor"] = {
            "teacher_accuracy": predictor.teacher_accuracy,
            "assumed": predictor.assumed,
            "typical_error": predictor.typical_error,
            "unknown": predictor.unknown,
        }
        value["decoding_ms"] = DECODING_MS
        if self.nearest_ms is not None:
            value["nearest_target_ms"] = self.nearest_ms
        if self.pareto:
            value["pareto"] = msgspec.to_builtins(self.pareto)
        if self.explanations:
            value["explanations"] = msgspec.to_builtins(self.explanations)
        return value


def precisions_of(named: Sequence[str] | None, any_precision: bool) -> tuple[Precision, ...]:
    """The precisions to plan with; fp32 unless others are asked for. Raises InputError."""
    if any_precision:
        return PRECISIONS
    for name in named or ():
        if name not in PRECISIONS:
            raise InputError(f"--precision: expected some of {', '.join(PRECISIONS)}, got {name!r}")
    return tuple(p for p in PRECISIONS if p in (named or FP32))


def make_planned(
    teacher: TeacherSpec,
    profiles: Sequence[str],
    options: PlanOptions,
    num_classes: int,
    *,
    precisions: Sequence[Precision] = FP32,
    runs: Sequence[Path] = (),
    training: Training | None = None,
    rows: Collection[str] = (),
    families: Sequence[str] | None = None,
    weights: Path | None = None,
    explained: bool = False,
    front: bool = False,
) -> Planned:
    """Read profiles and runs, and search; raises ConfigError, InputError and PlanRefused.

    `training` is what members will have; without it, what as long as it takes brings. `families`
    and the folder `weights` say what members may be of: see `planner.families`; `rows` names the
    networks whose classifiers have the data's classes.
    """
    known = None if weights is None else weights_in(weights)
    allowed = families_of(families, known, teacher.shape, num_classes)
    own = read_runs(runs)
    law = shipped_law()
    devices = read_profiles(profiles)
    predictor = predictor_for(
        law,
        teacher.shape,
        num_classes=num_classes,
        teacher_accuracy=options.teacher_accuracy,
        own=own,
        training=training,
    )
    problem = make_problem(
        teacher,
        devices,
        num_classes=num_classes,
        predictor=replace(predictor, pretrained=frozenset(known or ()), rows=frozenset(rows)),
        precisions=precisions,
        max_energy_j=options.max_energy_j,
        percentile=options.percentile,
        client_bps=None if options.client_mbit is None else 1e6 * options.client_mbit,
        families=allowed,
    )
    plan = with_batches(_searched(problem, options), devices)
    nearest_ms = None
    if plan.refused and options.anyway:
        plan = msgspec.structs.replace(
            plan, refused=False, reason=f"made against advice: {plan.reason}"
        )
    elif plan.refused and options.min_accuracy is None:
        nearest_ms = nearest_target_ms(problem, plan)
    return Planned(
        nearest_ms=nearest_ms,
        plan=msgspec.structs.replace(plan, deadline_ms=deadline_ms(problem, plan)),
        problem=problem,
        law=law,
        pareto=pareto(problem, options.latency_ms) if front else [],
        explanations=explain(problem, plan) if explained else [],
    )


def _searched(problem: Problem, options: PlanOptions) -> Plan:
    if options.min_accuracy is not None:
        return plan_with_accuracy(problem, options.min_accuracy, options.latency_ms)
    assert options.latency_ms is not None
    return plan_within(problem, options.latency_ms)
