"""crew.toml: which trainers train which network, and how they agree on its weights."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from mdp.errors import ConfigError
from mdp.files import Record, pattern, read_toml, toml_bytes, write_bytes
from partitioner.crew.coordinator.neighbours import graph_of, neighbours_of, reached_in
from partitioner.crew.coordinator.sizes import KEEP, CodecName, TensorCodec
from partitioner.crew.planning.costs import RATIO, Chain, What
from partitioner.crew.planning.facts import Facts, Name
from partitioner.crew.planning.flows import Route, ShardSizes
from partitioner.crew.planning.rules import GIVEN, MISSING, gives_weights_of_one, refusals
from partitioner.crew.planning.work import NetworkWork, Work, pace

NetworkName = Annotated[
    str, pattern(r"^(teacher|member-(0|[1-9][0-9]{0,2}))\Z", "`teacher` or `member-K`")
]
Trainers = tuple[Name, ...]
Above0 = Annotated[int, Meta(gt=0, le=2**40)]

#: Pictures of a round, and bytes of a bucket (torch's default), where a plan says nothing.
EVERY_PICTURES, BUCKET_BYTES = 4096, 25 * 2**20
#: Keys that came after the digests that run folders keep: they count where they are set.
_LATER_KEYS = ("period", "step_size", "moments", "owner", "when", "meet", "mask", "keep")


#: Keys of which only counts whether they are given.
_GIVEN_OR_NOT = (
    "by", "every_pictures", "moments", "bucket_bytes", "mask", "micro_batches", "stage"
)  # fmt: skip
#: A part that was written as 0.33 is a third.
_ROUNDED = 0.02


StepSize = Literal["given", "auto"]


class TensorRule(Record, frozen=True, kw_only=True):
    """The codec of those of a network's tensors whose names match, as fnmatch does."""

    match: Annotated[str, Meta(min_length=1, max_length=200)]
    codec: TensorCodec


class Stage(Record, frozen=True, kw_only=True):
    """Consecutive blocks of a network, on one trainer of each pipeline."""

    blocks: Annotated[int, Meta(ge=1, le=1000)]
    #: With several, each is of another pipeline, and all average the stage's gradients.
    by: Name | Annotated[Trainers, Meta(min_length=1)]
    #: Micro-batches between their forward and backward passes, at most those of the stage before;
    #: without it, what never waits, or those of the stage before.
    in_flight: Annotated[int, Meta(ge=1, le=1000)] | None = None

    @property
    def trainers(self) -> Trainers:
        """Its trainers, by pipeline."""
        return (self.by,) if isinstance(self.by, str) else self.by


class MeanOwner(Record, frozen=True, kw_only=True, tag_field="kind", tag="mean"):
    """The owner of a shard sends its mean to all."""


class OuterOwner(Record, frozen=True, kw_only=True, tag_field="kind", tag="outer"):
    """The owner of a shard steps from the last parameters towards their mean, as DiLoCo does.

    R -= step (d + momentum v), where d = R - mean, and v = momentum v + d before.
    """

    step: Annotated[float, Meta(gt=0, le=10)] = 1.0
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.0


class KfacOwner(Record, frozen=True, kw_only=True, tag_field="kind", tag="kfac"):
    """The owner of a dense layer preconditions its gradient: see `averaging.kfac`."""

    #: Step size of dense layers, as a multiple of the schedule's.
    step: Annotated[float, Meta(gt=0, le=1000)] = 10.0
    #: As a multiple of a layer's mean curvature.
    damping: Annotated[float, Meta(gt=0, le=1e9)] = 1000.0


class MuonOwner(Record, frozen=True, kw_only=True, tag_field="kind", tag="muon"):
    """The owner of a block's matrix takes its step by Muon: see `averaging.muon`."""

    #: Step size of blocks' matrices, as a multiple of the schedule's.
    step: Annotated[float, Meta(gt=0, le=1000)] = 2.0


class WholeGroup(Record, frozen=True, kw_only=True, tag_field="kind", tag="everyone"):
    """All trainers of a network meet."""


#: Trainers of a group.
Size = Annotated[int, Meta(ge=2, le=1000)]


class ShuffledGroups(Record, frozen=True, kw_only=True, tag_field="kind", tag="shuffled"):
    """Groups of a site that are drawn anew in every round; in some rounds one crosses the sites."""

    size: Size = 2
    cross_every: Annotated[int, Meta(ge=1, le=1000)] = 4


