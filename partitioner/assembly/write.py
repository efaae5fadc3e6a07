"""Assemble trained models in a bundle folder: export, check, quantize, time, fit the fusion."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from msgspec import UNSET
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from mdp.errors import InputError
from mdp.files import replacing_folder, write_bytes, write_json
from mdp.formats.bundle import MANIFEST, Manifest, model_path, sha256_of
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment, NetworkSpec, Plan, Region, Spec, SubModelSpec
from mdp.formats.profile import DeviceProfile, RuntimeName
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import CPU, Execution, Runtime
from mdp.runtimes.onnxruntime import open_session
from mdp.runtimes.select import check_execution, open_runtime
from partitioner.assembly import members
from partitioner.assembly.imported import (
    HEADS,
    classifier_of,
    count_costs,
    onnx_member,
    own_logits,
    stage_of,
    timm_module,
)
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, PictureSet, choose_rows, thin_out
from partitioner.data.memmaps import Views
from partitioner.estimates.latency import Way, fit_latency, spec_of
from partitioner.estimates.latency_networks import unmeasured_networks
from partitioner.export import sessions
from partitioner.export.quantize import quantize_model
from partitioner.export.unknown import unknown_logits
from partitioner.export.write import (
    MAX_ERROR,
    ParityError,
    ServedMember,
    check_parity,
    to_onnx,
    versions,
)
from partitioner.fusion.bundle_fit import TrainingAnswers, fit_bundle, fit_bundle_of_several
from partitioner.fusion.region_choice import CHOSEN_ON, TRIED_ON, Seen, choose_regions, shorten
from partitioner.networks.families import NetworkStage
from partitioner.networks.feature_distance import attach_distance, features_at
from partitioner.networks.submodel import SubModel
from partitioner.networks.teacher import teacher_spec
from partitioner.regions import REGIONS, WHOLE, where
from partitioner.run.progress import Progress
from partitioner.run.threads import side_by_side

#: Pictures for the comparison of the served form with its source.
_COMPARED = 32
#: Training pictures that the distance of features is measured from, at most.
TAUGHT = 500
#: Repetitions of a latency measurement.
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class LeftOutAnswers:
    """Answers to training pictures, or scenes, by classifiers that were fitted without them."""

    #: By device, log-probabilities `[S, C]`.
    answers: Mapping[str, NDArray[np.floating]]
    #: Classes `[S]`, or sets of labels.
    targets: NDArray[np.int64]
    #: Devices whose network was trained since: their answers are those of the network before.
    outdated: frozenset[str] = frozenset()


@dataclass(slots=True)
class Assembly:
    """The assembly of one bundle: its data and folders."""

    folder: Path
    data: Dataset
    limit: int
    cache: Path
    progress: Progress
    #: The latency target that the models were chosen for; None: they were named.
    target_ms: float | None = None
    #: By device, the milliseconds of computing that its model was chosen by.
    predicted_ms: Mapping[str, float] = field(default_factory=dict)
    #: Facts about where they come from, beside those of their files.
    origin: Mapping[str, str] = field(default_factory=dict)
    #: What fusion is fitted to beside the calibration split, if anything.
    left_out: "LeftOutAnswers | None" = None
    #: By device, features `[N, D]` of training pictures of which the distance is measured, where
    #: its network's are known.
    features: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    #: Models that tell the distance of their features.
    distant: set[Path] = field(default_factory=set)
    #: Milliseconds of reference encoders on one thread of this machine.
    references: dict[SubModelSpec, float] = field(default_factory=dict)

    def write(
        self,
        models: Sequence[members.Model],
        rows: Sequence[tuple[int, list[int]]],
        profiles: Mapping[str, DeviceProfile],
        out: Path,
        name: str,
    ) -> None:
        """Write the bundle without an evaluation; raises InputError and ParityError."""
        for model in models:
            check_execution(_here(model))
        pictures = thin_out(self.data.calibration, self.limit)
        for remark in unmeasured_networks(profiles.values()):
            self.progress.note(remark)
        assignments: list[Assignment] = []
        runtimes: list[Runtime] = []
        firsts = members.file_owners(models)
        shared = {
            first: [model for model, one in zip(models, firsts, strict=True) if one == first]
            for first in firsts
        }
        with replacing_folder(out) as folder:
            paths = [folder / model_path(k) for k in range(len(models))]
            exported: dict[int, Spec] = {}
            for k, sharing in shared.items():
                with self.progress.step(f"exporting the network of {models[k].device}"):
                    exported[k] = self._export(models[k], *rows[k], paths[k], pictures, sharing)
            networks = [exported[first] for first in firsts]
            regions = self._regions(models, networks, [paths[first] for first in firsts], pictures)
            for k, sharing in shared.items():
                seen_by = list(dict.fromkeys(model.camera for model in sharing))
                self._quantize(models[k], regions[k], networks[k], paths[k], pictures, seen_by)
            for k, (model, first) in enumerate(zip(models, firsts, strict=True)):
                if first != k:
                    write_bytes(paths[k], paths[first].read_bytes())
                part, runtime = self._member(
                    k, model, regions[k], networks[k], profiles[model.device], paths[k], pictures
                )
                assignments.append(part)
                runtimes.append(runtime)
            calibration = self._answers(assignments, runtimes, pictures)
            plan = members.assemble_plan(assignments, len(self.data.labels), self.target_ms)
            labels, unknown = len(self.data.labels), self.data.unknown
            cascade, more, sets = None, self._more(plan), self.data.sets
            if sets is not None:
                held = sets.flags(pictures.targets)
                others = None
                if more is not None:
                    others = more.contributions, sets.flags(more.targets)
                files = fit_bundle_of_several(folder, plan, calibration, held, others)
            else:
                files, cascade = fit_bundle(
                    folder,
                    plan,
                    calibration,
                    pictures.targets,
                    more=more,
                    unknown=unknown_logits(
                        folder, plan, labels, unknown, self.cache, self.progress
                    ),
                    note=self.progress.note,
                    distance=self.distant.issuperset(paths[first] for first in shared),
                )
            manifest = Manifest(
                name=name,
                labels=list(self.data.labels),
                plan=plan,
                files=files,
                provenance=self._provenance(models, pictures),
                cascade=cascade,
                labels_per_item=UNSET if sets is None else "several",
            )
            write_json(folder / MANIFEST, manifest)

    def _more(self, plan: Plan) -> TrainingAnswers | None:
        """Answers that fusion weights are fitted to beside the calibration split."""
        more = self.left_out
        if more is None:
            return None
        answers = {
            a.k: Contribution.of([more.answers[a.device].astype(np.float32)])
            for a in plan.assignments
        }
        outdated = {a.k for a in plan.assignments if a.device in more.outdated}
        return TrainingAnswers(answers, more.targets, frozenset(outdated))

    def _export(
        self,
        model: members.Model,
        names: int,
        rows: list[int],
        path: Path,
        pictures: PictureSet,
        sharing: Sequence[members.Model],
    ) -> Spec:
        """Write one model in fp32 and compare it with its source; returns its spec.

        `sharing` are all models of this file.
        """
        source = self.folder / model.source
        if model.onnx is not None:
            content, size = onnx_member(model, source, names, rows)
        else:
            assert model.image_size is not None
            module, size = timm_module(model, source, names, rows), model.image_size
            # The distance is told in the mean of the logits, which log-odds have for themselves.
            if self.data.sets is None and (place := classifier_of(module)) is not None:
                stage = stage_of(module)
                features = self._features(sharing, module, place, stage, size)
                attach_distance(module, place, features, stage)
                self.distant.add(path)
            content = to_onnx(module, size, HEADS, {})
        parameters, macs = count_costs(content)
        write_bytes(path, content)
        some = self._views(thin_out(pictures, _COMPARED), size, [WHOLE], model.camera)[0]
        if model.onnx is None:
            error = check_parity(path, module, some, HEADS)
        else:
            error = _same_logits(path, source, model, some, rows)
        self.progress.note(f"{source}: served form at most {error:.1e} from it in fp32")
        if model.timm is not None and model.pooling == "tokens":
            shape = teacher_spec(model.timm, {}).shape
            return replace(
                shape, image_size=size, depth=model.depth or shape.depth, precision=model.precision
            )
        return NetworkSpec(
            name=model.timm or source.name,
            image_size=size,
            precision=model.precision,
            parameters=parameters,
            macs=macs,
        )

    def _features(
        self,
        sharing: Sequence[members.Model],
        module: torch.nn.Module,
        place: str,
        stage: NetworkStage | None,
        size: int,
    ) -> Tensor:
        """Features `[N, D]` of training pictures, of which the distance is measured.

        They are those of the cameras of all models that share the file.
        """
        seen_by = {model.camera: model for model in sharing}.values()
        known = [self.features[one.device] for one in seen_by if one.device in self.features]
        if len(known) == len(seen_by):
            return torch.from_numpy(np.concatenate(known))
        return features_at(module, place, self._taught(list(seen_by), size), stage)

    def _taught(self, models: Sequence[members.Model], size: int) -> Views:
        """Training pictures `[N, S, S, 3]` as `models` see them, of each equally many."""
        found = []
        for model in models:
            train = self.data.train
            if model.camera is not None:
                rows = [
                    n
                    for n, one in enumerate(train.sources)
                    if isinstance(one, Mapping) and model.camera in one
                ]
                train = choose_rows(train, rows)
            some = thin_out(train, TAUGHT // len(models))
            region = WHOLE if model.region is None else model.region
            found.append(self._views(some, size, [region], model.camera, "training")[0])
        return np.concatenate(found)

    def _regions(
        self,
        models: Sequence[members.Model],
        networks: Sequence[Spec],
        paths: Sequence[Path],
        pictures: PictureSet,
    ) -> list[Region]:
        """The region of each member: its model's, else chosen on calibration pictures in fp32.

        All are tried on few of them, and those that are best there on more.
        """
        allowed = [list(REGIONS) if m.region is None else [m.region] for m in models]
        if all(len(regions) == 1 for regions in allowed):
            return [region for (region,) in allowed]
        some = thin_out(pictures, CHOSEN_ON)
        opened = {path: open_session(path) for path in paths}
        views: dict[tuple[int, Region], Views] = {}
        for k, (model, network) in enumerate(zip(models, networks, strict=True)):
            cut = self._views(some, network.image_size, allowed[k], model.camera)
            views |= {(k, region): one for region, one in zip(allowed[k], cut, strict=True)}

        def see(allowed: Sequence[Sequence[Region]], rows: NDArray[np.int64]) -> Seen:
            """Answers of members to these pictures, each region of each as its own job."""
            jobs = [(k, region) for k, regions in enumerate(allowed) for region in regions]

            def answer(job: tuple[int, Region]) -> Contribution:
                session, pixels = opened[paths[job[0]]], views[job]
                if len(rows) < len(pixels):
                    pixels = pixels[rows]
                return Contribution.of(sessions.run_session(session, pixels, HEADS))

            what = f"trying {len(jobs)} views on {len(rows):,} pictures"
            found = dict(zip(jobs, side_by_side(answer, jobs, self.progress, what), strict=True))
            return lambda k, region: found[k, region]

        if len(some) > TRIED_ON:
            few = np.linspace(0, len(some) - 1, TRIED_ON).astype(np.int64)
            allowed = shorten(allowed, see(allowed, few), some.targets[few])
        every = np.arange(len(some))
        return choose_regions(allowed, see(allowed, every), some.targets)

    def _quantize(
        self,
        model: members.Model,
        region: Region,
        network: Spec,
        path: Path,
        pictures: PictureSet,
        cameras: Sequence[str | None],
    ) -> None:
        """Bring one model to its precision, by the pictures of all `cameras` that share it."""
        pixels = None
        if model.precision == "int8-static":
            side = network.image_size
            views = [self._views(pictures, side, [region], one)[0] for one in cameras]
            pixels = np.concatenate(views)
        write_bytes(path, quantize_model(path.read_bytes(), model.precision, pixels, whole=True))

    def _member(
        self,
        k: int,
        model: members.Model,
        region: Region,
        network: Spec,
        profile: DeviceProfile,
        path: Path,
        pictures: PictureSet,
    ) -> tuple[Assignment, Runtime]:
        """Time one model, alone; returns its assignment and what runs it here."""
        pixels = self._views(pictures, network.image_size, [region], model.camera)[0]
        runtime = open_runtime(
            ModelFile.read(path), _here(model, network.image_size),
            num_classes=len(self.data.labels),
        )  # fmt: skip
        if (predicted := self.predicted_ms.get(model.device)) is not None:
            compute_ms, how = predicted, f"predicted: {predicted:.2f} ms"
        else:
            compute_ms, how = self._estimate(
                network, profile, model.runtime, lambda: quickest_ms(runtime.run, pixels)
            )
        of = f" of camera {model.camera}" if model.camera else ""
        why = "named in the list of models" if self.target_ms is None else "chosen by measurement"
        part = members.assign(
            k, model, region, network, profile, compute_ms, f"{why}; {how}", len(self.data.labels)
        )
        self.progress.note(
            f"sub-model {k} for {model.device}: {network.words}, sees {where(region)}{of}, "
            f"{path.stat().st_size / 1e6:.2f} MB; {how}"
        )
        return part, runtime

    def _answers(
        self, parts: Sequence[Assignment], runtimes: Sequence[Runtime], pictures: PictureSet
    ) -> dict[int, Contribution]:
        """Each member's calibration logits, side by side."""

        def answer(part: Assignment) -> Contribution:
            (pixels,) = self._views(pictures, part.spec.image_size, [part.region], part.camera)
            return sessions.member_contribution(runtimes[part.k], pixels, part)

        what = f"running the members on {len(pictures):,} calibration pictures"
        found = side_by_side(answer, parts, self.progress, what)
        return {part.k: one for part, one in zip(parts, found, strict=True)}

    def _views(
        self,
        pictures: PictureSet,
        size: int,
        regions: Sequence[Region],
        camera: str | None,
        split: str = "calibration",
    ) -> list[Views]:
        """Pictures `[N, S, S, 3]` as devices see them, for each region."""
        views = [View(size, region, camera=camera) for region in regions]
        what = f"{split} split at {size} px"
        return load_views(pictures, views, self.cache, self.progress, what)

    def _estimate(
        self,
        network: Spec,
        profile: DeviceProfile,
        runtime: RuntimeName,
        time_here: Callable[[], float],
    ) -> tuple[float, str]:
        """Estimated milliseconds on the device, and the method in words.

        Of a plain ViT from the plain ViTs measured there; of another network from such networks
        measured there, else from this machine's time and a reference encoder.
        """
        if isinstance(network, SubModelSpec):
            way = Way(
                precision=network.precision,
                runtime=runtime,
                provider=profile.provider,
                threads=profile.threads,
            )
            plain = fit_latency(profile, way).estimate(network, len(self.data.labels))
            return plain.ms, (
                f"estimated: {plain.ms:.2f} ms ({plain.low_ms:.2f} to {plain.high_ms:.2f}) from "
                "plain ViTs measured on the device"
            )
        if (known := members.network_estimate(profile, network, runtime)) is not None:
            return known.ms, (
                f"estimated: {known.ms:.2f} ms ({known.low_ms:.2f} to {known.high_ms:.2f}) from "
                "networks measured on the device"
            )
        point = members.reference_point(profile, network)
        spec = spec_of(point)
        if spec not in self.references:
            self.references[spec] = self._time(spec)
        ratio, here_ms = point.latency_ms / self.references[spec], time_here()
        return here_ms * ratio, (
            f"estimated: {here_ms:.2f} ms here on one thread, times {ratio:.2g} as the profile "
            f"says of an encoder of {spec.words}"
        )

    def _time(self, spec: SubModelSpec) -> float:
        """Milliseconds of one picture on one thread of this machine, with random weights."""
        path = self.cache / "reference.onnx"
        content = to_onnx(ServedMember(SubModel(spec, 2)), spec.image_size, HEADS, {})
        write_bytes(path, content)
        noise = np.random.default_rng(0).integers(
            0, 256, (4, spec.image_size, spec.image_size, 3), dtype=np.uint8
        )
        return quickest_ms(sessions.run_of(open_session(path)), noise)

    def _provenance(self, models: Sequence[members.Model], pictures: PictureSet) -> dict[str, str]:
        """Source, checksum and licence of every model."""
        facts = {
            "method": "assembled from models that exist, without training",
            **self.origin,
            "data": Path(self.data.source).name,
            "calibration_digest": self.data.calibration.digest,
            "calibration_pictures": str(len(pictures)),
            "test_digest": self.data.test.digest,
        }
        for k, model in enumerate(models):
            source = self.folder / model.source
            kind = f"timm {model.timm}, " if model.timm else ""
            facts[f"model_{k}"] = (
                f"{kind}{source.name}, sha256 {sha256_of(source)}, licence: {model.licence}"
            )
            facts[f"labels_{k}"] = f"sha256 {sha256_of(self.folder / model.labels)}"
        return facts | versions()


