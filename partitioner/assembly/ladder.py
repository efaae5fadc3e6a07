"""Rungs for a bundle's members, made of models that it has: in less precision, or of students.

A ladder serves a burst: the device answers by a lower rung, quicker and less accurate, where the
top one would be late. After Academus, which drops the students of an equal group.
"""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

from msgspec import UNSET
from msgspec.structs import replace

from mdp.errors import InputError
from mdp.files import read_json, replacing_folder, write_bytes
from mdp.formats.bundle import FUSION, Bundle, file_entry, model_path, model_paths
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import MAX_RUNGS, Assignment, NetworkSpec, Plan, PredictedMs, Rung
from mdp.formats.profile import Precision
from mdp.fusion.fuse import Contribution, FusionWeights
from mdp.pictures.crop import Pixels
from partitioner.assembly.students import join_models
from partitioner.data.crops import load_views, view_of
from partitioner.data.datasets import Dataset, PictureSet, thin_out
from partitioner.estimates.macs import macs, memory_bytes, parameters
from partitioner.export.evaluate import (
    Report,
    accuracy,
    check_labels,
    earlier_teacher_accuracy,
    evaluate,
    write_report,
)
from partitioner.export.quantize import QuantizationError, quantize_model
from partitioner.export.quantize_bundle import check_calibration_split, check_no_rungs
from partitioner.export.sessions import member_contribution, open_member
from partitioner.export.try_precision import MIN_GAIN, best_ms
from partitioner.export.unknown import unknown_logits
from partitioner.fusion.bundle_fit import fit_bundle
from partitioner.fusion.novelty_fit import tells_distance
from partitioner.fusion.stacking import fit_scales
from partitioner.run.progress import Progress

#: Precisions of a rung below fp32.
PRECISIONS: tuple[Precision, ...] = tuple(
    p for p in get_args(Precision) if p not in ("fp32", "bf16")
)


class Students(NamedTuple):
    """Equal members of which the first, the first two, .. become the rungs of one device."""

    device: str
    ks: tuple[int, ...]


@dataclass(slots=True)
class MadeRung:
    """One form of a member, with what it computes."""

    part: Assignment
    content: bytes
    why: str
    #: Of the calibration pictures.
    logits: Contribution
    #: Milliseconds of one picture on one thread of this machine.
    here_ms: float = 0.0


def parse_rungs(texts: Sequence[str], bundle: Bundle) -> Precision | list[Students]:
    """The precision of lower rungs, or groups of students as `DEVICE=K,K,..`; raises InputError."""
    plan = bundle.manifest.plan
    expected = f"--rungs: expected one of {', '.join(PRECISIONS)}, or DEVICE=K,K,.. for each group"
    for precision in PRECISIONS:
        if list(texts) == [precision]:
            return precision
    groups: list[Students] = []
    for text in texts:
        device, _, numbers = text.partition("=")
        ks = numbers.split(",")
        if not all(k.isdecimal() and int(k) < len(plan.assignments) for k in ks):
            raise InputError(
                f"{expected} of students, each of 0 to {len(plan.assignments) - 1}, got {text!r}"
            )
        groups.append(Students(device, tuple(map(int, ks))))
    named = [k for group in groups for k in group.ks]
    if not groups or len(set(named)) < len(named):
        raise InputError(f"{expected}, each student once, got {' '.join(texts) or 'nothing'}")
    for group in groups:
        _check_equal(bundle, group)
    return groups


def _check_equal(bundle: Bundle, group: Students) -> None:
    """Raise InputError for students that are not equal, or of whom there are too many or few."""
    plan = bundle.manifest.plan
    parts = [plan.assignments[k] for k in group.ks]
    if not 2 <= len(parts) <= MAX_RUNGS:
        raise InputError(f"--rungs {group.device}: expected 2 to {MAX_RUNGS} students")
    if group.device not in [part.device for part in parts]:
        known = ", ".join(part.device for part in parts)
        raise InputError(f"--rungs {group.device}: expected the device of a student: {known}")
    for part in parts:
        for key in ("spec", "region", "camera", "runtime"):
            if getattr(part, key) != getattr(parts[0], key):
                raise InputError(
                    f"--rungs {group.device}: {bundle.path}: sub-models {parts[0].k} and {part.k} "
                    f"differ in {key}: expected equal students"
                )


