"""Terms of the latency formula of public networks.

`served_costs.json` is written by `python -m tools.served_costs`: counts of every
network of the catalogue at its published picture size, in the form that devices serve.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Annotated

import numpy as np
from msgspec import Meta, json

from mdp.files import Record
from mdp.formats.plan import NetworkSpec
from partitioner.estimates.catalogue import Network, network_of
from partitioner.estimates.latency_terms import Array

_SHIPPED = "served_costs.json"
_Count = Annotated[int, Meta(ge=0)]
#: The columns of `network_terms`. Activations are values that pass an activation function of more
#: than a comparison; GELU, of several operators, stands apart.
NAMES = (
    "call",
    "layers",
    "operators",
    "pointwise",
    "spatial",
    "depthwise",
    "other",
    "values",
    "parameters",
    "activations",
    "gelu",
    "elementwise",
)


class Served(Record, frozen=True):
    """Counts of one picture in a network without its classifier, branches re-parametrised."""

    name: str
    #: Convolutions and linear layers, and multiply-accumulates of three kinds of these.
    layers: _Count
    pointwise: _Count
    spatial: _Count
    depthwise: _Count
    #: Values written by layers, by activation functions and by other operators.
    values: _Count
    activations: _Count
    gelu: _Count
    elementwise: _Count
    #: Operators that are no layers.
    operators: _Count


class ServedCosts(Record, frozen=True):
    """The shipped file."""

    timm: str
    networks: list[Served]


@cache
def _read_served_costs() -> Mapping[str, Served]:
    content = (resources.files("partitioner.estimates") / _SHIPPED).read_bytes()
    return {one.name: one for one in json.decode(content, type=ServedCosts).networks}


def network_terms(specs: Sequence[NetworkSpec]) -> Array:
    """`[n, len(NAMES)]`: counts of one picture of each network; NaN rows for unknown ones."""
    return np.array([_row(spec) for spec in specs], dtype=np.float64).reshape(-1, len(NAMES))


def _row(spec: NetworkSpec) -> list[float]:
    network, served = network_of(spec), _read_served_costs().get(spec.name)
    if network is None or served is None or spec.image_size not in network.costs:
        return [np.nan] * len(NAMES)
    counts = _scale_counts(network, served, spec.image_size)
    return [float(counts[name]) for name in NAMES]


def _scale_counts(network: Network, served: Served, image_size: int) -> dict[str, float]:
    """The counts at another picture size, scaled like the catalogue's."""
    own, asked = network.costs[network.image_size], network.costs[image_size]
    larger = asked.values / own.values
    grown = {
        kind: getattr(served, kind) * getattr(asked, kind) / max(1, getattr(own, kind))
        for kind in ("pointwise", "spatial", "depthwise")
    }
    written = {
        kind: getattr(served, kind) * larger
        for kind in ("values", "activations", "gelu", "elementwise")
    }
    return (
        grown
        | written
        | {
            "call": 1,
            "layers": served.layers,
            "operators": served.operators,
            "other": asked.other,
            "parameters": network.parameters,
        }
    )
