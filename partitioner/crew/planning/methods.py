"""The speed at which a crew trains a network, by the best method that is allowed. Pure.

Candidates after AutoSync, Poseidon and DeAR; a method is scored by predicted seconds alone.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, product
from typing import Literal

from msgspec.structs import replace

from partitioner.crew.coordinator.neighbours import neighbours_of
from partitioner.crew.coordinator.rounds import growing_means
from partitioner.crew.coordinator.sizes import CodecName
from partitioner.crew.planning.assign import Labels, search
from partitioner.crew.planning.costs import (
    RATIO,
    What,
    answers_per_s,
    next_forward_s,
    sent_ratio,
    step_s,
)
from partitioner.crew.planning.facts import Facts, Trainer
from partitioner.crew.planning.flows import Links, MeanTime, Route
from partitioner.crew.planning.losses import STEP_SIZES
from partitioner.crew.planning.rules import refusals
from partitioner.crew.planning.stages import PipelineFacts, in_best_order, pipeline_time
from partitioner.crew.planning.syncplan import (
    BUCKET_BYTES,
    Neighbourhood,
    NetworkSync,
    RequestedGroups,
    Stage,
    Trainers,
    WholeGroup,
    is_exact,
    memory_bytes_of,
)
from partitioner.crew.planning.work import FrozenPasses, NetworkWork, pace

#: `exact`: weights as of one process; `recorded`: beside them means of parameters in int8, whose
#: loss was measured (`losses`); `any`: all.
Allowed = Literal["exact", "recorded", "any"]

#: Seconds of a step whose means come in two halves, of those with no other cost, over lines of 20
#: Mbit/s (benchmarks.crew.next_forward): members wait for each other in every bucket, twice.
_HALVED = 1.1
#: Bytes of a bucket: over slow lines small ones hide more, over quick ones they cost latencies.
_BUCKETS = (2**18, 2**20, 5 * 2**20, BUCKET_BYTES)
#: A mean takes at most this of a round, which has at least so many steps and at most a share of an
#: epoch.
_MEAN_SHARE, _LEAST_STEPS, _EPOCH_SHARE = 0.1, 16, 1 / 8
#: Longest step of a trainer, of a round.
_LONGEST_STEP = 1 / 4
#: What a mean reaches of its lines' rates, each measured alone and in one direction: gloo's ring
#: and stages of pairs, without a trainer, in namespaces at 20 Mbit/s (0.83 to 0.97).
_REACHED = 0.85
_CODECS: tuple[CodecName, ...] = ("fp32", "fp16", "int8")
_ROUTES: tuple[Route, ...] = ("ring", "two_phase", "two_tier")
_WHAT: tuple[What, ...] = ("gradients", "parameters")
_MICRO_BATCHES = (2, 4, 8, 16)
_MOST_STAGES = 4
#: Places of trainers in pipelines that local search looks at.
_REGROUPED = 300
#: Each further trainer has to make a crew this much quicker: it can also delay and fail.
WORTH = 1.02


@dataclass(frozen=True, slots=True)
class Method:
    """A way in which a crew trains a network, and what that takes."""

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

    def best(self, network: NetworkWork, crew: tuple[str, ...]) -> Method | None:
        """The quickest allowed method of a crew; None where the network is not for it.

        That is: no method is `predicted`.
        """
        found = [self.predict(network, sync) for sync in self.candidates(network, crew)]
        some = [method for method in found if method is not None]
        return max(some, key=lambda method: method.pictures_per_s, default=None)

    def predict(self, network: NetworkWork, sync: NetworkSync) -> Method | None:
        """Predict how quickly a network is trained as `sync` says; None where that cannot be.

        That is: a trainer's pace or a line is unknown, memory too small, or a step of rounds too
        long. Tensors with rules of their own count as all others.
        """
        crew = sync.crew or self.facts.names
        paces = [self._pace(name, network) for name in crew]
        if min(paces) <= 0 or not self._is_connected(crew):
            return None
        if sync.stage:
            mean_s = self._stage_mean_s(network, sync)
            return Method(sync, network.batch / (self._passes_s(network, sync) + mean_s), mean_s)
        if not self._fits(network, sync, crew):
            return None
        if len(crew) == 1:
            return Method(sync, paces[0])
        mean_s = self.mean_s(network, sync)
        if sync.what == "gradients":
            return _by_gradients(network, sync, paces, mean_s)
        return _in_rounds(network, sync, paces, mean_s)

    def mean_s(self, network: NetworkWork, sync: NetworkSync) -> float:
        """Predicted seconds of a mean; 0 in stages, alone, and over lines that were not measured.

        Where only some meet, of those that are worst connected.
        """
        crew = sync.crew or self.facts.names
        if sync.stage or not self._is_connected(crew):
            return 0.0
        size_bytes, starts = _sent_bytes(network, sync), 1
        if sync.what == "gradients":
            starts = _buckets(network, sync)
        mean = self._mean(sync, crew, size_bytes)
        return starts * mean.latency_s + mean.per_byte_s * size_bytes

    def _mean(self, sync: NetworkSync, crew: Sequence[str], size_bytes: float) -> MeanTime:
        """A mean of so many bytes of those that meet; where some do, of the worst connected.

        Neighbours count as long as all take that publish at once.
        """
        meet = sync.meet

        def mean_of(group: Sequence[str]) -> MeanTime:
            return self.links.mean(sync.way, group, sync.shards)

        def seconds(group: Sequence[str]) -> float:
            return mean_of(group).of(size_bytes)

        if isinstance(meet, WholeGroup):
            return mean_of(crew)
        if isinstance(meet, Neighbourhood):
            return self.links.publication(neighbours_of(crew, meet.pairs))
        if isinstance(meet, RequestedGroups):
            return mean_of(_worst_group(crew, meet.size, seconds))
        sites = self.links.sites_of(crew)
        # One that is left over joins a group.
        sizes = [meet.size + (len(site) % meet.size == 1) for site in sites]
        worst = [_worst_group(site, size, seconds) for site, size in zip(sites, sizes, strict=True)]
        inside = mean_of(max(worst, key=seconds))
        if len(sites) == 1:
            return inside
        across, part = mean_of([site[-1] for site in sites]), 1 / meet.cross_every
        return MeanTime(
            (1 - part) * inside.latency_s + part * across.latency_s,
            (1 - part) * inside.per_byte_s + part * across.per_byte_s,
        )

    def _pace(self, name: str, network: NetworkWork | FrozenPasses) -> float:
        return pace(self._trainers[name], network)

    def _is_connected(self, crew: Sequence[str]) -> bool:
        lines = self.links.lines
        return all((a, b) in lines for i, a in enumerate(crew) for b in crew[:i])

    def _fits(self, network: NetworkWork, sync: NetworkSync, crew: Sequence[str]) -> bool:
        needed = memory_bytes_of(network, sync, tuple(crew))
        return all(needed <= self._trainers[name].memory_bytes for name in crew)

    def candidates(self, network: NetworkWork, crew: tuple[str, ...]) -> Iterator[NetworkSync]:
        """The ways of a crew that are compared; none where lines between it were not measured."""
        sync = NetworkSync(name=network.name, by=crew)
        if len(crew) <= 1 or not self._is_connected(crew):
            yield from [sync] if len(crew) == 1 else []
            return
        together = sum(self._pace(name, network) for name in crew)
        several_sites = 1 < len(self.links.sites_of(crew)) < len(crew)
        for what, codec, route in self._ways:
            if route == "two_tier" and not several_sites:
                continue
            way = replace(sync, what=what, codec=codec, route=route)
            if what == "gradients":
                for bucket_bytes in _BUCKETS:
                    at_once = replace(way, shares="pace", bucket_bytes=bucket_bytes)
                    yield at_once
                    halved = replace(at_once, when="next_forward")
                    # Where codecs may round, rounds are quicker.
                    if codec == "fp32" and not any(refusals(halved.words)):
                        yield halved
            else:
                mean_s = self.links.mean(route, crew).of(_transfer_bytes(network, codec))
                every = round_pictures(network, together, mean_s)
                yield replace(way, every_pictures=every, step_size=STEP_SIZES[network.start])

    @cached_property
    def _ways(self) -> list[tuple[What, CodecName, Route]]:
        """Combinations of what is averaged, codec and route that rules and `allowed` have."""
        found = list[tuple[What, CodecName, Route]]()
        for codec, route, what in product(_CODECS, _ROUTES, _WHAT):
            way = NetworkSync(name="member-0", what=what, codec=codec, route=route)
            recorded = what == "parameters" and codec == "int8"
            allowed = self.allowed == "any" or (recorded and self.allowed == "recorded")
            if (allowed or is_exact(way)) and not any(refusals(way.words)):
                found.append((what, codec, route))
        return found

    def answers(
        self, passes: FrozenPasses, names: Sequence[str], coordinator: str
    ) -> tuple[tuple[str, ...], float]:
        """Those of `names` that compute frozen passes, and their pictures/s together.

        Answers go to the coordinator over each trainer's line, and over the coordinator's own.
        """
        rates = {}
        for name in names:
            rates[name] = self._pace(name, passes) if name == coordinator else 0.0
            if (name, coordinator) in self.links.lines:
                rate = self.links.lines[name, coordinator][1]
                rates[name] = answers_per_s(self._pace(name, passes), rate, passes.numbers)
        down = self.links.capacities.get(f"{coordinator} down", math.inf)
        own = rates.get(coordinator, 0.0)
        together = own + answers_per_s(sum(rates.values()) - own, down, passes.numbers)
        return tuple(name for name in names if rates[name]), together

    def hand_in_s(self, network: NetworkWork, sync: NetworkSync) -> float:
        """Seconds of sending finished weights to the coordinator; infinite over unmeasured lines.

        A crew with the coordinator has them there; a pipeline's are put together by its first
        stage.
        """
        coordinator, crew = self.facts.names[0], sync.crew or self.facts.names
        senders = crew[:1] if sync.stage else crew
        if coordinator in senders:
            return 0.0
        lines = [self.links.lines.get((name, coordinator)) for name in senders]
        took = [late + network.size_bytes / _REACHED / rate for late, rate in filter(None, lines)]
        return min(took, default=math.inf)

    def in_stages(self, network: NetworkWork) -> Method | None:
        """Pipelines of unequal stages, for a network that fits on no trainer whole.

        Several pipelines share a batch where they are worth their trainers. Who is in which stage
        of which pipeline is grouped after DT-FM: the trainers of a stage average its gradients,
        those of a pipeline send each other what is between their blocks, and local search weighs
        both by the lines' predicted seconds.
        """
        if not network.blocks:
            return None
        names, found = self._by_pace(network), list[Method | None]()
        for count in range(2, min(_MOST_STAGES, len(names), network.blocks) + 1):
            for parts in range(1, len(names) // count + 1):
                groupings = self._groupings(names[: count * parts], parts)
                for micro_batches, groups in product(_MICRO_BATCHES, groupings):
                    if count <= micro_batches <= network.batch // parts:
                        found.append(self._stages(network, groups, micro_batches))
        some = [method for method in found if method is not None]
        best = max(some, key=_worth_of, default=None)
        if best is None or len(best.sync.pipelines) == 1:
            return best
        return max(best, *self._regroup(network, best.sync, names), key=_worth_of)

    def _groupings(self, crew: Sequence[str], parts: int) -> list[tuple[Trainers, ...]]:
        """The trainers of each stage, of so many pipelines: by pace; by site those of a stage
        together, or those of a pipeline. None where lines between them were not measured.
        """
        if not self._is_connected(crew):
            return []
        by_site = [name for site in self.links.sites_of(crew) for name in site]
        count = len(crew) // parts
        stages = [
            tuple(tuple(names[i * parts : (i + 1) * parts]) for i in range(count))
            for names in (crew, by_site)
        ]
        pipelines = tuple(tuple(by_site[i::count]) for i in range(count))
        return list(dict.fromkeys([*stages, pipelines]))

    def _regroup(
        self, network: NetworkWork, sync: NetworkSync, names: Sequence[str]
    ) -> Iterator[Method]:
        """Pipelines whose trainers have changed places, with the stages of `sync` and new ones."""
        stages, parts = sync.stage, len(sync.pipelines)
        micro_batches = sync.micro_batches or 1
        memory = [
            network.stage_bytes(stage.blocks, kept, micro_batches * parts, is_first=i == 0)
            for i, (stage, kept) in enumerate(zip(stages, sync.in_flight, strict=True))
        ]
        placed = [name for stage in stages for name in stage.trainers]
        placed += [name for name in names if name not in placed]

        def groups_of(labels: Labels) -> list[Trainers]:
            """The trainers of each stage; who is placed behind them takes no part."""
            found = [placed[label] for label in labels[: parts * len(stages)]]
            return [tuple(found[i * parts : (i + 1) * parts]) for i in range(len(stages))]

        def with_groups(groups: Sequence[Trainers]) -> NetworkSync:
            moved = (replace(one, by=by) for one, by in zip(stages, groups, strict=True))
            return replace(sync, stage=tuple(moved))

        def seconds(labels: Labels) -> tuple[float, ...]:
            groups = groups_of(labels)
            fits = all(
                needed <= self._trainers[name].memory_bytes
                for needed, group in zip(memory, groups, strict=True)
                for name in group
            )
            method = self.predict(network, with_groups(groups)) if fits else None
            return (1 / method.pictures_per_s if method else math.inf,)

        groups = groups_of(search([tuple(range(len(placed)))], seconds, 0, (), _REGROUPED))
        again = self.predict(network, with_groups(groups))
        return filter(None, (again, self._stages(network, groups, micro_batches)))

    def _by_pace(self, network: NetworkWork) -> list[str]:
        """Trainers that have memory for a stage of at least one block, the quickest first."""
        many = _most_micro_batches(network)
        names = [
            trainer.name
            for trainer in self.facts.trainer
            if self._pace(trainer.name, network) > 0
            and network.most_blocks(trainer.memory_bytes, 1, many)
        ]
        return sorted(names, key=lambda name: -self._pace(name, network))

    def lacking_memory(self, network: NetworkWork) -> str:
        """The trainer that comes nearest to having memory for what is left of a network in stages.

        With a micro-batch in flight at each stage, the smallest, and the others' memory full. Empty
        where memory suffices, or the network is not for stages.
        """
        if not network.blocks or not self.facts.trainer:
            return ""
        micro_batches = _most_micro_batches(network)
        crew = self._by_pace(network)[: min(_MOST_STAGES, micro_batches)]
        memory = {name: self._trainers[name].memory_bytes for name in crew or self.facts.names}
        largest = max(memory, key=lambda name: memory[name])
        others = sum(
            network.most_blocks(there, 1, micro_batches)
            for name, there in memory.items()
            if name != largest
        )
        left, there = network.blocks - others, memory[largest]
        needed = network.stage_bytes(left, 1, micro_batches, is_first=True)
        if needed <= there:
            return ""
        return (
            f"{network.name} fits in no stages: with one micro-batch in flight at each, and the "
            f"memory of the others full, {largest} needs about {needed / 1e9:.1f} GB, it has "
            f"{there / 1e9:.1f} GB"
        )

    def _stages(
        self, network: NetworkWork, groups: Sequence[Trainers], micro_batches: int
    ) -> Method | None:
        """The best stages of trainers in groups, each of one stage, in whatever order.

        Cut for the slowest of each group and the least memory in it. None where they do not fit.
        """
        kept, cuts = range(1, len(groups) + 1), micro_batches * len(groups[0])
        memory = [min(self._trainers[name].memory_bytes for name in group) for group in groups]
        most = [[network.most_blocks(there, n, cuts) for n in kept] for there in memory]
        slowest = [min(group, key=lambda name: self._pace(name, network)) for group in groups]
        way_s = max(self._way_s(network, pipeline, cuts) for pipeline in zip(*groups, strict=True))
        pipeline, _ = self._pipeline(network, slowest, micro_batches, cuts, way_s)
        try:
            found = in_best_order(network.blocks, pipeline, most)
        except ValueError:  # they do not fit
            return None
        stages = tuple(
            Stage(blocks=size, by=_one_or_all(groups[i]), in_flight=limit)
            for i, size, limit in zip(found.order, found.blocks, found.in_flight, strict=True)
        )
        sync = NetworkSync(name=network.name, micro_batches=micro_batches, stage=stages)
        return self.predict(network, sync)

    def _passes_s(self, network: NetworkWork, sync: NetworkSync) -> float:
        """Seconds of a batch's passes through the slowest of the pipelines that share it."""
        blocks, micro_batches = [stage.blocks for stage in sync.stage], sync.micro_batches or 1
        cuts, found = micro_batches * len(sync.pipelines), []
        for crew in sync.pipelines:
            way_s = self._way_s(network, crew, cuts)
            pipeline, unit_s = self._pipeline(network, crew, micro_batches, cuts, way_s)
            pipeline = dataclasses.replace(pipeline, in_flight=sync.in_flight)
            found.append(pipeline_time(blocks, pipeline) * unit_s)
        return max(found)

    def _stage_mean_s(self, network: NetworkWork, sync: NetworkSync) -> float:
        """Seconds in which the trainers of each stage average its gradients, after the passes."""
        if len(sync.pipelines) == 1:
            return 0.0
        block_bytes = network.size_bytes / max(1, network.blocks)
        return max(
            self.links.mean(sync.way, stage.trainers, sync.shards).of(stage.blocks * block_bytes)
            for stage in sync.stage
        )

    def _way_s(self, network: NetworkWork, crew: Sequence[str], cuts: int) -> float:
        """Seconds of a micro-batch's way between the worst connected two of a pipeline.

        cuts: micro-batches of a whole batch.
        """
        size_bytes = network.boundary_bytes * network.batch / cuts
        lines = (self.links.lines[a, b] for a in crew for b in crew if a != b)
        return max(late + size_bytes / rate for late, rate in lines)

    def _pipeline(
        self, network: NetworkWork, crew: Sequence[str], micro_batches: int, cuts: int, way_s: float
    ) -> tuple[PipelineFacts, float]:
        """A pipeline, and seconds of its unit: of one block's forward pass on the first trainer.

        micro_batches: of the pipeline's part of a batch; cuts: of a whole batch.
        """
        paces = [self._pace(name, network) for name in crew]
        unit_s = network.batch / cuts / paces[0] / (3 * network.blocks)
        speeds = tuple(one / paces[0] for one in paces)
        pipeline = PipelineFacts(
            speeds=speeds, micro_batches=micro_batches, transfer=way_s / unit_s
        )
        return pipeline, unit_s


