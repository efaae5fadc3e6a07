"""Measure a bundle's own files: the teacher, each member, every arrival subset.

Of a subset both the accuracy and the calibration error count.
Everything here runs through the planned runtime and `mdp.fusion.fuse`, as it will on the devices.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.bundle import (
    JOINED_BY,
    MANIFEST,
    Bundle,
    Evaluation,
    LowestRungs,
    MemberAccuracy,
    PerRule,
    Rejection,
    SizeAccuracy,
    SubsetAccuracy,
    SubsetRejection,
    TeacherAccuracy,
)
from mdp.formats.plan import Assignment, Plan
from mdp.fusion.cascade import Cascade
from mdp.fusion.fuse import (
    Contribution,
    Fusion,
    FusionWeights,
    Logits,
    fuse,
    list_subsets,
    probabilities,
    scale_rung,
    sizes_not_listed,
    weights_for,
)
from mdp.fusion.novelty import NoveltyScore
from mdp.fusion.novelty_table import Novelty
from mdp.load import LEAST_S, OtherLoad
from mdp.pictures.crop import Pixels
from mdp.runtimes.onnxruntime import open_session
from partitioner.data.crops import View, load_views, view_of
from partitioner.data.datasets import Dataset, PictureSet, thin_out
from partitioner.data.scenes import fuse_answers, places, single_pictures
from partitioner.estimates.macs import macs, parameters
from partitioner.export.confusions import confusions
from partitioner.export.sessions import (
    latency_ms,
    logits_file,
    member_contribution,
    open_member,
    run_of,
    run_session,
)
from partitioner.export.several_labels import measure_several, own_accuracy
from partitioner.export.unknown import unknown_logits
from partitioner.fusion.cascade_cost import BothWays, both_ways
from partitioner.fusion.cascade_fit import MIN_PICTURES, fit_cascade, measure_cascade
from partitioner.fusion.novelty_fit import area_under_curve
from partitioner.fusion.stacking import SAMPLED, sample_subsets
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.threads import side_by_side

Targets = NDArray[np.int64]
#: Bins of the expected calibration error, as its authors use.
ECE_BINS = 15


@dataclass(frozen=True, slots=True)
class Report:
    """The manifest's evaluation, and latencies measured on this machine."""

    evaluation: Evaluation
    #: One thread of the planned runtime, one picture, median, in milliseconds.
    member_latency_ms: list[float]
    teacher_latency_ms: float | None
    #: The bundle's own, or fitted for one that had none.
    cascade: Cascade | None = None
    #: Mean cores that other processes kept busy meanwhile; None where that was not told.
    others_cores: float | None = None
    #: Accuracy alone of each rung below the top, by sub-model.
    rungs: Mapping[int, Sequence[float]] = field(default_factory=dict)

    def as_json(self, bundle: Bundle) -> dict[str, Any]:
        """The content of `mdp-partition evaluate --json`."""
        value: dict[str, Any] = msgspec.to_builtins(self.evaluation)
        plan, classes = bundle.manifest.plan, len(bundle.manifest.labels)
        for member, assignment, took_ms in zip(
            value["members"], plan.assignments, self.member_latency_ms, strict=True
        ):
            member["latency_ms"] = took_ms
            member["parameters"] = parameters(assignment.spec, classes)
            member["macs"] = macs(assignment.spec, classes)
        if value["teacher"] is not None:
            value["teacher"]["latency_ms"] = self.teacher_latency_ms
            value["teacher"]["macs"] = macs(plan.require_teacher().shape, classes)
        value["rungs"] = {str(k): list(found) for k, found in self.rungs.items()}
        value["others_cores"] = self.others_cores
        value["predicted"] = msgspec.to_builtins(plan.accuracy)
        del value["early"]
        if (ways := self.both_ways(plan)) is not None:
            value["cascade"] |= msgspec.to_builtins(ways)
        return value

    def both_ways(self, plan: Plan) -> BothWays | None:
        """Costs of a cascade on the evaluation's pictures, stacked; None where there is none."""
        measured = self.evaluation.cascade
        if measured is None:
            return None
        return both_ways(plan, measured.first, measured.escalated.stacked)