def add_rungs(
    bundle: Bundle,
    data: Dataset,
    wanted: Precision | Sequence[Students],
    out: Path,
    limit: int,
    cache: Path,
    progress: Progress,
) -> Report:
    """Write `bundle` with rungs to `out`, fitted on at most `limit` calibration pictures.

    Returns the evaluation on the test pictures, with all devices at their top and at their lowest
    rungs. Raises InputError, and leaves `out` unchanged, for what cannot be made.
    """
    check_no_rungs(bundle)
    if bundle.manifest.inspection:
        raise InputError(f"{bundle.path}: has anomaly heads, which rungs lack: expected none")
    check_labels(bundle, data)
    check_calibration_split(bundle, data)
    manifest, pictures = bundle.manifest, thin_out(data.calibration, limit)
    if manifest.plan.replicas:
        raise InputError(
            f"{bundle.path}: {manifest.plan.replicas[0].device} is a replica: expected a plan "
            "without, as rungs are made for one device"
        )
    making = _Making(bundle, pictures, cache, progress)
    if isinstance(wanted, str):
        ladders, what = making.precise(wanted), f"{wanted} below fp32"
    else:
        ladders = making.group(wanted)
        what = ", ".join(f"{group.device} of students {group.ks}" for group in wanted)
    plan, cascade = making.make_plan(ladders), manifest.cascade
    with replacing_folder(out) as folder:
        for k, ladder in enumerate(ladders):
            for number, made in enumerate(ladder):
                write_bytes(folder / model_path(k, number), made.content)
        if isinstance(wanted, str):
            write_bytes(folder / FUSION, bundle.content(FUSION))
        else:
            classes = len(manifest.labels)
            _, cascade = fit_bundle(
                folder,
                plan,
                {k: ladder[0].logits for k, ladder in enumerate(ladders)},
                pictures.targets,
                unknown=unknown_logits(folder, plan, classes, data.unknown, cache, progress),
                note=progress.note,
                distance=tells_distance(bundle.fusion_weights()),
            )
        fusion = read_json(folder / FUSION, FusionWeights)
        plan = with_rungs(plan, ladders, fusion, pictures)
        paths = [*model_paths(plan), FUSION]
        changed = replace(
            manifest,
            plan=plan,
            files={path: file_entry(folder / path) for path in paths},
            cascade=cascade,
            early=None,
            evaluation=None,
            quantisation=manifest.quantisation if isinstance(wanted, str) else None,
            provenance={**manifest.provenance, "rungs": f"{what}, of bundle {bundle.digest[:12]}"},
        )
        made_bundle = Bundle(folder, changed)
        report = evaluate(made_bundle, data, None, cache, progress)
        teacher = earlier_teacher_accuracy(manifest.evaluation, data)
        evaluation = replace(report.evaluation, teacher=teacher)
        report = dataclasses.replace(report, evaluation=evaluation)
        write_report(made_bundle, report)
    return report


