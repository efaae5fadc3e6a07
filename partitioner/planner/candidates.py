"""What one device could run: every choice's latency there, and the few worth considering. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.formats.plan import Encoding, PredictedMs, Spec
from mdp.formats.profile import DeviceProfile, Precision
from partitioner.estimates.accuracy_law import Array
from partitioner.estimates.latency import Way, own_way, ways
from partitioner.estimates.latency_members import MemberLatency, fit_members
from partitioner.estimates.latency_quantiles import TYPICAL, Jitter, Pace, jitter_of
from partitioner.estimates.network import UNSHARED, Port, choose_encoding, network_ms, request_bytes
from partitioner.planner.design_space import Choices, words


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A choice on one device: how it is run there, and what it costs."""

    #: Row of the choices.
    choice: int
    spec: Spec
    way: Way
    encoding: Encoding
    #: Of its crop, as it is sent.
    request_bytes: float
    #: Network: with the link to itself, and `wait_ms` for others' crops, where these are known.
    predicted_ms: PredictedMs
    #: How far computing times lie apart, and the link's.
    sigma: float
    jitter: Jitter
    memory_bytes: int
    #: None where the profile does not tell the device's power.
    energy_j: float | None
    capability: float
    view: int
    model: int
    #: What no two members may share.
    identity: int
    wait_ms: float = 0.0

    def __str__(self) -> str:
        return words(self.spec)

    def by_ms(self, pace: Pace) -> float:
        """When it has answered, at this pace."""
        ms = self.predicted_ms
        if pace.typical:
            return ms.total
        compute, network, sigma = (np.array([v]) for v in (ms.compute, ms.network, self.sigma))
        return float(pace.by_ms(compute, network, sigma, self.jitter)[0])

    def waiting(self, wait_ms: float) -> "Candidate":
        """The same, its crop being so long at the client's port behind those of others."""
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
class Timetable:
    """Milliseconds `[n]` of every choice on one device, run in its fastest way."""

    compute_ms: Array
    network_ms: Array
    #: Of the crop.
    request_bytes: Array
    #: Of the logarithm of the computing time.
    sigma: Array
    jitter: Jitter
    #: Index of the fastest way; -1 where the device measured none of that precision.
    way: NDArray[np.int64]
    #: Which choices the device can run at all, whatever the target: measured, quick widths, memory.
    possible: NDArray[np.bool_]

    def only(self, rows: NDArray[np.int64]) -> "Timetable":
        """Some rows of it."""
        return Timetable(
            compute_ms=self.compute_ms[rows],
            network_ms=self.network_ms[rows],
            request_bytes=self.request_bytes[rows],
            sigma=self.sigma[rows],
            jitter=self.jitter,
            way=self.way[rows],
            possible=self.possible[rows],
        )

    def by_ms(self, pace: Pace, port: Port = UNSHARED) -> Array:
        """When each has answered at this pace; typically compute and network, and no more."""
        alone = pace.by_ms(self.compute_ms, self.network_ms, self.sigma, self.jitter)
        if not port.shared:
            return alone
        waited: Array = np.round(alone + port.wait_ms(self.request_bytes), 3)
        return waited


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Device:
    """A profile, its fitted ways of running, and the choices that are worth considering there."""

    profile: DeviceProfile
    models: tuple[MemberLatency, ...]
    #: Of each group of choices those that no quicker one outdoes, and those that would be such
    #: without them, with their times.
    rows: NDArray[np.int64]
    times: Timetable
    #: The quickest choice at all, whether its memory suffices or not.
    quickest: Candidate
    choices: Choices = field(repr=False)

    @property
    def name(self) -> str:
        """The profile's name."""
        return self.profile.name

    def within(
        self,
        target_ms: float,
        max_energy_j: float | None = None,
        *,
        pace: Pace = TYPICAL,
        port: Port = UNSHARED,
        per_view: int | None = None,
    ) -> list[Candidate]:
        """What meets the target and, alone, the energy limit; of each view only the best few."""
        places = self.places(target_ms, max_energy_j, pace, port)
        if per_view is not None:
            places = self._best_few(places, per_view)
        shared = (self.profile, self.models, self.choices, self.times)
        return [candidate(*shared, place, int(self.rows[place])) for place in places.tolist()]

    def places(
        self,
        target_ms: float,
        max_energy_j: float | None = None,
        pace: Pace = TYPICAL,
        port: Port = UNSHARED,
    ) -> NDArray[np.int64]:
        """Where in `rows` that is."""
        met = self.times.by_ms(pace, port) <= target_ms
        if max_energy_j is not None:
            power_w = self.profile.power_w or np.inf
            met &= power_w * np.round(self.times.compute_ms, 3) / 1e3 <= max_energy_j
        return np.flatnonzero(met)

    def _best_few(self, places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        """Of each view and precision the most capable places."""
        rows = self.rows[places]
        order = np.lexsort((-self.choices.capability[rows], self.choices.group[rows]))
        groups = self.choices.group[rows][order]
        first = np.searchsorted(groups, groups)
        kept: NDArray[np.int64] = np.sort(places[order[np.arange(len(order)) - first < count]])
        return kept

    def running(self, choice: int) -> Candidate | None:
        """A choice as this device would run it, or None where it cannot."""
        table = timetable(self.profile, self.models, self.choices, np.array([choice]))
        if not table.possible[0]:
            return None
        return candidate(self.profile, self.models, self.choices, table, 0, choice)


def evaluate_device(
    profile: DeviceProfile,
    models: tuple[MemberLatency, ...],
    choices: Choices,
    pace: Pace = TYPICAL,
) -> Device:
    """Cost every choice on a device, run in its fitted ways, and keep the useful ones."""
    rows = np.arange(len(choices))
    table = timetable(profile, models, choices, rows)
    total_ms, capability, group = table.by_ms(pace), choices.capability, choices.group
    order = np.lexsort((rows, -capability, total_ms))
    order = order[table.possible[order]]
    best = skyline(order, group, capability)
    # Two members may not share a shape, so each device needs second bests.
    others = order[~np.isin(order, best)]
    places = np.concatenate([best, skyline(others, group, capability)])
    measured = np.where(table.way >= 0, total_ms, np.inf)
    quickest = int(np.argmin(np.where(choices.fast_on(profile), measured, np.inf)))
    return Device(
        profile=profile,
        models=models,
        rows=places,
        times=table.only(places),
        quickest=candidate(profile, models, choices, table, quickest, quickest),
        choices=choices,
    )


def fitted_ways(
    profile: DeviceProfile, precisions: Sequence[Precision], *, networks: bool = False
) -> tuple[MemberLatency, ...]:
    """The formula of every measured way with one of the precisions; raises InputError for none.

    Where fp32 has too few points with the profile's threads, those with fewer stand in. Latencies
    of networks are known only where they are asked for.
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


def timetable(
    profile: DeviceProfile,
    models: Sequence[MemberLatency],
    choices: Choices,
    rows: NDArray[np.int64],
) -> Timetable:
    """Cost some ascending rows of the choices on a device."""
    compute_ms = np.full(len(rows), np.inf)
    way, sigma = np.full(len(rows), -1), np.zeros(len(rows))
    for index, model in enumerate(models):
        mine = choices.of_way(model.way, rows)
        if not len(mine):
            continue
        took_ms = model.from_terms(choices.counts[rows[mine]], *choices.networks_among(rows[mine]))
        quicker = took_ms < compute_ms[mine]
        compute_ms[mine[quicker]], way[mine[quicker]] = took_ms[quicker], index
        sigma[mine[quicker]] = model.vit.spread.sigma(took_ms[quicker])
    fits = choices.memory_bytes[rows] <= profile.memory_bytes
    possible = (way >= 0) & fits & choices.fast_on(profile)[rows]
    return Timetable(
        compute_ms=compute_ms,
        network_ms=_by_size(
            choices,
            rows,
            lambda size: network_ms(
                profile.link, size, choices.num_classes, _encoding(profile, choices, size)
            ),
        ),
        request_bytes=_by_size(
            choices, rows, lambda size: request_bytes(size, _encoding(profile, choices, size))
        ),
        sigma=sigma,
        jitter=jitter_of(profile.link),
        way=way,
        possible=possible,
    )


def _by_size(choices: Choices, rows: NDArray[np.int64], of: Callable[[int], float]) -> Array:
    """What follows from a row's picture size alone, worked out once for each size."""
    sizes, index = np.unique(choices.image_sizes[rows], return_inverse=True)
    taken: Array = np.array([of(size) for size in sizes.tolist()], dtype=np.float64)[index]
    return taken


def _encoding(profile: DeviceProfile, choices: Choices, image_size: int) -> Encoding:
    return choose_encoding(profile.link, image_size, choices.num_classes)


def skyline(
    order: NDArray[np.int64], group: NDArray[np.int64], capability: Array
) -> NDArray[np.int64]:
    """The rows, in `order`, that are more capable than every earlier one of their group."""
    kept = [np.empty(0, dtype=np.int64)]
    for value in np.unique(group[order]).tolist():
        mine = order[group[order] == value]
        best_before = np.maximum.accumulate(np.concatenate([[-np.inf], capability[mine][:-1]]))
        kept.append(mine[capability[mine] > best_before])
    return np.concatenate(kept)


def candidate(
    profile: DeviceProfile,
    models: Sequence[MemberLatency],
    choices: Choices,
    table: Timetable,
    row: int,
    choice: int,
) -> Candidate:
    """Row `row` of the timetable, which is that choice, as a candidate."""
    compute, network = (
        round(float(table.compute_ms[row]), 3),
        round(float(table.network_ms[row]), 3),
    )
    image_size, power_w = choices.specs[choice].image_size, profile.power_w
    encoding = _encoding(profile, choices, image_size)
    return Candidate(
        choice=choice,
        spec=choices.specs[choice],
        way=models[int(table.way[row])].way if table.way[row] >= 0 else own_way(profile),
        encoding=encoding,
        request_bytes=request_bytes(image_size, encoding),
        predicted_ms=PredictedMs(
            compute=compute, network=network, total=round(compute + network, 3)
        ),
        sigma=float(table.sigma[row]),
        jitter=table.jitter,
        memory_bytes=int(choices.memory_bytes[choice]),
        energy_j=None if power_w is None else round(power_w * compute / 1e3, 6),
        capability=float(choices.capability[choice]),
        view=int(choices.view[choice]),
        model=int(choices.model[choice]),
        identity=int(choices.identity[choice]),
    )
