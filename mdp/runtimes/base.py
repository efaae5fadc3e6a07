"""The interface of runtimes, and the checks that all of them make."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from mdp.errors import AgentError
from mdp.formats.plan import Assignment
from mdp.formats.profile import Precision, RuntimeName
from mdp.fusion.anomaly_table import MAP_SIDE
from mdp.fusion.fuse import Contribution
from mdp.pictures.crop import Pixels

CPU = "CPUExecutionProvider"
#: Name of the exported graph's input.
INPUT = "images"
#: Names of its outputs; without boosting the last alone.
HEADS = ("boost", "bag")
#: Names of an anomaly head's outputs, which follow: a score, and a map in bytes.
ANOMALY, ANOMALY_MAP = "anomaly", "anomaly_map"
#: The metadata key of a file's precision; absent in bundles of 0.1.0.
PRECISION_KEY = "mdp_precision"
#: Runs before READY: the first ones allocate memory and choose kernels.
WARM_UP_RUNS = 3

#: Name -> type and shape without the batch.
Signature = Mapping[str, tuple[str, list[object]]]


class Execution(Struct, frozen=True, kw_only=True):
    """The way to run a sub-model."""

    runtime: RuntimeName
    #: An execution provider of onnxruntime, or OpenVINO's name of a device other than the CPU.
    provider: str
    precision: Precision
    image_size: int
    threads: int = 1
    #: Whether threads spin while they wait for each other.
    spin: bool = False

    @classmethod
    def of(cls, assignment: Assignment) -> "Execution":
        """As planned."""
        return cls(
            runtime=assignment.runtime,
            provider=assignment.provider,
            precision=assignment.spec.precision,
            image_size=assignment.spec.image_size,
            threads=assignment.threads,
            spin=assignment.spin,
        )


class NotHereError(AgentError):
    """The planned runtime, provider or precision is not available on this device."""

    def __init__(self, planned: str, here: str) -> None:
        super().__init__(f"the plan asks for {planned}, {here}")


class Runtime(Protocol):
    """Executes one sub-model."""

    #: The provider in use: onnxruntime's, or OpenVINO's device, as in `openvino:CPU`.
    provider: str
    #: Whether provider, runtime or precision is not the planned one.
    fallback: bool

    def warm_up(self) -> None:
        """Run until steady; raises AgentError if the logits are not finite."""

    def run(self, pixels: Pixels) -> Contribution:
        """Each head's logits `[N, num_classes]` for crops `[N, image_size, image_size, 3]`.

        Of a model with an anomaly head also its scores `[N]` and maps `[N, 16, 16]`.
        """


def check_graph(
    model: Path,
    execution: Execution,
    num_classes: int,
    *,
    inputs: Signature,
    outputs: Mapping[str, object],
    precision: str | None,
    uint8: str,
) -> Sequence[str]:
    """Names of the outputs: as `HEADS` has them, then an anomaly head's where there is one.

    `outputs` maps names to their last lengths, `precision` is in the file's metadata, `uint8` is
    the runtime's name of that type. Raises AgentError unless the loaded graph is the planned
    sub-model.
    """
    side, planned = execution.image_size, execution.precision
    if inputs != {INPUT: (uint8, [side, side, 3])}:
        raise AgentError(
            f"{model}: expected one input {INPUT!r} of uint8 [N, {side}, {side}, 3], got {inputs}"
        )
    named = (HEADS, HEADS[1:])
    beside = {ANOMALY: 1, ANOMALY_MAP: MAP_SIDE}
    inspected = ANOMALY in outputs
    logits = {
        name: length for name, length in outputs.items() if not inspected or name not in beside
    }
    heads = next((h for h in named if logits == dict.fromkeys(h, num_classes)), None)
    if inspected and any(outputs.get(name) != length for name, length in beside.items()):
        raise AgentError(
            f"{model}: expected an anomaly head of {beside}, got "
            f"{ {name: outputs.get(name) for name in beside} }"
        )
    if heads is None:
        raise AgentError(
            f"{model}: expected an output 'bag', or 'boost' and 'bag', with {num_classes} classes, "
            f"got {outputs}"
        )
    # For bf16, in which a runtime computes, the file's numbers are fp32.
    if precision is not None and precision != ("fp32" if planned == "bf16" else planned):
        raise AgentError(
            f"{model}: expected a model in {planned}, as planned, got one in {precision}"
        )
    return (*heads, *beside) if inspected else heads


def contribution_of(outputs: Sequence[str], values: Sequence[Any]) -> Contribution:
    """The contribution of a run: `values` `[N, ...]` of the `outputs` that `check_graph` names."""
    if outputs[-1] != ANOMALY_MAP:
        return Contribution.of(values)
    *heads, scores, maps = values
    return replace(Contribution.of(heads), anomaly=scores[:, 0], anomaly_map=maps)


def run_until_steady(run: Callable[[Pixels], Contribution], image_size: int) -> None:
    """Run a few times on a black picture; raises AgentError if the logits are not finite."""
    blank = np.zeros((1, image_size, image_size, 3), dtype=np.uint8)
    try:
        for _ in range(WARM_UP_RUNS):
            contribution = run(blank)
    except Exception as error:  # runtimes raise types of their own, without a common base
        raise AgentError(f"the model cannot be run: {error}") from error
    if not np.isfinite(contribution.heads).all():
        raise AgentError("the model gives logits that are not finite on a black picture")
    if contribution.anomaly is not None and not np.isfinite(contribution.anomaly).all():
        raise AgentError("the model's anomaly head gives no finite score of a black picture")