class RequestedGroups(Record, frozen=True, kw_only=True, tag_field="kind", tag="on_request"):
    """Groups of those that ask for one: see `coordinator.partial.OnRequest`."""

    size: Size = 2
    gap: Annotated[int, Meta(ge=1, le=10**6)] = 8
    #: Of the asking trainer's lap.
    reach: Annotated[float, Meta(ge=0)] = 0.25
    divide: bool = False


class Neighbourhood(Record, frozen=True, kw_only=True, tag_field="kind", tag="neighbours"):
    """Means with neighbours' newest parameters: see `coordinator.neighbours.Neighbours`."""

    gap: Annotated[int, Meta(ge=1, le=10**6)] = 4
    backup: Annotated[int, Meta(ge=0, le=1000)] = 1
    stale: Annotated[int, Meta(ge=0, le=10**6)] = 0
    skip: Annotated[int, Meta(ge=1, le=10**6)] = 8
    #: Those who are neighbours; with none a ring of the network's trainers, in their order.
    pairs: tuple[tuple[Name, Name], ...] = ()


class NetworkSync(Record, frozen=True, kw_only=True):
    """The training of one network."""

    name: NetworkName
    by: Trainers = ()
    what: What = "gradients"
    every_pictures: Above0 | None = None
    period: Literal["same", "grows"] = "same"
    step_size: StepSize = "given"
    #: AdamW's are averaged with each so many means.
    moments: Annotated[int, Meta(ge=1, le=1000)] | None = None
    owner: MeanOwner | OuterOwner | KfacOwner | MuonOwner = MeanOwner()
    when: Literal["at_once", "background", "next_forward"] = "at_once"
    meet: WholeGroup | ShuffledGroups | RequestedGroups | Neighbourhood = WholeGroup()
    shares: Literal["equal", "pace"] = "equal"
    route: Route | None = None
    shards: ShardSizes = "equal"
    codec: CodecName = "fp32"
    #: Of parameters only this part travels in each mean, one over a whole number.
    mask: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    #: The part of them that `top4` sends, the largest.
    keep: Annotated[float, Meta(ge=0.001, le=1)] | None = None
    bucket_bytes: Above0 | None = None
    tensor: tuple[TensorRule, ...] = ()
    micro_batches: Annotated[int, Meta(ge=1, le=1000)] | None = None
    stage: tuple[Stage, ...] = ()

    @property
    def way(self) -> Route:
        """The route: with none given a ring, unless what travels needs two phases."""
        coded = self.mask is not None or not self.codecs <= {"fp32", "fp16", "factors"}
        needed = coded or self.when == "next_forward"
        return self.route or ("two_phase" if needed else "ring")

    @property
    def codecs(self) -> set[TensorCodec]:
        """Codecs of all tensors."""
        return {self.codec, *(rule.codec for rule in self.tensor)}

    @property
    def stride(self) -> int:
        """Each so many-th number of the parameters travels in a mean."""
        return round(1 / self.mask) if self.mask else 1

    @property
    def keep_share(self) -> float:
        """The part of what travels that `top4` sends."""
        return self.keep or KEEP

    @property
    def round_pictures(self) -> int:
        """Pictures of all together between two means of parameters."""
        return self.every_pictures or EVERY_PICTURES

    @property
    def crew(self) -> Trainers:
        """The trainers of it; nobody in particular where no one is named.

        Of pipelines one after another, each in the order of its stages.
        """
        return self.by or tuple(name for pipeline in self.pipelines for name in pipeline)

    @property
    def pipelines(self) -> tuple[Trainers, ...]:
        """The trainers of each pipeline, by stage."""
        return tuple(zip(*(stage.trainers for stage in self.stage), strict=False))

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Micro-batches between their forward and backward passes, by stage."""
        found = list[int]()
        for i, stage in enumerate(self.stage):
            never_waits = len(self.stage) - i
            before = found[-1] if found else never_waits
            found.append(min(stage.in_flight or before, never_waits))
        return tuple(found)

    @property
    def words(self) -> dict[str, frozenset[str]]:
        """The values of the keys that exclude each other, as `rules` has them."""
        given = {
            key: frozenset((GIVEN if getattr(self, key) else MISSING,)) for key in _GIVEN_OR_NOT
        }
        named = {
            key: frozenset((getattr(self, key),))
            for key in ("name", "what", "period", "step_size", "when", "shares", "shards")
        }
        of_all = {
            key: frozenset((msgspec.to_builtins(tagged)["kind"],))
            for key, tagged in (("owner", self.owner), ("meet", self.meet))
        }
        of_all["route"] = frozenset((self.way,))
        return {**given, **named, **of_all, "codec": frozenset(self.codecs)}

    def codec_of(self, tensor: str) -> CodecName:
        """The codec of a tensor by its name: of the first rule that matches.

        What no factors are sent of, or would be more bytes, goes in fp32.
        """
        found = self._rule_of(tensor)
        return "fp32" if found == "factors" else found

    def is_factored(self, tensor: str) -> bool:
        """Tell whether factors of a tensor's gradient may travel in its place."""
        return self._rule_of(tensor) == "factors"

    def _rule_of(self, tensor: str) -> TensorCodec:
        rules = (rule.codec for rule in self.tensor if fnmatchcase(tensor, rule.match))
        return next(rules, self.codec)


