"""accuracy.json -> means over seeds, differences from ours, and whether the aims are met. Pure."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.accuracy.methods import OURS
from benchmarks.accuracy.results import Results, Run
from benchmarks.accuracy.shapes import shape_name


@dataclass(frozen=True, slots=True)
class Spread:
    """Mean and sample standard deviation over seeds; nan for the latter with one seed."""

    mean: float
    deviation: float
    seeds: int

    @property
    def error(self) -> float:
        """Standard error of the mean."""
        return self.deviation / math.sqrt(self.seeds)


@dataclass(frozen=True, slots=True)
class Aim:
    """Something that has to be reached, the figure, and whether it is; None where unknown."""

    aim: str
    figure: str
    holds: bool | None


#: A number of one run under one rule; None where the run has no such subsets.
Figure = Callable[[Run, str], float | None]


def spread(values: Sequence[float]) -> Spread:
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(statistics.fmean(values), deviation, len(values))


def of_size(run: Run, rule: str, size: int) -> list[float]:
    return [s.accuracy[rule] for s in run.subsets if len(s.members) == size and rule in s.accuracy]


def all_in(run: Run, rule: str) -> float | None:
    return _mean(of_size(run, rule, len(run.members)))


def one_missing(run: Run, rule: str) -> float | None:
    """Mean over which one is missing."""
    return _mean(of_size(run, rule, len(run.members) - 1))


def two_in(run: Run, rule: str) -> float | None:
    """Mean over all pairs; none where there are no two members."""
    return _mean(of_size(run, rule, 2))


def one_in(run: Run, rule: str) -> float | None:
    """Mean over the member that answers alone."""
    return _mean(of_size(run, rule, 1))


def best_alone(run: Run, rule: str) -> float | None:
    return max(of_size(run, rule, 1), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def runs_of(results: Results, method: str) -> list[Run]:
    return sorted((r for r in results.runs if r.method == method), key=lambda r: r.seed)


def over_seeds(runs: Sequence[Run], rule: str, figure: Figure) -> Spread | None:
    """A figure's spread over the runs that have it."""
    values = [value for run in runs if (value := figure(run, rule)) is not None]
    return spread(values) if values else None


def paired(
    runs: Sequence[Run], rule: str, others: Sequence[Run], other_rule: str, figure: Figure = all_in
) -> Spread | None:
    """Spread of `runs` less `others`, seed by seed; None where no seed is in both."""
    theirs = {run.seed: figure(run, other_rule) for run in others}
    differences = [
        here - there
        for run in runs
        if (here := figure(run, rule)) is not None and (there := theirs.get(run.seed)) is not None
    ]
    return spread(differences) if differences else None


def aims(results: Results) -> list[Aim]:
    ours, teacher = runs_of(results, OURS), results.teacher
    found = [
        _above(results, "single", "alone", 2.0),
        _above(results, "independent", "averaged", 1.0),
        *(_above(results, rival, "fused") for rival in
          ("class-split", "class-split-drop", "class-pruned")),
    ]  # fmt: skip
    mean = over_seeds(ours, "stacked", all_in)
    under = None if mean is None or teacher is None else (mean.mean - teacher.accuracy) * 100
    ratios = [run.cost_ratio for run in ours if run.cost_ratio is not None]
    ratio = statistics.fmean(ratios) if ratios else None
    slowest = None
    if results.latency is not None and ours:
        times_ms = [results.latency.shapes_ms[shape_name(spec)] for spec in ours[0].members]
        slowest = max(times_ms) / results.latency.teacher_ms
    lost, won = (_percent_points(ours, *pair) for pair in
                 ((all_in, one_missing), (two_in, best_alone)))  # fmt: skip
    return [
        *found,
        _aim("all in: at most 1 point under the teacher", under, "{:+.2f} points",
             lambda x: x >= -1),
        _aim("every member: at most a fifth of the teacher's latency", slowest,
             "slowest {:.2f} of it", lambda x: x <= 0.2),
        _aim("any one missing: at most 1.5 points under all in, on average", lost, "{:.2f} points",
             lambda x: x <= 1.5),
        _aim("any two in: above the best single member, on average", won, "{:+.2f} points",
             lambda x: x > 0),
        _stacked_is_safe(ours),
        _earns(results, "stacking term", "stack-0.5", ("schedule", "stack_weight")),
        _earns(results, "joint pass", "joint", ("joint_schedule", "epochs")),
        _aim("training: under 3 times the largest member alone", ratio, "{:.2f}", lambda x: x < 3),
    ]  # fmt: skip


def _aim(aim: str, value: float | None, form: str, holds: Callable[[float], bool]) -> Aim:
    if value is None:
        return Aim(aim, "not measured", None)
    return Aim(aim, form.format(value), holds(value))


def _above(results: Results, rival: str, rule: str, points: float = 0.0) -> Aim:
    """Ours, all in, is above a rival, and by at least so many points."""
    difference = paired(runs_of(results, OURS), "stacked", runs_of(results, rival), rule)
    value = None if difference is None else difference.mean * 100
    by = f"at least {points:g} points above" if points else "above"
    aim = f"all in: {by} {rival}, {rule}"
    return _aim(aim, value, "{:+.2f} points", lambda x: x >= points if points else x > 0)


def _percent_points(ours: Sequence[Run], more: Figure, less: Figure) -> float | None:
    """By how much one figure of ours, stacked, is above another in the mean over seeds."""
    pairs = [(more(run, "stacked"), less(run, "stacked")) for run in ours]
    found = [a - b for a, b in pairs if a is not None and b is not None]
    return statistics.fmean(found) * 100 if found else None


def _stacked_is_safe(ours: Sequence[Run]) -> Aim:
    """Over seeds, the subset where stacking is worst against the better plain rule."""
    by_members: dict[tuple[int, ...], list[float]] = {}
    for run in ours:
        for subset in run.subsets:
            a = subset.accuracy
            gain = a["stacked"] - max(a["boosted"], a["bagged"])
            by_members.setdefault(subset.members, []).append(gain * 100)
    aim = "stacked: at most 0.2 points under the better of boosted and bagged, for any subset"
    if not by_members:
        return Aim(aim, "not measured", None)
    worst = min(map(statistics.fmean, by_members.values()))
    single = min(map(min, by_members.values()))
    return Aim(aim, f"{worst:+.2f} points (in a single run {single:+.2f})", worst >= -0.2)


def _earns(results: Results, what: str, part: str, setting: tuple[str, str]) -> Aim:
    """A part's gain, all in: more than its standard error, or the part has to be off."""
    aim, ours = f"{what}: earns its place, or is off by default", runs_of(results, OURS)
    if not ours:
        return Aim(aim, "not measured", None)
    on = bool(ours[0].settings[setting[0]][setting[1]])
    with_it, without = (OURS, f"no-{part.partition('-')[0]}") if on else (part, OURS)
    gain = paired(runs_of(results, with_it), "stacked", runs_of(results, without), "stacked")
    state = "on" if on else "off"
    if gain is None:
        return Aim(aim, f"{state}; not measured", None if on else True)
    figure = f"{gain.mean * 100:+.2f} ± {gain.deviation * 100:.2f} points ({state})"
    return Aim(aim, figure, gain.mean > gain.error if on else True)
