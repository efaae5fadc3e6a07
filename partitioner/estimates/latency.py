"""Latency of a plain ViT on a device, fitted to the points of its profile.

Each way of running has its formula: a sum of terms that grow with the model
(`partitioner.estimates.latency_terms`) times non-negative coefficients. This is the roofline model
of Williams, Waterman and Patterson (CACM 2009) with its terms added instead of maximised.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mdp.errors import InputError
from mdp.formats.plan import PredictedMs, SubModelSpec
from mdp.formats.profile import DeviceProfile, LatencyPoint, Precision, RuntimeName
from partitioner.estimates.latency_fit import fit_terms
from partitioner.estimates.latency_quantiles import Spread, spread_of
from partitioner.estimates.latency_terms import Array, dimensions, terms
from partitioner.estimates.macs import macs
from partitioner.estimates.network import choose_encoding, network_ms

#: Least points of a formula.
MIN_POINTS = 3
#: A model that is larger in every dimension may be faster by this factor, as points are noisy; more
#: is an error of the profile, such as seconds among milliseconds.
MAX_REVERSED = 5.0
#: A slowdown under lasting load by at most this factor is noise.
SUSTAINED_NOISE = 1.02
#: Two-sided 90 % quantile of the standard normal distribution.
NINE_OF_TEN = 1.645
#: Logarithm of the largest factor of an interval; far extrapolations overflow beyond it.
_MAX_LOG_FACTOR = 20.0


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Way:
    """Precision, runtime, provider and threads of a sub-model on its device."""

    precision: Precision = "fp32"
    runtime: RuntimeName = "onnxruntime"
    provider: str = "CPUExecutionProvider"
    threads: int = 1

    def __str__(self) -> str:
        plural = "" if self.threads == 1 else "s"
        return (
            f"{self.precision} in {self.runtime} on {self.provider} "
            f"with {self.threads} thread{plural}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A predicted latency and its 90 % interval."""

    ms: float
    low_ms: float
    high_ms: float
    #: Dimensions in which the shape extrapolates, in words; empty if in none.
    outside: str


def ways(profile: DeviceProfile) -> list[Way]:
    """Every allowed way of running with enough points in the profile, sorted."""
    counts = Counter(_way_of(point, profile) for point in profile.latency)
    return sorted(
        way for way, count in counts.items() if count >= MIN_POINTS and _fits(way, profile)
    )


def _fits(way: Way, profile: DeviceProfile) -> bool:
    """Tell whether the way's threads fit.

    A GPU's profile does not count its processor's threads.
    """
    return way.provider != profile.provider or way.threads <= profile.threads


def own_way(profile: DeviceProfile) -> Way:
    """fp32 in onnxruntime on the profile's provider with its threads."""
    return Way(provider=profile.provider, threads=profile.threads)


def _way_of(point: LatencyPoint, profile: DeviceProfile) -> Way:
    return Way(
        precision=point.precision,
        runtime=point.runtime,
        provider=point.provider or profile.provider,
        threads=point.threads,
    )


def spec_of(point: LatencyPoint) -> SubModelSpec:
    """The shape of a profile's latency point."""
    return SubModelSpec(
        image_size=point.image_size,
        patch_size=point.patch_size,
        embed_dim=point.embed_dim,
        depth=point.depth,
        num_heads=point.num_heads,
        mlp_ratio=point.mlp_ratio,
        precision=point.precision,
    )


def points_of(profile: DeviceProfile, way: Way) -> list[LatencyPoint]:
    """The points of this way of running."""
    return [point for point in profile.latency if _way_of(point, profile) == way]


def matching_points(profile: DeviceProfile, way: Way | None = None) -> list[LatencyPoint]:
    """The points that `way` is fitted to; None is the profile's own way.

    Where that has too few points, slower ones with fewer threads are taken too. Raises InputError
    for fewer than three points, and for points that contradict each other.
    """
    wanted = way or own_way(profile)
    points = points_of(profile, wanted)
    if way is None and len(points) < MIN_POINTS:
        points = [
            point
            for point in profile.latency
            if point.threads <= profile.threads
            and _way_of(point, profile) == replace(wanted, threads=point.threads)
        ]
    if len(points) < MIN_POINTS:
        raise InputError(_too_few(profile, way, len(points)))
    _check_contradictions(profile, points)
    return points


def _too_few(profile: DeviceProfile, way: Way | None, found: int) -> str:
    start = f"profile {profile.name!r}: expected at least {MIN_POINTS} `latency` points "
    if way is None:
        return (
            f"{start}with {profile.threads} threads or fewer, fp32, in onnxruntime on "
            f"{profile.provider}, found {found}"
        )
    measured = "; ".join(map(str, ways(profile))) or "none"
    return f"{start}of {way}, found {found} (ways with enough points: {measured})"


def _check_contradictions(profile: DeviceProfile, points: Sequence[LatencyPoint]) -> None:
    """Raise InputError where a larger model is far faster; equal shapes are checked on reading."""
    sizes = _sizes(points)
    smaller = (sizes[:, None] <= sizes).all(axis=2)
    measured_ms = np.array([point.latency_ms for point in points])
    slower = measured_ms[:, None] > MAX_REVERSED * measured_ms
    for small, large in np.argwhere(smaller & slower).tolist():
        raise InputError(
            f"profile {profile.name!r}: `latency` contradicts itself: "
            f"{_words(points[small])} takes {points[small].latency_ms:g} ms and "
            f"{_words(points[large])}, larger, takes {points[large].latency_ms:g} ms"
        )


