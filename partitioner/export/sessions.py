"""Run exported models here as devices do: in the planned runtime and precision."""

import functools
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mdp.errors import InputError
from mdp.extras import install
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment
from mdp.formats.profile import Precision, RuntimeName
from mdp.fusion.fuse import Contribution, Logits
from mdp.imports import silence_onnxruntime, without
from mdp.pictures.crop import Pixels

CPU, TENSORRT = "CPUExecutionProvider", "TensorrtExecutionProvider"
#: Pictures per run where throughput counts.
_BATCH = 128
#: Single pictures timed after the warm-up ones.
_TIMED, _WARM_UP = 50, 5
#: What a processor computes in, where the file leaves that open.
_HINTS = {"fp32": "f32", "fp16": "f32", "bf16": "bf16", "int8-static": "f32"}
#: Parts of openvino's package that report its use to its maker, or exist only for parts that do.
_REPORTING = ("openvino_telemetry", "openvino.tools.ovc")


def _path(model: Path | ModelFile) -> Path:
    return model.path if isinstance(model, ModelFile) else model


def open_session(
    model: Path | ModelFile, *, threads: int = 1, provider: str = CPU, spin: bool = False
) -> Any:
    """An onnxruntime session, on the processor if nothing else is said.

    A bundle's model comes as the bytes that were checked; a path is that of a file just made.
    With `spin` its threads wait for each other awake, but only while it runs.
    Raises InputError if the file is no model, or the provider is not here or cannot be started.
    """
    silence_onnxruntime()
    import onnxruntime

    if provider not in onnxruntime.get_available_providers():
        available = ", ".join(onnxruntime.get_available_providers())
        raise InputError(f"expected {provider} on this machine, found {available}")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spin else "0")
    if spin:
        # Going on would take the core away from whoever else is measured on this machine.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = 3
    try:
        # By itself it would print an error and try again with the processor.
        session = onnxruntime.InferenceSession(
            model.content if isinstance(model, ModelFile) else str(model),
            options,
            providers=[provider],
            enable_fallback=0,
        )
    except Exception as error:  # onnxruntime's exceptions share no base
        raise InputError(f"{_path(model)}: onnxruntime cannot load it: {error}") from error
    # It keeps a model's bytes to start anew with other providers, which nothing asks of it.
    session._model_bytes = None
    started = session.get_providers()[0]
    if started != provider:
        raise InputError(f"onnxruntime lists {provider} on this machine, but started {started}")
    return session


class OpenVinoSession:
    """A model in OpenVINO, one picture at a time; as much of onnxruntime's manners as we use."""

    def __init__(self, model: Path | ModelFile, *, precision: Precision, threads: int = 1) -> None:
        """Raises InputError if the file is no model, or OpenVINO or the precision not here."""
        openvino, core = _core(precision)
        try:
            onnx = openvino.frontend.FrontEndManager().load_by_framework("onnx")
            graph = onnx.convert(
                onnx.load(io.BytesIO(model.content) if isinstance(model, ModelFile) else str(model))
            )
            self._names = [output.any_name for output in graph.outputs]
            size = graph.input().partial_shape[1]
            graph.reshape({"images": [1, size, size, 3]})
            wishes = {
                "INFERENCE_PRECISION_HINT": _HINTS[precision],
                "PERFORMANCE_HINT": "LATENCY",
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1,
                "ENABLE_CPU_PINNING": False,
            }
            self._request = core.compile_model(graph, "CPU", wishes).create_infer_request()
        except Exception as error:  # OpenVINO raises types of its own, without a common base
            text = " ".join(str(error).split())
            raise InputError(f"{_path(model)}: openvino cannot load it: {text}") from error

    def run(self, outputs: list[str] | None, feed: dict[str, Pixels]) -> list[Logits]:
        """Each of `outputs`, or all there are, `[N, C]`."""
        pixels, names = feed["images"], outputs or self._names
        rows = [self._run_one(names, pixels[row : row + 1]) for row in range(len(pixels))]
        return [np.concatenate(column) for column in zip(*rows, strict=True)]

    def _run_one(self, outputs: list[str], pixels: Pixels) -> list[Logits]:
        self._request.infer({"images": pixels})
        return [self._request.get_tensor(name).data.copy() for name in outputs]


