"""How quickly a crew trains a network, by the best method that is allowed. Pure.

Candidates after AutoSync, Poseidon and DeAR; a method is scored by predicted seconds alone.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from partitioner.crew.planning.costs import RATIO, Codec, What, answers_per_s, step_s
from partitioner.crew.planning.facts import Facts, Trainer
from partitioner.crew.planning.flows import PIECES, Links, Route, Shards
from partitioner.crew.planning.stages import Pipeline, in_best_order
from partitioner.crew.planning.syncplan import BUCKET_BYTES, NetworkSync, Stage
from partitioner.crew.planning.work import FrozenPasses, Network, pace

#: `exact`: weights as of one process; `recorded`: beside them means of parameters in int8, whose
#: loss was measured; `any`: all.
Allowed = Literal["exact", "recorded", "any"]

_BUCKETS = (2**20, 5 * 2**20, BUCKET_BYTES)
#: A mean takes at most this of a round, which has at least so many steps and at most a share of an
#: epoch.
_MEAN_SHARE, _LEAST_STEPS, _EPOCH_SHARE = 0.1, 16, 1 / 8
#: Longest step of a trainer, of a round.
_LONGEST_STEP = 1 / 4
_MICRO_BATCHES = (2, 4, 8, 16)
_MOST_STAGES = 4


@dataclass(frozen=True, slots=True)
class Method:
    """How a crew trains a network, and what that takes."""

    sync: NetworkSync
    pictures_per_s: float
    #: Of one mean, and of waiting for the last trainer before it.
    mean_s: float = 0.0
    wait_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Methods:
    """Methods between the trainers of some facts."""

    facts: Facts
    allowed: Allowed = "recorded"

    @cached_property
    def links(self) -> Links:
        """The links of the facts."""
        return Links(self.facts)

    @cached_property
    def _trainers(self) -> dict[str, Trainer]:
        return {trainer.name: trainer for trainer in self.facts.trainer}

    def best(self, network: Network, crew: tuple[str, ...]) -> Method | None:
        """The quickest allowed method of a crew; None where the network is not for it.

        That is: a trainer's pace is unknown, its memory too small, or its step longer than a
        quarter of a round, or a line between two was not measured.
        """
        paces = [self._pace(name, network) for name in crew]
        if not crew or min(paces) <= 0:
            return None
        if len(crew) == 1:
            sync = NetworkSync(name=network.name, by=crew)
            fits = self._fits(network, "gradients", "fp32", crew)
            return Method(sync, paces[0]) if fits else None
        if not self._is_connected(crew):
            return None
        found = self._candidates(network, crew, paces)
        return max(found, key=lambda m: m.pictures_per_s, default=None)

    def _pace(self, name: str, network: Network | FrozenPasses) -> float:
        return pace(self._trainers[name], network)

    def _is_connected(self, crew: Sequence[str]) -> bool:
        lines = self.links.lines
        return all((a, b) in lines for i, a in enumerate(crew) for b in crew[:i])

    def _fits(self, network: Network, what: What, codec: Codec, crew: Sequence[str]) -> bool:
        needed = network.memory_bytes(what, codec, len(crew))
        return all(needed <= self._trainers[name].memory_bytes for name in crew)

    def _candidates(
        self, network: Network, crew: tuple[str, ...], paces: Sequence[float]
    ) -> Iterator[Method]:
        codecs: tuple[Codec, ...] = ("fp32", "fp16", "int8")
        kinds: tuple[What, ...] = ("gradients", "parameters")
        for what in kinds:
            for codec in codecs:
                if self._is_allowed(what, codec) and self._fits(network, what, codec, crew):
                    for route, shards in self._routes(crew, codec):
                        mean = self.links.mean(route, crew, shards)
                        size = RATIO[codec] * network.size_bytes
                        sync = NetworkSync(
                            name=network.name,
                            by=crew,
                            what=what,
                            codec=codec,
                            route=route,
                            shards=shards,
                        )
                        if what == "gradients":
                            yield from _by_gradients(
                                network, sync, paces, mean.latency_s, mean.per_byte_s * size
                            )
                        elif (found := _in_rounds(network, sync, paces, mean.of(size))) is not None:
                            yield found

    def _is_allowed(self, what: What, codec: Codec) -> bool:
        exact = what == "gradients" and codec == "fp32"
        recorded = what == "parameters" and codec == "int8"
        return exact or self.allowed == "any" or (recorded and self.allowed == "recorded")

    def _routes(self, crew: Sequence[str], codec: Codec) -> Iterator[tuple[Route, Shards]]:
        if codec != "int8":
            yield "ring", "equal"
        yield "two_phase", "equal"
        if PIECES > 1 and len(crew) > 2:  # it does not pay where phases are one after another
            yield "two_phase", "link"
        sites = self.links.sites_of(crew)
        if 1 < len(sites) < len(crew):
            yield "two_tier", "equal"

    def answers(self, passes: FrozenPasses, desk: str) -> tuple[tuple[str, ...], float]:
        """Who computes frozen passes, and their pictures/s together; answers go to the desk."""
        by, together = [], 0.0
        for trainer in self.facts.trainer:
            known = pace(trainer, passes)
            if trainer.name == desk:
                rate = known
            elif (trainer.name, desk) in self.links.lines:
                line = self.links.lines[trainer.name, desk]
                rate = answers_per_s(known, line[1], passes.classes)
            else:
                rate = 0.0
            if rate > 0:
                by.append(trainer.name)
                together += rate
        down = self.links.capacities.get(f"{desk} down", math.inf)
        most = self._pace(desk, passes) + answers_per_s(math.inf, down, passes.classes)
        return tuple(by), min(together, most)

    def in_stages(self, network: Network) -> Method | None:
        """A pipeline of unequal stages, for a network that fits on no trainer whole."""
        if not network.blocks:
            return None
        names = [n for n in self.facts.names if self._pace(n, network) > 0]
        names.sort(key=lambda name: -self._pace(name, network))
        found = []
        for count in range(2, min(_MOST_STAGES, len(names), network.blocks) + 1):
            crew = names[:count]
            if self._is_connected(crew):
                for micro_batches in _MICRO_BATCHES:
                    if micro_batches <= network.batch:
                        found.append(self._pipeline(network, crew, micro_batches))
        some = [method for method in found if method is not None]
        return max(some, key=lambda method: method.pictures_per_s, default=None)

    def _pipeline(self, network: Network, crew: Sequence[str], micro_batches: int) -> Method | None:
        pictures, blocks = network.batch / micro_batches, network.blocks
        paces = [self._pace(name, network) for name in crew]
        # Of one block's forward pass on the first: a third of its share of a step.
        unit_s = pictures / paces[0] / (3 * blocks)
        lines = [self.links.lines[a, b] for a in crew for b in crew if a != b]
        way_s = max(late + network.boundary_bytes * pictures / rate for late, rate in lines)
        kept = len(crew) * pictures * network.activation_bytes
        block_bytes = (4 * network.size_bytes + kept) / blocks
        most = [int(self._trainers[name].memory_bytes // block_bytes) for name in crew]
        if min(most) < 1 or sum(most) < blocks:
            return None
        pipeline = Pipeline(
            speeds=tuple(one / paces[0] for one in paces),
            micro_batches=micro_batches,
            transfer=way_s / unit_s,
        )
        order, sizes, time = in_best_order(blocks, pipeline, most)
        stages = tuple(Stage(blocks=size, by=crew[i]) for i, size in zip(order, sizes, strict=True))
        sync = NetworkSync(name=network.name, micro_batches=micro_batches, stage=stages)
        return Method(sync, network.batch / (time * unit_s))


def _by_gradients(
    network: Network,
    sync: NetworkSync,
    paces: Sequence[float],
    latency_s: float,
    transfer_s: float,
) -> Iterator[Method]:
    """Steps with shares by pace, for each size of buckets."""
    compute_s = network.batch / sum(paces)
    for bucket_bytes in _BUCKETS:
        buckets = math.ceil(network.size_bytes / bucket_bytes)
        mean_s = buckets * latency_s + transfer_s
        seconds = step_s("gradients", compute_s, mean_s, buckets=buckets)
        with_bucket = NetworkSync(
            name=sync.name,
            by=sync.by,
            codec=sync.codec,
            route=sync.route,
            shards=sync.shards,
            shares="pace",
            bucket_bytes=bucket_bytes,
        )
        yield Method(with_bucket, network.batch / seconds, mean_s)


def _in_rounds(
    network: Network, sync: NetworkSync, paces: Sequence[float], mean_s: float
) -> Method | None:
    """Rounds that end by the pictures of all; claims are a crew's part of a batch."""
    together = sum(paces)
    step = -(-network.batch // len(paces)) / min(paces)
    every = round_pictures(network, together, mean_s)
    if step > _LONGEST_STEP * every / together:
        return None
    seconds = every / together + mean_s + step / 2
    in_rounds = NetworkSync(
        name=sync.name,
        by=sync.by,
        what=sync.what,
        every_pictures=every,
        route=sync.route,
        shards=sync.shards,
        codec=sync.codec,
    )
    return Method(in_rounds, every / seconds, mean_s, step / 2)


def round_pictures(network: Network, pictures_per_s: float, mean_s: float) -> int:
    """Pictures of a round: whole steps of which a mean takes a tenth, within bounds."""
    steps = math.ceil(mean_s * pictures_per_s / _MEAN_SHARE / network.batch)
    most = max(1, int(_EPOCH_SHARE * network.pictures / network.batch))
    return network.batch * min(max(steps, _LEAST_STEPS), most)
