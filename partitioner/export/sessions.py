"""Run exported models on this machine, in the runtimes of the devices."""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment
from mdp.formats.profile import Precision
from mdp.fusion.fuse import Contribution, Logits
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import CPU, INPUT, Execution, Runtime
from mdp.runtimes.openvino import HINTS
from mdp.runtimes.select import open_runtime

#: Pictures per run where throughput counts: of a ViT-Ti at 160 px 15 ms each, 20 ms with 128.
_BATCH = 16
#: Single pictures timed after the warm-up ones.
_TIMED, _WARM_UP = 50, 5


def on_processor(execution: Execution) -> Execution:
    """As `execution`, on one thread of this machine's processor.

    onnxruntime replaces OpenVINO in fp16, which only its GPUs and NPUs compute in.
    """
    able = execution.runtime != "openvino" or execution.precision in HINTS["CPU"]
    return replace(
        execution,
        runtime=execution.runtime if able else "onnxruntime",
        provider=CPU,
        threads=1,
        spin=False,
    )


def open_member(model: ModelFile, assignment: Assignment, num_classes: int) -> Runtime:
    """One member as it is planned, but on one thread of the processor; raises AgentError."""
    return open_runtime(model, on_processor(Execution.of(assignment)), num_classes=num_classes)


def run_session(
    session: Any, pixels: Pixels, outputs: Sequence[str], batch: int = _BATCH
) -> list[Logits]:
    """Each of `outputs` `[N, C]` of an onnxruntime session for views `[N, S, S, 3]`."""
    parts = [
        session.run(outputs, {INPUT: np.ascontiguousarray(pixels[start : start + batch])})
        for start in range(0, len(pixels), batch)
    ]
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def contribution(runtime: Runtime, pixels: Pixels, batch: int = _BATCH) -> Contribution:
    """Each head's logits `[N, C]` of one member, `batch` pictures at a time."""
    parts = [
        runtime.run(np.ascontiguousarray(pixels[start : start + batch])).heads
        for start in range(0, len(pixels), batch)
    ]
    return Contribution.of([np.concatenate(head) for head in zip(*parts, strict=True)])


def batch_for(precision: Precision) -> int:
    """Batch size with the same outputs as one by one on a device.

    Dynamic int8 takes the range of activations over the whole batch.
    """
    return 1 if precision == "int8" else _BATCH


def member_contribution(
    runtime: Runtime, pixels: Pixels, assignment: Assignment, kept: Path | None = None
) -> Contribution:
    """Each head's logits `[N, C]` of one member, as its device computes them.

    They are read where the file `kept` has them, see `logits_file`.
    """
    if kept is not None and kept.is_file():
        return Contribution.of([np.array(head) for head in np.moveaxis(np.load(kept), 1, 0)])
    return contribution(runtime, pixels, batch_for(assignment.spec.precision))


def logits_file(cache: Path, model: ModelFile, assignment: Assignment, pictures: str) -> Path:
    """File for one member's logits `[N, heads, C]` of pictures by digest, of a crew's trainers."""
    # The command line imports this module without torch.
    from partitioner.data.crops import view_of

    way = f"{view_of(assignment).name} {on_processor(Execution.of(assignment))}"
    made_of = [model.content, way.encode(), pictures.encode()]
    digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in made_of))
    return cache / f"logits-{assignment.k}-{digest.hexdigest()[:16]}.npy"


def latency_ms(
    run: Callable[[Pixels], object], pixels: Pixels, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median milliseconds of one picture, after a warm-up, over the views `[N, S, S, 3]`."""
    times_s = []
    for turn in range(_WARM_UP + _TIMED):
        one = np.ascontiguousarray(pixels[turn % len(pixels)][np.newaxis])
        started_s = clock()
        run(one)
        times_s.append(clock() - started_s)
    return float(np.median(times_s[_WARM_UP:]) * 1e3)


def run_of(session: Any) -> Callable[[Pixels], object]:
    """A function from views to all outputs of an onnxruntime session."""
    return lambda pixels: session.run(None, {INPUT: pixels})
