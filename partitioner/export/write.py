"""Export: one ONNX file per sub-model, checked against torch, in a bundle folder."""

import copy
import importlib.metadata
import platform
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mdp.errors import MDPError
from mdp.files import replacing_folder, write_bytes, write_json
from mdp.formats.bundle import (
    FUSION,
    MANIFEST,
    Manifest,
    file_entry,
    model_path,
    model_paths,
    sha256_of,
)
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment, Plan
from mdp.fusion.fuse import (
    Contribution,
    FusionWeights,
    SizeWeights,
    SubsetWeights,
    list_subsets,
    sizes_not_listed,
)
from mdp.pictures.crop import Pixels
from mdp.runtimes.onnxruntime import open_session
from partitioner.data.datasets import Dataset
from partitioner.export.quantize import MIN_RANGE_PICTURES, quantize_model
from partitioner.export.sessions import logits_file, member_contribution, open_member, run_session
from partitioner.export.unknown import unknown_logits
from partitioner.fusion.bundle_fit import fit_bundle
from partitioner.networks.inference_form import to_inference_form
from partitioner.networks.members import build_member, to_served_form
from partitioner.networks.submodel import Member
from partitioner.networks.teacher import Teacher, outline
from partitioner.run.progress import Progress
from partitioner.training.context import TrainingContext
from partitioner.training.teacher import ensure_teacher

OPSET = 18
#: Key of the provenance that a bundle without training has.
UNTRAINED = "untrained"
#: Largest allowed difference of any logit between onnxruntime and torch, in fp32; and as a share of
#: the largest logit, where that is more: rounding grows with it. Logits of 50, of classes that a
#: linear classifier tells apart easily, differ by 2e-4 from those in fp64 in either.
MAX_ERROR, _MAX_SHARE = 1e-3, 1e-4
#: Test pictures and batch sizes on which the two are compared.
_COMPARED, _BATCHES = 64, (1, 8)
METHOD = (
    "MDP (Wang et al., MSN 2023, DOI 10.1109/MSN60784.2023.00086), re-implemented from the abstract"
)
_PACKAGES = ("mdp-edge", "torch", "timm", "onnx", "onnxruntime", "numpy", "pillow")


class ParityError(MDPError):
    """An exported model does not compute what the trained one does."""


class ServedMember(nn.Module):
    """The network that a device runs: uint8 `[N, H, W, 3]` -> every head's logits `[N, C]`."""

    def __init__(self, submodel: Member) -> None:
        super().__init__()
        # A copy, so that its constants are not among the sub-model's weights.
        self.normalise, self.submodel = copy.deepcopy(submodel.normalise), submodel

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits of the boost head, if there is one, and the bag head."""
        x: Tensor = self.normalise(images.permute(0, 3, 1, 2).float())
        return self.submodel.of_normalised(x).logits


class ServedTeacher(nn.Module):
    """The teacher with the same input: uint8 `[N, H, W, 3]` -> logits `[N, C]`."""

    def __init__(self, teacher: Teacher) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Logits, as a tuple of one."""
        return (self.teacher(images.permute(0, 3, 1, 2).float()),)


