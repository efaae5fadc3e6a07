"""Latency of a public network on a device, from its profile.

For ways of running with measured networks, a formula as for plain ViTs
(`partitioner.estimates.latency`): non-negative coefficients times `network_terms`, times a factor
per measured family. Otherwise the catalogue's ratio to ViT-S/16 on another processor.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from mdp.errors import InputError
from mdp.formats.plan import NetworkSpec, SubModelSpec
from mdp.formats.profile import DeviceProfile, NetworkPoint, Precision
from partitioner.estimates.catalogue import catalogue, network_of
from partitioner.estimates.latency import NINE_OF_TEN, Estimate, LatencyModel, Way, load_factor
from partitioner.estimates.latency_fit import non_negative_least_squares
from partitioner.estimates.latency_terms import Array
from partitioner.estimates.network_terms import NAMES, network_terms

#: The shape that catalogue latencies are relative to.
_VIT_S = SubModelSpec(
    image_size=224, patch_size=16, embed_dim=384, depth=12, num_heads=6, mlp_ratio=4.0
)
#: Error factor of a latency from the ratio.
_RATIO_RANGE = 2.0
#: Least measured networks of a formula.
MIN_NETWORKS = 4
#: Weight, in points, of the prior that all terms have equal shares. On 26 unseen networks in fp32
#: the errors are the same from 0 to 0.3, and larger at 1.
_HOLD = 0.3
#: Weight, in points, of the prior that a family's factor is 1.
_FAMILY_HOLD = 0.3
#: Least relative error of a fit.
_LEAST_ERROR = 0.05
#: Cap of the logarithmic error of a left-out network, whose terms a fit to few points may lack.
_MOST_ERROR = math.log(3)
#: Error of a family that was not measured, relative to a measured one.
_OTHER_FAMILY = 2.0
#: Extrapolation of a network whose profile has only plain ViTs.
_BY_RATIO = "networks (measured: plain ViTs; taken from another processor)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkFit:
    """The formula fitted to networks that were measured on the device, in one way of running."""

    precision: Precision
    #: Milliseconds per unit of each column of `network_terms`.
    coefficients: Array
    factors: dict[str, float]
    #: Relative error of networks whose family is left out of the fit.
    error: float
    #: Slowdown under lasting load against the measured points.
    sustained: float = 1.0

    def predict_many_ms(self, specs: Sequence[NetworkSpec]) -> Array:
        """Milliseconds `[n]` of one picture, NaN for networks that are not in the catalogue.

        Raises InputError for another precision than the formula's.
        """
        for precision in {spec.precision for spec in specs}:
            if precision != self.precision:
                raise InputError(f"expected networks of {self.precision}, got {precision}")
        factors = [self.factors.get(_family(spec), 1.0) for spec in specs]
        found: Array = network_terms(specs) @ self.coefficients * factors * self.sustained
        return found

    def estimate(self, spec: NetworkSpec) -> Estimate | None:
        """The prediction and its interval, or None where unknown; raises InputError."""
        milliseconds = float(self.predict_many_ms([spec])[0])
        if math.isnan(milliseconds):
            return None
        error = self.error * (1 if _family(spec) in self.factors else _OTHER_FAMILY)
        return _within(milliseconds, math.exp(NINE_OF_TEN * error), outside="")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkLatency:
    """The latency of public networks in one way of running."""

    #: None where too few networks were measured on the device.
    fitted: NetworkFit | None
    #: Of plain ViTs in this way, for the ratio of those that the fit does not know.
    vit: LatencyModel = field(repr=False)

    def predict_many_ms(self, specs: Sequence[NetworkSpec]) -> Array:
        """Compute milliseconds `[n]` of one picture of each network; NaN where unknown.

        Raises InputError for another precision than the way's.
        """
        found = np.full(len(specs), np.nan)
        if self.fitted is not None:
            found = self.fitted.predict_many_ms(specs)
        for place in np.flatnonzero(np.isnan(found)).tolist():
            ratio = ratio_ms(self.vit, specs[place])
            found[place] = np.nan if ratio is None else ratio
        return found

    def estimate(self, spec: NetworkSpec) -> Estimate | None:
        """The prediction and its interval, or None where unknown; raises InputError."""
        if self.fitted is not None and (found := self.fitted.estimate(spec)) is not None:
            return found
        ratio = ratio_ms(self.vit, spec)
        return None if ratio is None else _within(ratio, _RATIO_RANGE, outside=_BY_RATIO)


def _within(milliseconds: float, factor: float, outside: str) -> Estimate:
    return Estimate(
        ms=milliseconds,
        low_ms=milliseconds / factor,
        high_ms=milliseconds * factor,
        outside=outside,
    )


def fit_networks(profile: DeviceProfile, way: Way) -> NetworkFit | None:
    """Fit the formula to the networks measured in `way`; None where they are too few.

    Raises InputError where the profile measured a network that is not in the catalogue.
    """
    points = _network_points(profile, way)
    if len({(point.name, point.image_size) for point in points}) < MIN_NETWORKS:
        return None
    return _fit_points(points, way.precision, load_factor(profile))


def _network_points(profile: DeviceProfile, way: Way) -> list[NetworkPoint]:
    """The networks measured in this way, one picture at a time.

    Raises InputError for one that is not in the catalogue, or not at that picture size.
    """
    for place, point in enumerate(profile.networks):
        network = catalogue().get(point.name)
        where = f"profile {profile.name!r}: `networks[{place}]`"
        if network is None:
            raise InputError(f"{where}: expected a network of the catalogue, got {point.name!r}")
        if point.image_size not in network.costs:
            known = ", ".join(map(str, network.costs))
            raise InputError(
                f"{where}: {point.name}: expected a picture size of {known} px, "
                f"got {point.image_size}"
            )
    return [
        point
        for point in profile.networks
        if point.batch == 1
        and way
        == Way(
            precision=point.precision,
            runtime=point.runtime,
            provider=point.provider or profile.provider,
            threads=point.threads,
        )
    ]


def unmeasured_networks(profiles: Iterable[DeviceProfile]) -> list[str]:
    """Remarks on profiles without measured networks, one for all of which the same is known."""
    names: dict[str, list[str]] = {}
    for profile in profiles:
        if not profile.networks:
            why = "no probe measured it" if profile.probe is None else "its probe is older"
            names.setdefault(why, []).append(profile.name)
    return [
        f"no networks of families are measured in the profile of {', '.join(alike)} ({why}): their "
        "latencies are estimated from its plain ViTs' and may be off by a factor of 2; "
        f"mdp-agent probe --out {alike[0]}.toml on the device measures them"
        for why, alike in names.items()
    ]


def _fit_points(
    points: Sequence[NetworkPoint], precision: Precision, sustained: float
) -> NetworkFit:
    """Fit the formula to networks of the catalogue, minimising squared relative errors."""
    measured = np.array([point.latency_ms for point in points])
    specs = [_spec(point) for point in points]
    families = [_family(spec) for spec in specs]
    relative = network_terms(specs) / measured[:, None]
    coefficients = _coefficients(relative)
    left_out = [
        _log_error(float(relative[place] @ _without(relative, families, family)))
        for place, family in enumerate(families)
    ]
    rest = np.log(1 / (relative @ coefficients))
    factors = {
        family: math.exp(
            sum(r for r, of in zip(rest, families, strict=True) if of == family)
            / (families.count(family) + _FAMILY_HOLD)
        )
        for family in families
    }
    error = float(np.hypot(_LEAST_ERROR, np.sqrt(np.mean(np.square(left_out))) / _OTHER_FAMILY))
    return NetworkFit(
        precision=precision,
        coefficients=coefficients,
        factors=factors,
        error=error,
        sustained=sustained,
    )


def _log_error(predicted: float) -> float:
    """Logarithmic error of a prediction relative to the measured value, capped."""
    return min(_MOST_ERROR, abs(math.log(max(predicted, 1e-9))))


def _without(relative: Array, families: Sequence[str], family: str) -> Array:
    """Coefficients fitted to the other families, or to all where there are no others."""
    others = relative[[of != family for of in families]]
    return _coefficients(others if len(others) else relative)


def _coefficients(relative: Array) -> Array:
    """The non-negative coefficients whose `relative @ coefficients` is closest to one.

    `relative` `[points, terms]` are the terms over the measured milliseconds.
    """
    unit = np.sqrt((relative**2).mean(axis=0))
    unit[unit == 0] = 1.0
    shares = relative / unit
    together = shares.sum(axis=1)
    equal = np.full(len(NAMES), together.sum() / (together @ together))
    system = np.vstack([shares, _HOLD * np.eye(len(NAMES))])
    wanted = np.append(np.ones(len(relative)), _HOLD * equal)
    found: Array = non_negative_least_squares(system, wanted) / unit
    return found


def _spec(point: NetworkPoint) -> NetworkSpec:
    return catalogue()[point.name].spec(point.image_size, 0, point.precision)


def _family(spec: NetworkSpec) -> str:
    network = network_of(spec)
    return "" if network is None else network.family


def ratio_ms(model: LatencyModel, spec: NetworkSpec) -> float | None:
    """Estimated compute milliseconds of one picture, or None where unknown.

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
    return ratio * size * model.predict_ms(replace(_VIT_S, precision=spec.precision), 0)