def accuracy(logits: Logits, targets: Targets) -> float:
    """Share of the rows of `logits[N, C]` whose largest entry is the target's."""
    return float((logits.argmax(axis=1) == targets).mean())


def expected_calibration_error(
    probabilities: Logits, targets: Targets, bins: int = ECE_BINS
) -> float:
    """Distance of the top probability from the accuracy, of `probabilities[N, C]`, 0 to 1.

    Pictures are put into `bins` bins of equal width (m/M, (m+1)/M] by their top probability; the
    distances of the bins' mean top probability from their accuracy are averaged with their shares
    of the pictures. After Guo, Pleiss, Sun and Weinberger, On Calibration of Modern Neural
    Networks, ICML 2017.
    """
    confidence = probabilities.max(axis=1).astype(np.float64)
    right = probabilities.argmax(axis=1) == targets
    index = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    distance = np.bincount(index, weights=right - confidence, minlength=bins)
    return float(np.abs(distance).sum() / len(targets))


def measure_subset(
    contributions: Mapping[int, Contribution],
    members: tuple[int, ...],
    fusion: FusionWeights,
    targets: Targets,
) -> SubsetAccuracy:
    """Accuracy and calibration error of one arrival subset under every fusion rule."""

    def of(rule: Fusion) -> tuple[float, float]:
        scores = probabilities(fuse(contributions, weights_for(members, rule, fusion)))
        return accuracy(scores, targets), expected_calibration_error(scores, targets)

    found = {rule: of(rule) for rule in fusion.rules}
    return SubsetAccuracy(
        members=members,
        ece=PerRule(**{rule: error for rule, (_, error) in found.items()}),
        **{rule: right for rule, (right, _) in found.items()},
    )


def subset_accuracies(
    contributions: Mapping[int, Contribution], fusion: FusionWeights, targets: Targets
) -> list[SubsetAccuracy]:
    """Accuracies of every listed arrival subset: all of them up to 8 members."""
    return [
        measure_subset(contributions, members, fusion, targets)
        for members in list_subsets(contributions)
    ]


def size_accuracies(
    contributions: Mapping[int, Contribution], fusion: FusionWeights, targets: Targets
) -> tuple[SizeAccuracy, ...]:
    """Accuracies of the sizes with too many subsets to list, from samples of them.

    The samples differ from those to which the sizes' weights were fitted.
    """
    found, count = [], len(contributions)
    for size in sizes_not_listed(count):
        sample = [
            measure_subset(contributions, members, fusion, targets)
            for members in sample_subsets(count, size, SAMPLED, seed=1)
        ]
        errors = [one.ece for one in sample if one.ece is not None]

        def over(reduce: Callable[[list[float]], np.floating], of: Sequence[PerRule]) -> PerRule:
            return PerRule(
                **{rule: float(reduce([one.under(rule) for one in of])) for rule in fusion.rules}
            )

        found.append(
            SizeAccuracy(
                size=size,
                sampled=len(sample),
                mean=over(np.mean, sample),
                lowest=over(np.min, sample),
                ece=over(np.mean, errors),
            )
        )
    return tuple(found)


