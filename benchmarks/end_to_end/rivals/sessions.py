"""onnxruntime as every rival has it: one thread that sleeps when there is nothing to do."""

from pathlib import Path
from typing import Any

import onnxruntime


def open_session(model: Path | bytes) -> Any:
    """A session with the options of the product's own agents."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    source = model if isinstance(model, bytes) else str(model)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
