"""Opens the runtime that a plan names."""

from mdp.formats.model_file import ModelFile
from mdp.runtimes.base import Execution, NotHereError, Runtime
from mdp.runtimes.onnxruntime import OrtRuntime
from mdp.runtimes.openvino import OpenVinoRuntime, core_for


def open_runtime(
    model: ModelFile, execution: Execution, *, num_classes: int, allow_fallback: bool = False
) -> Runtime:
    """Load `model` in the planned runtime, with the planned provider and precision.

    If these are not available, onnxruntime's CPU provider runs the file where `allow_fallback` is
    set; otherwise raises NotHereError. Raises AgentError for another model.
    """
    if execution.runtime == "openvino":
        try:
            return OpenVinoRuntime(model, execution, num_classes=num_classes)
        except NotHereError:
            if not allow_fallback:
                raise
    return OrtRuntime(model, execution, num_classes=num_classes, allow_fallback=allow_fallback)


def check_execution(execution: Execution) -> None:
    """Raise NotHereError if no model can run in this way here."""
    if execution.runtime == "openvino":
        core_for(execution)
