"""Candidates of one device: costs of every choice, and the few worth considering. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.formats.plan import Encoding, PredictedMs, Spec
from mdp.formats.profile import DeviceProfile, NetworkLink, Precision
from partitioner.estimates.accuracy_law import Array
from partitioner.estimates.latency import Way, own_way, ways
from partitioner.estimates.latency_members import MemberLatency, fit_members
from partitioner.estimates.latency_quantiles import MEDIAN, Jitter, LatencyQuantile, jitter_of
from partitioner.estimates.network import (
    FRAMING_BYTES,
    choose_encoding,
    fetch_ms,
    look_ms,
    network_ms,
    request_bytes,
)
from partitioner.planner.design_space import DesignSpace, words
from partitioner.planner.limits import PlanLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A sub-model or a public network on one device, and its predicted costs."""

    spec: Spec
    #: `network` is for an otherwise unused link, plus a candidate's `wait_ms`.
    predicted_ms: PredictedMs
    #: Standard deviation of the logarithm of the computing time, and the link's delays.
    sigma: float
    jitter: Jitter
    #: None where the profile has no power.
    energy_j: float | None
    capability: float

    def latency_ms(self, quantile: LatencyQuantile) -> float:
        """Milliseconds of an answer at this quantile."""
        ms = self.predicted_ms
        if quantile.median:
            return ms.total
        compute, network, sigma = (np.array([v]) for v in (ms.compute, ms.network, self.sigma))
        return float(quantile.latency_ms(compute, network, sigma, self.jitter)[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate(Run):
    """A choice of the design space as one device runs it."""

    #: Row of the design space.
    choice: int
    way: Way
    encoding: Encoding
    #: Bytes of the encoded crop.
    request_bytes: float
    memory_bytes: int
    view: int
    model: int
    #: Unique among a plan's members.
    identity: int
    #: Wait for other members' crops at the client's port.
    wait_ms: float = 0.0

    def __str__(self) -> str:
        return words(self.spec)

    def with_wait(self, wait_ms: float) -> "Candidate":
        """A copy whose crop waits so long at the client's port for those of other members."""
        ms, longer = self.predicted_ms, wait_ms - self.wait_ms
        if not longer:
            return self
        predicted = PredictedMs(
            compute=ms.compute,
            network=round(ms.network + longer, 3),
            total=round(ms.total + longer, 3),
        )
        return replace(self, predicted_ms=predicted, wait_ms=wait_ms)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CostTable:
    """Costs `[n]` of some choices on one device, each in its fastest way of running."""

    compute_ms: Array
    network_ms: Array
    #: Bytes of the encoded crop.
    request_bytes: Array
    #: Standard deviation of the logarithm of the computing time.
    sigma: Array
    jitter: Jitter
    #: Index of the fastest way; -1 where none of that precision was measured.
    way: NDArray[np.int64]
    #: Whether the device can run the choice at all: measured, unpadded width, enough memory.
    possible: NDArray[np.bool_]

    def only(self, rows: NDArray[np.int64]) -> "CostTable":
        """Some rows of the table."""
        arrays = ("compute_ms", "network_ms", "request_bytes", "sigma", "way", "possible")
        return replace(self, **{name: getattr(self, name)[rows] for name in arrays})

    def latency_ms(self, quantile: LatencyQuantile) -> Array:
        """Milliseconds `[n]` of an answer at this quantile, without a wait for other crops."""
        return quantile.latency_ms(self.compute_ms, self.network_ms, self.sigma, self.jitter)

    def within(self, limits: PlanLimits) -> NDArray[np.bool_]:
        """Choices that meet the target, with the wait for other crops at the client's port."""
        waits_ms = limits.port_wait_ms(self.request_bytes)
        total_ms = np.round(self.latency_ms(limits.quantile) + waits_ms, 3)
        met: NDArray[np.bool_] = total_ms <= limits.target_ms
        return met


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """The camera whose pictures a device computes."""

    camera: str
    #: Of the camera, from 0.
    number: int
    #: Name and link of the device that has the camera, where it is another one.
    owner: str = ""
    owner_link: NetworkLink | None = None

    def network_ms(self, link: NetworkLink, image_size: int, num_classes: int) -> float:
        """Milliseconds of a look beside computing."""
        asked_ms = look_ms(link, num_classes)
        if self.owner_link is None:
            return asked_ms
        return asked_ms + fetch_ms(self.owner_link, link, image_size)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FittedProfile:
    """A profile with its latency models, for any choice of a design space."""

    profile: DeviceProfile
    models: tuple[MemberLatency, ...]
    choices: DesignSpace = field(repr=False)
    #: None where all devices see one picture, which is sent to them.
    sight: Sight | None = None

    @property
    def name(self) -> str:
        """The profile's name."""
        return self.profile.name

    @property
    def beyond(self) -> int:
        """The number added to views and identities of choices, which differ between cameras."""
        return 0 if self.sight is None else self.sight.number * len(self.choices)

    def network_ms(self, image_size: int) -> float:
        """Milliseconds of one request beside computing, on an unused link."""
        link, classes = self.profile.link, self.choices.num_classes
        if self.sight is not None:
            return self.sight.network_ms(link, image_size, classes)
        return network_ms(link, image_size, classes, self._encoding(image_size))

    def request_bytes(self, image_size: int) -> float:
        """Bytes of one request."""
        if self.sight is not None:
            return FRAMING_BYTES
        return request_bytes(image_size, self._encoding(image_size))

    def cost_table(self, rows: NDArray[np.int64]) -> CostTable:
        """Costs of ascending rows of the choices."""
        choices = self.choices
        compute_ms = np.full(len(rows), np.inf)
        way, sigma = np.full(len(rows), -1), np.zeros(len(rows))
        for index, model in enumerate(self.models):
            mine = choices.of_way(model.way, rows)
            if not len(mine):
                continue
            networks = choices.networks_among(rows[mine])
            took_ms = model.from_terms(choices.counts[rows[mine]], *networks)
            quicker = took_ms < compute_ms[mine]
            compute_ms[mine[quicker]], way[mine[quicker]] = took_ms[quicker], index
            sigma[mine[quicker]] = model.vit.spread.sigma(took_ms[quicker])
        # Network time follows from the picture size alone.
        sizes, of_size = np.unique(choices.image_sizes[rows], return_inverse=True)
        sent_ms = [self.network_ms(size) for size in sizes.tolist()]
        sent_bytes = [self.request_bytes(size) for size in sizes.tolist()]
        fits = choices.memory_bytes[rows] <= self.profile.memory_bytes
        return CostTable(
            compute_ms=compute_ms,
            network_ms=np.array(sent_ms, dtype=np.float64)[of_size],
            request_bytes=np.array(sent_bytes, dtype=np.float64)[of_size],
            sigma=sigma,
            jitter=jitter_of(self.profile.link),
            way=way,
            possible=(way >= 0) & fits & choices.fast_on(self.profile)[rows],
        )

    def candidate(self, table: CostTable, place: int, row: int) -> Candidate:
        """Row `row` of the choices, which stands at `place` of the table, as a candidate."""
        choices, power_w = self.choices, self.profile.power_w
        compute, network = (round(float(t[place]), 3) for t in (table.compute_ms, table.network_ms))
        spec, way = choices.specs[row], int(table.way[place])
        return Candidate(
            choice=int(row),
            spec=spec,
            way=self.models[way].way if way >= 0 else own_way(self.profile),
            encoding=self._encoding(spec.image_size),
            request_bytes=float(table.request_bytes[place]),
            predicted_ms=PredictedMs(
                compute=compute, network=network, total=round(compute + network, 3)
            ),
            sigma=float(table.sigma[place]),
            jitter=table.jitter,
            memory_bytes=int(choices.memory_bytes[row]),
            energy_j=None if power_w is None else round(power_w * compute / 1e3, 6),
            capability=float(choices.capability[row]),
            view=int(choices.view[row]) + self.beyond,
            model=int(choices.model[row]),
            identity=int(choices.identity[row]) + self.beyond,
        )

    def _encoding(self, image_size: int) -> Encoding:
        if self.sight is not None:
            return "raw"
        return choose_encoding(self.profile.link, image_size, self.choices.num_classes)

    def running(self, row: int) -> Candidate | None:
        """A choice as this device runs it; None where it cannot."""
        table = self.cost_table(np.array([row]))
        return self.candidate(table, 0, row) if table.possible[0] else None

    def model_of(self, c: Candidate) -> MemberLatency:
        """The latency model of the candidate's way of running."""
        return next(model for model in self.models if model.way == c.way)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeviceCandidates(FittedProfile):
    """A device with the choices that are worth considering on it."""

    #: Of each group of choices the Pareto front in time and capability, and the front without it.
    rows: NDArray[np.int64]
    costs: CostTable
    #: The fastest choice, whatever memory it needs.
    quickest: Candidate
    #: Whether other devices have cameras, and this one neither has nor may compute one.
    blind: bool = False
    #: Devices that compute this one's camera instead, where any of them can in time.
    before: tuple["DeviceCandidates", ...] = ()

    def within(self, limits: PlanLimits, *, per_view: int | None = None) -> list[Candidate]:
        """Candidates that meet target and energy limit alone; of each view the best `per_view`."""
        places = self.places(limits)
        if per_view is not None:
            places = self._best_few(places, per_view)
        return [self.candidate(self.costs, place, self.rows[place]) for place in places.tolist()]

    def places(self, limits: PlanLimits) -> NDArray[np.int64]:
        """Their indices in `rows`."""
        if self.blind or self.computing_neighbour(limits):
            return np.empty(0, dtype=np.int64)
        met = self.costs.within(limits)
        if limits.max_energy_j is not None:
            power_w = self.profile.power_w or np.inf
            met &= power_w * np.round(self.costs.compute_ms, 3) / 1e3 <= limits.max_energy_j
        return np.flatnonzero(met)

    def computing_neighbour(self, limits: PlanLimits) -> str:
        """The device that computes this one's camera instead of it; empty where none can."""
        return next((other.name for other in self.before if len(other.places(limits))), "")

    def _best_few(self, places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Of each view and precision the most capable."""
        rows = self.rows[places]
        order = np.lexsort((-self.choices.capability[rows], self.choices.group[rows]))
        groups = self.choices.group[rows][order]
        first = np.searchsorted(groups, groups)
        kept: NDArray[np.int64] = np.sort(places[order[np.arange(len(order)) - first < count]])
        return kept


def evaluate_device(
    profile: DeviceProfile,
    models: tuple[MemberLatency, ...],
    choices: DesignSpace,
    quantile: LatencyQuantile = MEDIAN,
    sight: Sight | None = None,
) -> DeviceCandidates:
    """Cost every choice on a device, and keep those on the Pareto front and just below it."""
    fitted = FittedProfile(profile=profile, models=models, choices=choices, sight=sight)
    rows = np.arange(len(choices))
    table = fitted.cost_table(rows)
    total_ms, capability, group = table.latency_ms(quantile), choices.capability, choices.group
    order = np.lexsort((rows, -capability, total_ms))
    order = order[table.possible[order]]
    best = pareto_front(order, group, capability)
    # Members differ in shape, so each device needs second bests.
    others = order[~np.isin(order, best)]
    places = np.concatenate([best, pareto_front(others, group, capability)])
    measured = np.where(table.way >= 0, total_ms, np.inf)
    quickest = int(np.argmin(np.where(choices.fast_on(profile), measured, np.inf)))
    return DeviceCandidates(
        profile=profile,
        models=models,
        rows=places,
        costs=table.only(places),
        quickest=fitted.candidate(table, quickest, quickest),
        choices=choices,
        sight=sight,
    )


def fit_ways(
    profile: DeviceProfile, precisions: Sequence[Precision], *, networks: bool = False
) -> tuple[MemberLatency, ...]:
    """The latency model of every measured way with one of the precisions.

    Where fp32 has too few points with the profile's threads, those with fewer stand in. `networks`
    adds models of other families. Raises InputError where none of the precisions was measured.
    """
    measured = [way for way in ways(profile) if way.precision in precisions]
    models = [fit_members(profile, way, networks=networks) for way in measured]
    if "fp32" in precisions and not any(way.precision == "fp32" for way in measured):
        models.append(fit_members(profile, networks=networks))
    if not models:
        known = ", ".join(sorted({point.precision for point in profile.latency}))
        raise InputError(
            f"profile {profile.name!r}: expected `latency` points of {', '.join(precisions)}, "
            f"found {known}"
        )
    return tuple(models)


def pareto_front(
    order: NDArray[np.int64], group: NDArray[np.int64], capability: Array
) -> NDArray[np.int64]:
    """The rows, in `order`, that are more capable than every earlier one of their group."""
    kept = [np.empty(0, dtype=np.int64)]
    for value in np.unique(group[order]).tolist():
        mine = order[group[order] == value]
        best_before = np.maximum.accumulate(np.concatenate([[-np.inf], capability[mine][:-1]]))
        kept.append(mine[capability[mine] > best_before])
    return np.concatenate(kept)
