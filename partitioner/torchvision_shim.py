"""Import timm beside a torchvision whose compiled operators cannot be loaded.

timm imports torchvision. Its default wheel is built for CUDA; beside a CPU build of torch it finds
no CUDA library, loads none of its operators, and then stops with "operator torchvision::nms does
not exist" while it registers shapes for them. MDP calls none of these operators: with their two
schemas declared, and no kernel behind them, torchvision and timm import as usual.
"""

import importlib
from types import ModuleType
from typing import Any

import torch

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
#: torch forgets a library's operators when its Library object dies, so it is kept here.
_declared: list[Any] = []


def import_timm() -> ModuleType:
    """The `timm` package; every use of timm in this project starts here."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms does not exist" not in str(error):
            raise
        declare_operators()
    timm = importlib.import_module("timm")
    # Attention written out in plain operators: twice as quick to train in bf16 on a processor as
    # the fused kernel (90 against 218 ms a step), and what ONNX export can take apart.
    timm.layers.set_fused_attn(False)
    return timm


def declare_operators() -> None:
    """Declare `torchvision::nms` and `torchvision::qnms`, once, where nobody else has."""
    if _declared or hasattr(torch.ops.torchvision, "nms"):
        return
    # torch.library is not annotated.
    make: Any = torch.library.Library
    library = make("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _declared.append(library)