def measure_rejection(
    contributions: Mapping[int, Contribution],
    fusion: FusionWeights,
    novelty: Novelty,
    unknown: Mapping[int, Contribution] | None = None,
) -> Rejection:
    """Shares of known items, and of unknown ones, that are above the thresholds of the default
    rate, and the area under the ROC curve, of every arrival subset.

    `contributions` are logits `[N, C]` of items of the classes, `unknown` `[U, C]` of others.
    """
    place = novelty.place(None)

    def of(members: tuple[int, ...]) -> tuple[float, float | None, float | None]:
        fitted = novelty.of(members)
        assert fitted is not None
        scored, threshold = NoveltyScore(members, fusion), fitted.thresholds[place]
        known = scored.of(contributions, fitted.weights)
        share = float((known > threshold).mean())
        if unknown is None:
            return share, None, None
        strange = scored.of(unknown, fitted.weights)
        return share, float((strange > threshold).mean()), area_under_curve(known, strange)

    count = len(contributions)
    found = []
    for members in list_subsets(contributions):
        known, strange, area = of(members)
        found.append(
            SubsetRejection(
                size=len(members), known=known, unknown=strange, auc=area, members=members
            )
        )
    for size in sizes_not_listed(count):
        sample = [of(one) for one in sample_subsets(count, size, SAMPLED, seed=1)]
        means = [
            float(np.mean([value for value in column if value is not None])) if unknown else None
            for column in list(zip(*sample, strict=True))[1:]
        ]
        share = float(np.mean([one[0] for one in sample]))
        found.append(SubsetRejection(size=size, known=share, unknown=means[0], auc=means[1]))
    pictures = 0 if unknown is None else len(unknown[0].bag)
    return Rejection(rate=novelty.default, subsets=found, unknown_pictures=pictures)


def check_labels(bundle: Bundle, data: Dataset) -> None:
    """Raise InputError unless the classes of `data` are those of the bundle."""
    manifest = bundle.manifest
    if list(data.labels) != manifest.labels:
        kind = "labels" if manifest.several else "classes"
        odd = sorted(set(data.labels) ^ set(manifest.labels))
        joined = [] if manifest.several else [label for label in odd if JOINED_BY in label]
        apart = "; labels exclude each other there" if joined else ""
        raise InputError(
            f"--data {data.source}: expected the {len(manifest.labels)} {kind} of {bundle.path}, "
            f"but only one of them has {', '.join(odd[:5]) or 'this order'}{apart}"
        )


def run_members(
    bundle: Bundle, data: Dataset, cache: Path, progress: Progress
) -> tuple[dict[int, Contribution], list[float], float | None]:
    """Every member's logits `[N, C]` for the test split, its latency in ms, and others' load.

    Raises InputError if the classes of `data` are not the bundle's. `cache` keeps the views.
    """
    check_labels(bundle, data)
    return run_on(bundle, data.test, "test", cache, progress)


def run_on(
    bundle: Bundle, pictures: PictureSet, split: str, cache: Path, progress: Progress
) -> tuple[dict[int, Contribution], list[float], float | None]:
    """Every member's logits `[N, C]` for one split, and its latency in ms.

    The last value is the mean number of cores that other processes kept busy meanwhile.
    """
    assignments = bundle.manifest.plan.assignments
    views = load_views(
        pictures,
        [view_of(a) for a in assignments],
        cache,
        progress,
        f"{split} split, for the members",
    )
    runtimes = [open_member(bundle.model(a.k), a, len(bundle.manifest.labels)) for a in assignments]
    others = OtherLoad()

    def answers(number: int) -> Contribution:
        a = assignments[number]
        kept = logits_file(cache, bundle.model(a.k), a, pictures.digest)
        return member_contribution(runtimes[number], views[number], a, kept)

    what = f"running the members on the {split} split"
    # The longest first, so that none is left that runs alone at the end.
    classes = len(bundle.manifest.labels)
    order = sorted(
        range(len(assignments)), key=lambda number: -macs(assignments[number].spec, classes)
    )
    found = dict(zip(order, side_by_side(answers, order, progress, what), strict=True))
    contributions = {a.k: found[number] for number, a in enumerate(assignments)}
    # Each is timed alone.
    latencies_ms = [
        latency_ms(runtime.run, pixels) for runtime, pixels in zip(runtimes, views, strict=True)
    ]
    return contributions, latencies_ms, others.cores(LEAST_S)


