"""Choose the runtime that a plan names, or refuse."""

from devices.runtime.base import NotHereError, OrtRuntime, Runtime
from devices.runtime.openvino import OpenVinoRuntime
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import Assignment


def open_runtime(
    model: ModelFile,
    assignment: Assignment,
    *,
    num_classes: int,
    threads: int | None = None,
    allow_fallback: bool = False,
) -> Runtime:
    """Load `model` in the planned runtime, with the planned provider and precision.

    Where that cannot be had and `allow_fallback` is set, onnxruntime's CPU provider serves the
    file and says so; otherwise raises AgentError, as it does for a file that is another model.
    """
    if assignment.runtime == "openvino":
        try:
            return OpenVinoRuntime(model, assignment, num_classes=num_classes, threads=threads)
        except NotHereError:
            if not allow_fallback:
                raise
    return OrtRuntime(
        model, assignment, num_classes=num_classes, threads=threads, allow_fallback=allow_fallback
    )