class _Making:
    """Makes the rungs of one bundle, and measures them here."""

    def __init__(
        self, bundle: Bundle, pictures: PictureSet, cache: Path, progress: Progress
    ) -> None:
        self._bundle, self._progress = bundle, progress
        self._parts = bundle.manifest.plan.assignments
        self._classes = len(bundle.manifest.labels)
        views = [view_of(part) for part in self._parts]
        self._pixels = load_views(pictures, views, cache, progress, "calibration split")

    def precise(self, precision: Precision) -> list[list[MadeRung]]:
        """Each member, and below those in fp32 the same in `precision`; raises InputError."""
        ladders = []
        for part in self._parts:
            content, pixels = self._bundle.model(part.k).content, self._pixels[part.k]
            forms = [(part, content)]
            if part.spec.precision == "fp32":
                try:
                    lower = quantize_model(content, precision, pixels)
                except QuantizationError as error:
                    raise InputError(f"sub-model {part.k} {error}") from error
                forms.append((replace(part.in_precision(precision), runtime="onnxruntime"), lower))
            ladders.append(self._ladder(forms, f"the same in {precision}", pixels))
        return _check(ladders)

    def group(self, groups: Sequence[Students]) -> list[list[MadeRung]]:
        """The first m to 1 students of each group, and each other member; raises InputError."""
        fusion, ladders = self._bundle.fusion_weights(), []
        first = {group.ks[0]: group for group in groups}
        others = {k for group in groups for k in group.ks[1:]}
        for part in self._parts:
            if part.k in others:
                continue
            forms = [(part, self._bundle.model(part.k).content)]
            if (group := first.get(part.k)) is not None:
                forms = [
                    self._students(group, count, fusion) for count in range(len(group.ks), 0, -1)
                ]
            ladders.append(self._ladder(forms, "fewer students", self._pixels[part.k]))
        return _check(ladders)

    def _students(
        self, group: Students, count: int, fusion: FusionWeights
    ) -> tuple[Assignment, bytes]:
        """The first `count` students of a group as one sub-model of its device."""
        ks = sorted(group.ks[:count])
        fitted = fusion.weights_of(ks)
        assert fitted is not None
        pairs = zip(fitted.a, fitted.b, strict=True) if fitted.a else ((b,) for b in fitted.b)
        content = join_models([self._bundle.model(k).content for k in ks], list(pairs))
        spec = self._parts[ks[0]].spec
        network = NetworkSpec(
            name=f"{count} x {spec.outline}",
            image_size=spec.image_size,
            parameters=count * parameters(spec, self._classes),
            macs=count * macs(spec, self._classes),
            precision=spec.precision,
        )
        own = next(part for part in self._parts if part.device == group.device)
        part = replace(
            own, submodel=None, network=network, memory_bytes=memory_bytes(network, self._classes)
        )
        return part, content

    def _ladder(
        self, forms: Sequence[tuple[Assignment, bytes]], why: str, pixels: Pixels
    ) -> list[MadeRung]:
        """The forms of one member, without those that are hardly quicker here than the one above.

        Predictions of the whole are for its last form alone, and scaled by the times here.
        """
        files = [ModelFile(self._bundle.path, content) for _, content in forms]
        runtimes = [
            open_member(file, part, self._classes)
            for file, (part, _) in zip(files, forms, strict=True)
        ]
        here_ms = [1.0]
        if len(forms) > 1:
            # Processor time, as of one thread: other load does not count.
            here_ms = best_ms([one.run for one in runtimes], pixels, time.process_time)
        ladder: list[MadeRung] = []
        for (part, content), runtime, took_ms in zip(forms, runtimes, here_ms, strict=True):
            if ladder and took_ms > (1 - MIN_GAIN) * ladder[-1].here_ms:
                self._progress.note(
                    f"sub-model {part.k} for {part.device}: {why} ({part.spec.outline}, "
                    f"{part.spec.precision}) takes {took_ms:.3g} ms here, the rung above "
                    f"{ladder[-1].here_ms:.3g}: left out"
                )
                continue
            logits = member_contribution(runtime, pixels, part)
            ladder.append(MadeRung(part, content, why, logits, took_ms))
        return ladder

    def make_plan(self, ladders: Sequence[Sequence[MadeRung]]) -> Plan:
        """The plan with the tops of `ladders` as members, without the devices of other students."""
        plan = self._bundle.manifest.plan
        tops = []
        for k, ladder in enumerate(ladders):
            top = ladder[0].part
            if top.network is not None and top.network != self._parts[top.k].network:
                # Its predictions are those of a single student, the last rung.
                ratio = ladder[0].here_ms / ladder[-1].here_ms
                compute, network = top.predicted_ms.compute * ratio, top.predicted_ms.network
                top = replace(
                    top,
                    predicted_ms=PredictedMs(
                        compute=compute, network=network, total=compute + network
                    ),
                    energy_j=None if top.energy_j is None else top.energy_j * ratio,
                    accuracy=None,
                )
            tops.append(replace(top, k=k))
        kept = {top.device for top in tops}
        gone = [part.device for part in self._parts if part.device not in kept]
        why = "its student is a rung of another device"
        return replace(
            plan, assignments=tops, left_out={**plan.left_out, **dict.fromkeys(gone, why)}
        )


def _check(ladders: list[list[MadeRung]]) -> list[list[MadeRung]]:
    if max(map(len, ladders)) == 1:
        raise InputError("--rungs: expected a form that is quicker here than the top, found none")
    return ladders


def with_rungs(
    plan: Plan, ladders: Sequence[Sequence[MadeRung]], fusion: FusionWeights, pictures: PictureSet
) -> Plan:
    """`plan` with the rungs of each member below its top, for the weights of `fusion`.

    Their accuracies are those on the calibration `pictures`, until they are evaluated.
    """
    assignments = []
    for top, (first, *lower) in zip(plan.assignments, ladders, strict=True):
        weights = fusion.weights_of((top.k,))
        assert weights is not None
        rungs = [
            Rung(
                accuracy=accuracy(made.logits.bag, pictures.targets),
                compute_ms=top.predicted_ms.compute * made.here_ms / first.here_ms,
                memory_bytes=memory_bytes(made.part.spec, fusion.num_classes),
                scales=fit_scales(made.logits, weights, pictures.targets),
                why=f"{made.why}; {made.here_ms / first.here_ms:.0%} of the top's time here",
                submodel=made.part.submodel,
                network=made.part.network,
                runtime=made.part.runtime,
            )
            for made in lower
        ]
        assignments.append(replace(top, rungs=tuple(rungs) if rungs else UNSET))
    return replace(plan, assignments=assignments)
