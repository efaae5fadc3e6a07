"""Milliseconds of a public network on a device, from its profile. Pure.

Where the profile has only plain ViTs measured, the catalogue's ratio to ViT-S/16 stands in.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mdp.errors import InputError
from mdp.formats.plan import NetworkSpec, SubModelSpec
from mdp.formats.profile import DeviceProfile
from partitioner.estimates.catalogue import network_of
from partitioner.estimates.latency import LatencyModel, Way, fit_latency
from partitioner.estimates.latency_terms import Array

#: The shape that catalogue latencies are relative to.
_VIT_S = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=384, depth=12, num_heads=6, mlp_ratio=4.0
)
#: Where a latency from the ratio may lie: on another processor networks compare otherwise.
_RATIO_RANGE = 2.0
#: `measured`: fitted to networks that were measured on the device; `ratio`: from the catalogue's
#: ratio to ViT-S on another processor.
Basis = Literal["measured", "ratio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEstimate:
    """A predicted latency, where it most likely lies, and what it is based on."""

    ms: float
    low_ms: float
    high_ms: float
    basis: Basis


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkLatency:
    """The latency of public networks in one way of running."""

    vit: LatencyModel
    basis: Basis

    def predict_many_ms(self, specs: Sequence[NetworkSpec]) -> Array:
        """Compute milliseconds `[n]` of one picture of each network; NaN where nothing is known.

        Raises InputError for another precision than the way's.
        """
        found = [ratio_ms(self.vit, spec) for spec in specs]
        return np.array([np.nan if ms is None else ms for ms in found])

    def estimate(self, spec: NetworkSpec) -> NetworkEstimate | None:
        """The prediction and its range, or None where nothing is known; raises InputError."""
        milliseconds = float(self.predict_many_ms([spec])[0])
        if np.isnan(milliseconds):
            return None
        return NetworkEstimate(
            ms=milliseconds,
            low_ms=milliseconds / _RATIO_RANGE,
            high_ms=milliseconds * _RATIO_RANGE,
            basis=self.basis,
        )


def fit_networks(profile: DeviceProfile, way: Way | None = None) -> NetworkLatency:
    """The latency of networks in `way`, None being the profile's own in fp32.

    Raises InputError as `fit_latency` does.
    """
    return NetworkLatency(vit=fit_latency(profile, way), basis="ratio")


def network_ms_on(
    profile: DeviceProfile, way: Way | None, spec: NetworkSpec
) -> NetworkEstimate | None:
    """Estimated compute milliseconds of one picture; see `fit_networks` for several."""
    return fit_networks(profile, way).estimate(spec)


def ratio_ms(model: LatencyModel, spec: NetworkSpec) -> float | None:
    """Estimated compute milliseconds of one picture, or None where nothing is known.

    The catalogue's ratio to ViT-S/16 on another processor times ViT-S/16 on this device, scaled by
    multiply-accumulates to the picture size. Raises InputError for another precision than the
    model's.
    """
    if spec.precision != model.way.precision:
        raise InputError(f"expected a network of {model.way.precision}, got {spec.precision}")
    network = network_of(spec)
    if network is None or spec.image_size not in network.costs:
        return None
    ratio = network.vit_s_ratio if spec.precision == "fp32" else network.vit_s_ratio_int8
    if ratio is None or spec.precision not in ("fp32", "int8-static"):
        return None
    size = network.costs[spec.image_size].macs / network.costs[network.image_size].macs
    reference = SubModelSpec(
        image_size=_VIT_S.image_size,
        patch_size=_VIT_S.patch_size,
        embed_dim=_VIT_S.embed_dim,
        depth=_VIT_S.depth,
        num_heads=_VIT_S.num_heads,
        mlp_ratio=_VIT_S.mlp_ratio,
        precision=spec.precision,
    )
    return ratio * size * model.predict_ms(reference, 0)
