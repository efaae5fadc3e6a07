"""Quantise a bundle: try every way of running every member, keep what earns its place."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from mdp.errors import InputError
from mdp.files import replacing_folder, write_bytes, write_json
from mdp.formats.bundle import (
    FUSION,
    MANIFEST,
    BeforeAfter,
    Bundle,
    Evaluation,
    Quantization,
    QuantizedMember,
    TriedPrecision,
    file_entry,
    model_path,
)
from mdp.formats.plan import Assignment, Plan, PredictedMs
from mdp.fusion.fuse import Contribution
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import Dataset
from partitioner.estimates.macs import memory_bytes
from partitioner.export.evaluate import Report, check_labels, evaluate
from partitioner.export.precision_choice import (
    Candidate,
    Way,
    choose,
    needed_pictures,
    points,
    way_words,
)
from partitioner.export.quantize_trials import Asked, Judge, Member, Trial
from partitioner.fusion.cascade_fit import fit_cascade
from partitioner.fusion.stacking import fit_fusion
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress


def quantise(
    bundle: Bundle,
    data: Dataset,
    run: RunFolder | None,
    asked: Asked,
    out: Path,
    cache: Path,
    progress: Progress,
) -> Report | None:
    """Write the bundle again into `out`, with every member in the precision that earned it.

    Returns the new evaluation, or None if nothing was kept: then the record alone is new. Raises
    InputError, and leaves `out` as it was, for a bundle or pictures that cannot be used.
    """
    _check(bundle, data, asked)
    plan = bundle.manifest.plan
    views = [view_of(a) for a in plan.assignments]
    pixels = load_views(data.calibration, views, cache, progress, "calibration split")
    trials: list[Trial] = []
    plain: dict[int, Contribution] = {}
    with progress.task("trying precisions", len(plan.assignments)) as advance:
        for assignment in plan.assignments:
            member = Member(bundle, assignment, pixels[assignment.k], asked)
            plain[assignment.k] = member.plain
            if asked.members is None or assignment.k in asked.members:
                trials += member.trials()
            advance(1, "")
    judge = Judge(plain, trials, data)
    candidates = choose(
        [judge.alone(trial) for trial in trials],
        judge.loss,
        {a.k: a.predicted_ms.total for a in plan.assignments},
        asked.max_loss,
    )
    kept = {c.k: c for c in candidates if c.kept}
    models = {t.candidate.k: t.model for t in trials if _is_kept(t.candidate, kept)}
    manifest = msgspec.structs.replace(bundle.manifest, plan=replanned(plan, kept, bundle))
    contributions = judge.with_ways(_ways(kept))
    fusion = fit_fusion(contributions, data.calibration.targets)
    before = _evaluation(bundle, data, cache, progress)
    with replacing_folder(out) as folder:
        _copy(bundle, folder, models)
        report = None
        if kept:
            write_json(folder / FUSION, fusion)
            files = {name: file_entry(folder / name) for name in manifest.files}
            targets = data.calibration.targets
            cascade = fit_cascade(manifest.plan, contributions, targets, fusion)
            manifest = msgspec.structs.replace(manifest, files=files, cascade=cascade, early=None)
            manifest = msgspec.structs.replace(manifest, evaluation=before)
            report = evaluate(Bundle(folder, manifest), data, run, cache, progress)
            manifest = msgspec.structs.replace(manifest, evaluation=report.evaluation)
        after = before if report is None else report.evaluation
        record = _record(bundle, data, asked, candidates, judge, (before, after))
        write_json(folder / MANIFEST, msgspec.structs.replace(manifest, quantisation=record))
    return report


def _check(bundle: Bundle, data: Dataset, asked: Asked) -> None:
    """Raise InputError for what cannot be quantised, or not with these pictures."""
    manifest, path = bundle.manifest, bundle.path
    check_labels(bundle, data)
    if "untrained" in manifest.provenance:
        raise InputError(
            f"{path}: is untrained, so it has no accuracy to lose; plan the precision instead"
        )
    if manifest.evaluation is None:
        raise InputError(f"{path}: was never evaluated: run mdp-partition evaluate --write first")
    for assignment in manifest.plan.assignments:
        precision = assignment.spec.precision
        if precision != "fp32":
            raise InputError(
                f"{path}: sub-model {assignment.k} is in {precision} already: expected fp32"
            )
    devices = {a.device for a in manifest.plan.assignments}
    devices |= {replica.device for replica in manifest.plan.replicas}
    named = {"--here": asked.here, "--profiles": [p.name for p in asked.profiles]}
    for option, names in named.items():
        for name in names:
            if name not in devices:
                known = ", ".join(sorted(devices))
                raise InputError(f"{option}: {path} has no device {name!r} (there are: {known})")
    needed = needed_pictures(asked.max_loss)
    if len(data.calibration) < needed:
        raise InputError(
            f"--data {data.source}: {len(data.calibration)} calibration pictures cannot show a "
            f"loss of {points(asked.max_loss)}: expected at least {needed}, or a larger --max-loss"
        )
    trained = manifest.provenance.get("calibration_digest")
    if trained is not None and trained != data.calibration.digest:
        raise InputError(
            f"--data {data.source}: the calibration split is not that of {path}, whose sub-models "
            "may have been trained on its pictures (give the --limit-train of the training)"
        )


def _ways(kept: Mapping[int, Candidate]) -> dict[int, Way]:
    return {k: candidate.way for k, candidate in kept.items()}


def _is_kept(candidate: Candidate, kept: Mapping[int, Candidate]) -> bool:
    return candidate.k in kept and kept[candidate.k].way == candidate.way


def replanned(plan: Plan, kept: Mapping[int, Candidate], bundle: Bundle) -> Plan:
    """The plan with the precisions that were kept: runtime, milliseconds, memory and why."""
    num_classes = len(bundle.manifest.labels)
    changed = [
        _reassigned(a, kept[a.k], num_classes) if a.k in kept else a for a in plan.assignments
    ]
    # A replica's milliseconds stay those of fp32: it was measured to be faster, as it had to be.
    replicas = [
        msgspec.structs.replace(r, runtime=kept[r.k].way[1], memory_bytes=changed[r.k].memory_bytes)
        if r.k in kept
        else r
        for r in plan.replicas
    ]
    return msgspec.structs.replace(plan, assignments=changed, replicas=replicas)


def _reassigned(assignment: Assignment, kept: Candidate, num_classes: int) -> Assignment:
    precision, runtime = kept.way
    assert kept.timing is not None
    assignment = assignment.in_precision(precision)
    old = assignment.predicted_ms
    compute = round(old.compute * kept.timing.ratio, 3)
    energy_j = assignment.energy_j
    return msgspec.structs.replace(
        assignment,
        runtime=runtime,
        predicted_ms=PredictedMs(
            compute=compute, network=old.network, total=round(compute + old.network, 3)
        ),
        memory_bytes=memory_bytes(assignment.spec, num_classes),
        energy_j=None if energy_j is None else energy_j * kept.timing.ratio,
        why=f"{assignment.why}; {way_words(kept.way)}: {kept.reason}",
    )


def _evaluation(bundle: Bundle, data: Dataset, cache: Path, progress: Progress) -> Evaluation:
    """The bundle's own evaluation, made anew if it is about other pictures."""
    known = bundle.manifest.evaluation
    if known is not None and known.data_digest == data.test.digest:
        return known
    return evaluate(bundle, data, None, cache, progress).evaluation


