"""OpenVINO: a sub-model on one of its devices, where a plan says so.

OpenVINO's package reports its own import to a statistics server of its maker, from a part that
converts models and that nobody serving one needs. That part is left out here, so nothing is sent.
"""

import functools
import io
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mdp.errors import AgentError
from mdp.extras import install
from mdp.formats.model_file import ModelFile
from mdp.formats.profile import Precision
from mdp.fusion.fuse import Contribution
from mdp.imports import without
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import (
    CPU,
    INPUT,
    PRECISION_KEY,
    Execution,
    NotHereError,
    check_input,
    check_outputs,
    check_precision,
    run_until_steady,
)

#: What a status writes before OpenVINO's name of the device.
PREFIX = "openvino:"
OPENVINO_CPU = f"{PREFIX}CPU"
#: Kind of device -> precision -> what its matrix products are computed in where the file leaves
#: that open. NPUs compute in f16 and take no such wish.
HINTS: Mapping[str, Mapping[Precision, str | None]] = {
    "CPU": {"fp32": "f32", "bf16": "bf16", "int8-static": "f32"},
    "GPU": {"fp32": "f32", "fp16": "f16", "int8-static": "f16"},
    "NPU": {"fp16": None, "int8-static": None},
}
#: What OpenVINO says of a device that does not only imitate a precision.
_CAPABILITIES: Mapping[Precision, str] = {"bf16": "BF16", "fp16": "FP16"}
#: Parts of the package that report to its maker, or exist only for parts that do.
REPORTING = ("openvino_telemetry", "openvino.tools.ovc")


class OpenVinoRuntime:
    """A sub-model in OpenVINO on one of its devices: one picture at a time, one stream."""

    #: What is planned otherwise is refused, so there is no falling back inside OpenVINO.
    fallback = False

    def __init__(self, model: ModelFile, execution: Execution, *, num_classes: int) -> None:
        """Load `model`; raises AgentError if it is another model, or what is planned not there."""
        device, size = device_of(execution.provider), execution.image_size
        openvino, core = core_for(execution)
        try:
            graph = _read(openvino, model)
        except Exception as error:  # OpenVINO raises types of its own, without a common base
            raise AgentError(f"{model.path}: openvino cannot load it: {_line(error)}") from error
        self._heads = _checked_heads(graph, model.path, execution, num_classes)
        try:
            # Agents compute one picture at a time. Knowing that made ViTs 3 to 5 % faster, and NPUs
            # take no other graph.
            graph.reshape({INPUT: [1, size, size, 3]})
            wishes = _wishes(device, execution.precision, execution.threads)
            self._compiled = core.compile_model(graph, device, wishes)
            self._request = self._compiled.create_infer_request()
        except Exception as error:  # OpenVINO raises types of its own, without a common base
            if device != "CPU":
                raise NotHereError(
                    f"openvino on {device}", f"which cannot be started: {_line(error)}"
                ) from error
            raise AgentError(f"{model.path}: openvino cannot load it: {_line(error)}") from error
        self.provider = f"{PREFIX}{device}"
        self._image_size = size

    def warm_up(self) -> None:
        """Run until steady; raises AgentError if the logits are not finite."""
        run_until_steady(self.run, self._image_size)

    def run(self, pixels: Pixels) -> Contribution:
        """Each head's logits `[N, num_classes]` for crops `[N, image_size, image_size, 3]`."""
        rows = [self._run_one(pixels[row : row + 1]) for row in range(len(pixels))]
        return Contribution.of([np.concatenate(head) for head in zip(*rows, strict=True)])

    def _run_one(self, pixels: Pixels) -> list[Any]:
        self._request.infer({INPUT: pixels})
        # The request's own memory is written anew by the next run.
        return [self._request.get_tensor(head).data.copy() for head in self._heads]


def import_openvino() -> Any:
    """OpenVINO without what reports its use; raises ImportError where it is not installed."""
    with without(*REPORTING):
        import openvino
        import openvino.frontend
    return openvino


@functools.cache
def core_of(openvino: Any) -> Any:
    """OpenVINO's core: one for the whole process, until its end.

    Its processor plugin gives the thread that loads it a signal stack, and frees that with the last
    core, in whichever thread: the next signal with a Python handler would end the process.
    """
    return openvino.Core()


