"""Write a bundle anew with the precisions accepted for its members, and a record of all tried."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.files import replacing_folder, write_bytes, write_json
from mdp.formats.bundle import (
    MANIFEST,
    BeforeAfter,
    Bundle,
    Evaluation,
    Quantization,
    QuantizedMember,
    TriedPrecision,
    model_path,
)
from mdp.formats.plan import Assignment, Plan, PredictedMs
from mdp.fusion.fuse import Contribution, fuse
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import Dataset
from partitioner.estimates.macs import memory_bytes
from partitioner.export.evaluate import Report, accuracy, check_labels, evaluate
from partitioner.export.quantize import Way
from partitioner.export.sessions import member_contribution, open_member
from partitioner.export.try_precision import (
    QuantizeRequest,
    Trial,
    accept,
    pictures_needed,
    points,
    try_member,
    way_words,
)
from partitioner.export.unknown import unknown_logits
from partitioner.fusion.bundle_fit import fit_bundle
from partitioner.fusion.novelty_fit import tells_distance
from partitioner.fusion.stacking import fit_subset
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress


class Fused:
    """Stacked accuracy of all members on the calibration pictures, weights fitted each time."""

    def __init__(
        self, exact: Mapping[int, Contribution], trials: Sequence[Trial], targets: NDArray[np.int64]
    ) -> None:
        """`exact` are the fp32 logits `[N, C]` by member, `targets` `[N]` the labels."""
        self._exact, self._targets = exact, targets
        self._tried = {(t.k, t.way): t.logits for t in trials if t.logits is not None}
        self.fp32 = self._accuracy({})

    def logits(self, ways: Mapping[int, Way]) -> dict[int, Contribution]:
        """Every member's logits, those of `ways` in another precision or runtime."""
        return {k: self._tried[k, ways[k]] if k in ways else c for k, c in self._exact.items()}

    def loss(self, ways: Mapping[int, Way]) -> float:
        """Accuracy lost against fp32, a fraction; negative for a gain."""
        return self.fp32 - self._accuracy(ways)

    def _accuracy(self, ways: Mapping[int, Way]) -> float:
        members = self.logits(ways)
        weights = fit_subset(members, sorted(members), self._targets)
        return accuracy(fuse(members, weights), self._targets)


def quantize_bundle(
    bundle: Bundle,
    data: Dataset,
    run: RunFolder | None,
    request: QuantizeRequest,
    out: Path,
    cache: Path,
    progress: Progress,
) -> Report | None:
    """Write `bundle` to `out`, each member in the precision that `accept` leaves it.

    Returns the new evaluation, or None if no precision was accepted: then only the record is new.
    Raises InputError, and leaves `out` unchanged, for an unusable bundle or unusable pictures.
    """
    bundle.require_one_label("quantize")
    _check(bundle, data, request)
    plan, pictures = bundle.manifest.plan, data.calibration
    views = [view_of(a) for a in plan.assignments]
    pixels = load_views(pictures, views, cache, progress, "calibration split")
    trials: list[Trial] = []
    exact: dict[int, Contribution] = {}
    with progress.task("trying precisions", len(plan.assignments)) as advance:
        for a in plan.assignments:
            runtime = open_member(bundle.model(a.k), a, len(bundle.manifest.labels))
            exact[a.k] = member_contribution(runtime, pixels[a.k], a)
            if request.members is None or a.k in request.members:
                trials += try_member(bundle, a, pixels[a.k], request)
            advance(1, "")
    fused = Fused(exact, trials, pictures.targets)
    for trial in trials:
        if trial.logits is not None:
            trial.loss = fused.loss({trial.k: trial.way})
    urgency = {a.k: a.predicted_ms.total for a in plan.assignments}
    accept(trials, fused.loss, urgency, request.max_loss)
    before = bundle.manifest.evaluation
    if before is None or before.data_digest != data.test.digest:
        before = evaluate(bundle, data, None, cache, progress).evaluation
    accepted = {trial.k: trial for trial in trials if trial.accepted}
    manifest, report = bundle.manifest, None
    with replacing_folder(out) as folder:
        models = {model_path(k): trial.model for k, trial in accepted.items()}
        for name in manifest.files:
            write_bytes(folder / name, models.get(name) or bundle.verified(name).read_bytes())
        if accepted:
            changed = replan(plan, accepted, len(manifest.labels))
            logits = fused.logits({k: trial.way for k, trial in accepted.items()})
            labels = len(manifest.labels)
            files, cascade = fit_bundle(
                folder,
                changed,
                logits,
                pictures.targets,
                unknown=unknown_logits(folder, changed, labels, data.unknown, cache, progress),
                note=progress.note,
                distance=tells_distance(bundle.fusion_weights()),
            )
            manifest = replace(
                manifest, plan=changed, files=files, cascade=cascade, early=None, evaluation=before
            )
            report = evaluate(Bundle(folder, manifest), data, run, cache, progress)
            manifest = replace(manifest, evaluation=report.evaluation)
        after = before if report is None else report.evaluation
        record = _record(plan, request, trials, fused, len(pictures), before, after)
        write_json(folder / MANIFEST, replace(manifest, quantisation=record))
    return report


