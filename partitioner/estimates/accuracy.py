"""What accuracy a member adds: the law of `accuracy_law`, fitted to recorded runs. Pure.

Exponents are fitted to members alone, what members add to each other to measured subsets. Every
source of runs counts the same, however many runs it has. Where the runs say little about an
exponent, a stated prior holds it. How far the law is off is measured by
leaving runs out and predicting them from their shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import numpy as np
from msgspec import json

from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import NetworkSpec, Region, Spec, SubModelSpec
from partitioner.estimates.accuracy_law import (
    AccuracyLaw,
    Array,
    Member,
    accuracy_of,
    capabilities,
    capability_of,
    features,
    model_of,
    together,
    view_of,
)
from partitioner.estimates.accuracy_networks import network_capability
from partitioner.estimates.accuracy_records import RecordedRun

#: Where the teacher was never measured, planning takes it to be right on this share of pictures.
ASSUMED_TEACHER_ACCURACY = 0.8
_SHIPPED = "accuracy_law.json"
#: What exponents are taken to be before any run was seen, and how many sources that counts for.
#: Fitted with multiply-accumulates as the only feature the runs give 0.03 per factor e; these grow
#: with the square of the width, with depth and with tokens. That a coarser picture and a part of
#: the square cost as much is a guess. No exponent falls below half of this: nothing is for free.
_PRIOR, PRIOR_WEIGHT = (0.06, 0.03, 0.03, 0.03, 0.03), 0.1
#: What is tried for the law's other constants.
_SHARPNESS = np.geomspace(4, 100, 53)
_OVERLAPS = np.linspace(0, 0.9, 19)
#: Members of the user's own runs that have to be seen before half of their mean deviation from the
#: law is believed: about what separates two trainings of one shape, over what separates sources.
_HALF_BELIEVED = 2.0


class LawErrors(Record, frozen=True):
    """Mean absolute errors, as fractions of pictures, of runs predicted from shapes alone."""

    #: A member alone, where its shape was left out of the fit.
    shape_left_out: float
    #: Any measured subset, where its run was left out.
    run_left_out: float
    #: Any measured subset, where everything from that source was left out.
    source_left_out: float


class FittedLaw(Record, frozen=True):
    """A law, how far it is off, and what it was fitted to."""

    law: AccuracyLaw
    errors: LawErrors
    runs: int
    members: int
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictor:
    """A law applied to one teacher on one data set."""

    law: AccuracyLaw
    teacher: SubModelSpec
    teacher_accuracy: float
    #: Whether that accuracy is an assumption.
    assumed: bool
    #: Factor on capabilities that runs of this teacher showed; 1 without any.
    factor: float
    typical_error: float
    num_classes: int

    def of_shapes(self, shrinkage: Array) -> Array:
        """Capability `[n]` of shapes by their `features` `[n, 5]`."""
        return self.factor * capabilities(self.law, self.teacher_accuracy, shrinkage)

    def of_specs(self, specs: Sequence[Spec], regions: Sequence[Region]) -> Array:
        """Capability `[n]` of members of any family, each with the region that it sees.

        Raises InputError for a network that the catalogue does not have.
        """
        values = np.zeros(len(specs))
        plain = [k for k, spec in enumerate(specs) if isinstance(spec, SubModelSpec)]
        shapes = [spec for spec in specs if isinstance(spec, SubModelSpec)]
        if shapes:
            seen = [regions[k] for k in plain]
            values[plain] = self.of_shapes(features(self.teacher, shapes, seen))
        for k, spec in enumerate(specs):
            if isinstance(spec, NetworkSpec):
                values[k] = network_capability(
                    self.law, self.teacher, self.teacher_accuracy, spec, regions[k]
                )
        return values

    def accuracy(self, capability: float) -> float:
        """Share of right answers."""
        return float(accuracy_of(np.array(capability), self.num_classes))


def shipped_law() -> FittedLaw:
    """The law fitted to the runs that come with MDP."""
    content = (resources.files("partitioner.estimates") / _SHIPPED).read_bytes()
    return json.decode(content, type=FittedLaw)


def predictor_for(
    fitted: FittedLaw,
    teacher: SubModelSpec,
    *,
    num_classes: int,
    teacher_accuracy: float | None = None,
    own: Sequence[RecordedRun] = (),
) -> Predictor:
    """The law for a teacher; `own` are the user's runs, of which those of this shape calibrate it.

    A given accuracy counts before a measured one, and that before the assumed one.
    """
    mine = [run for run in own if run.teacher == teacher]
    known = teacher_accuracy
    if known is None and mine:
        known = float(np.mean([run.teacher_accuracy for run in mine]))
    if known is not None and not 0 < known < 1:
        raise InputError(f"expected the teacher's accuracy above 0 and below 1, got {known:g}")
    return Predictor(
        law=fitted.law,
        teacher=teacher,
        teacher_accuracy=ASSUMED_TEACHER_ACCURACY if known is None else known,
        assumed=known is None,
        factor=_factor(fitted.law, mine),
        typical_error=fitted.errors.run_left_out if mine else fitted.errors.source_left_out,
        num_classes=num_classes,
    )


def _factor(law: AccuracyLaw, runs: Sequence[RecordedRun]) -> float:
    """By what the members of `runs` are more capable than the law says, believed in part."""
    deviations = []
    for run in runs:
        predicted = _capabilities(law, run)
        for k, accuracy in _alone(run).items():
            deviations.append(np.log(capability_of(accuracy) / predicted[k]))
    if not deviations:
        return 1.0
    believed = len(deviations) / (len(deviations) + _HALF_BELIEVED)
    return float(np.exp(believed * np.mean(deviations)))


def fit(runs: Sequence[RecordedRun]) -> FittedLaw:
    """Fit the law and measure its errors; raises InputError for no usable runs."""
    return FittedLaw(
        law=fit_law(runs),
        errors=LawErrors(
            shape_left_out=_left_out(runs, _shape_key, alone=True),
            run_left_out=_left_out(runs, _run_key),
            source_left_out=_left_out(runs, _source_key),
        ),
        runs=len(runs),
        members=sum(len(run.members) for run in runs),
        sources=tuple(sorted({run.source for run in runs})),
    )


def fit_law(runs: Sequence[RecordedRun]) -> AccuracyLaw:
    """The constants that suit the runs best; raises InputError for no usable runs."""
    exponents = _fit_exponents(runs)
    sharpness, same_view, same_model, same_region = _fit_together(runs)
    return AccuracyLaw(
        exponents=exponents,
        sharpness=sharpness,
        same_view=same_view,
        same_model=same_model,
        same_region=same_region,
    )


def _fit_exponents(runs: Sequence[RecordedRun]) -> tuple[float, float, float, float, float]:
    """Non-negative least squares on the logarithm of members' capabilities over the teacher's.

    The prior takes part as one more observation of each exponent.
    """
    from scipy.optimize import nnls

    rows, wanted, sources = [], [], []
    for run in runs:
        top = capability_of(run.teacher_accuracy)
        shrinkage = _features(run)
        for k, accuracy in _alone(run).items():
            rows.append(shrinkage[k])
            wanted.append(-np.log(capability_of(accuracy) / top) / top)
            sources.append(run.source)
    if not rows:
        raise InputError("expected recorded runs with members that were measured alone")
    weights = _source_weights(sources)
    least = np.array(_PRIOR) / 2
    prior = PRIOR_WEIGHT**0.5 * np.eye(len(_PRIOR))
    seen = np.array(rows)
    beyond = nnls(
        np.vstack([seen * weights[:, None], prior]),
        np.concatenate([(np.array(wanted) - seen @ least) * weights, prior @ least]),
    )[0]
    width, depth, tokens, detail, area = (round(float(v), 6) for v in least + beyond)
    return (width, depth, tokens, detail, area)


def _fit_together(runs: Sequence[RecordedRun]) -> tuple[float, float, float, float]:
    """Sharpness and overlaps that predict subsets best from their members' own accuracies."""
    known, wanted, sources = [], [], []
    for run in runs:
        alone = _alone(run)
        for subset in run.subsets:
            if len(subset.members) > 1 and all(k in alone for k in subset.members):
                known.append(
                    _members(run, {k: capability_of(a) for k, a in alone.items()}, subset.members)
                )
                wanted.append(subset.accuracy)
                sources.append(run.source)
    if not known:
        raise InputError("expected recorded runs with several members that were measured together")
    weights = _source_weights(sources) ** 2
    target, best = np.array(wanted), None
    overlaps = np.stack(np.meshgrid(*[_OVERLAPS] * 3), axis=-1).reshape(-1, 3)
    overlaps = overlaps[overlaps.sum(axis=1) <= _OVERLAPS[-1] + 1e-9]
    top = np.array([max(m.capability for m in members) for members in known])
    for sharpness in _SHARPNESS:
        sums = np.array([_sums(members, float(sharpness)) for members in known])
        total = sums[:, 0] + overlaps @ (sums[:, 1:] - sums[:, :1]).T
        errors = -np.expm1(-top * total ** (1 / sharpness)) - target
        loss = (errors**2) @ weights
        index = int(np.argmin(loss))
        if best is None or loss[index] < best[0] * (1 - 1e-9):
            best = (loss[index], float(sharpness), *overlaps[index].tolist())
    assert best is not None
    return best[1:]


