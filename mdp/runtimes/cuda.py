"""NVIDIA's GPUs: loads the libraries of CUDA and TensorRT, and sets their options."""

import contextlib
import functools
import hashlib
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from mdp.errors import AgentError
from mdp.formats.profile import Precision

CUDA, TENSORRT = "CUDAExecutionProvider", "TensorrtExecutionProvider"
#: Providers that need CUDA's libraries.
ON_CUDA = frozenset({CUDA, TENSORRT})


def options_for(provider: str, precision: Precision, model: bytes) -> dict[str, str]:
    """Options of onnxruntime's `provider` for a `model` in `precision`; raises AgentError."""
    if provider == CUDA:
        # fp32 as planned: by default CUDA's matrix units use TF32, with 10 of 23 mantissa bits.
        return {"use_tf32": "0"}
    if provider == TENSORRT:
        return {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": str(_engine_folder(model)),
            "trt_fp16_enable": "1" if precision == "fp16" else "0",
            "trt_int8_enable": "1" if precision == "int8-static" else "0",
        }
    return {}


def _engine_folder(model: bytes) -> Path:
    """TensorRT's cache of compiled engines for this model, readable by its owner only.

    One folder a file: onnxruntime names engines by the graph without its weights, and would use
    another bundle's.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "mdp" / "tensorrt" / hashlib.sha256(model).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
    except OSError as error:
        raise AgentError(
            f"{folder}: no folder for TensorRT's engines: {error.strerror or error}; "
            "XDG_CACHE_HOME names another place"
        ) from error
    return folder


@functools.cache
def load_libraries(ort: Any) -> None:
    """Load CUDA's libraries for `ort`, the module, if its build uses them and they are installed.

    The system's loader does not search pip's folders.
    """
    if ON_CUDA.isdisjoint(ort.get_available_providers()):
        return
    # In onnxruntime 1.21 and later.
    if preload := getattr(ort, "preload_dlls", None):
        # It prints missing libraries, and standard output is for events.
        with contextlib.redirect_stdout(sys.stderr):
            preload()


def load_tensorrt() -> None:
    """Load TensorRT's libraries from pip's folder, and disable TF32."""
    # onnxruntime has no option for TF32 on TensorRT; NVIDIA's libraries read this variable.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    with contextlib.suppress(ImportError), contextlib.redirect_stdout(sys.stderr):
        importlib.import_module("tensorrt")