def _copy(bundle: Bundle, folder: Path, models: Mapping[int, bytes]) -> None:
    """Every file of the bundle that was verified, with new models for some members."""
    new = {model_path(k): model for k, model in models.items()}
    for name in bundle.manifest.files:
        content = new[name] if name in new else bundle.verified(name).read_bytes()
        write_bytes(folder / name, content)


def _record(
    bundle: Bundle,
    data: Dataset,
    asked: Asked,
    candidates: Sequence[Candidate],
    judge: Judge,
    evaluations: tuple[Evaluation, Evaluation],
) -> Quantization:
    kept = {c.k: c.way for c in candidates if c.kept}
    whole = tuple(range(len(bundle.manifest.plan.assignments)))
    before, after = ({s.members: s.stacked for s in e.subsets} for e in evaluations)
    worst = max(before, key=lambda members: before[members] - after[members])
    return Quantization(
        max_loss=asked.max_loss,
        calibration_pictures=len(data.calibration),
        test_pictures=evaluations[1].pictures,
        calibration=BeforeAfter(
            members=whole, fp32=judge.before, now=judge.before - judge.loss(kept)
        ),
        test=BeforeAfter(members=whole, fp32=before[whole], now=after[whole]),
        worst=BeforeAfter(members=worst, fp32=before[worst], now=after[worst]),
        members=[
            QuantizedMember(
                k=a.k,
                device=a.device,
                measured=_source(a.device, asked),
                tried=[_tried_record(c) for c in candidates if c.k == a.k],
            )
            for a in bundle.manifest.plan.assignments
        ],
    )


def _source(device: str, asked: Asked) -> str:
    """Where a device's milliseconds come from."""
    if device in asked.here:
        return "here, on the machine that quantised"
    profile = next((p for p in asked.profiles if p.name == device), None)
    if profile is None:
        return "nowhere"
    return f"profile {device}: {profile.provenance['latency'].source}"


def _tried_record(candidate: Candidate) -> TriedPrecision:
    timing = candidate.timing
    return TriedPrecision(
        precision=candidate.way[0],
        runtime=candidate.way[1],
        kept=candidate.kept,
        reason=candidate.reason,
        compute_ms=None if timing is None else round(timing.compute_ms, 4),
        fp32_ms=None if timing is None else round(timing.fp32_ms, 4),
        loss=candidate.loss,
    )