def _worth_of(method: Method) -> float:
    """Pictures a second, less what further trainers have to bring."""
    return method.pictures_per_s / WORTH ** (len(method.sync.crew) - 1)


def _one_or_all(group: Trainers) -> str | Trainers:
    """A trainer by its name where it is alone at a stage."""
    return group[0] if len(group) == 1 else group


def _most_micro_batches(network: NetworkWork) -> int:
    """The smallest parts of a batch that are tried."""
    return max((n for n in _MICRO_BATCHES if n <= network.batch), default=1)


def _transfer_bytes(network: NetworkWork, codec: CodecName) -> float:
    """Encoded bytes of a mean, as many more as lines do not reach their rates."""
    return RATIO[codec] * network.size_bytes / _REACHED


def _sent_bytes(network: NetworkWork, sync: NetworkSync) -> float:
    """The same of what travels as `sync` says; an epoch's last mean is of every number."""
    settling = min(1.0, sync.round_pictures / max(1, network.pictures))
    share = sent_ratio(sync.codec, sync.stride, sync.keep_share, settling)
    return share * network.size_bytes / _REACHED


def _buckets(network: NetworkWork, sync: NetworkSync) -> int:
    """Parts in which gradients are averaged."""
    return math.ceil(network.size_bytes / (sync.bucket_bytes or BUCKET_BYTES))


