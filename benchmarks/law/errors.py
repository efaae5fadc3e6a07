"""Errors of the accuracy law on what it was not fitted to: sources left out, and predicted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.law.fit import STARTS, Fused, fit_alone, fit_law, law_of, source_weights
from benchmarks.law.runs import as_members, has_untouched
from mdp.errors import InputError
from partitioner.estimates.accuracy import FittedLaw, LawErrors, OnFile
from partitioner.estimates.accuracy_law import AccuracyLaw, Training, capability_of, together
from partitioner.estimates.accuracy_records import RecordedRun, predict_capabilities

#: Share of predictions that an interval is to hold.
_INSIDE = 0.9


def fit(runs: Sequence[RecordedRun]) -> FittedLaw:
    """Fit the law and measure its errors; raises InputError for no usable runs."""
    by_run = cross_validate(runs, lambda run: (run.source, run.name))
    by_source = cross_validate(runs, lambda run: run.source)
    return FittedLaw(
        law=fit_law(runs),
        errors=LawErrors(
            run_left_out=_mean_error(by_run),
            source_left_out=_mean_error(by_source),
            unknown_left_out=_mean_error([one for one in by_source if one.how == "unknown"]),
            taught=spread_of(by_source, "taught"),
            scratch=spread_of(by_source, "scratch"),
            unknown=spread_of(by_source, "unknown"),
        ),
        beyond=_beyond(runs),
        on_file=on_file(runs),
        runs=len(runs),
        members=sum(len(run.members) for run in runs),
        sources=tuple(sorted({run.source for run in runs})),
    )


def on_file(runs: Sequence[RecordedRun]) -> OnFile:
    """Records of our own trainings; published models are trained as nobody here trains."""
    own = [run for run in runs if run.taught and not has_untouched(run)]
    trainings = [m.training for r in own for m in r.members if isinstance(m.training, Training)]
    seen: dict[str, tuple[float, float]] = {
        start: (min(amounts), max(amounts))
        for start in STARTS
        if (amounts := [t.pictures_seen for t in trainings if t.start == start])
    }
    return OnFile(
        seen=seen,
        pictures=min((training.pictures for training in trainings), default=1),
        num_classes=max((run.num_classes for run in own), default=2),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A measured subset of a run that the law was not fitted to."""

    run: RecordedRun
    members: tuple[int, ...]
    predicted: float
    measured: float
    #: How its members were trained: published, taught, scratch, or unknown to what was fitted to.
    how: str

    @property
    def off(self) -> float:
        """Predicted less measured accuracy."""
        return float(-np.expm1(-self.predicted)) - self.measured

    @property
    def factor(self) -> float:
        """Absolute logarithm of measured over predicted capability."""
        return abs(float(np.log(capability_of(self.measured) / self.predicted)))


def cross_validate(
    runs: Sequence[RecordedRun], key: Callable[[RecordedRun], object]
) -> list[Checked]:
    """Every subset of trainings, predicted by the law that is fitted to the runs of other keys."""
    fused = Fused.of(runs)
    found: list[Checked] = []
    for left in dict.fromkeys(key(run) for run in runs if not has_untouched(run)):
        rest = [run for run in runs if key(run) != left]
        try:
            law = law_of(fit_alone(rest), fused.best(rest))
        except InputError:
            continue
        trained = on_file(rest)
        for run in (run for run in runs if key(run) == left):
            found += check_run(law, trained, run)
    return found


def check_run(law: AccuracyLaw, trained: OnFile, run: RecordedRun) -> list[Checked]:
    """The subsets of a run that the law was not fitted to."""
    predicted = predict_capabilities(law, run)
    hows = {k: _how(trained, run, k) for k in predicted}
    worst = ("unknown", "scratch", "published", "taught")
    return [
        Checked(
            run=run,
            members=subset.members,
            predicted=together(law, as_members(run, predicted, subset.members)),
            measured=min(max(subset.accuracy, 1e-6), 1 - 1e-6),
            how=next(how for how in worst if how in {hows[k] for k in subset.members}),
        )
        for subset in run.subsets
    ]


def _how(trained: OnFile, run: RecordedRun, k: int) -> str:
    training = run.members[k].training
    if not run.taught:
        return "published"
    if not isinstance(training, Training):
        return "taught"
    if trained.unlike(training, run.num_classes):
        return "unknown"
    return "scratch" if training.start == "scratch" else "taught"


def _mean_error(checked: Sequence[Checked]) -> float:
    """Mean over sources of the mean absolute error."""
    by_source: dict[str, list[float]] = {}
    for one in checked:
        by_source.setdefault(one.run.source, []).append(abs(one.off))
    return float(np.mean([np.mean(off) for off in by_source.values()])) if by_source else 1.0


def spread_of(checked: Sequence[Checked], how: str) -> float:
    """Factor that nine of ten are below, every source counting the same.

    Of the unknown the largest factor of any training.
    """
    if how == "unknown":
        return max((one.factor for one in checked if one.how != "published"), default=1.0)
    chosen = sorted((one for one in checked if one.how == how), key=lambda one: one.factor)
    if not chosen:
        return 1.0
    weights = source_weights([one.run.source for one in chosen]) ** 2
    reached = np.cumsum(weights) / weights.sum()
    return chosen[int(np.searchsorted(reached, _INSIDE))].factor


def _beyond(runs: Sequence[RecordedRun]) -> float:
    """Capability of the best measured subset over its teacher's, as a factor."""
    ratios = [
        capability_of(min(subset.accuracy, 1 - 1e-6)) / capability_of(run.teacher_accuracy)
        for run in runs
        if run.taught and not has_untouched(run)
        for subset in run.subsets
    ]
    return float(max(ratios, default=1.0))