def _sums(members: Sequence[Member], sharpness: float) -> tuple[float, float, float, float]:
    """Parts relative to the best: of all, of the best per view, per build and per region."""
    best = max(member.capability for member in members)
    parts = [(member.capability / best) ** sharpness for member in members]
    found = []
    for what in ("view", "model", "region"):
        most: dict[object, float] = {}
        for member, part in zip(members, parts, strict=True):
            key = getattr(member, what)
            most[key] = max(most.get(key, 0.0), part)
        found.append(sum(most.values()))
    return sum(parts), found[0], found[1], found[2]


def _left_out(
    runs: Sequence[RecordedRun], key: Callable[[RecordedRun, int], object], *, alone: bool = False
) -> float:
    """Mean over sources of the mean absolute error of what is predicted with its key left out."""
    by_source: dict[str, list[float]] = {}
    laws: dict[object, AccuracyLaw | None] = {}
    for run in runs:
        for subset in run.subsets:
            if alone and len(subset.members) > 1:
                continue
            left = key(run, subset.members[0])
            if left not in laws:
                laws[left] = _law_without(runs, key, left)
            law = laws[left]
            if law is not None:
                capability = together(law, _members(run, _capabilities(law, run), subset.members))
                error = abs(-np.expm1(-capability) - subset.accuracy)
                by_source.setdefault(run.source, []).append(float(error))
    return float(np.mean([np.mean(errors) for errors in by_source.values()])) if by_source else 1.0