class Answers(Record, frozen=True, kw_only=True):
    """Trainers that compute frozen passes: the teacher's answers, and those of earlier members."""

    by: Trainers = ()
    #: Only so many of the teacher's largest logits of each picture, and the others' log-sum.
    keep: Annotated[int, Meta(ge=1, le=2**16)] | None = None


class SyncPlan(Record, frozen=True, kw_only=True):
    """crew.toml. The empty plan is training without it: all trainers average gradients."""

    format_version: Literal[1] = 1
    #: Digest of the facts that the plan was made from.
    facts: str = ""
    chain: Chain = "strict"
    answers: Answers = Answers()
    network: tuple[NetworkSync, ...] = ()

    def of(self, name: str) -> NetworkSync:
        """The training of a network; with the defaults where the plan does not name it."""
        return next((n for n in self.network if n.name == name), NetworkSync(name=name))

    @property
    def digest(self) -> str:
        """Identity of what changes weights, as 64 hexadecimal digits; of exact plans the same."""
        changing = {sync.name: _essence(sync) for sync in self.network if not is_exact(sync)}
        essence = (self.chain, changing)
        return hashlib.sha256(msgspec.json.encode(essence, order="sorted")).hexdigest()


def _essence(sync: NetworkSync) -> dict[str, object]:
    """Keys that change a network's weights; later ones count where they are not as by default."""
    every = None if sync.what == "gradients" else sync.round_pictures
    mask = 1 / sync.stride if sync.stride > 1 else None
    keep = None if sync.keep_share == KEEP else sync.keep_share
    same: dict[str, object] = {
        "by": (),
        "bucket_bytes": None,
        "route": sync.way,
        "every_pictures": every,
        "mask": mask,
        "keep": keep,
    }
    found: dict[str, object] = msgspec.to_builtins(msgspec.structs.replace(sync, **same))
    default: dict[str, object] = msgspec.to_builtins(NetworkSync(name=sync.name))
    for key in _LATER_KEYS:
        if found[key] == default[key]:
            del found[key]
    return found


def is_exact(sync: NetworkSync) -> bool:
    """Tell whether a network gets the weights of one process, up to rounding."""
    return gives_weights_of_one(sync.words)


def is_exact_plan(plan: SyncPlan) -> bool:
    """Tell whether all networks get the weights of one process, up to rounding."""
    whole = plan.answers.keep is None
    return whole and plan.chain == "strict" and all(map(is_exact, plan.network))


def read_plan(
    path: str | os.PathLike[str], facts: Facts | None = None, work: Work | None = None
) -> SyncPlan:
    """Read crew.toml; raises ConfigError naming file, key and what was expected."""
    plan = read_toml(path, SyncPlan)
    for sentence in contradictions(plan, facts, work):
        raise ConfigError(f"{Path(path)}: {sentence}")
    return plan


def write_plan(path: str | os.PathLike[str], plan: SyncPlan) -> None:
    """Write crew.toml atomically, without the keys that have no value or an empty one."""
    write_bytes(path, toml_bytes(plan, empty=False))


def contradictions(
    plan: SyncPlan, facts: Facts | None = None, work: Work | None = None
) -> list[str]:
    """The reasons that a plan cannot be followed: a sentence each, which begins with the key.

    Without `facts` or `work`, what depends on them is not looked at.
    """
    found = list(_of_the_crews(plan))
    for i, sync in enumerate(plan.network):
        found += [f"`network[{i}].{said}" for said in _of_a_network(sync)]
    if work is not None:
        found += _of_names(plan, [network.name for network in work.networks])
        keep, passes = plan.answers.keep, work.answers
        if keep is not None and passes is not None and keep > passes.numbers:
            found.append(
                f"`answers.keep`: expected at most {passes.numbers}, as many as classes, "
                f"found {keep}"
            )
    if facts is not None and not found:
        found += _of_facts(plan, facts, work)
    return found