def _sizes(points: Sequence[LatencyPoint]) -> Array:
    columns = dimensions([spec_of(point) for point in points])
    extra = np.array([(point.batch, -point.threads) for point in points], dtype=np.float64)
    return np.column_stack([*columns.values(), extra])


def _words(point: LatencyPoint) -> str:
    return (
        f"{point.image_size} px, patch {point.patch_size}, {point.embed_dim} wide, "
        f"{point.depth} deep"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencyModel:
    """The fitted formula of one way of running; it never predicts a larger model to be faster."""

    way: Way
    #: Milliseconds per unit of each column of `partitioner.estimates.latency_terms.terms`.
    coefficients: Array
    #: Covariance of the coefficients `[terms, terms]`, in units of the squared `error`.
    covariance: Array
    #: Relative leave-one-out error, root mean square.
    error: float
    #: Range of every measured dimension.
    measured: dict[str, tuple[float, float]]
    #: Spread of runs of one model.
    spread: Spread
    #: Threads of the points, where they are fewer than the way's.
    stand_in_threads: int | None = None
    #: Slowdown under lasting load against the measured points.
    sustained: float = 1.0

    def from_terms(self, counts: Array) -> Array:
        """Predicted milliseconds `[n]` under lasting load, of shapes with terms `[n, terms]`."""
        predicted: Array = counts @ self.coefficients * self.sustained
        return predicted

    def predict_many_ms(
        self, specs: Sequence[SubModelSpec], num_classes: int, batch: int = 1
    ) -> Array:
        """Predicted milliseconds `[n]` of one run of each; raises InputError."""
        for precision in {spec.precision for spec in specs}:
            if precision != self.way.precision:
                raise InputError(f"expected sub-models of {self.way.precision}, got {precision}")
        return self.from_terms(terms(specs, num_classes, batch))

    def predict_ms(self, spec: SubModelSpec, num_classes: int, batch: int = 1) -> float:
        """Predicted compute milliseconds of one run of `batch` pictures; raises InputError."""
        return float(self.predict_many_ms([spec], num_classes, batch)[0])

    def estimate(self, spec: SubModelSpec, num_classes: int, batch: int = 1) -> Estimate:
        """The prediction, its interval and its extrapolation; raises InputError."""
        milliseconds = self.predict_ms(spec, num_classes, batch)
        shares = terms([spec], num_classes, batch)[0] * self.sustained / milliseconds
        spread = self.error * math.sqrt(1 + float(shares @ self.covariance @ shares))
        factor = math.exp(min(NINE_OF_TEN * spread, _MAX_LOG_FACTOR))
        return Estimate(
            ms=milliseconds,
            low_ms=milliseconds / factor,
            high_ms=milliseconds * factor,
            outside=self._outside(spec, batch),
        )

    def _outside(self, spec: SubModelSpec, batch: int) -> str:
        """The dimensions outside the measured range, in words."""
        asked = _ranges([spec], np.array([float(batch)]))
        outside = [
            f"{name} {asked[name][0]:.4g} (measured: {low:.4g} to {high:.4g})"
            for name, (low, high) in self.measured.items()
            if not low <= asked[name][0] <= high
        ]
        if self.stand_in_threads is not None:
            outside.append(
                f"threads {self.way.threads} (measured: {self.stand_in_threads} and fewer)"
            )
        return ", ".join(outside)


def _ranges(specs: Sequence[SubModelSpec], batches: Array) -> dict[str, tuple[float, float]]:
    """Range of every dimension and of the multiply-accumulates of a run."""
    columns = dimensions(specs)
    columns["batch"] = batches
    columns["mega_macs"] = columns["batch"] * [macs(spec, 0) / 1e6 for spec in specs]
    return {name: (float(c.min()), float(c.max())) for name, c in columns.items()}


def fit_latency(profile: DeviceProfile, way: Way | None = None) -> LatencyModel:
    """Fit the formula to the profile's points of `way`, minimising squared relative errors.

    None is `own_way`. Points are encoders with a negligible classifier, counted with no classes.
    Raises InputError.
    """
    points = matching_points(profile, way)
    specs = [spec_of(point) for point in points]
    batches = np.array([point.batch for point in points], dtype=np.float64)
    measured_ms = np.array([point.latency_ms for point in points])
    fitted = fit_terms(terms(specs, 0, batches) / measured_ms[:, None])
    wanted = way or own_way(profile)
    most_threads = max(point.threads for point in points)
    return LatencyModel(
        way=wanted,
        coefficients=fitted.coefficients,
        covariance=fitted.covariance,
        error=fitted.error,
        measured=_ranges(specs, batches),
        spread=spread_of(points),
        stand_in_threads=None if most_threads == wanted.threads else most_threads,
        sustained=load_factor(profile),
    )


def load_factor(profile: DeviceProfile) -> float:
    """Latency after minutes of load over that of the first minute; 1 where unknown.

    Measured with one encoder in one way of running, and applied to all.
    """
    load = None if profile.probe is None else profile.probe.sustained
    if load is None:
        return 1.0
    factor = load.last_minute_ms / load.first_minute_ms
    return factor if factor > SUSTAINED_NOISE else 1.0


def predict(
    profile: DeviceProfile, compute_ms: float, image_size: int, num_classes: int
) -> PredictedMs:
    """Predicted milliseconds of one picture sent to a device that computes `compute_ms`."""
    encoding = choose_encoding(profile.link, image_size, num_classes)
    network = round(network_ms(profile.link, image_size, num_classes, encoding), 3)
    compute = round(compute_ms, 3)
    return PredictedMs(compute=compute, network=network, total=round(compute + network, 3))