def to_onnx(
    module: nn.Module, image_size: int, outputs: Sequence[str], properties: Mapping[str, str]
) -> bytes:
    """`module` as a checked ONNX model: input `images` uint8 `[N, S, S, 3]` with any N."""
    import onnx

    shape = (2, image_size, image_size, 3)
    noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    example = torch.from_numpy(noise)
    served = to_inference_form(module, example)
    with warnings.catch_warnings():
        # torch.export copies pytree specs in a way that its own pytree module has deprecated.
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)`", FutureWarning)
        # Some of timm's networks keep attention biases that they have once looked up.
        warnings.filterwarnings("ignore", r"(?s)The tensor attribute.*during export", UserWarning)
        program: Any = torch.onnx.export(
            served,
            (example,),
            input_names=["images"],
            output_names=list(outputs),
            dynamic_shapes={"images": {0: torch.export.Dim("N", min=1, max=2**16)}},
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    model = program.model_proto
    _strip(model)
    _keep_zero_padding(model)
    onnx.helper.set_model_props(model, dict(properties))
    onnx.checker.check_model(model, full_check=True)
    content: bytes = model.SerializeToString()
    return content


def _strip(model: Any) -> None:
    """Remove the exporter's metadata: stack traces with local paths, a third of the file."""
    graph = model.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info):
        del part.metadata_props[:]
        part.doc_string = ""
    for tensor in graph.initializer:
        del tensor.metadata_props[:]


def _keep_zero_padding(model: Any) -> None:
    """Pad with the least positive number instead of zero where a maximum follows.

    onnxruntime (1.31, `Pad_Fusion`) takes zero padding into MaxPool, which ignores padding, so that
    maxima of negative numbers at the edge come out wrong.
    """
    from onnx import numpy_helper

    graph, tiny = model.graph, "mdp/least_positive"
    pooled = {node.input[0] for node in graph.node if node.op_type == "MaxPool"}
    zeros = {t.name for t in graph.initializer if not numpy_helper.to_array(t).any()} | {""}
    changed = False
    for node in graph.node:
        if node.op_type == "Pad" and node.output[0] in pooled:
            inputs = [*node.input, ""]
            if inputs[2] in zeros:
                node.input[:] = [*inputs[:2], tiny, *inputs[3:-1]]
                changed = True
    if changed:
        least = np.array(np.finfo(np.float32).tiny, dtype=np.float32)
        graph.initializer.append(numpy_helper.from_array(least, tiny))


def check_parity(model: Path, module: nn.Module, pixels: Pixels, outputs: Sequence[str]) -> float:
    """Largest difference of any logit on real views `[N, S, S, 3]`, one by one and in eights.

    Raises ParityError above what is allowed.
    """
    session = open_session(model)
    with torch.inference_mode():
        expected = module.eval()(torch.from_numpy(np.array(pixels)))
    allowed = max(MAX_ERROR, *(_MAX_SHARE * float(one.abs().max()) for one in expected))
    worst = float(
        np.max([
            np.abs(ours - theirs.numpy()).max()
            for batch in _BATCHES
            for ours, theirs in zip(
                run_session(session, pixels, outputs, batch), expected, strict=True
            )
        ])
    )  # fmt: skip
    # numpy's maximum of numbers with a NaN is NaN, which is no less than anything.
    if not worst <= allowed:
        raise ParityError(
            f"{model}: differs from torch by {worst:.2e} on {len(pixels)} pictures, "
            f"expected at most {allowed:.1e}"
        )
    return worst


def export_bundle(work: TrainingContext, out: Path, name: str) -> dict[int, float]:
    """Write the bundle folder `out`; returns each member's largest difference from torch.

    Also exports the teacher into the run folder, so that it can be compared. Raises InputError if
    the run is not finished and ParityError if a model is not what was trained.
    """
    work.run.require_trained(work.plan)
    _export_teacher(work)
    errors, calibration = {}, {}
    with replacing_folder(out) as folder:
        for assignment in work.plan.assignments:
            k = assignment.k
            errors[k], calibration[k] = _export_member(work, assignment, folder, name)
        data, cache, progress = work.data, work.run.cache, work.progress
        files, cascade = fit_bundle(
            folder,
            work.plan,
            calibration,
            data.calibration.targets,
            unknown=unknown_logits(
                folder, work.plan, len(data.labels), data.unknown, cache, progress
            ),
            note=progress.note,
        )
        manifest = Manifest(
            name=name,
            labels=list(work.data.labels),
            plan=work.plan,
            files=files,
            provenance=_provenance(work),
            cascade=cascade,
        )
        write_json(folder / MANIFEST, manifest)
    return errors


def _export_member(
    work: TrainingContext, assignment: Assignment, folder: Path, name: str
) -> tuple[float, Contribution]:
    """Write one model; returns its difference from torch and its calibration logits."""
    path = folder / model_path(assignment.k)
    if assignment.k in work.exported:
        source, error = work.exported[assignment.k]
        write_bytes(path, source.read_bytes())
    else:
        error = export_member(work, assignment, path, name)
    model = ModelFile.read(path)
    runtime = open_member(model, assignment, len(work.data.labels))
    calibration = work.member_pixels(assignment, "calibration")
    kept = logits_file(work.run.cache, model, assignment, work.data.calibration.digest)
    return error, member_contribution(runtime, calibration, assignment, kept)


def export_member(work: TrainingContext, assignment: Assignment, path: Path, name: str) -> float:
    """Write the model of one sub-model of the bundle `name`; returns its difference from torch."""
    module = ServedMember(work.load_member(assignment))
    pixels = work.member_pixels(assignment, "test")[:_COMPARED]
    calibration = work.member_pixels(assignment, "calibration")
    properties = _properties(assignment, name, len(work.data.labels))
    with work.progress.step(f"exporting sub-model {assignment.k}"):
        error = _write_member(module, assignment, path, properties, pixels, calibration)
    precision = assignment.spec.precision
    work.progress.note(
        f"sub-model {assignment.k} for {assignment.device}: {path.stat().st_size / 1e6:.2f} MB, "
        f"at most {error:.1e} from torch on {len(pixels)} pictures"
        + ("" if precision == "fp32" else f", then made to {precision}")
    )
    return error


def _write_member(
    module: ServedMember,
    assignment: Assignment,
    path: Path,
    properties: Mapping[str, str],
    pixels: Pixels,
    calibration: Pixels,
) -> float:
    """Write one model in the planned precision; returns the fp32 one's difference from torch."""
    heads = module.submodel.heads
    model = to_onnx(to_served_form(module), assignment.spec.image_size, heads, properties)
    write_bytes(path, model)
    error = check_parity(path, module, pixels, heads)
    write_bytes(path, quantize_model(model, assignment.spec.precision, calibration))
    return error


def _properties(assignment: Assignment, name: str, num_classes: int) -> dict[str, str]:
    """Essentials of the manifest, for the model's metadata."""
    return {
        "mdp_format_version": "1",
        "mdp_bundle": name,
        "mdp_k": str(assignment.k),
        "mdp_device": assignment.device,
        "mdp_image_size": str(assignment.spec.image_size),
        "mdp_num_classes": str(num_classes),
    }


def export_untrained(
    plan: Plan, labels: list[str], out: Path, name: str, progress: Progress
) -> dict[int, float]:
    """Write a bundle of `plan` with random weights, for latency; returns differences from torch.

    The manifest says that it is untrained, and nothing is expected of its answers. Raises
    ParityError.
    """
    errors: dict[int, float] = {}
    with replacing_folder(out) as folder:
        for assignment in plan.assignments:
            errors[assignment.k] = _write_random_member(assignment, folder, name, len(labels))
            progress.note(f"sub-model {assignment.k} for {assignment.device}: untrained")
        write_json(folder / FUSION, _plain_fusion(len(plan.assignments), len(labels)))
        paths = [*model_paths(plan), FUSION]
        manifest = Manifest(
            name=name,
            labels=labels,
            plan=plan,
            files={path: file_entry(folder / path) for path in paths},
            provenance={UNTRAINED: "random weights, for latency: its answers mean nothing"}
            | versions(),
        )
        write_json(folder / MANIFEST, manifest)
    return errors


def _write_random_member(
    assignment: Assignment, folder: Path, name: str, num_classes: int
) -> float:
    """Write one model with weights drawn from its index; returns its difference from torch."""
    size = assignment.spec.image_size
    with torch.random.fork_rng():
        torch.manual_seed(assignment.k)
        module = ServedMember(build_member(assignment.spec, num_classes))
    shape = (MIN_RANGE_PICTURES, size, size, 3)
    noise = np.random.default_rng(assignment.k).integers(0, 256, shape, dtype=np.uint8)
    properties = _properties(assignment, name, num_classes) | {"mdp_" + UNTRAINED: "true"}
    path = folder / model_path(assignment.k)
    return _write_member(module, assignment, path, properties, noise[: _BATCHES[-1]], noise)


def _plain_fusion(count: int, num_classes: int) -> FusionWeights:
    """The mean of the bag heads for every arrival subset."""
    return FusionWeights(
        num_classes=num_classes,
        subsets=[
            SubsetWeights(members=s, a=(), b=(1 / len(s),) * len(s))
            for s in list_subsets(range(count))
        ],
        by_size=tuple(
            SizeWeights(size=size, a=(), b=(1 / size,) * count) for size in sizes_not_listed(count)
        ),
    )


def _export_teacher(work: TrainingContext) -> None:
    """Write the run's teacher.onnx once; a finished run's teacher does not change any more."""
    path = work.run.teacher_onnx
    if path.is_file():
        return
    teacher = ServedTeacher(ensure_teacher(work, None)).cpu()
    size = work.plan.require_teacher().shape.image_size
    properties = {"mdp_format_version": "1", "mdp_teacher": work.plan.require_teacher().name}
    write_bytes(path, to_onnx(teacher, size, ["logits"], properties))
    pixels = work.teacher_pixels("test")[:_COMPARED]
    try:
        error = check_parity(path, teacher, pixels, ["logits"])
    except ParityError:
        path.unlink()
        raise
    work.progress.note(
        f"teacher: {path.stat().st_size / 1e6:.2f} MB, at most {error:.1e} from torch"
    )


def _provenance(work: TrainingContext) -> dict[str, str]:
    """Teacher, data, settings and versions, for the manifest."""
    settings, unknown = work.settings, unknown_digest(work.data)
    return {
        "method": METHOD,
        **teacher_provenance(work),
        "seed": str(settings.seed),
        "data": Path(work.data.source).name,
        "train_digest": work.data.train.digest,
        "calibration_digest": work.data.calibration.digest,
        "test_digest": work.data.test.digest,
        "settings_digest": sha256_of(work.run.settings_file),
        "run_digest": work.run.digest(work.plan),
        **({"unknown_digest": unknown} if unknown else {}),
        **versions(),
    }


def unknown_digest(data: Dataset) -> str:
    """Digest of the pictures of no class that a score of novelty is chosen by; empty without."""
    return "" if data.unknown is None else data.unknown.digest


#: Which classifier a teacher with given weights has, in words.
_CLASSES = {
    "kept": "its own classifier as it is",
    "names": "rows of its own classifier, cut by class names",
    "probe": "a linear probe on its features",
}


def teacher_provenance(work: TrainingContext) -> dict[str, str]:
    """The teacher's weights, normalisation, pooling and classifier."""
    facts, epochs = work.settings.teacher, work.settings.teacher_schedule.epochs
    network = outline(facts.name, facts.args)
    config = network.pretrained_cfg
    given = facts.pretrained or facts.checkpoint is not None
    weights = "timm's" if facts.pretrained else "drawn"
    if facts.checkpoint is not None:
        weights = f"{facts.file}, sha256 {facts.checkpoint}"
    trained = f", trained for {epochs} epochs here" if epochs else ""
    mean, std = (" ".join(f"{value:g}" for value in config[key]) for key in ("mean", "std"))
    return {
        "teacher": " ".join([facts.name, *(f"{k}={v}" for k, v in sorted(facts.args.items()))]),
        "teacher_weights": weights + trained,
        "teacher_normalisation": f"mean {mean}, std {std}, of pixels 0..1",
        "teacher_pooling": network.global_pool or "none",
        "teacher_classes": _CLASSES[facts.classes] if given else "as trained here",
    }


def versions() -> dict[str, str]:
    """Versions of Python and the packages that make a bundle."""
    versions = {package: importlib.metadata.version(package) for package in _PACKAGES}
    return {"python": platform.python_version(), **versions}
