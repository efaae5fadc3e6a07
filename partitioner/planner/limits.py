"""Limits that every plan of one search has to meet. Pure."""

from dataclasses import dataclass

import numpy as np

from mdp.formats.plan import PLANNED_MEMBERS
from partitioner.estimates.latency_quantiles import MEDIAN, LatencyQuantile
from partitioner.estimates.latency_terms import Array
from partitioner.estimates.network import wait_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLimits:
    """Latency target, energy, members and the client's network port."""

    target_ms: float
    max_energy_j: float | None = None
    #: Quantile of a member's latency that has to be within the target.
    quantile: LatencyQuantile = MEDIAN
    max_members: int = PLANNED_MEMBERS
    #: Bits per second of the client's network port, through which all crops leave.
    client_bps: float = np.inf
    #: Assumed bytes of all crops of one picture; infinite: each crop has the port to itself.
    port_bytes: float = np.inf

    def port_wait_ms(self, own_bytes: Array) -> Array:
        """Milliseconds that crops `[n]` of these bytes wait for the others at the port."""
        if np.isinf(self.port_bytes):
            return np.zeros(len(own_bytes))
        return wait_ms(self.port_bytes - own_bytes, self.client_bps)
