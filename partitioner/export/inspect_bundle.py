"""Give the models of a bundle anomaly heads, fitted in one pass over good scenes.

Good scenes are scored by folds that were fitted without them, so that no threshold is too low. The
classes are answered as before: logits, fusion weights and the evaluation stay, while the models'
files, and with them the bundle's digest, change.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.files import replacing_folder, write_bytes, write_json
from mdp.formats.bundle import (
    FUSION,
    MANIFEST,
    Bundle,
    InspectedMember,
    Inspection,
    file_entry,
    model_path,
)
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment, Plan, PredictedMs, Replica
from mdp.fusion.anomaly import surprise
from mdp.fusion.anomaly_table import DEFAULT_GOOD_RATE, Anomaly
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import INPUT, Runtime
from mdp.runtimes.onnxruntime import import_onnxruntime
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import PictureSet, open_scenes, thin_out
from partitioner.export import anomaly_head as heads
from partitioner.export.quantize import SAME_FILE
from partitioner.export.sessions import batch_for, open_member
from partitioner.export.try_precision import best_ms
from partitioner.fusion.anomaly_fit import check_count, fit_anomaly, lone_sides, suspicious
from partitioner.fusion.novelty_fit import area_under_curve
from partitioner.run.progress import Progress

Values = NDArray[np.float64]
#: A place where a sub-model is served.
Served = TypeVar("Served", Assignment, Replica)
#: Folds that score each other's good scenes.
FOLDS = 5
#: Scenes of them that are used, at most: evenly spaced.
MOST_GOOD = 2000
#: Area under the ROC curve that a member in a lower precision may lose, as a fraction.
MAX_LOSS = 0.02
#: Share of planted patches below which a camera is called nearly blind: where items lie alike, all
#: are found, and hardly any where something lies before every tenth view (docs/how-to/inspect.md).
SEEING = 0.5
#: Defective scenes: one to choose by, and one to measure by.
LEAST_DEFECTS = 2
#: Scenes that an error names, at most.
_NAMED = 20
#: Features that are kept in memory between two looks at them, at most.
_KEPT_BYTES = 400 * 2**20
_LEAST_LIMIT = 1e-6
#: Rounds in which a model is timed with its head and without.
_ROUNDS = 6
#: The share of good pictures with a stranger cell than a map's `MAP_LIMIT`.
_MAP_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectRequest:
    """Pictures to learn from, and the rate at which good items may be rejected."""

    good: str
    #: The option that names them, for errors.
    option: str = "--data"
    #: A folder of defective scenes that measure; None without any.
    defects: str | None = None
    rate: float = DEFAULT_GOOD_RATE
    #: The bundle before `quantize`, whose fp32 members are compared with the quantized ones.
    before: Bundle | None = None
    max_loss: float = MAX_LOSS
    #: Whether good scenes that look defective are taken for good all the same.
    all_good: bool = False


@dataclass(slots=True, kw_only=True)
class _FittedMember:
    """One member's head, and its scores."""

    assignment: Assignment
    model: bytes
    facts: InspectedMember
    #: Scores of good scenes, of those with a planted patch, and of defective ones.
    good: Values
    patched: Values
    defects: Values | None