def _here(model: members.Model, image_size: int = 0) -> Execution:
    """The model's execution on this machine."""
    return sessions.on_processor(
        Execution(
            runtime=model.runtime, provider=CPU, precision=model.precision, image_size=image_size
        )
    )


def quickest_ms(run: Callable[[Pixels], object], pixels: Pixels) -> float:
    """Milliseconds of processor time on one thread, the least of several medians."""
    return min(sessions.latency_ms(run, pixels, time.process_time) for _ in range(_ROUNDS))


def _same_logits(
    path: Path, source: Path, model: members.Model, pixels: Pixels, rows: list[int]
) -> float:
    """Largest difference of the served form from the ONNX file, relative to its largest logit."""
    try:
        (served,) = sessions.run_session(open_session(path), pixels, HEADS)
    except Exception as error:  # onnxruntime's exceptions share no base
        text = " ".join(str(error).split())[:200]
        raise InputError(f"{source}: cannot compute several pictures at once: {text}") from error
    own = own_logits(source, model, pixels, rows)
    worst = float(np.abs(served - own).max()) / max(1.0, float(np.abs(own).max()))
    if not worst <= MAX_ERROR:
        raise ParityError(
            f"{source}: its served form differs by {worst:.2e} of the largest logit, expected at "
            f"most {MAX_ERROR:.0e}"
        )
    return worst