def _law_without(
    runs: Sequence[RecordedRun], key: Callable[[RecordedRun, int], object], left: object
) -> AccuracyLaw | None:
    """The law fitted to what has another key; None where too little is left."""
    others = []
    for run in runs:
        kept = {k for k in range(len(run.members)) if key(run, k) != left}
        subsets = [subset for subset in run.subsets if kept.issuperset(subset.members)]
        if subsets:
            others.append(
                RecordedRun(
                    name=run.name,
                    source=run.source,
                    teacher=run.teacher,
                    teacher_accuracy=run.teacher_accuracy,
                    members=run.members,
                    subsets=subsets,
                    pictures=run.pictures,
                )
            )
    try:
        return fit_law(others)
    except InputError:
        return None


def _shape_key(run: RecordedRun, k: int) -> object:
    return (run.members[k].submodel, run.members[k].region, run.source)


def _run_key(run: RecordedRun, _: int) -> object:
    return (run.source, run.name)


def _source_key(run: RecordedRun, _: int) -> object:
    return run.source


def _source_weights(sources: Sequence[str]) -> Array:
    """Square roots of weights by which every source counts the same."""
    return np.array([sources.count(source) ** -0.5 for source in sources])


def _alone(run: RecordedRun) -> dict[int, float]:
    """Accuracy of the members that were measured alone, kept off the ends."""
    return {
        subset.members[0]: min(max(subset.accuracy, 1e-6), 1 - 1e-6)
        for subset in run.subsets
        if len(subset.members) == 1
    }


def _features(run: RecordedRun) -> Array:
    shapes = [member.submodel for member in run.members]
    return features(run.teacher, shapes, [member.region for member in run.members])


def _capabilities(law: AccuracyLaw, run: RecordedRun) -> dict[int, float]:
    values = capabilities(law, run.teacher_accuracy, _features(run))
    return dict(enumerate(values.tolist()))


def _members(run: RecordedRun, capability: dict[int, float], subset: Sequence[int]) -> list[Member]:
    return [
        Member(
            capability=capability[k],
            view=view_of(run.members[k].submodel, run.members[k].region),
            model=model_of(run.members[k].submodel),
            region=run.members[k].region,
        )
        for k in subset
    ]