def inspect_bundle(
    bundle: Bundle, out: Path, request: InspectRequest, cache: Path, progress: Progress
) -> Bundle:
    """Write `bundle` with anomaly heads into `out`, which may be the same.

    Raises InputError for good scenes that are too few or hold defects, which it names, for a
    network without a layer of places, and for a quantized member that tells planted patches apart
    worse than its fp32 model by more than `request.max_loss`.
    """
    manifest = bundle.manifest
    if "untrained" in manifest.provenance:
        raise InputError(f"{bundle.path}: is untrained: its layers say nothing of a picture")
    if any(a.lower for a in manifest.plan.assignments):
        raise InputError(f"{bundle.path}: has rungs, which get no anomaly heads: expected none")
    _check_before(bundle, request.before)
    good, defects = open_inspected(
        request, {a.camera for a in manifest.plan.assignments if a.camera}
    )
    views = [view_of(a) for a in manifest.plan.assignments]
    seen = load_views(good, views, cache, progress, "good scenes")
    faulty: list[Pixels | None] = [None] * len(views)
    if defects is not None:
        faulty = [*load_views(defects, views, cache, progress, "defective scenes")]
    members = []
    with progress.task("fitting anomaly heads", len(views)) as advance:
        for a, pixels, others in zip(manifest.plan.assignments, seen, faulty, strict=True):
            members.append(_fit_member(bundle, a, pixels, others, request))
            advance(1, a.device)
    _check_gate(request, members)
    scores = {m.assignment.k: m.good for m in members}
    if (found := suspicious(scores)) and not request.all_good:
        raise InputError(_format_error(request, good, found))
    strange = lone_sides(
        scores,
        {m.assignment.k: m.patched for m in members},
        {m.assignment.k: m.assignment.camera for m in members},
    )
    measured = {m.assignment.k: m.defects for m in members if m.defects is not None}
    if measured:
        # Those that choose how scores are fused do not measure it.
        chosen_by = {k: one[::2] for k, one in measured.items()}
        strange, measured = chosen_by, {k: one[1::2] for k, one in measured.items()}
    table = fit_anomaly(
        scores, strange, rate=request.rate, measured=measured or None, note=progress.note
    )
    for member in members:
        member.facts = replace(member.facts, planted_found=_planted_found(table, member))
    if warning := _blind_warning(members, table.default):
        progress.note(warning)
    inspection = Inspection(
        data=Path(request.good).name,
        data_digest=good.digest,
        good=len(good),
        members=[m.facts for m in members],
        defective=table.defective,
        defects=None if request.defects is None else Path(request.defects).name,
        rate=request.rate,
    )
    fusion = replace(bundle.fusion_weights(), anomaly=table)
    with replacing_folder(out) as folder:
        for name in manifest.files:
            write_bytes(folder / name, bundle.verified(name).read_bytes())
        for member in members:
            write_bytes(folder / model_path(member.assignment.k), member.model)
        write_json(folder / FUSION, fusion)
        changed = replace(
            manifest,
            plan=_replan(manifest.plan, members, manifest.inspection or None),
            files={name: file_entry(folder / name) for name in manifest.files},
            inspection=inspection,
        )
        write_json(folder / MANIFEST, changed)
    return Bundle.open(out)


def open_inspected(
    request: InspectRequest, cameras: Iterable[str]
) -> tuple[PictureSet, PictureSet | None]:
    """The good scenes of all `cameras`, and the defective ones; raises InputError for too few."""
    names = sorted({*cameras})
    good = thin_out(open_scenes(request.good, names), MOST_GOOD)
    try:
        check_count(len(good))
    except InputError as error:
        raise InputError(f"{request.option} {request.good}: {error}") from None
    defects = None if request.defects is None else open_scenes(request.defects, names)
    if defects is not None and len(defects) < LEAST_DEFECTS:
        raise InputError(
            f"--defects {request.defects}: expected at least {LEAST_DEFECTS} defective scenes, of "
            f"which half choose and half measure, got {len(defects)}"
        )
    return good, defects


def _fit_member(
    bundle: Bundle,
    assignment: Assignment,
    pixels: Pixels,
    defects: Pixels | None,
    request: InspectRequest,
) -> _FittedMember:
    """One member with a head fitted to good pictures `[N, S, S, 3]`, and the scores it gives."""
    k, precision = assignment.k, assignment.spec.precision
    before = bundle.model(k)
    plain = heads.without_head(before.content) if heads.has_head(before.content) else before.content
    head = _add_head(plain, before.path, pixels, batch_for(precision))
    classes = len(bundle.manifest.labels)
    runs = [
        open_member(ModelFile(before.path, content), assignment, classes)
        for content in (plain, head.model)
    ]
    without_ms, with_ms = best_ms([run.run for run in runs], pixels[:1], time.process_time, _ROUNDS)
    exact: float | None = None
    if request.before is not None and precision not in SAME_FILE:
        exact = _exact_auc(request.before, assignment, pixels)
    facts = InspectedMember(
        k=k,
        device=assignment.device,
        layers=head.words,
        added_bytes=len(head.model) - len(plain),
        time_ratio=round(with_ms / without_ms, 4),
        planted_auc=round(area_under_curve(head.good, head.patched), 4),
        fp32_planted_auc=None if exact is None else round(exact, 4),
    )
    return _FittedMember(
        assignment=assignment,
        model=head.model,
        facts=facts,
        good=head.good,
        patched=head.patched,
        defects=None if defects is None else _scores(runs[1], defects, batch_for(precision)),
    )


