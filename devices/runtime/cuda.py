"""On NVIDIA's GPUs: CUDA's libraries found, and a session that computes what was planned."""

import contextlib
import functools
import sys
from collections.abc import Mapping
from typing import Any

CUDA = "CUDAExecutionProvider"
#: Providers that need CUDA's libraries.
ON_CUDA = frozenset({CUDA, "TensorrtExecutionProvider"})
#: By provider, what it is told. Products in fp32 as planned: by default CUDA's matrix units drop 13
#: of the 23 bits of their factors (TF32).
OPTIONS: Mapping[str, Mapping[str, str]] = {CUDA: {"use_tf32": "0"}}


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
