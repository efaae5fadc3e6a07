"""How far apart equal requests lie, and by when a share of the answers is complete. Pure.

Computing times are log-normal around the predicted one, with the spread that the profile's 10th and
90th percentiles show near that latency. Each message on the link is late by an exponential time.
What the simulator draws from is the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np
from numpy.typing import NDArray

from mdp.formats.profile import LatencyPoint, Link

Array = NDArray[np.float64]

#: Of the logarithm of a computation's time, where a profile has no 10th and 90th percentiles: a
#: 90th percentile some 14 % above the median, as small encoders on a shared server core had.
ASSUMED_SIGMA = 0.1
#: Mean delay of a message on a link of which no spread was measured.
ASSUMED_JITTER_MS = 0.1
#: What a client needs for each member to cut and send, and at the end to fuse: the median call to
#: 1, 3 and 8 agents takes 0.4, 0.7 and 1.8 ms beside computing (benchmarks/results/overhead.json).
CLIENT_SEND_MS, CLIENT_FUSE_MS = 0.2, 0.1
#: A standard normal variable is below minus or above plus this with a probability of 10 % each.
_Z90 = 1.2815515655446004
#: Points of about the same latency whose spreads are taken together, by their median.
_NEIGHBOURS = 5
#: Median and 90th percentile of the sum of two exponential variables of mean 1.
TWO_MEDIAN, _TWO_P90 = 1.6783469900166605, 3.8897201698674290
#: Gauss-Laguerre nodes over which such a sum is averaged.
_NODES = 24


def sigma_of(p10_ms: float, p90_ms: float) -> float:
    """Sigma of the log-normal distribution with these 10th and 90th percentiles."""
    return math.log(p90_ms / p10_ms) / (2 * _Z90)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """Sigma of a computation's time by how long it takes, as far as a profile tells."""

    #: Ascending logarithms of measured milliseconds, and the sigma there; one of each at least.
    log_ms: Array
    sigmas: Array
    #: False where it is `ASSUMED_SIGMA`.
    measured: bool

    def sigma(self, compute_ms: Array) -> Array:
        """Sigma `[n]` of computations of these milliseconds `[n]`; beyond the points as there."""
        known = np.interp(np.log(np.maximum(compute_ms, 1e-6)), self.log_ms, self.sigmas)
        return np.asarray(known, dtype=np.float64)


ASSUMED = Spread(log_ms=np.zeros(1), sigmas=np.array([ASSUMED_SIGMA]), measured=False)


def spread_of(points: Sequence[LatencyPoint]) -> Spread:
    """The spread that these points show, each smoothed over its neighbours in latency."""
    known = sorted(
        (math.log(point.latency_ms / point.batch), sigma_of(point.p10_ms, point.p90_ms))
        for point in points
        if point.p10_ms is not None and point.p90_ms is not None
    )
    if not known:
        return ASSUMED
    sigmas = [sigma for _, sigma in known]
    half = _NEIGHBOURS // 2
    smooth = [median(sigmas[max(0, i - half) : i + half + 1]) for i in range(len(sigmas))]
    return Spread(
        log_ms=np.array([log_ms for log_ms, _ in known]), sigmas=np.array(smooth), measured=True
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Jitter:
    """How late messages on a link are: an exponential delay of `mean_ms` for each of the two."""

    mean_ms: float
    #: What the two add to the median round trip that the profile names: nothing where that was
    #: measured with them in it.
    added_ms: float


def jitter_of(link: Link) -> Jitter:
    """As the link's 90th percentile says, else as assumed."""
    if link.round_trip_p90_s is None:
        return Jitter(mean_ms=ASSUMED_JITTER_MS, added_ms=TWO_MEDIAN * ASSUMED_JITTER_MS)
    late_ms = 1e3 * (link.round_trip_p90_s - link.round_trip_s)
    mean_ms = late_ms / (_TWO_P90 - TWO_MEDIAN)
    # No more than the whole round trip can be delay.
    return Jitter(mean_ms=min(mean_ms, 1e3 * link.round_trip_s / TWO_MEDIAN), added_ms=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """By when a member counts as answering: typically, or in a share of the requests."""

    #: Standard normal and two-exponential quantiles of that share; 0 and `TWO_MEDIAN`: the median.
    z: float = 0.0
    two: float = TWO_MEDIAN
    #: What the client needs beside.
    client_ms: float = 0.0
    typical: bool = True

    def by_ms(self, compute_ms: Array, network_ms: Array, sigma: Array, jitter: Jitter) -> Array:
        """When a member has answered `[n]`, in milliseconds, to the microsecond as a plan says it.

        The excesses over the medians of computing and network are independent and added as such.
        """
        total = np.round(compute_ms, 3) + np.round(network_ms, 3)
        if not self.typical:
            known = np.where(np.isfinite(compute_ms), compute_ms, 0.0)
            late = np.hypot(
                known * np.expm1(self.z * sigma), jitter.mean_ms * (self.two - TWO_MEDIAN)
            )
            total = total + late + jitter.added_ms + self.client_ms
        rounded: Array = np.round(total, 3)
        return rounded


TYPICAL = Pace()


def client_ms(members: int) -> float:
    """What a client needs for an answer of so many members, typically."""
    return CLIENT_SEND_MS * members + CLIENT_FUSE_MS


def pace_for(percentile: float | None, members: int) -> Pace:
    """The pace of each of `members`, so that this percentage of answers is complete in time.

    None is about each member's typical answer and nothing else. Members are late independently.
    """
    if percentile is None:
        return TYPICAL
    from scipy.special import gammaincinv

    share = (percentile / 100) ** (1 / members)
    return Pace(
        z=NormalDist().inv_cdf(share),
        two=float(gammaincinv(2, share)),
        client_ms=client_ms(members),
        typical=False,
    )


def share_in_time(
    limit_ms: float, compute_ms: float, network_ms: float, sigma: float, jitter: Jitter
) -> float:
    """Share of requests that a member answers within the limit, the client's work left out."""
    # The typical delay is in `network_ms` already.
    left_ms = limit_ms - network_ms + TWO_MEDIAN * jitter.mean_ms - jitter.added_ms
    if sigma == 0 or jitter.mean_ms == 0:
        return _one_of_both(left_ms, compute_ms, sigma, jitter.mean_ms)
    nodes, weights = np.polynomial.laguerre.laggauss(_NODES)
    normal = NormalDist()
    shares = [
        normal.cdf(math.log(left / compute_ms) / sigma) if left > 0 else 0.0
        for left in (left_ms - jitter.mean_ms * nodes).tolist()
    ]
    # The density of two exponentials' sum is x exp(-x).
    return float(min(1.0, (weights * nodes) @ np.array(shares)))


def _one_of_both(left_ms: float, compute_ms: float, sigma: float, mean_ms: float) -> float:
    """The same where at most one of computing and the link varies."""
    from scipy.special import gammainc

    if left_ms <= 0:
        return 0.0
    if sigma:
        return NormalDist().cdf(math.log(left_ms / compute_ms) / sigma)
    if mean_ms:
        return float(gammainc(2, max(0.0, left_ms - compute_ms) / mean_ms))
    return float(left_ms >= compute_ms)