def run_rungs(
    bundle: Bundle, pictures: PictureSet, cache: Path, progress: Progress
) -> dict[int, list[Contribution]]:
    """Logits `[N, C]` of every rung below the top, by sub-model, ready for the top's weights.

    Of the pictures of the test split.
    """
    parts = [a for a in bundle.manifest.plan.assignments if a.lower]
    if not parts:
        return {}
    what = "test split, for the rungs"
    views = load_views(pictures, [view_of(a) for a in parts], cache, progress, what)
    jobs = [
        (a, number, pixels)
        for a, pixels in zip(parts, views, strict=True)
        for number in range(1, len(a.lower) + 1)
    ]

    def answers(job: tuple[Assignment, int, Pixels]) -> Contribution:
        a, number, pixels = job
        part, model = a.at(number), bundle.model(a.k, number)
        runtime = open_member(model, part, len(bundle.manifest.labels))
        kept = logits_file(cache, model, part, pictures.digest)
        own = member_contribution(runtime, pixels, part, kept)
        return scale_rung(own, a.lower[number - 1].scales)

    found: dict[int, list[Contribution]] = {a.k: [] for a in parts}
    what = "running the rungs on the test split"
    for (a, _, _), one in zip(jobs, side_by_side(answers, jobs, progress, what), strict=True):
        found[a.k].append(one)
    return found


def evaluate(
    bundle: Bundle, data: Dataset, run: RunFolder | None, cache: Path, progress: Progress
) -> Report:
    """Measure `bundle` on the test split of `data`; raises InputError if its classes differ.

    The teacher is measured where a `run` has it; else the accuracy that `bundle` holds is kept.
    `cache` keeps the pictures' views.
    """
    if bundle.manifest.several:
        return _evaluate_several(bundle, data, cache, progress)
    contributions, latencies_ms, others_cores = run_members(bundle, data, cache, progress)
    assignments, targets = bundle.manifest.plan.assignments, data.test.targets
    rungs = run_rungs(bundle, data.test, cache, progress)
    lowest = {**contributions, **{k: own[-1] for k, own in rungs.items()}}
    teacher = _teacher(bundle, data, run, cache, progress)
    fusion = bundle.fusion_weights()
    cascade = _cascade(bundle, data, fusion, cache, progress)
    measured = TeacherAccuracy(accuracy=teacher[0]) if teacher else None
    evaluation = Evaluation(
        data=Path(data.source).name,
        data_digest=data.test.digest,
        pictures=len(targets),
        teacher=measured or earlier_teacher_accuracy(bundle.manifest.evaluation, data),
        members=[
            MemberAccuracy(
                k=a.k, device=a.device, accuracy=accuracy(contributions[a.k].bag, targets)
            )
            for a in assignments
        ],
        subsets=subset_accuracies(contributions, fusion, targets),
        sizes=size_accuracies(contributions, fusion, targets),
        cascade=None
        if cascade is None
        else measure_cascade(contributions, targets, fusion, cascade),
        rejection=UNSET
        if not fusion.novelty
        else measure_rejection(
            contributions,
            fusion,
            fusion.novelty,
            unknown_logits(
                bundle.path,
                bundle.manifest.plan,
                len(bundle.manifest.labels),
                data.unknown_test,
                cache,
                progress,
            ),
        ),
        lowest=UNSET
        if not rungs
        else LowestRungs(
            subsets=subset_accuracies(lowest, fusion, targets),
            sizes=size_accuracies(lowest, fusion, targets),
        ),
        confusions=confusions(
            fuse(contributions, weights_for(tuple(sorted(contributions)), "stacked", fusion)),
            targets,
            bundle.manifest.labels,
        )
        or UNSET,
    )
    busy = [cores for cores in (others_cores, teacher[2] if teacher else None) if cores is not None]
    return Report(
        evaluation,
        latencies_ms,
        teacher[1] if teacher else None,
        cascade,
        others_cores=max(busy, default=None),
        rungs={k: [accuracy(one.bag, targets) for one in own] for k, own in rungs.items()},
    )


def _evaluate_several(bundle: Bundle, data: Dataset, cache: Path, progress: Progress) -> Report:
    """The same for a bundle of which several labels may hold: without a teacher and rungs."""
    contributions, latencies_ms, others_cores = run_members(bundle, data, cache, progress)
    fusion, held = bundle.fusion_weights(), data.flags(data.test)
    subsets, by_label = measure_several(contributions, fusion, held, ECE_BINS)
    evaluation = Evaluation(
        data=Path(data.source).name,
        data_digest=data.test.digest,
        pictures=len(held),
        teacher=None,
        members=[
            MemberAccuracy(
                k=a.k, device=a.device, accuracy=own_accuracy(contributions[a.k].bag, held)
            )
            for a in bundle.manifest.plan.assignments
        ],
        subsets=subsets,
        by_label=by_label,
    )
    return Report(evaluation, latencies_ms, None, others_cores=others_cores)


