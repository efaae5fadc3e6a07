"""Latency of a member of any family on a device, in one way of running."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.formats.plan import NetworkSpec, Spec, SubModelSpec
from mdp.formats.profile import DeviceProfile
from partitioner.estimates.latency import Estimate, LatencyModel, Way, fit_latency
from partitioner.estimates.latency_networks import NetworkLatency, fit_networks
from partitioner.estimates.latency_terms import Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemberLatency:
    """The latency of members of every family in one way of running."""

    vit: LatencyModel
    #: None where no network is planned.
    networks: NetworkLatency | None = None

    @property
    def way(self) -> Way:
        """The way of running."""
        return self.vit.way

    def from_terms(
        self, counts: Array, places: NDArray[np.int64], networks: Sequence[NetworkSpec]
    ) -> Array:
        """Compute milliseconds `[n]`: of plain ViTs by their terms `[n, terms]`.

        Rows `places` are `networks`, with inf where the latency is unknown.
        """
        took_ms = self.vit.from_terms(counts)
        if len(networks):
            took_ms[places] = np.inf
            if self.networks is not None:
                known = self.networks.predict_many_ms(networks)
                took_ms[places] = np.where(np.isnan(known), np.inf, known)
        return took_ms

    def predict_ms(self, spec: Spec, num_classes: int) -> float:
        """Compute milliseconds of one picture; raises InputError where unknown."""
        return self.estimate(spec, num_classes).ms

    def estimate(self, spec: Spec, num_classes: int) -> Estimate:
        """Milliseconds of one picture with their interval; raises InputError where unknown."""
        if isinstance(spec, SubModelSpec):
            return self.vit.estimate(spec, num_classes)
        found = None if self.networks is None else self.networks.estimate(spec)
        if found is None:
            raise InputError(f"the latency of {spec.words} in {self.way} is not known")
        return found


def fit_members(
    profile: DeviceProfile, way: Way | None = None, *, networks: bool = True
) -> MemberLatency:
    """Fit the profile's points of `way`, None being fp32 with its threads; raises InputError."""
    vit = fit_latency(profile, way)
    if not networks:
        return MemberLatency(vit=vit)
    fitted = fit_networks(profile, vit.way)
    return MemberLatency(vit=vit, networks=NetworkLatency(fitted=fitted, vit=vit))
