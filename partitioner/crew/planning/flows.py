"""Seconds of a mean over links that its messages share. Pure.

A flow is bytes over the links that it uses; flows on one link share it max-min fairly. A route is
a list of phases, one after another, each a list of transfers at once.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from partitioner.crew.coordinator.shares import link_shares
from partitioner.crew.planning.facts import Facts, Line

Route = Literal["ring", "two_phase", "two_tier"]
ShardSizes = Literal["equal", "link"]

#: From, to, and how many vectors.
Transfer = tuple[str, str, float]
Phase = list[Transfer]
#: Bytes, and the links that they use.
Flow = tuple[float, tuple[str, ...]]

#: Between more trainers a phase counts as long as its busiest link: the lower bound, 50 times as
#: quickly, as assignments are searched among tens of thousands of crews.
_MOST_TRAINERS = 8


def finish_s(flows: Sequence[Flow], capacities: Mapping[str, float]) -> float:
    """Seconds until the last of `flows` ends, by progressive filling.

    `capacities` are bytes/s of each link. The rates of the flows under way are max-min fair: the
    link with the least for each of its flows gives them that rate, then the next of what is left.
    """
    left = {i: float(size) for i, (size, _) in enumerate(flows) if size > 0}
    now = 0.0
    while left:
        rates = _fair_rates({i: flows[i][1] for i in left}, capacities)
        step = min(left[i] / rates[i] for i in left)
        now += step
        # A flow that ends with the quickest one ends now, whatever rounding leaves of it.
        left = {
            i: size - step * rates[i]
            for i, size in left.items()
            if size > step * rates[i] * (1 + 1e-12)
        }
    return now


def _fair_rates(
    links: Mapping[int, tuple[str, ...]], capacities: Mapping[str, float]
) -> dict[int, float]:
    free = {link: capacities[link] for used in links.values() for link in used}
    rates: dict[int, float] = {}
    while len(rates) < len(links):
        users: dict[str, list[int]] = {}
        for i, used in links.items():
            if i not in rates:
                for link in used:
                    users.setdefault(link, []).append(i)
        tightest = min(users, key=lambda link: free[link] / len(users[link]))
        rate = free[tightest] / len(users[tightest])
        for i in users[tightest]:
            rates[i] = rate
            for link in links[i]:
                free[link] = max(0.0, free[link] - rate)
    return rates


def busiest_s(flows: Sequence[Flow], capacities: Mapping[str, float]) -> float:
    """Seconds that the busiest link needs for its bytes: a lower bound of `finish_s`."""
    load: dict[str, float] = {}
    for size, links in flows:
        for link in links:
            load[link] = load.get(link, 0.0) + size
    return max((size / capacities[link] for link, size in load.items()), default=0.0)


@dataclass(frozen=True, slots=True)
class MeanTime:
    """Seconds of one mean: those of its messages' starts, and those of each byte of the vector."""

    latency_s: float
    per_byte_s: float

    def of(self, size_bytes: float) -> float:
        """Seconds of a mean of a vector of so many encoded bytes."""
        return self.latency_s + size_bytes * self.per_byte_s