def _openvino(precision: Precision) -> Any:
    try:
        with without(*_REPORTING):
            import openvino
            import openvino.frontend
    except ImportError as error:
        raise InputError(
            f"openvino in {precision}: openvino is not installed here: "
            + install("partition,openvino")
        ) from error
    return openvino


@functools.cache
def _core_of(openvino: Any) -> Any:
    """OpenVINO's core, kept until the process ends.

    With the last core goes the signal stack that its processor plugin gave the thread that loaded
    it, in whichever thread that happens: the next signal with a Python handler would be the end.
    """
    return openvino.Core()


def _core(precision: Precision) -> tuple[Any, Any]:
    openvino = _openvino(precision)
    core = _core_of(openvino)
    if precision == "bf16" and "BF16" not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise InputError("expected a processor that computes in bf16, this one does not")
    return openvino, core


def check_way(precision: Precision, runtime: RuntimeName) -> None:
    """Raise InputError if no model could be run here in this way."""
    if runtime == "openvino":
        _core(precision)


def open_way(
    model: Path | ModelFile,
    precision: Precision,
    runtime: RuntimeName,
    *,
    threads: int = 1,
    provider: str = CPU,
    spin: bool = False,
) -> Any:
    """A session of `model` in one way of running; raises InputError where it cannot be had here.

    What compiles a model for a device other than the processor is for agents and their probe.
    """
    if provider == TENSORRT or (runtime == "openvino" and provider != CPU):
        raise InputError(f"{runtime} on {provider} cannot be tried here")
    if runtime == "openvino":
        return OpenVinoSession(model, precision=precision, threads=threads)
    return open_session(model, threads=threads, provider=provider, spin=spin)


def open_member(model: Path | ModelFile, assignment: Assignment, *, threads: int = 1) -> Any:
    """A session of one member as it is planned, but on the processor; raises InputError."""
    return open_way(model, assignment.spec.precision, assignment.runtime, threads=threads)


def run_session(
    session: Any, pixels: Pixels, outputs: list[str], batch: int = _BATCH
) -> list[Logits]:
    """Each of `outputs` `[N, C]` for views `[N, S, S, 3]`, `batch` pictures at a time."""
    parts = [
        session.run(outputs, {"images": np.ascontiguousarray(pixels[start : start + batch])})
        for start in range(0, len(pixels), batch)
    ]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def contribution(session: Any, pixels: Pixels, batch: int = _BATCH) -> Contribution:
    """Both heads' logits `[N, C]` of one member."""
    boost, bag = run_session(session, pixels, ["boost", "bag"], batch)
    return Contribution(boost, bag)


def batch_for(precision: Precision) -> int:
    """Pictures at a time where the outcome has to be the devices', who take them one by one.

    Dynamic int8 takes the range of activations over the whole batch.
    """
    return 1 if precision == "int8" else _BATCH


def member_contribution(session: Any, pixels: Pixels, assignment: Assignment) -> Contribution:
    """Both heads' logits `[N, C]` of one member, as its device computes them."""
    return contribution(session, pixels, batch_for(assignment.spec.precision))


def latency_ms(
    session: Any, pixels: Pixels, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median milliseconds of one picture, after a warm-up; the views `[N, S, S, 3]` take turns."""
    times_s = []
    for turn in range(_WARM_UP + _TIMED):
        one = np.ascontiguousarray(pixels[turn % len(pixels)][np.newaxis])
        started_s = clock()
        session.run(None, {"images": one})
        times_s.append(clock() - started_s)
    return float(np.median(times_s[_WARM_UP:]) * 1e3)