def _check(bundle: Bundle, data: Dataset, request: QuantizeRequest) -> None:
    """Raise InputError for a bundle or pictures that cannot be used."""
    manifest, path = bundle.manifest, bundle.path
    if manifest.inspection:
        raise InputError(
            f"{path}: has anomaly heads, which are fitted to each model as it is served: quantize "
            "the bundle without them, then give it to mdp-partition inspect"
        )
    check_labels(bundle, data)
    if "untrained" in manifest.provenance:
        raise InputError(
            f"{path}: is untrained, so it has no accuracy to lose; plan the precision instead"
        )
    if manifest.evaluation is None:
        raise InputError(f"{path}: was never evaluated: run mdp-partition evaluate --write first")
    check_no_rungs(bundle)
    for assignment in manifest.plan.assignments:
        precision = assignment.spec.precision
        if precision != "fp32":
            raise InputError(
                f"{path}: sub-model {assignment.k} is in {precision} already: expected fp32"
            )
    plan = manifest.plan
    devices = {a.device for a in plan.assignments} | {r.device for r in plan.replicas}
    named = {"--here": request.here, "--profiles": [p.name for p in request.profiles]}
    for option, names in named.items():
        for name in names:
            if name not in devices:
                known = ", ".join(sorted(devices))
                raise InputError(f"{option}: {path} has no device {name!r} (there are: {known})")
    needed = pictures_needed(request.max_loss)
    if len(data.calibration) < needed:
        raise InputError(
            f"--data {data.source}: {len(data.calibration)} calibration pictures cannot show a "
            f"loss of {points(request.max_loss)}: expected at least {needed}, "
            "or a larger --max-loss"
        )
    check_calibration_split(bundle, data)


def check_calibration_split(bundle: Bundle, data: Dataset) -> None:
    """Raise InputError for calibration pictures that the sub-models may have been trained on."""
    trained = bundle.manifest.provenance.get("calibration_digest")
    if trained is not None and trained != data.calibration.digest:
        raise InputError(
            f"--data {data.source}: the calibration split is not that of {bundle.path}, whose "
            "sub-models may have been trained on its pictures (give the --limit-train of the "
            "training)"
        )


def check_no_rungs(bundle: Bundle) -> None:
    """Raise InputError for a bundle that has rungs already."""
    for a in bundle.manifest.plan.assignments:
        if a.lower:
            raise InputError(
                f"{bundle.path}: sub-model {a.k} has {len(a.lower)} rungs below the top: expected "
                "a bundle without, of which they are made"
            )


def replan(plan: Plan, accepted: Mapping[int, Trial], num_classes: int) -> Plan:
    """`plan` with the accepted precisions: runtime, milliseconds, memory, energy and reason."""

    def change(a: Assignment) -> Assignment:
        trial = accepted.get(a.k)
        if trial is None or trial.timing is None:
            return a
        a, old = a.in_precision(trial.way[0]), a.predicted_ms
        compute = round(old.compute * trial.timing.ratio, 3)
        return replace(
            a,
            runtime=trial.way[1],
            predicted_ms=PredictedMs(
                compute=compute, network=old.network, total=round(compute + old.network, 3)
            ),
            memory_bytes=memory_bytes(a.spec, num_classes),
            energy_j=None if a.energy_j is None else a.energy_j * trial.timing.ratio,
            why=f"{a.why}; {way_words(trial.way)}: {trial.reason}",
        )

    assignments = [change(a) for a in plan.assignments]
    # A replica's milliseconds stay those of fp32, an upper bound.
    replicas = [
        replace(r, runtime=assignments[r.k].runtime, memory_bytes=assignments[r.k].memory_bytes)
        if r.k in accepted
        else r
        for r in plan.replicas
    ]
    return replace(plan, assignments=assignments, replicas=replicas)


def _record(
    plan: Plan,
    request: QuantizeRequest,
    trials: Sequence[Trial],
    fused: Fused,
    calibration_pictures: int,
    before: Evaluation,
    after: Evaluation,
) -> Quantization:
    """The record of what was tried, for the manifest."""
    everyone = tuple(a.k for a in plan.assignments)
    was, now = ({s.members: s.stacked for s in e.subsets} for e in (before, after))
    worst = max(was, key=lambda members: was[members] - now[members])
    loss = fused.loss({trial.k: trial.way for trial in trials if trial.accepted})
    calibration = BeforeAfter(members=everyone, fp32=fused.fp32, now=fused.fp32 - loss)
    return Quantization(
        max_loss=request.max_loss,
        calibration_pictures=calibration_pictures,
        test_pictures=after.pictures,
        calibration=calibration,
        test=BeforeAfter(members=everyone, fp32=was[everyone], now=now[everyone]),
        worst=BeforeAfter(members=worst, fp32=was[worst], now=now[worst]),
        members=[
            QuantizedMember(
                k=a.k,
                device=a.device,
                measured=_source(a.device, request),
                tried=[
                    TriedPrecision(
                        precision=t.way[0],
                        runtime=t.way[1],
                        kept=t.accepted,
                        reason=t.reason,
                        compute_ms=None if t.timing is None else round(t.timing.compute_ms, 4),
                        fp32_ms=None if t.timing is None else round(t.timing.fp32_ms, 4),
                        loss=t.loss,
                    )
                    for t in trials
                    if t.k == a.k
                ],
            )
            for a in plan.assignments
        ],
    )


def _source(device: str, request: QuantizeRequest) -> str:
    if device in request.here:
        return "here, on the machine that quantized"
    profile = next((p for p in request.profiles if p.name == device), None)
    if profile is None:
        return "nowhere"
    return f"profile {device}: {profile.provenance['latency'].source}"