@dataclass(frozen=True, eq=False)
class Links:
    """The links between trainers: every trainer's own in each direction, and shared trunks.

    A trainer's own link carries what its quickest line does, or what the facts say; a line that is
    slower than every link on its way is a further link.
    """

    facts: Facts

    @cached_property
    def lines(self) -> dict[tuple[str, str], tuple[float, float]]:
        """Pair, in either order, to one-way seconds and bytes/s from the first to the second."""
        return {
            pair: found
            for line in self.facts.line
            for pair, found in zip(
                ((line.a, line.b), (line.b, line.a)), _both_ways(line), strict=True
            )
        }

    @cached_property
    def capacities(self) -> dict[str, float]:
        """Link to bytes/s."""
        found: dict[str, float] = {}
        for (a, b), (_, rate) in self.lines.items():
            for link in (f"{a} up", f"{b} down"):
                found[link] = max(found.get(link, 0.0), rate)
            found[f"{a} > {b}"] = rate
        for trainer in self.facts.trainer:
            for link in (f"{trainer.name} up", f"{trainer.name} down"):
                if link in found:
                    found[link] = max(found[link], trainer.bytes_per_s or 0.0)
        for trunk in self.facts.trunk:
            found[f"{trunk.name} out"] = found[f"{trunk.name} in"] = trunk.bytes_per_s
        return found

    @cached_property
    def paths(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """Pair to the links between the first and the second."""
        return {pair: self._path(*pair) for pair in self.lines}

    def _path(self, a: str, b: str) -> tuple[str, ...]:
        path = [f"{a} up", f"{b} down"]
        for trunk in self.facts.trunk:
            if (a in trunk.inside) != (b in trunk.inside):
                path.append(f"{trunk.name} {'out' if a in trunk.inside else 'in'}")
        if self.capacities[f"{a} > {b}"] < min(self.capacities[link] for link in path):
            path.append(f"{a} > {b}")
        return tuple(path)

    @cached_property
    def sites(self) -> list[tuple[str, ...]]:
        """Sites, as `Facts.sites` has them."""
        return self.facts.sites

    def sites_of(self, crew: Sequence[str]) -> list[tuple[str, ...]]:
        """The crew by site, each site's best connected trainer, its leader, first."""
        found = []
        for site in self.sites:
            members = [name for name in site if name in crew]
            members.sort(key=lambda name: -self.reach(name))
            if members:
                found.append(tuple(members))
        return found

    def reach(self, name: str) -> float:
        """Bytes/s of a trainer's own link, in its slower direction; infinite without lines."""
        ways = (self.capacities.get(f"{name} {way}", math.inf) for way in ("up", "down"))
        return min(ways)

    def shares(self, crew: Sequence[str], shards: ShardSizes) -> list[float]:
        """Each trainer's share of the vector in a two-phase mean."""
        if shards == "link":
            return link_shares([self.reach(name) for name in crew])
        return [1 / len(crew)] * len(crew)

    def phases_s(self, phases: Sequence[Phase]) -> float:
        """Seconds of phases one after another, without latencies; a vector has 1 byte."""
        count = finish_s if len(self.facts.trainer) <= _MOST_TRAINERS else busiest_s
        return sum(
            count([(part, self.paths[a, b]) for a, b, part in phase], self.capacities)
            for phase in phases
        )

    def latency_s(self, crew: Sequence[str]) -> float:
        """The longest way of a message between two of the crew, one way."""
        return max((self.lines[a, b][0] for a in crew for b in crew if a != b), default=0.0)

    def mean(self, route: Route, crew: Sequence[str], shards: ShardSizes = "equal") -> MeanTime:
        """Seconds of a mean of `crew`, whose pairs were all measured."""
        return _mean(self, route, tuple(crew), shards)

    def publication(self, neighbours: Mapping[str, set[str]]) -> MeanTime:
        """Seconds in which each sends its vector to its neighbours, all at once."""
        pairs = [(a, b) for a, others in neighbours.items() for b in sorted(others)]
        latency_s = max((self.lines[pair][0] for pair in pairs), default=0.0)
        return MeanTime(latency_s, self.phases_s([[(a, b, 1.0) for a, b in pairs]]))


@lru_cache(maxsize=100_000)
def _mean(links: Links, route: Route, crew: tuple[str, ...], shards: ShardSizes) -> MeanTime:
    n = len(crew)
    if n == 1:
        return MeanTime(0.0, 0.0)
    if route == "two_phase":
        phases = two_phase(crew, links.shares(crew, shards))
        return MeanTime(2 * links.latency_s(crew), links.phases_s(phases))
    sites = links.sites_of(crew)
    if route == "ring":
        # Neighbours of one site beside each other: each trunk is crossed once each way.
        order = [name for site in sites for name in site]
        way_s = max(links.lines[a, b][0] for a, b in zip(order, order[1:] + order[:1], strict=True))
        return MeanTime(2 * (n - 1) * way_s, links.phases_s([ring(order)]))
    leaders = [site[0] for site in sites]
    inside_s = max(links.latency_s(site) for site in sites)
    latency_s = 2 * inside_s + 2 * links.latency_s(leaders)
    return MeanTime(latency_s, links.phases_s(two_tier(sites)))


def ring(order: Sequence[str]) -> Phase:
    """An all-reduce around `order`: each trainer sends 2 (n - 1) / n vectors to the next."""
    n = len(order)
    return [(a, order[(i + 1) % n], 2 * (n - 1) / n) for i, a in enumerate(order)] if n > 1 else []


def two_phase(crew: Sequence[str], shares: Sequence[float]) -> list[Phase]:
    """Every shard to its owner, and the owner's mean of it to all."""
    owned = list(zip(crew, shares, strict=True))
    first = [(a, b, share) for b, share in owned for a in crew if a != b]
    return [first, [(b, a, share) for a, b, share in first]]


def two_tier(sites: Sequence[Sequence[str]]) -> list[Phase]:
    """Vectors to each site's first trainer, two phases among these, and the mean back."""
    collect = [(name, site[0], 1.0) for site in sites for name in site[1:]]
    leaders = [site[0] for site in sites]
    among = two_phase(leaders, [1 / len(leaders)] * len(leaders))
    return [collect, *among, [(b, a, part) for a, b, part in collect]]


def _both_ways(line: Line) -> tuple[tuple[float, float], tuple[float, float]]:
    return (line.latency_s, line.bytes_per_s), (line.latency_s, line.back_bytes_per_s)
