"""Predicted accuracy of members of a fleet: the law, applied to one teacher. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources

import numpy as np
from msgspec import json, structs

from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import NetworkSpec, Spec, SubModelSpec
from partitioner.estimates.accuracy_law import (
    AccuracyLaw,
    Array,
    Start,
    Task,
    Training,
    accuracy_of,
    capabilities,
    capability_of,
)
from partitioner.estimates.accuracy_records import (
    RecordedRun,
    RecordedSubset,
    alone_of,
    predict_capabilities,
)
from partitioner.regions import WHOLE

#: Where the teacher was never measured, planning takes it to be right on this share of pictures.
ASSUMED_TEACHER_ACCURACY = 0.8
#: Sides in pixels of the smallest pictures that pretrained networks were measured on, teacher and
#: network alike (docs/results/accuracy.md).
SMALLEST_KNOWN = 96
#: Why nothing is predicted of a teacher that was never measured.
ASSUMED = "the teacher's accuracy on such pictures is not known"
_SHIPPED = "accuracy_law.json"
#: Members of the user's own runs that have to be seen before half of their mean deviation from the
#: law is believed: about what separates two trainings of one shape, over what separates sources.
_HALF_BELIEVED = 2.0
#: A training or a number of classes beyond what is on file by this factor is like nothing on file.
_ALIKE = 1.5
#: Why what views add is not known.
NO_SCENES = "what the views add together is unknown: no scenes measured"
#: Values of p that are tried: members that add almost all they have, to such that add nothing.
_SHARPNESS = np.geomspace(1, 64, 400)


class LawErrors(Record, frozen=True):
    """Errors of predictions from shapes alone, on what was left out of the fit."""

    #: Mean absolute errors of subsets, as fractions of pictures.
    run_left_out: float
    source_left_out: float
    #: Of trainings of sources left out that nothing else on file is like.
    unknown_left_out: float
    #: Nine of ten measured capabilities lie within exp(this) of the predicted one: of members that
    #: started from weights that knew something, of those that started from nothing, and, as the
    #: most that any training was off, of those that nothing on file is like.
    taught: float
    scratch: float
    unknown: float


class OnFile(Record, frozen=True):
    """Kinds of trainings on record."""

    #: Fewest and most pictures times epochs, by start.
    seen: dict[str, tuple[float, float]]
    #: Fewest pictures.
    pictures: int
    #: Most classes.
    num_classes: int

    def unlike(self, training: Training, num_classes: int) -> str:
        """Reason why none of them is like this training, or an empty text."""
        low, high = self.seen.get(training.start, (np.inf, 0.0))
        if not low / _ALIKE <= training.pictures_seen <= high * _ALIKE:
            return f"no training on file saw about {training.pictures_seen:,.0f} pictures"
        if training.pictures * _ALIKE < self.pictures:
            return f"no training on file had as few as {training.pictures:,} pictures"
        if num_classes > self.num_classes * _ALIKE:
            return f"no training on file had more than {self.num_classes} classes"
        return ""


class FittedLaw(Record, frozen=True):
    """A law, how far it is off, and what it was fitted to."""

    law: AccuracyLaw
    errors: LawErrors
    #: Capability of the best measured subset over its teacher's.
    beyond: float
    on_file: OnFile
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
    #: Pictures and epochs that a member will be trained for; None: not said, as long as it takes.
    training: Training | None = None
    #: Networks that start from published weights; None: all of them.
    pretrained: frozenset[str] | None = None
    #: Of these, networks whose classifiers have rows for the data's classes, as the teacher's has.
    rows: frozenset[str] = frozenset()
    #: Nine of ten capabilities lie within exp(this) of the predicted one; of members that start
    #: from nothing, within exp(`scratch`).
    spread: float = 0.0
    scratch: float = 0.0
    #: Why no recorded training is like this one, whatever the members are; empty where one may be.
    unknown: str = ""
    #: What recorded trainings were like; None where the user's own runs are followed instead.
    on_file: OnFile | None = None
    #: How much more capable than their teacher members ever were, as a factor.
    beyond: float = np.inf
    #: What views of several cameras add together, in words; empty where that is not known.
    views: str = ""

    @property
    def task(self) -> Task:
        """The task that members are taught."""
        return Task(
            teacher=self.teacher, accuracy=self.teacher_accuracy, num_classes=self.num_classes
        )

    @property
    def has_networks(self) -> bool:
        """Tell whether public networks' accuracy is known for the teacher's size of pictures."""
        return self.teacher.image_size >= SMALLEST_KNOWN

    def of_specs(self, specs: Sequence[Spec]) -> Array:
        """Capability `[n]` of members of any family that see the whole square.

        Raises InputError for a network that the catalogue does not have.
        """
        trainings = [self._training(spec) for spec in specs]
        values = capabilities(
            self.law.alone,
            self.task,
            specs,
            [WHOLE] * len(specs),
            trainings,
            capped=self.has_networks,
        )
        return np.asarray(self.factor * values)

    def _training(self, spec: Spec) -> Training | None:
        """A plain ViT starts as the training says, a network from published weights if any."""
        if self.training is None or _same_shape(spec, self.teacher):
            return None  # the teacher itself is not trained again
        if not isinstance(spec, NetworkSpec):
            return self.training
        known = self.pretrained is None or spec.name in self.pretrained
        start: Start = "pretrained" if known else "scratch"
        return structs.replace(self.training, start=start, rows=known and spec.name in self.rows)

    def unknown_of(self, specs: Sequence[Spec]) -> str:
        """Reason why no record supports an accuracy of these members; empty where one does."""
        reasons = [ASSUMED if self.assumed else "", self.unknown]
        if self.on_file is not None:
            trainings = [training for spec in specs if (training := self._training(spec))]
            reasons += [self.on_file.unlike(one, self.num_classes) for one in trainings]
        return "; ".join(dict.fromkeys(filter(None, reasons)))

    def accuracy(self, capability: float) -> float:
        """Share of right answers."""
        return float(accuracy_of(np.array(capability), self.num_classes))

    @property
    def most(self) -> float:
        """The capability that members together are taken to reach at most."""
        return capability_of(self.teacher_accuracy) * self.beyond

    def interval(self, accuracy: float, specs: Sequence[Spec] = ()) -> tuple[float, float]:
        """The accuracies that nine of ten measurements of members `specs` lie between."""
        capability, spread = capability_of(min(accuracy, 1 - 1e-9)), self.spread
        trainings = [training for spec in specs if (training := self._training(spec))]
        if any(training.start == "scratch" for training in trainings):
            spread = max(spread, self.scratch)
        low = self.accuracy(capability * float(np.exp(-spread)))
        high = self.accuracy(capability * float(np.exp(spread)))
        return low, max(accuracy, min(high, self.accuracy(self.most)))


def _same_shape(spec: Spec, teacher: SubModelSpec) -> bool:
    return spec == structs.replace(teacher, precision=spec.precision)


def read_shipped_law() -> FittedLaw:
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
    training: Training | None = None,
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
    unknown = unlike = "" if mine else "how long members will be trained was not said"
    if training is not None and not mine:
        unknown, unlike = "", fitted.on_file.unlike(training, num_classes)
    scratch = training is not None and training.start == "scratch"
    errors = fitted.errors
    typical = errors.unknown_left_out if unlike else errors.source_left_out
    if mine:
        typical = errors.run_left_out
    return Predictor(
        law=fitted.law,
        teacher=teacher,
        teacher_accuracy=ASSUMED_TEACHER_ACCURACY if known is None else known,
        assumed=known is None,
        factor=_factor(fitted.law, mine),
        typical_error=typical,
        num_classes=num_classes,
        training=training,
        spread=errors.unknown if unlike else errors.scratch if scratch else errors.taught,
        scratch=errors.scratch,
        unknown=unknown,
        on_file=None if mine else fitted.on_file,
        beyond=fitted.beyond,
    )


def _factor(law: AccuracyLaw, runs: Sequence[RecordedRun]) -> float:
    """By what the members of `runs` are more capable than the law says, believed in part."""
    deviations = []
    for run in runs:
        predicted = predict_capabilities(law, run)
        for k, accuracy in alone_of(run).items():
            deviations.append(np.log(capability_of(accuracy) / predicted[k]))
    if not deviations:
        return 1.0
    believed = len(deviations) / (len(deviations) + _HALF_BELIEVED)
    return float(np.exp(believed * np.mean(deviations)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Views:
    """Gain by views of several cameras, fitted to evaluated bundles of scenes.

    Members with cameras of their own share neither view nor errors as networks on one picture do:
    with capabilities c_k theirs is (sum of c_k ** p) ** (1 / p) for one p, `sharpness`, that fits
    the measured subsets best. docs/results/scenes.md has its errors.
    """

    sharpness: float
    #: Mean absolute error of the subsets that it was fitted to, as a fraction of scenes.
    error: float
    subsets: int

    def accuracy(self, capabilities: Sequence[float]) -> float:
        """Share of right answers of members that all arrived."""
        return _accuracy(capabilities, self.sharpness)

    def __str__(self) -> str:
        return (
            f"what the views add together is as in {self.subsets} measured subsets of cameras, "
            f"off by {100 * self.error:.1f} points on average"
        )


def fit_views(scenes: Sequence[Sequence[RecordedSubset]]) -> Views | None:
    """The law of all these subsets; None where no subset of several members was measured."""
    measured: list[tuple[list[float], float]] = []
    for subsets in scenes:
        alone = {s.members[0]: s.accuracy for s in subsets if len(s.members) == 1}
        measured += [
            ([capability_of(min(alone[k], 1 - 1e-6)) for k in s.members], s.accuracy)
            for s in subsets
            if len(s.members) > 1 and alone.keys() >= set(s.members)
        ]
    if not measured:
        return None
    errors = np.array(
        [[_accuracy(parts, p) - accuracy for parts, accuracy in measured] for p in _SHARPNESS]
    )
    best = int(np.argmin((errors**2).mean(axis=1)))
    return Views(
        sharpness=float(_SHARPNESS[best]),
        error=float(np.abs(errors[best]).mean()),
        subsets=len(measured),
    )


def _accuracy(capabilities: Sequence[float], sharpness: float) -> float:
    together = float(np.linalg.norm(capabilities, ord=sharpness))
    return -math.expm1(-together)


def seeing(predictor: Predictor, views: Views | None) -> Predictor:
    """`predictor` of members with cameras of their own; without measured scenes it says so."""
    if views is not None:
        law = structs.replace(
            predictor.law, sharpness=views.sharpness, same_view=0.0, same_model=0.0
        )
        error = max(predictor.typical_error, views.error)
        # The teacher sees one view.
        return replace(predictor, law=law, beyond=math.inf, typical_error=error, views=str(views))
    errors = read_shipped_law().errors
    return replace(
        predictor,
        unknown="; ".join(filter(None, (predictor.unknown, NO_SCENES))),
        typical_error=max(predictor.typical_error, errors.unknown_left_out),
        spread=errors.unknown,
    )
