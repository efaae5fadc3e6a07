"""Latency distributions of members, and quantiles of complete answers.

Computing times are log-normal around the prediction, with the spread of the profile's 10th and 90th
percentiles near that latency. Each message has an exponential delay. The simulator draws from the
same distributions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np
from numpy.typing import NDArray

from mdp.formats.profile import LatencyPoint, NetworkLink

Array = NDArray[np.float64]

#: Sigma of log computing time without 10th and 90th percentiles in the profile: a 90th percentile
#: 14 % above the median, as of small encoders on a shared server core.
ASSUMED_SIGMA = 0.1
#: Mean delay of a message on a link without a measured spread.
ASSUMED_JITTER_MS = 0.1
#: Client time to cut and send for each member, and to fuse: the median call to 1, 3 and 8 agents
#: takes 0.4, 0.7 and 1.8 ms beside computing (benchmarks/results/overhead.json).
CLIENT_SEND_MS, CLIENT_FUSE_MS = 0.2, 0.1
#: 90 % quantile of the standard normal distribution.
_Z90 = 1.2815515655446004
#: Neighbours in latency over whose sigmas the median is taken.
_NEIGHBOURS = 5
#: Median and 90th percentile of the sum of two exponential variables of mean 1.
TWO_MEDIAN, _TWO_P90 = 1.6783469900166605, 3.8897201698674290
#: Gauss-Laguerre nodes for averages over such a sum.
_NODES = 24


def sigma_of(p10_ms: float, p90_ms: float) -> float:
    """Sigma of the log-normal distribution with these 10th and 90th percentiles."""
    return math.log(p90_ms / p10_ms) / (2 * _Z90)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spread:
    """Sigma of computing times as a function of the time."""

    #: Ascending logarithms of measured milliseconds, and their sigmas; at least one.
    log_ms: Array
    sigmas: Array
    #: False where it is `ASSUMED_SIGMA`.
    measured: bool

    def sigma(self, compute_ms: Array) -> Array:
        """Sigma `[n]` at milliseconds `[n]`, constant beyond the points."""
        known = np.interp(np.log(np.maximum(compute_ms, 1e-6)), self.log_ms, self.sigmas)
        return np.asarray(known, dtype=np.float64)


ASSUMED = Spread(log_ms=np.zeros(1), sigmas=np.array([ASSUMED_SIGMA]), measured=False)


def spread_of(points: Sequence[LatencyPoint]) -> Spread:
    """The spread of these points, smoothed over neighbours in latency."""
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
    """Exponential delay of a request and its reply, of `mean_ms` each."""

    mean_ms: float
    #: Delay beyond the profile's median round trip; 0 where that includes it.
    added_ms: float


def jitter_of(link: NetworkLink) -> Jitter:
    """From the link's 90th percentile, else as assumed."""
    if link.round_trip_p90_s is None:
        return Jitter(mean_ms=ASSUMED_JITTER_MS, added_ms=TWO_MEDIAN * ASSUMED_JITTER_MS)
    late_ms = 1e3 * (link.round_trip_p90_s - link.round_trip_s)
    mean_ms = late_ms / (_TWO_P90 - TWO_MEDIAN)
    # No more than the whole round trip can be delay.
    return Jitter(mean_ms=min(mean_ms, 1e3 * link.round_trip_s / TWO_MEDIAN), added_ms=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyQuantile:
    """A quantile of a member's latency: the median, or that of a share of the requests."""

    #: Standard normal and two-exponential quantiles of that share; 0 and `TWO_MEDIAN`: the median.
    z: float = 0.0
    two: float = TWO_MEDIAN
    #: Client time.
    client_ms: float = 0.0
    median: bool = True

    def latency_ms(
        self, compute_ms: Array, network_ms: Array, sigma: Array, jitter: Jitter
    ) -> Array:
        """Latency `[n]` in milliseconds, to the microsecond.

        The excesses of computing and network over their medians are independent: the root of their
        summed squares.
        """
        total = np.round(compute_ms, 3) + np.round(network_ms, 3)
        if not self.median:
            known = np.where(np.isfinite(compute_ms), compute_ms, 0.0)
            late = np.hypot(
                known * np.expm1(self.z * sigma), jitter.mean_ms * (self.two - TWO_MEDIAN)
            )
            total = total + late + jitter.added_ms + self.client_ms
        rounded: Array = np.round(total, 3)
        return rounded


MEDIAN = LatencyQuantile()


def client_ms(members: int) -> float:
    """Typical client time of an answer of so many members."""
    return CLIENT_SEND_MS * members + CLIENT_FUSE_MS


def quantile_for(percentile: float | None, members: int) -> LatencyQuantile:
    """The quantile of each of `members` with which this percentage of answers is complete.

    Members are independent. None: each member's median.
    """
    if percentile is None:
        return MEDIAN
    from scipy.special import gammaincinv

    share = (percentile / 100) ** (1 / members)
    return LatencyQuantile(
        z=NormalDist().inv_cdf(share),
        two=float(gammaincinv(2, share)),
        client_ms=client_ms(members),
        median=False,
    )


def share_in_time(
    limit_ms: float, compute_ms: float, network_ms: float, sigma: float, jitter: Jitter
) -> float:
    """Share of requests that a member answers within the limit, without client time."""
    # `network_ms` includes the median delay.
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
