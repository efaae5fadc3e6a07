"""On NVIDIA's GPUs: CUDA's libraries found, and a sub-model's kernels launched together.

A small transformer on a large GPU mostly waits for its kernels to be launched one by one. Recorded
once as a CUDA graph and launched as one, they take about half of the time (docs/lab-log.md).
onnxruntime records: https://onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdp.crop import Pixels

CUDA = "CUDAExecutionProvider"
#: Providers that need CUDA's libraries.
ON_CUDA = frozenset({CUDA, "TensorrtExecutionProvider"})
#: Products in fp32 as planned. By default their factors lose 13 of 23 bits to the matrix units.
PLAIN: Mapping[str, str] = {"use_tf32": "0"}
RECORDING: Mapping[str, str] = {**PLAIN, "enable_cuda_graph": "1"}
#: While kernels are recorded, no other thread of the process may copy, allocate or load on the GPU.
_RUNNING, _LOADING = threading.Lock(), threading.Lock()


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


def new_session(
    ort: Any, model: str, options: Any, provider: str | tuple[str, dict[str, str]]
) -> Any:
    """A session of `ort`, the module, that tries nothing else; raises what onnxruntime raises."""
    # By itself it would print an error to standard output and try again without the options.
    return ort.InferenceSession(model, options, providers=[provider], enable_fallback=0)


def open_session(
    ort: Any, model: str, options: Any, heads: Sequence[str], name: str
) -> tuple[Any, "RecordedRuns | None"]:
    """A session on the GPU, and its runs recorded, where they can be.

    They cannot where a part of the graph has to run on the processor. Raises what onnxruntime
    raises, which may give a session on the processor instead where there is no GPU.
    """
    with contextlib.suppress(Exception):  # onnxruntime's exceptions have no common base
        with _LOADING:
            session = new_session(ort, model, options, (CUDA, dict(RECORDING)))
        if session.get_providers()[0] != CUDA:
            return session, None
        runs = RecordedRuns(ort, session, heads, name)
        (given,) = session.get_inputs()
        runs.run(np.zeros((1, *given.shape[1:]), dtype=np.uint8))
        return session, runs
    with _LOADING:
        return new_session(ort, model, options, (CUDA, dict(PLAIN))), None


class RecordedRuns:
    """Runs `session`, which was opened for recording: a graph for every number of pictures."""

    def __init__(self, ort: Any, session: Any, heads: Sequence[str], name: str) -> None:
        """`name` is the input's, `heads` are the outputs'."""
        self._ort = ort
        self._session = session
        classes = {given.name: given.shape[-1] for given in session.get_outputs()}
        self._heads = {head: classes[head] for head in heads}
        self._name = name
        self._graphs: dict[int, _Graph] = {}
        #: onnxruntime records for each thread anew: for how many pictures this one has.
        self._here = threading.local()

    def run(self, pixels: Pixels) -> Sequence[NDArray[np.float32]]:
        """The heads' logits `[N, num_classes]` for crops `[N, image_size, image_size, 3]`."""
        recorded: set[int] = self._here.__dict__.setdefault("recorded", set())
        with _RUNNING:
            if len(pixels) in recorded:
                return self._graphs[len(pixels)].run(pixels)
            with _LOADING:
                graph = self._graphs.get(len(pixels)) or self._new(pixels)
                logits = graph.run(pixels)
        recorded.add(len(pixels))
        return logits

    def _new(self, pixels: Pixels) -> "_Graph":
        graph = _Graph(self._ort, self._session, self._heads, self._name, pixels.shape)
        self._graphs[len(pixels)] = graph
        return graph


class _Graph:
    """Where a graph reads and writes on the GPU: what it was recorded with is what it uses."""

    def __init__(
        self, ort: Any, session: Any, heads: Mapping[str, int], name: str, shape: Sequence[int]
    ) -> None:
        new = ort.OrtValue.ortvalue_from_shape_and_type
        self._session = session
        self._pixels = new(list(shape), np.uint8, "cuda", 0)
        self._logits = [new([shape[0], n], np.float32, "cuda", 0) for n in heads.values()]
        self._binding = session.io_binding()
        self._binding.bind_ortvalue_input(name, self._pixels)
        for head, logits in zip(heads, self._logits, strict=True):
            self._binding.bind_ortvalue_output(head, logits)
        self._options = ort.RunOptions()
        self._options.add_run_config_entry("gpu_graph_id", str(shape[0]))

    def run(self, pixels: Pixels) -> Sequence[NDArray[np.float32]]:
        self._pixels.update_inplace(np.ascontiguousarray(pixels))
        self._session.run_with_iobinding(self._binding, self._options)
        return [logits.numpy() for logits in self._logits]
