"""Import timm with a torchvision whose compiled operators cannot be loaded.

timm imports torchvision, whose default wheel is built for CUDA: with a CPU build of torch it loads
no operators and fails with "operator torchvision::nms does not exist". MDP calls none of them, so
that declaring two schemas without kernels suffices.
"""

import importlib
from types import ModuleType
from typing import Any

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
#: Keeps the Library object alive, and its operators with it.
_declared: list[Any] = []


def import_timm() -> ModuleType:
    """The `timm` package; the project's only import of it."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        declare_operators()
    timm = importlib.import_module("timm")
    # Unfused attention trains twice as fast in bf16 on a processor (90 against 218 ms a step), and
    # exports to plain ONNX operators.
    timm.layers.set_fused_attn(False)
    return timm


def declare_operators() -> None:
    """Declare `torchvision::nms` and `torchvision::qnms` unless they are declared."""
    if _declared or hasattr(torch.ops.torchvision, "nms"):
        return
    # torch.library is not annotated.
    make: Any = torch.library.Library
    library = make("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _declared.append(library)
