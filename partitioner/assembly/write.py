"""Turn models that exist into a bundle folder: export, check, quantise, time, fit the fusion."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mdp.errors import InputError
from mdp.files import replacing_folder, write_bytes, write_json
from mdp.formats.bundle import MANIFEST, Manifest, model_path, sha256_of
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment, NetworkSpec, Region, SubModelSpec
from mdp.formats.profile import DeviceProfile, RuntimeName
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import CPU, Execution
from mdp.runtimes.onnxruntime import open_session
from mdp.runtimes.select import check_execution, open_runtime
from partitioner.assembly.imported import HEADS, counted, onnx_member, own_logits, timm_module
from partitioner.assembly.members import (
    CENTRES,
    Model,
    assembled_plan,
    assigned,
    network_estimate,
    reference_point,
)
from partitioner.data.crops import WHOLE, View, load_views
from partitioner.data.datasets import Dataset, PictureSet
from partitioner.data.memmaps import Views
from partitioner.estimates.latency import spec_of
from partitioner.estimates.latency_networks import older_probe
from partitioner.export.evaluate import accuracy
from partitioner.export.quantize import quantized
from partitioner.export.sessions import (
    latency_ms,
    member_contribution,
    on_processor,
    run_of,
    run_session,
)
from partitioner.export.write import (
    MAX_ERROR,
    ParityError,
    ServedMember,
    check_parity,
    to_onnx,
    versions,
)
from partitioner.fusion.bundle_fit import fit_bundle
from partitioner.networks.submodel import SubModel
from partitioner.run.progress import Progress

#: Fewer calibration pictures than this leave the fusion weights uncertain, which is said.
FEW_PICTURES = 1000
#: Pictures on which the served form is compared with the model itself.
_COMPARED = 32
#: How often a latency is taken.
_ROUNDS = 5


@dataclass(slots=True)
class Assembly:
    """What all models of one bundle share."""

    folder: Path
    data: Dataset
    limit: int
    cache: Path
    progress: Progress
    #: Milliseconds here on one thread of the encoders with which devices are compared.
    references: dict[SubModelSpec, float] = field(default_factory=dict)

    def write(
        self,
        models: Sequence[Model],
        rows: Sequence[tuple[int, list[int]]],
        profiles: Mapping[str, DeviceProfile],
        out: Path,
        name: str,
    ) -> None:
        """Write the bundle without an evaluation; raises InputError and ParityError."""
        for model in models:
            check_execution(_here(model))
        pictures = thinned(self.data.calibration, self.limit)
        if len(pictures) < FEW_PICTURES:
            self.progress.note(
                f"{len(pictures)} calibration pictures: fusion weights are fitted to few pictures "
                f"(expected {FEW_PICTURES:,} to 5,000)"
            )
        for profile in profiles.values():
            if (older := older_probe(profile)) is not None:
                self.progress.note(older)
        assignments: list[Assignment] = []
        calibration: dict[int, Contribution] = {}
        with replacing_folder(out) as folder:
            for k, (model, (names, kept)) in enumerate(zip(models, rows, strict=True)):
                path = folder / model_path(k)
                part, calibration[k] = self._member(
                    k, model, names, kept, profiles[model.device], path, pictures
                )
                assignments.append(part)
            plan = assembled_plan(assignments, len(self.data.labels))
            files, cascade = fit_bundle(folder, plan, calibration, pictures.targets)
            manifest = Manifest(
                name=name,
                labels=list(self.data.labels),
                plan=plan,
                files=files,
                provenance=self._provenance(models, pictures),
                cascade=cascade,
            )
            write_json(folder / MANIFEST, manifest)

    def _member(
        self,
        k: int,
        model: Model,
        names: int,
        rows: list[int],
        profile: DeviceProfile,
        path: Path,
        pictures: PictureSet,
    ) -> tuple[Assignment, Contribution]:
        """Write one model; returns its part of the plan, and its calibration logits."""
        source = self.folder / model.source
        if model.onnx is not None:
            content, size = onnx_member(model, source, names, rows)
        else:
            assert model.image_size is not None
            module, size = timm_module(model, source, names, rows), model.image_size
            content = to_onnx(module, size, HEADS, {})
        parameters, macs = counted(content)
        network = NetworkSpec(
            name=model.timm or source.name,
            image_size=size,
            precision=model.precision,
            parameters=parameters,
            macs=macs,
        )
        write_bytes(path, content)
        some = self._views(pictures, size, model.region or WHOLE)[:_COMPARED]
        if model.onnx is None:
            error = check_parity(path, module, some, HEADS)
        else:
            error = _same_logits(path, source, model, some, rows)
        region = model.region or self._best_centre(path, size, pictures)
        pixels = self._views(pictures, size, region)
        write_bytes(path, quantized(content, model.precision, pixels, whole=True))
        runtime = open_runtime(
            ModelFile.read(path), _here(model, size), num_classes=len(self.data.labels)
        )
        here_ms = quickest_ms(runtime.run, pixels)
        compute_ms, how = self._scaled(here_ms, network, profile, model.runtime)
        part = assigned(k, model, region, network, profile, compute_ms, how, len(self.data.labels))
        side, size_mb = region.right - region.left, path.stat().st_size / 1e6
        self.progress.note(
            f"sub-model {k} for {model.device}: {network.words}, sees {side:.0%} of the side, "
            f"{size_mb:.2f} MB, at most {error:.1e} from its source in fp32; {how}"
        )
        return part, member_contribution(runtime, pixels, part)

    def _views(self, pictures: PictureSet, size: int, region: Region) -> Views:
        """The calibration pictures `[N, S, S, 3]` as a device sees them."""
        what = f"calibration split at {size} px"
        return load_views(pictures, [View(size, region)], self.cache, self.progress, what)[0]

    def _best_centre(self, path: Path, size: int, pictures: PictureSet) -> Region:
        """The part of the calibration pictures on which a model is right most often."""
        session = open_session(path)

        def right(region: Region) -> float:
            bag = run_session(session, self._views(pictures, size, region), HEADS)[0]
            return accuracy(bag, pictures.targets)

        return max(CENTRES, key=right)

    def _scaled(
        self,
        here_ms: float,
        network: NetworkSpec,
        profile: DeviceProfile,
        runtime: RuntimeName,
    ) -> tuple[float, str]:
        """Milliseconds on the device as estimated, and how that was done.

        From networks that were measured there; else from those here.
        """
        if (known := network_estimate(profile, network, runtime)) is not None:
            return known.ms, (
                f"estimated: {known.ms:.2f} ms ({known.low_ms:.2f} to {known.high_ms:.2f}) from "
                "networks measured on the device"
            )
        point = reference_point(profile, network)
        spec = spec_of(point)
        if spec not in self.references:
            self.references[spec] = self._time(spec)
        ratio = point.latency_ms / self.references[spec]
        return here_ms * ratio, (
            f"estimated: {here_ms:.2f} ms here on one thread, times {ratio:.2g} as the profile "
            f"says of an encoder of {spec.words}"
        )

    def _time(self, spec: SubModelSpec) -> float:
        """One thread here, one picture, with random weights."""
        path = self.cache / "reference.onnx"
        content = to_onnx(ServedMember(SubModel(spec, 2)), spec.image_size, HEADS, {})
        write_bytes(path, content)
        noise = np.random.default_rng(0).integers(
            0, 256, (4, spec.image_size, spec.image_size, 3), dtype=np.uint8
        )
        return quickest_ms(run_of(open_session(path)), noise)

    def _provenance(self, models: Sequence[Model], pictures: PictureSet) -> dict[str, str]:
        """Where every model comes from, in words."""
        facts = {
            "method": "assembled from models that exist, without training",
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


def _here(model: Model, image_size: int = 0) -> Execution:
    """How a model is run on this machine, whatever its device is."""
    return on_processor(
        Execution(
            runtime=model.runtime, provider=CPU, precision=model.precision, image_size=image_size
        )
    )


def quickest_ms(run: Callable[[Pixels], object], pixels: Pixels) -> float:
    """Processor time of one thread, the least of several medians: others at work matter little."""
    return min(latency_ms(run, pixels, time.process_time) for _ in range(_ROUNDS))


def thinned(pictures: PictureSet, limit: int) -> PictureSet:
    """At most `limit` pictures, evenly from all classes; they are sorted by class."""
    if len(pictures) <= limit:
        return pictures
    rows = np.linspace(0, len(pictures) - 1, limit).astype(np.int64)
    digest = hashlib.sha256(f"{pictures.digest} {limit}".encode()).hexdigest()
    return PictureSet(
        sources=[pictures.sources[row] for row in rows],
        names=tuple(pictures.names[row] for row in rows),
        targets=pictures.targets[rows],
        digest=digest,
    )


def _same_logits(path: Path, source: Path, model: Model, pixels: Pixels, rows: list[int]) -> float:
    """Largest difference of the served form from the ONNX file, relative to its largest logit."""
    try:
        (served,) = run_session(open_session(path), pixels, HEADS)
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