def _worst_group(
    names: Sequence[str], size: int, seconds: Callable[[Sequence[str]], float]
) -> tuple[str, ...]:
    """Those `size` of some whose mean takes longest: the worst pair, and who slows it down most."""
    if size >= len(names):
        return tuple(names)
    found: tuple[str, ...] = max(combinations(names, 2), key=seconds)
    while len(found) < size:
        others = [name for name in names if name not in found]
        found = max(((*found, name) for name in others), key=seconds)
    return tuple(found)


def _by_gradients(
    network: NetworkWork, sync: NetworkSync, paces: Sequence[float], mean_s: float
) -> Method:
    """A step in each batch, whose shares end together or are equal."""
    slowest = network.batch / len(paces) / min(paces)
    compute_s = network.batch / sum(paces) if sync.shares == "pace" else slowest
    buckets = _buckets(network, sync)
    seconds = step_s("gradients", compute_s, mean_s, buckets=buckets)
    if sync.when == "next_forward":
        seconds = _HALVED * next_forward_s(compute_s, mean_s, buckets)
    return Method(sync, network.batch / seconds, mean_s)


def _in_rounds(
    network: NetworkWork, sync: NetworkSync, paces: Sequence[float], mean_s: float
) -> Method | None:
    """Rounds that end by the pictures of all; claims are a crew's part of a batch."""
    slowest = -(-network.batch // len(paces)) / min(paces)
    round_s = sync.round_pictures / sum(paces)
    if slowest > _LONGEST_STEP * round_s:
        return None
    steps = 1.0
    if sync.period == "grows":
        first, epoch = round(sync.round_pictures / network.batch), network.pictures // network.batch
        every = growing_means(
            max(1, first), max(1, network.all_pictures // network.batch), max(1, epoch)
        )
        steps = max(1.0, network.all_pictures / sync.round_pictures / every)
    seconds = step_s("parameters", round_s, mean_s, steps=steps, wait_s=slowest / 2)
    if sync.when == "background":
        seconds = max(round_s + slowest / 2 / steps, mean_s / steps)
    return Method(sync, sync.round_pictures / seconds, mean_s, slowest / 2)


def round_pictures(network: NetworkWork, pictures_per_s: float, mean_s: float) -> int:
    """Pictures of a round: whole steps of which a mean takes a tenth, within bounds."""
    steps = math.ceil(mean_s * pictures_per_s / _MEAN_SHARE / network.batch)
    most = max(1, int(_EPOCH_SHARE * network.pictures / network.batch))
    return network.batch * min(max(steps, _LEAST_STEPS), most)