@dataclass(frozen=True, slots=True)
class _Head:
    """A model with a head, and the scores `[N]` of good pictures, and of them with a patch."""

    model: bytes
    good: Values
    patched: Values
    #: The layers that the head reads.
    words: str


def _add_head(plain: bytes, path: Path, pixels: Pixels, batch: int) -> _Head:
    """A model with a head fitted to good pictures, which are scored by folds without them."""
    layers = heads.choose_layers(plain, str(path))
    ort = import_onnxruntime()
    session = ort.InferenceSession(
        heads.with_features(plain, layers), providers=["CPUExecutionProvider"]
    )
    names = heads.feature_names(layers)

    def features(of: Pixels) -> Iterator[list[heads.Floats]]:
        for start in range(0, len(of), batch):
            some = np.ascontiguousarray(of[start : start + batch])
            values = session.run(names, {INPUT: some})
            yield [layer.places(value) for layer, value in zip(layers, values, strict=True)]

    kept: list[list[heads.Floats]] | None = None
    places = sum(layer.side**2 * layer.channels for layer in layers)
    if len(pixels) * places * 4 <= _KEPT_BYTES:
        # The network runs once; of more pictures it runs twice.
        kept = [*features(pixels)]
    fits = heads.fit_folds(kept or features(pixels), layers, FOLDS)
    maps = heads.maps_by_folds(kept or features(pixels), layers, fits)
    good = heads.scores_of(maps).astype(np.float64)
    if not np.isfinite(good).all():
        raise InputError(
            f"{path}: its middle layers ({heads.words_of(layers)}) give numbers that are not "
            "finite of good pictures"
        )
    limit = max(float(np.quantile(good, 1 - _MAP_RATE)), _LEAST_LIMIT)
    maps = heads.maps_by_folds(features(heads.plant_patch(pixels)), layers, fits)
    return _Head(
        model=heads.with_head(plain, layers, fits.whole, limit),
        good=good,
        patched=heads.scores_of(maps).astype(np.float64),
        words=heads.words_of(layers),
    )


def _scores(runtime: Runtime, pixels: Pixels, batch: int) -> Values:
    """Scores `[N]` of pictures `[N, S, S, 3]`, as the device computes them."""
    parts = []
    for start in range(0, len(pixels), batch):
        found = runtime.run(np.ascontiguousarray(pixels[start : start + batch])).anomaly
        parts.append(np.asarray(found, dtype=np.float64))
    return np.concatenate(parts)


def _exact_auc(before: Bundle, assignment: Assignment, pixels: Pixels) -> float:
    """Area under the ROC curve of planted patches by a member's fp32 model."""
    model = before.model(assignment.k)
    plain = heads.without_head(model.content) if heads.has_head(model.content) else model.content
    head = _add_head(plain, model.path, pixels, batch_for("fp32"))
    return area_under_curve(head.good, head.patched)


def _check_before(bundle: Bundle, before: Bundle | None) -> None:
    """Raise InputError unless `before`, where it is given, has all quantized members in fp32."""
    if before is None:
        return
    where, old = f"--fp32 {before.path}", before.manifest.plan.assignments
    if before.manifest.labels != bundle.manifest.labels:
        raise InputError(f"{where}: expected the classes of {bundle.path}, found others")
    quantized = [a for a in bundle.manifest.plan.assignments if a.spec.precision not in SAME_FILE]
    if not quantized:
        raise InputError(f"{where}: {bundle.path} has no quantized sub-model to compare")
    for a in quantized:
        if a.k >= len(old):
            raise InputError(f"{where}: has no sub-model {a.k}")
        exact = old[a.k]
        same = replace(exact.spec, precision="fp32") == replace(a.spec, precision="fp32")
        if not same or exact.spec.precision not in SAME_FILE:
            raise InputError(
                f"{where}: expected sub-model {a.k} as {a.spec.words} in fp32, found "
                f"{exact.spec.words} in {exact.spec.precision}"
            )
        if view_of(exact) != view_of(a):
            raise InputError(
                f"{where}: expected sub-model {a.k} to see what that of {bundle.path} sees, found "
                "another view"
            )


