"""On NVIDIA's GPUs: CUDA's and TensorRT's libraries found, and sessions that compute as planned."""

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
    """What onnxruntime's `provider` is told for a `model` in `precision`; raises AgentError."""
    if provider == CUDA:
        # Products in fp32 as planned: by default CUDA's matrix units drop 13 of the 23 bits of
        # their factors (TF32).
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
    """Where TensorRT keeps what it has compiled of this model; made for its owner alone.

    One folder for each file: onnxruntime names engines by the graph without its weights, so that
    those of another bundle of the same shape would be taken.
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
    """Load CUDA's libraries for `ort`, the module, if its build can use them and they are there.

    The system's loader does not look where pip puts them; once loaded, they are found.
    """
    if ON_CUDA.isdisjoint(ort.get_available_providers()):
        return
    # In onnxruntime 1.21 and later.
    if preload := getattr(ort, "preload_dlls", None):
        # It prints what it does not find, and standard output is for whoever reads events.
        with contextlib.redirect_stdout(sys.stderr):
            preload()


def load_tensorrt() -> None:
    """Load TensorRT's libraries where pip has put them, and have them compute fp32 in full."""
    # onnxruntime has no option for TF32 on TensorRT; NVIDIA's libraries read this variable.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    with contextlib.suppress(ImportError), contextlib.redirect_stdout(sys.stderr):
        importlib.import_module("tensorrt")