def _of_the_crews(plan: SyncPlan) -> Iterator[str]:
    for name, count in Counter(sync.name for sync in plan.network).items():
        if count > 1:
            yield f"`network`: expected each network once, found {name} twice"
    crews = [("answers.by", plan.answers.by)]
    crews += [(f"network[{i}].by", sync.by) for i, sync in enumerate(plan.network)]
    for i, sync in enumerate(plan.network):
        of_stages = tuple(name for stage in sync.stage for name in stage.trainers)
        crews.append((f"network[{i}].stage", of_stages))
    for key, crew in crews:
        for name, count in Counter(crew).items():
            if count > 1:
                yield f"`{key}`: expected each trainer once, found {name} twice"


def _of_a_network(sync: NetworkSync) -> Iterator[str]:
    """Keys that exclude each other; each sentence goes on after "`network[i]."."""
    yield from refusals(sync.words)
    if sync.mask is not None and not _is_one_over_a_whole(sync.mask):
        yield f"mask`: expected one over a whole number, such as 0.1, found {sync.mask:g}"
    if sync.keep is not None and math.isnan(sync.keep):
        yield "keep`: expected a number, found nan"
    if sync.keep is not None and "top4" not in sync.codecs:
        yield 'keep`: expected only with codec = "top4": no other codec leaves numbers out'
    if sync.micro_batches is not None and sync.micro_batches < len(sync.stage):
        yield "micro_batches`: expected at least as many as stages"
    if len(sync.stage) == 1:
        yield "stage`: expected at least 2, or `by`"
    counts = [len(stage.trainers) for stage in sync.stage]
    if len(set(counts)) > 1:
        found = ", ".join(map(str, counts))
        yield f"stage`: expected as many trainers at each stage, found {found}"
    for i, (before, limit) in enumerate(pairwise(sync.in_flight), 1):
        if limit > before:
            yield (
                f"stage[{i}].in_flight`: expected at most {before}, as many as at the stage "
                f"before, found {limit}: {sync.stage[i].trainers[0]} would wait for ever"
            )


def _is_one_over_a_whole(part: float) -> bool:
    return not math.isnan(part) and abs(part * round(1 / part) - 1) <= _ROUNDED


def _of_names(plan: SyncPlan, networks: Sequence[str]) -> Iterator[str]:
    named = {sync.name for sync in plan.network}
    for name in sorted(named - set(networks)):
        yield f"`network`: expected only networks that are trained, found {name}"
    if named:
        for name in networks:
            if name not in named:
                yield f"`network`: expected all networks that are trained, {name} is missing"


def _of_facts(plan: SyncPlan, facts: Facts, work: Work | None) -> Iterator[str]:
    yield from _unknown("answers.by", plan.answers.by, facts)
    for i, sync in enumerate(plan.network):
        key = f"network[{i}]"
        unknown = list(_unknown(f"{key}.by", sync.crew, facts))
        if unknown:
            yield from unknown
            continue
        crew = sync.crew or facts.names
        if sync.shares == "pace":
            for name in crew:
                trainer = facts.of(name)
                known = sync.name in trainer.pictures_per_s
                if not known and not (work and pace(trainer, work.of(sync.name))):
                    yield f"`{key}.shares`: expected equal: no pace of {name} was measured"
        yield from _of_groups(f"{key}.meet", sync, crew, facts)
        if sync.shards == "link" and not facts.is_connected(crew):
            yield f"`{key}.shards`: expected equal: not all links of its trainers were measured"
        if sync.way == "two_tier" and not _has_sites(crew, facts):
            yield (
                f"`{key}.route`: expected ring or two_phase: two_tier needs two sites, "
                "one of them with several trainers"
            )
        if work is None:
            continue
        if sync.stage:
            yield from _of_stages(key, sync, plan, facts, work)
            continue
        needed = memory_bytes_of(work.of(sync.name), sync, crew)
        for name in crew:
            if needed > (there := facts.of(name).memory_bytes):
                yield (
                    f"`{key}.by`: {sync.name} needs about {needed / 1e9:.1f} GB, "
                    f"{name} has {there / 1e9:.1f} GB"
                )


def memory_bytes_of(network: NetworkWork, sync: NetworkSync, crew: Trainers) -> float:
    """Memory that each of a network's trainers needs; tensors with codecs of their own count."""
    codec: CodecName = "int8" if sync.codecs & {"int8", "top4"} else sync.codec
    # Means that are on their way lie beside the gradients of the next step.
    received = 1.0 if sync.when == "next_forward" else 0.0
    if isinstance(sync.meet, Neighbourhood):
        # One that was behind may be ahead before this trainer has ended its step.
        most = max(map(len, neighbours_of(crew, sync.meet.pairs).values()))
        received = most * 2 * (sync.meet.gap + 1) * RATIO[codec]
    return network.memory_bytes(
        sync.what,
        codec,
        len(crew),
        outer=isinstance(sync.owner, OuterOwner),
        masked=sync.stride > 1,
        received=received,
    )