def _check_gate(request: InspectRequest, members: Sequence[_FittedMember]) -> None:
    """Raise InputError for members whose precision costs too much; nothing is written."""
    worse = []
    for member in members:
        facts = member.facts
        exact = facts.fp32_planted_auc
        if exact is not None and exact - facts.planted_auc > request.max_loss:
            worse.append(
                f"sub-model {facts.k} ({facts.device}) tells planted patches apart with an area "
                f"under the curve of {facts.planted_auc:.3f} in "
                f"{member.assignment.spec.precision}, in fp32 with {exact:.3f}"
            )
    if worse:
        raise InputError(
            f"{'; '.join(worse)}: expected at most {request.max_loss:g} less: inspect the fp32 "
            "bundle, or allow more (--max-loss)"
        )


def _planted_found(table: Anomaly, member: _FittedMember) -> float:
    """The share of pictures with a planted patch that a member finds by its own threshold."""
    k = member.assignment.k
    alone = table.of((k,))
    assert alone
    found = surprise(member.patched, table.tails[k]) > alone.thresholds[table.place]
    return round(float(found.mean()), 4)


def _blind_warning(members: Sequence[_FittedMember], rate: float) -> str:
    """The line that names members that hardly find planted patches; empty without any."""
    blind = []
    for member in members:
        found, camera = member.facts.planted_found or 0.0, member.assignment.camera
        if found < SEEING:
            seen_by = f"camera {camera} ({member.facts.device})" if camera else member.facts.device
            blind.append(
                f"{seen_by} finds {found:.0%} of planted patches (area under the curve "
                f"{member.facts.planted_auc:.2f})"
            )
    if not blind:
        return ""
    return (
        f"warning: nearly blind at {rate:.2%} of good items rejected: {', '.join(blind)}: good "
        "scenes differ too much there: take them anew with items that lie alike and nothing before "
        "them, mask what changes, or leave the camera out"
    )


def _format_error(request: InspectRequest, good: PictureSet, rows: Sequence[int]) -> str:
    """The error that names good scenes which look defective."""
    names = ", ".join(good.names[row] for row in rows[:_NAMED])
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return (
        f"{request.option} {request.good}: {len(rows)} of {len(good)} good scenes differ from all "
        f"the others as defects do: {names}{more}: move them out, or say that they are good "
        "(--all-good)"
    )


def _replan(plan: Plan, members: Sequence[_FittedMember], old: Inspection | None) -> Plan:
    """`plan` with what the heads cost, milliseconds and memory, in place of `old` ones' cost."""
    before = {one.k: one for one in old.members} if old else {}
    ratios, added = {}, {}
    for member in members:
        k, facts = member.assignment.k, member.facts
        ratios[k], added[k] = max(1.0, facts.time_ratio), facts.added_bytes
        if k in before:
            ratios[k] /= max(1.0, before[k].time_ratio)
            added[k] -= before[k].added_bytes
    return replace(
        plan,
        assignments=[_with_cost(a, ratios[a.k], added[a.k]) for a in plan.assignments],
        replicas=[_with_cost(r, ratios[r.k], added[r.k]) for r in plan.replicas],
    )


def _with_cost(served: Served, ratio: float, added_bytes: int) -> Served:
    """A sub-model's place with `ratio` times the milliseconds, and so many more bytes."""
    network, compute = served.predicted_ms.network, served.predicted_ms.compute * ratio
    milliseconds = PredictedMs(
        compute=round(compute, 3), network=network, total=round(compute + network, 3)
    )
    memory = served.memory_bytes + added_bytes
    return replace(served, predicted_ms=milliseconds, memory_bytes=memory)
