"""OpenVINO: a sub-model on one of its devices.

The model converter in OpenVINO's package reports its import to a statistics server of its maker. It
is not imported here, so nothing is sent.
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
from mdp.runtimes import base

#: Before OpenVINO's name of the device in a status.
PREFIX = "openvino:"
#: Kind of device -> precision -> inference precision hint. NPUs compute in f16 and have no hint.
HINTS: Mapping[str, Mapping[Precision, str | None]] = {
    "CPU": {"fp32": "f32", "bf16": "bf16", "int8-static": "f32"},
    "GPU": {"fp32": "f32", "fp16": "f16", "int8-static": "f16"},
    "NPU": {"fp16": None, "int8-static": None},
}
#: OpenVINO's capability of a device that does not emulate a precision.
_CAPABILITIES: Mapping[Precision, str] = {"bf16": "BF16", "fp16": "FP16"}
#: Parts of the package that report to its maker, and those that import them.
REPORTING = ("openvino_telemetry", "openvino.tools.ovc")


class OpenVinoRuntime:
    """A sub-model in OpenVINO on one of its devices: one picture at a time, one stream."""

    #: OpenVINO refuses what it cannot run as planned.
    fallback = False

    def __init__(self, model: ModelFile, execution: base.Execution, *, num_classes: int) -> None:
        """Load `model`; raises AgentError for another model, or if the planned way is missing."""
        device, size = device_of(execution.provider), execution.image_size
        openvino, core = core_for(execution)
        try:
            graph = _read(openvino, model)
        except Exception as error:  # OpenVINO raises types of its own, without a common base
            raise AgentError(f"{model.path}: openvino cannot load it: {_line(error)}") from error
        self._outputs = _check_outputs(graph, model.path, execution, num_classes)
        try:
            # A fixed batch of one made ViTs 3 to 5 % faster, and NPUs accept no other graph.
            graph.reshape({base.INPUT: [1, size, size, 3]})
            settings = _settings(device, execution.precision, execution.threads)
            self._compiled = core.compile_model(graph, device, settings)
            self._request = self._compiled.create_infer_request()
        except Exception as error:  # OpenVINO raises types of its own, without a common base
            if device != "CPU":
                raise base.NotHereError(
                    f"openvino on {device}", f"which cannot be started: {_line(error)}"
                ) from error
            raise AgentError(f"{model.path}: openvino cannot load it: {_line(error)}") from error
        self.provider = f"{PREFIX}{device}"
        self._image_size = size

    def warm_up(self) -> None:
        """Run until steady; raises AgentError if the logits are not finite."""
        base.run_until_steady(self.run, self._image_size)

    def run(self, pixels: Pixels) -> Contribution:
        """Each head's outputs for crops `[N, image_size, image_size, 3]`, as Runtime says."""
        rows = [self._run_one(pixels[row : row + 1]) for row in range(len(pixels))]
        values = [np.concatenate(column) for column in zip(*rows, strict=True)]
        return base.contribution_of(self._outputs, values)

    def _run_one(self, pixels: Pixels) -> list[Any]:
        self._request.infer({base.INPUT: pixels})
        # The next run overwrites the request's memory.
        return [self._request.get_tensor(name).data.copy() for name in self._outputs]


def import_openvino() -> Any:
    """OpenVINO without its telemetry; raises ImportError where it is not installed."""
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


def core_for(execution: base.Execution) -> tuple[Any, Any]:
    """OpenVINO and its core; raises NotHereError if no model can run in this way."""
    try:
        openvino = import_openvino()
    except ImportError as error:
        raise base.NotHereError(
            f"openvino in {execution.precision}", f"which is not installed ({install('openvino')})"
        ) from error
    core = core_of(openvino)
    _check_device(core, device_of(execution.provider), execution.precision)
    return openvino, core


def device_of(provider: str) -> str:
    """OpenVINO's name of a plan's or profile's provider: `CPU`, `GPU`, `GPU.1`, `NPU`."""
    return "CPU" if provider == base.CPU else provider.removeprefix(PREFIX)


def provider_of(device: str) -> str:
    """The name of OpenVINO's device in plans and profiles: onnxruntime's for the processor."""
    return base.CPU if device == "CPU" else device


def precisions(device: str, able: Container[str]) -> list[Precision]:
    """Precisions served on OpenVINO's `device` with the capabilities `able`."""
    served = HINTS.get(_kind(device), {})
    return [p for p in served if p not in _CAPABILITIES or _CAPABILITIES[p] in able]


def _kind(device: str) -> str:
    return device.partition(".")[0]


def _check_device(core: Any, device: str, precision: Precision) -> None:
    """Raise NotHereError without `device`, or if it does not support `precision`."""
    # Listing devices loads the plugins of all, which the processor alone does not need.
    found = ["CPU"] if device == "CPU" else list(core.available_devices)
    # Of several GPUs the first one has two names.
    if _kind(device) not in HINTS or not {device, f"{device}.0"} & set(found):
        here = ", ".join(found) or "no device"
        raise base.NotHereError(f"openvino on {device}", f"openvino finds {here} here")
    where = "" if device == "CPU" else f" on {device}"
    planned = f"openvino in {precision}{where}"
    served = HINTS[_kind(device)]
    if precision not in served:
        raise base.NotHereError(planned, f"openvino has {', '.join(served)}{where}")
    try:
        able = list(core.get_property(device, "OPTIMIZATION_CAPABILITIES"))
    except Exception as error:  # OpenVINO raises types of its own, without a common base
        raise base.NotHereError(planned, f"which cannot be started: {_line(error)}") from error
    if precision not in precisions(device, able):
        unit = "processor" if device == "CPU" else "device"
        raise base.NotHereError(planned, f"this {unit} computes {', '.join(sorted(able))} only")


def _settings(device: str, precision: Precision, threads: int) -> dict[str, object]:
    settings: dict[str, object] = {"PERFORMANCE_HINT": "LATENCY"}
    if hint := HINTS[_kind(device)][precision]:
        settings["INFERENCE_PRECISION_HINT"] = hint
    if device == "CPU":
        settings |= {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            # Pinned threads would compete with other processes on their cores.
            "ENABLE_CPU_PINNING": False,
        }
    return settings


def _read(openvino: Any, model: ModelFile) -> Any:
    # By the ONNX frontend: the general reader tries six formats.
    onnx = openvino.frontend.FrontEndManager().load_by_framework("onnx")
    return onnx.convert(onnx.load(io.BytesIO(model.content)))


def _check_outputs(
    graph: Any, model: Path, execution: base.Execution, num_classes: int
) -> Sequence[str]:
    where = ["framework", base.PRECISION_KEY]
    return base.check_graph(
        model,
        execution,
        num_classes,
        inputs={i.any_name: (i.element_type.get_type_name(), _shape(i)[1:]) for i in graph.inputs},
        outputs={o.any_name: _shape(o)[-1] for o in graph.outputs},
        precision=graph.get_rt_info(where).astype(str) if graph.has_rt_info(where) else None,
        uint8="u8",
    )


def _shape(port: Any) -> list[object]:
    """Lengths of a port's dimensions, None where any will do."""
    return [d.get_length() if d.is_static else None for d in port.partial_shape]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