def _of_groups(key: str, sync: NetworkSync, crew: Trainers, facts: Facts) -> Iterator[str]:
    """Groups of some that there cannot be."""
    if isinstance(sync.meet, WholeGroup):
        return
    if len(crew) == 1:
        yield f"`{key}`: expected everyone: {crew[0]} trains {sync.name} alone"
    elif isinstance(sync.meet, Neighbourhood):
        yield from _of_neighbours(key, sync.meet, crew)
    elif sync.meet.size > len(crew):
        yield f"`{key}.size`: expected at most {len(crew)} trainers, found {sync.meet.size}"
    elif isinstance(sync.meet, ShuffledGroups) and max(_counts_by_site(crew, facts)) < 2:
        yield (
            f"`{key}`: expected everyone or on_request: shuffled needs a site with several of its "
            "trainers"
        )


def _of_neighbours(key: str, meet: Neighbourhood, crew: Trainers) -> Iterator[str]:
    """Neighbours that are none of the crew or do not connect it, and too few to back each other."""
    known = ", ".join(crew)
    for one, other in meet.pairs:
        for name in (one, other):
            if name not in crew:
                yield f"`{key}.pairs`: expected trainers of the network ({known}), found {name}"
                return
        if one == other:
            yield f"`{key}.pairs`: expected two trainers in each, found {one} twice"
            return
    reached = reached_in(graph_of(crew, meet.pairs))
    if meet.pairs and (others := [name for name in crew if name not in reached]):
        yield (
            f"`{key}.pairs`: expected to connect all trainers: {', '.join(others)} cannot be "
            f"reached from {crew[0]}"
        )
        return
    graph = neighbours_of(crew, meet.pairs)
    lonely = min(crew, key=lambda name: len(graph[name]))
    if meet.backup > (least := len(graph[lonely])):
        yield (
            f"`{key}.backup`: expected at most {least}, as many neighbours as {lonely} has, "
            f"found {meet.backup}"
        )


def _of_stages(
    key: str, sync: NetworkSync, plan: SyncPlan, facts: Facts, work: Work
) -> Iterator[str]:
    """Blocks and memory: of stages, and of who uses the whole network once it is trained."""
    network = work.of(sync.name)
    if (found := sum(stage.blocks for stage in sync.stage)) != network.blocks:
        yield f"`{key}.stage`: expected {network.blocks} blocks together, found {found}"
        return
    micro_batches = sync.micro_batches or 1
    # A pipeline has its part of a batch alone.
    cuts = micro_batches * len(sync.pipelines)
    needed = {
        name: network.stage_bytes(stage.blocks, kept, cuts, is_first=i == 0)
        for i, (stage, kept) in enumerate(zip(sync.stage, sync.in_flight, strict=True))
        for name in stage.trainers
    }
    using = [facts.names[0], *(plan.answers.by or facts.names)]
    using += [name for other in plan.network if other != sync for name in other.crew or facts.names]
    for name in facts.names:
        there = facts.of(name).memory_bytes
        if needed.get(name, 0.0) > there:
            gb = f"{needed[name] / 1e9:.1f} GB, {name} has {there / 1e9:.1f} GB"
            yield f"`{key}.stage`: the stage of {name} needs about {gb}"
        elif name in using and network.size_bytes > there:
            gb = f"{network.size_bytes / 1e9:.1f} GB, {name} has {there / 1e9:.1f} GB"
            yield (
                f"`{key}.stage`: the coordinator, and who computes answers or trains a member, "
                f"need the teacher's weights whole: {gb}"
            )


def _unknown(key: str, crew: Sequence[str], facts: Facts) -> Iterator[str]:
    for name in crew:
        if name not in facts.names:
            known = ", ".join(facts.names)
            yield f"`{key}`: expected trainers of the facts ({known}), found {name}"


def _counts_by_site(crew: Sequence[str], facts: Facts) -> list[int]:
    return [len(set(site) & set(crew)) for site in facts.sites]


def _has_sites(crew: Sequence[str], facts: Facts) -> bool:
    counts = _counts_by_site(crew, facts)
    return sum(count > 0 for count in counts) > 1 and max(counts) > 1