def core_for(execution: Execution) -> tuple[Any, Any]:
    """OpenVINO and its core; raises NotHereError where a model could not be run in this way."""
    try:
        openvino = import_openvino()
    except ImportError as error:
        raise NotHereError(
            f"openvino in {execution.precision}",
            f"which is not installed ({install('openvino')})",
        ) from error
    core = core_of(openvino)
    _check_device(core, device_of(execution.provider), execution.precision)
    return openvino, core


def device_of(provider: str) -> str:
    """OpenVINO's name of a plan's or profile's provider: `CPU`, `GPU`, `GPU.1`, `NPU`."""
    return "CPU" if provider == CPU else provider.removeprefix(PREFIX)


def provider_of(device: str) -> str:
    """What plans and profiles call OpenVINO's device: the processor as onnxruntime does."""
    return CPU if device == "CPU" else device


def precisions(device: str, able: Container[str]) -> list[Precision]:
    """What is served on OpenVINO's `device`, which says what it is `able` to compute in."""
    served = HINTS.get(_kind(device), {})
    return [p for p in served if p not in _CAPABILITIES or _CAPABILITIES[p] in able]


def _kind(device: str) -> str:
    return device.partition(".")[0]


def _check_device(core: Any, device: str, precision: Precision) -> None:
    """Raise NotHereError if there is no `device`, or if `precision` is nothing for it."""
    # Asking for all devices loads the plugins of all: not for the processor alone.
    found = ["CPU"] if device == "CPU" else list(core.available_devices)
    # Of several GPUs the first one has two names.
    if _kind(device) not in HINTS or not {device, f"{device}.0"} & set(found):
        here = ", ".join(found) or "no device"
        raise NotHereError(f"openvino on {device}", f"openvino finds {here} here")
    where = "" if device == "CPU" else f" on {device}"
    planned = f"openvino in {precision}{where}"
    served = HINTS[_kind(device)]
    if precision not in served:
        raise NotHereError(planned, f"openvino has {', '.join(served)}{where}")
    try:
        able = list(core.get_property(device, "OPTIMIZATION_CAPABILITIES"))
    except Exception as error:  # OpenVINO raises types of its own, without a common base
        raise NotHereError(planned, f"which cannot be started: {_line(error)}") from error
    if precision not in precisions(device, able):
        # Imitated, it gains nothing.
        who = "processor" if device == "CPU" else "device"
        raise NotHereError(planned, f"this {who} computes {', '.join(sorted(able))} only")


def _wishes(device: str, precision: Precision, threads: int) -> dict[str, object]:
    wishes: dict[str, object] = {"PERFORMANCE_HINT": "LATENCY"}
    if hint := HINTS[_kind(device)][precision]:
        wishes["INFERENCE_PRECISION_HINT"] = hint
    if device == "CPU":
        wishes |= {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            # Threads tied to cores would fight with whatever else runs on these cores.
            "ENABLE_CPU_PINNING": False,
        }
    return wishes


def _read(openvino: Any, model: ModelFile) -> Any:
    # By its own frontend: the package's general reader tries six formats on a file that is none.
    onnx = openvino.frontend.FrontEndManager().load_by_framework("onnx")
    return onnx.convert(onnx.load(io.BytesIO(model.content)))


def _checked_heads(
    graph: Any, model: Path, execution: Execution, num_classes: int
) -> Sequence[str]:
    """The names of the graph's outputs; raises AgentError unless it is as planned."""
    inputs = {i.any_name: (i.element_type.get_type_name(), _shape(i)[1:]) for i in graph.inputs}
    check_input(model, inputs, execution.image_size, uint8="u8")
    outputs = {o.any_name: _shape(o)[-1] for o in graph.outputs}
    where = ["framework", PRECISION_KEY]
    says = graph.get_rt_info(where).astype(str) if graph.has_rt_info(where) else None
    check_precision(model, says, execution.precision)
    return check_outputs(model, outputs, num_classes)


def _shape(port: Any) -> list[object]:
    """Lengths of a port's dimensions, None where any will do."""
    return [d.get_length() if d.is_static else None for d in port.partial_shape]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