def _cascade(
    bundle: Bundle, data: Dataset, fusion: FusionWeights, cache: Path, progress: Progress
) -> Cascade | None:
    """The bundle's cascade, or one that is fitted to the calibration pictures of its fusion.

    None without these pictures: others may have been trained on.
    """
    manifest = bundle.manifest
    if manifest.cascade is not None:
        return manifest.cascade
    if manifest.provenance.get("calibration_digest") != data.calibration.digest:
        return None
    # An assembled bundle may have been fitted to a part of them.
    count = int(manifest.provenance.get("calibration_pictures", len(data.calibration)))
    pictures = thin_out(data.calibration, count)
    if len(pictures) < MIN_PICTURES:
        return None
    contributions, *_ = run_on(bundle, pictures, "calibration", cache, progress)
    return fit_cascade(manifest.plan, contributions, pictures.targets, fusion)


def earlier_teacher_accuracy(before: Evaluation | None, data: Dataset) -> TeacherAccuracy | None:
    """The teacher's accuracy of an earlier evaluation, with its pictures where they differ."""
    if before is None or before.teacher is None or before.data_digest == data.test.digest:
        return None if before is None else before.teacher
    if before.teacher.data is not None:
        return before.teacher
    return msgspec.structs.replace(before.teacher, data=before.data, pictures=before.pictures)


def _teacher(
    bundle: Bundle, data: Dataset, run: RunFolder | None, cache: Path, progress: Progress
) -> tuple[float, float, float | None] | None:
    """Accuracy and latency in ms of the run's teacher, and others' load; None without it.

    Its kept logits are used if they are of the same pictures.
    """
    if run is None or not run.teacher_onnx.is_file():
        return None
    if bundle.manifest.provenance.get("run_digest") != run.digest(bundle.manifest.plan):
        progress.note(f"{run.path}: not the run that {bundle.path} was made of: teacher left out")
        return None
    view = View(bundle.manifest.plan.require_teacher().shape.image_size)
    single = single_pictures(data).test
    pixels = load_views(single, [view], cache, progress, "test split, for the teacher")[0]
    session = open_session(run.teacher_onnx)
    kept = run.answers(single.digest[:16]) if run.teacher.is_file() else None
    if kept is not None and kept.is_file():
        logits = np.load(kept)
    else:
        progress.note(f"running the teacher on {len(pixels):,} pictures")
        logits = run_session(session, pixels, ["logits"])[0]
    if data.cameras:
        # The answers to all views of a scene are fused, as the sub-models' are.
        logits = fuse_answers(logits, places(data.test, data.cameras))
    others = OtherLoad()
    took_ms = latency_ms(run_of(session), pixels)
    return accuracy(logits, data.test.targets), took_ms, others.cores(LEAST_S)


def write_report(bundle: Bundle, report: Report) -> Bundle:
    """Write the report to the bundle's manifest, atomically; returns the bundle."""
    manifest = msgspec.structs.replace(
        bundle.manifest,
        plan=_with_accuracies(bundle.manifest.plan, report.rungs),
        evaluation=report.evaluation,
        cascade=report.cascade,
        early=None,
    )
    write_json(bundle.path / MANIFEST, manifest)
    return Bundle(bundle.path, manifest)


def _with_accuracies(plan: Plan, rungs: Mapping[int, Sequence[float]]) -> Plan:
    """`plan` with the measured accuracies of its rungs."""
    replace = msgspec.structs.replace
    assignments = [
        replace(
            a,
            rungs=tuple(
                replace(rung, accuracy=found)
                for rung, found in zip(a.lower, rungs[a.k], strict=True)
            ),
        )
        if a.k in rungs
        else a
        for a in plan.assignments
    ]
    return replace(plan, assignments=assignments)
