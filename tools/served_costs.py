"""Count layers and operators of the catalogue's networks as served, branches re-parametrised.

python -m tools.served_costs --out partitioner/estimates/served_costs.json
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mdp.files import write_json
from partitioner.estimates.catalogue import Network, catalogue
from partitioner.estimates.network_terms import Served, ServedCosts
from partitioner.networks.families import Backbone, create
from partitioner.torchvision_shim import import_timm

_GELU = {"gelu", "erf"}
#: Activation functions other than comparisons.
_ACTIVATIONS = {"silu", "hardswish", "hardsigmoid", "sigmoid", "mish", "_softmax"}
#: Elementwise operators between layers; ReLU and norms are fused into layers.
_ELEMENTWISE = {
    *("add", "mul", "sub", "div", "cat", "pow", "rsqrt", "mean", "constant_pad_nd"),
    *("max_pool2d", "max_pool2d_with_indices", "avg_pool2d"),
    *("native_layer_norm", "native_group_norm", "linalg_vector_norm"),
}


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs of each operator, and values written by it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs, self.values = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        first = found[0] if isinstance(found, tuple | list) and found else found
        if isinstance(first, Tensor):
            name = func.__name__.split(".")[0].removesuffix("_")
            self.runs[name] += 1
            self.values[name] += first.numel()
        return found


def count_served(network: Network) -> Served:
    """Count one picture of the published size."""
    import_timm()
    from timm.utils.model import reparameterize_model

    size = network.image_size
    trunk = reparameterize_model(create(Backbone(network.name, size), 0).eval())
    counts: Counter[str] = Counter(pointwise=0, spatial=0, depthwise=0)

    def hook(module: nn.Module, _: Any, output: Tensor) -> None:
        counts["layers"] += 1
        counts["values"] += output.numel()
        if isinstance(module, nn.Linear):
            counts["pointwise"] += output.numel() * module.in_features
        elif isinstance(module, nn.Conv2d):
            kind = "pointwise" if module.kernel_size == (1, 1) else "spatial"
            if module.groups == module.in_channels and module.groups > 1:
                kind = "depthwise"
            counts[kind] += output.numel() * module.weight[0].numel()

    for module in trunk.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            module.register_forward_hook(hook)
    with torch.no_grad(), _Operators() as operators:
        trunk(torch.zeros(1, 3, size, size))

    def count_written(names: set[str]) -> int:
        return sum(operators.values[name] for name in names)

    return Served(
        name=network.name,
        **counts,
        activations=count_written(_ACTIVATIONS),
        gelu=count_written(_GELU),
        elementwise=count_written(_ELEMENTWISE),
        operators=sum(operators.runs[name] for name in _ACTIVATIONS | _GELU | _ELEMENTWISE),
    )


def main() -> None:
    """Count every network of the catalogue."""
    parser = argparse.ArgumentParser(description="Count networks as they are served.")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    networks = [count_served(network) for network in catalogue().values()]
    write_json(asked.out, ServedCosts(timm=import_timm().__version__, networks=networks))


if __name__ == "__main__":
    main()
