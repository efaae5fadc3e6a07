"""The accuracy law's constants, fitted to published models and recorded runs.

Exponents of a plain ViT's size come from models published with ImageNet-1k, one level per recipe;
what the user's task and training change, from our own runs; what members add to each other, from
measured subsets. Every source counts the same, however many runs it has, and stated priors hold
what the runs say little about.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.law.runs import as_members, has_untouched
from mdp.errors import InputError
from partitioner.estimates.accuracy_law import (
    SEEN,
    AccuracyLaw,
    AloneLaw,
    Array,
    LawMember,
    Start,
    Training,
    area_of,
    blur,
    capability_of,
    features,
    shape_lack,
)
from partitioner.estimates.accuracy_records import RecordedRun, alone_of
from partitioner.estimates.catalogue import network_of

#: What the constants are taken to be before any run was seen: exponents as if only
#: multiply-accumulates counted, and that a training's remainder falls as fast as other starts'.
_SHAPE_PRIOR = np.array([1.2, 0.6, 0.6, 0.1])
_TASK_PRIOR = np.array([0.35, 1.0, 0.5, 0.25, 1.5, 0.03])
_LEVEL_PRIOR = 0.48
#: What a constant that is wrong by its prior's size weighs, against a member off by two percent.
_PRIOR_WEIGHT = 0.3
#: Median over the catalogue's networks that were published at two sizes
#: (benchmarks/results/published-sizes.csv).
BLUR = 0.052
#: What is tried for the constants of members together.
_SHARPNESS = np.geomspace(3, 60, 31)
_OVERLAPS = np.linspace(0, 0.95, 20)
STARTS: tuple[Start, ...] = ("cut", "pretrained", "scratch")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Alone:
    """Members that were measured alone, `[n]` each."""

    shapes: Array
    teachers: Array
    #: Whether it is a network, and what that lacks: as published, and per unit of blur.
    network: Array
    published: Array
    blurred: Array
    taught: Array
    classes: Array
    pixels: Array
    area: Array
    #: `[n, starts]`: what is left per unit of its start.
    left: Array
    capability: Array
    weights: Array


def fit_law(runs: Sequence[RecordedRun]) -> AccuracyLaw:
    """The constants that suit the runs best; raises InputError for no usable runs."""
    return law_of(fit_alone(runs), Fused.of(runs).best(runs))


def fit_untouched(runs: Sequence[RecordedRun]) -> tuple[float, float]:
    """Lack of networks per unit of blur, and of untouched ones per logarithm of area left out.

    Least squares on what untouched networks lack in parts and on the whole, with a level for each
    network; without any the blur of published ones.
    """
    from scipy.optimize import nnls

    rows = [
        (run.members[k], 1 / capability_of(accuracy))
        for run in runs
        if has_untouched(run)
        for k, accuracy in alone_of(run).items()
    ]
    if not rows:
        return BLUR, 0.0
    names = [member.network.name for member, _ in rows if member.network is not None]
    terms = [(blur(m.spec, m.region), -np.log(area_of(m.region))) for m, _ in rows]
    levels = np.array([[name == own for own in sorted(set(names))] for name in names])
    found, _ = nnls(np.column_stack([terms, levels]), np.array([lack for _, lack in rows]))
    return round(float(found[0]), 4), round(float(found[1]), 4)


def law_of(alone: AloneLaw, fused: tuple[float, float, float]) -> AccuracyLaw:
    sharpness, view, model = fused
    return AccuracyLaw(alone=alone, sharpness=sharpness, same_view=view, same_model=model)


def fit_alone(runs: Sequence[RecordedRun]) -> AloneLaw:
    """Least squares on the logarithms of capabilities: the shape first, then the task."""
    from scipy.optimize import least_squares

    trained = [run for run in runs if not has_untouched(run)]
    published, own = (
        _alone([run for run in trained if run.taught == which]) for which in (False, True)
    )
    if not len(published.capability) + len(own.capability):
        raise InputError("expected recorded runs with members that were measured alone")

    def shape_errors(x: Array) -> Array:
        lack = published.taught + _shape(x, published.shapes) - _shape(x, published.teachers)
        return _errors(np.maximum(lack, 0.05), published, x, _SHAPE_PRIOR)

    shape: Array = least_squares(
        shape_errors, _SHAPE_PRIOR, bounds=(_SHAPE_PRIOR / 20, _SHAPE_PRIOR * 5)
    ).x
    level = _LEVEL_PRIOR
    if len(published.capability):
        sources = published.weights**2
        level = float(
            np.average(published.taught - _shape(shape, published.teachers), weights=sources)
        )

    blur, untouched_area = fit_untouched(runs)

    def task_errors(x: Array) -> Array:
        member = np.where(
            own.network > 0, own.published + blur * own.blurred, level + _shape(shape, own.shapes)
        )
        demand = own.classes ** x[0] * own.pixels ** x[1]
        lack = own.taught + demand * (member - level - _shape(shape, own.teachers))
        left = demand**0.25 * (own.left @ x[2:5])
        lack = np.hypot(np.maximum(lack, 0.1), left) - x[5] * np.log(own.area)
        return _errors(lack, own, x, _TASK_PRIOR)

    # A part of the picture costs half of the prior at least: nothing is for free.
    least = np.append(_TASK_PRIOR[:-1] / 20, _TASK_PRIOR[-1] / 2)
    task = least_squares(task_errors, _TASK_PRIOR, bounds=(least, _TASK_PRIOR * 5)).x
    width, depth, tokens, scale = (round(float(v), 4) for v in shape)
    classes, pixels, cut, pretrained, scratch, area = (round(float(v), 4) for v in task)
    return AloneLaw(
        exponents=(width, depth, tokens), scale=scale, level=round(level, 4), blur=blur,
        classes=classes, pixels=pixels, cut=cut, pretrained=pretrained, scratch=scratch, area=area,
        untouched_area=untouched_area,
    )  # fmt: skip


def _shape(x: Array, sizes: Array) -> Array:
    return shape_lack(x[:3], float(x[3]), sizes)


def _errors(lack: Array, of: _Alone, x: Array, prior: Array) -> Array:
    """Weighted residuals, in units of two percent of capability, and what the prior says."""
    off = -50 * np.log(lack * of.capability) * of.weights
    return np.concatenate([off, _PRIOR_WEIGHT * (x - prior) / prior])


def _alone(runs: Sequence[RecordedRun]) -> _Alone:
    rows: list[tuple[float, ...]] = []
    shapes, teachers, left, sources = [], [], [], []
    for run in runs:
        top = features([run.teacher])[0]
        for k, accuracy in alone_of(run).items():
            member = run.members[k]
            region, spec = member.region, member.submodel
            training = member.training if isinstance(member.training, Training) else None
            network = None if member.network is None else network_of(member.network)
            if spec is None and network is None:
                continue
            shapes.append(top if spec is None else features([spec])[0])
            teachers.append(top)
            left.append(
                [
                    (SEEN / training.pictures_seen) ** 0.5
                    if training and training.start == s
                    else 0.0
                    for s in STARTS
                ]
            )
            published = 0.0 if network is None else 1 / capability_of(network.top1 / 100)
            rows.append(
                (
                    float(network is not None), published, blur(member.spec),
                    1 / capability_of(run.teacher_accuracy), run.num_classes / 1000,
                    min(run.teacher.image_size / 224, 1.0),
                    area_of(region),
                    capability_of(accuracy),
                )
            )  # fmt: skip
            sources.append(run.source)
    columns = np.array(rows, dtype=np.float64).reshape(-1, 8).T
    return _Alone(
        shapes=np.array(shapes).reshape(-1, 4), teachers=np.array(teachers).reshape(-1, 4),
        network=columns[0], published=columns[1], blurred=columns[2], taught=columns[3],
        classes=columns[4], pixels=columns[5], area=columns[6], capability=columns[7],
        left=np.array(left).reshape(-1, len(STARTS)), weights=source_weights(sources),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused:
    """Squared errors of every choice of constants for every measured subset."""

    choices: Array
    #: `[choices, subsets]`.
    squares: NDArray[np.float32]
    keys: list[tuple[str, str]]

    @classmethod
    def of(cls, runs: Sequence[RecordedRun]) -> "Fused":
        """Try all constants on the subsets, with the members' own measured accuracies."""
        known, wanted, keys = [], [], []
        for run in runs:
            alone = {k: capability_of(a) for k, a in alone_of(run).items()}
            for subset in run.subsets:
                if len(subset.members) > 1 and all(k in alone for k in subset.members):
                    known.append(as_members(run, alone, subset.members))
                    wanted.append(subset.accuracy)
                    keys.append((run.source, run.name))
        if not known:
            raise InputError("expected recorded runs with several members measured together")
        overlaps = np.stack(np.meshgrid(_OVERLAPS, _OVERLAPS), axis=-1).reshape(-1, 2)
        overlaps = overlaps[overlaps.sum(axis=1) <= _OVERLAPS[-1] + 1e-9]
        top = np.array([max(m.capability for m in members) for members in known])
        squares = []
        for sharpness in _SHARPNESS:
            sums = np.array([_sums(members, float(sharpness)) for members in known])
            total = sums[:, 0] + overlaps @ (sums[:, 1:] - sums[:, :1]).T
            off = -np.expm1(-top * total ** (1 / sharpness)) - np.array(wanted)
            squares.append(np.square(off).astype(np.float32))
        sharpnesses = np.repeat(_SHARPNESS, len(overlaps))
        return cls(
            choices=np.column_stack([sharpnesses, np.tile(overlaps, (len(_SHARPNESS), 1))]),
            squares=np.concatenate(squares),
            keys=keys,
        )

    def best(self, runs: Sequence[RecordedRun]) -> tuple[float, float, float]:
        """Sharpness and overlaps that predict the subsets of these runs best."""
        names = {(run.source, run.name) for run in runs}
        rows = [row for row, key in enumerate(self.keys) if key in names]
        if not rows:
            raise InputError("expected recorded runs with several members measured together")
        weights = source_weights([self.keys[row][0] for row in rows]) ** 2
        loss = self.squares[:, rows] @ weights.astype(np.float32)
        sharpness, view, model = self.choices[int(np.argmin(loss))].tolist()
        return round(sharpness, 4), round(view, 4), round(model, 4)


def _sums(members: Sequence[LawMember], sharpness: float) -> tuple[float, float, float]:
    """Parts relative to the best: of all, of the best per view and per family."""
    best = max(member.capability for member in members)
    parts = [(member.capability / best) ** sharpness for member in members]
    found = []
    for what in ("view", "model"):
        most: dict[object, float] = {}
        for member, part in zip(members, parts, strict=True):
            key = getattr(member, what)
            most[key] = max(most.get(key, 0.0), part)
        found.append(sum(most.values()))
    return sum(parts), found[0], found[1]


def source_weights(sources: Sequence[str]) -> Array:
    """Square roots of weights by which every source counts the same."""
    return np.array([sources.count(source) ** -0.5 for source in sources])
