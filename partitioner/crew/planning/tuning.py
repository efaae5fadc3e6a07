"""Candidates that are tried with real trainers, and the quickest of them. Pure.

After AutoSync and DeAR's tuning of fusion sizes, which are one search here. Predicted seconds say
what is tried; of what was tried the measured seconds alone count, and no error is modelled.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from mdp.files import Record
from partitioner.crew.coordinator.jobs import Job
from partitioner.crew.coordinator.rounds import Period, RoundLengths
from partitioner.crew.coordinator.schedule import (
    LocalSgdSchedule,
    RoundSchedule,
    SynchronousSchedule,
)
from partitioner.crew.coordinator.shares import by_pace
from partitioner.crew.messages import Rank
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.flows import ShardSizes
from partitioner.crew.planning.methods import Allowed, Methods
from partitioner.crew.planning.syncplan import (
    BUCKET_BYTES,
    NetworkName,
    NetworkSync,
    SyncPlan,
    contradictions,
    is_exact,
)
from partitioner.crew.planning.work import NetworkWork, Work, pace

#: Most candidates of a network that are tried; steps of each that are not timed, and those that
#: are.
TRIALS, WARM_UP, TIMED = 12, 1, 5
#: Fusion sizes, in bytes.
_BUCKETS = tuple(megabytes * 2**20 for megabytes in (1, 2, 5, 10, 25, 50))
_SHARES: tuple[Literal["pace", "equal"], ...] = ("pace", "equal")
_SHARDS: tuple[ShardSizes, ...] = ("equal", "link")
#: Keys that are chosen; those which an entry may have beside them are kept.
_CHOSEN = ("what", "every_pictures", "when", "shares", "route", "shards", "codec", "bucket_bytes")
_KEPT = ("name", "by", "step_size")


class SyncCandidate(NamedTuple):
    """A way to train a network, and its predicted seconds of a step of a whole batch."""

    sync: NetworkSync
    predicted_s: float


class Alike(NamedTuple):
    """Networks of one shape and crew: what is measured of the first holds for all."""

    names: tuple[str, ...]
    network: NetworkWork
    crew: tuple[str, ...]
    #: That are tried, the least predicted seconds first.
    candidates: tuple[SyncCandidate, ...]


class StepTime(msgspec.Struct, frozen=True, tag="step"):
    """A trainer's seconds of a step that all take together: the median of those timed."""

    seconds: float


class RoundTime(msgspec.Struct, frozen=True, tag="round"):
    """A trainer's part of the round that is timed, from the mean before it to its own mean."""

    #: Its own.
    pictures: int
    #: To the end of its last step, and to that of the round.
    busy_s: float
    seconds: float


Part = StepTime | RoundTime


class Tried(Record, frozen=True, kw_only=True):
    """A candidate that was tried, with seconds of a step of a whole batch."""

    networks: tuple[NetworkName, ...]
    predicted_s: float
    measured_s: float
    kept: bool
    sync: NetworkSync

    @property
    def words(self) -> str:
        """The keys that were chosen."""
        sync = self.sync
        said: list[str] = [f"{sync.what} {sync.codec}", sync.way]
        if sync.shards == "link":
            said.append("shards by link")
        if sync.bucket_bytes is not None:
            said.append(f"buckets of {sync.bucket_bytes / 2**20:g} MiB")
        if sync.when == "next_forward":
            said.append("in the next forward pass")
        if sync.shares == "pace":
            said.append("shares by pace")
        if sync.what == "parameters":
            said.append(f"every {sync.round_pictures:,} pictures")
        return ", ".join(said)


class Tuned(Record, frozen=True, kw_only=True):
    """tuned.toml: all that was tried, beside the plan that it decided."""

    format_version: Literal[1] = 1
    #: Digest of the facts that predictions were made from.
    facts: str = ""
    tried: tuple[Tried, ...] = ()


def to_tune(
    plan: SyncPlan, facts: Facts, work: Work, allowed: Allowed = "recorded", most: int = TRIALS
) -> list[Alike]:
    """The networks of a plan that several trainers train, with at most `most` candidates each.

    An entry's own way is one of them where it can be predicted: nothing replaces it unmeasured.
    Left out are those with keys that no candidate has (stages, `meet`, `mask` and others), and
    those of which no candidate can be predicted.
    """
    methods = Methods(facts, allowed)
    found: dict[tuple[object, ...], Alike] = {}
    for network in work.networks:
        sync = plan.of(network.name)
        crew = sync.crew or facts.names
        if len(crew) == 1 or not _is_tunable(sync):
            continue
        key = (replace(sync, name="teacher"), crew, _shape(network, crew, facts))
        if key in found:
            found[key] = found[key]._replace(names=(*found[key].names, network.name))
            continue
        some = shortlist(candidates(methods, network, _base(sync, network.name)), most)
        effects = [_effect(methods, network, crew, one.sync) for one in some]
        own = _predict(methods, network, replace(sync, name=network.name))
        if own is not None and _effect(methods, network, crew, own.sync) not in effects:
            some = shortlist([*some[: most - 1], own], most)
        if some:
            found[key] = Alike((network.name,), network, crew, tuple(some))
    return list(found.values())


def _predict(methods: Methods, network: NetworkWork, sync: NetworkSync) -> SyncCandidate | None:
    """A way with its predicted seconds; None where it is not allowed or cannot be predicted."""
    if methods.allowed == "exact" and not is_exact(sync):
        return None
    alone = SyncPlan(network=(sync,))
    if contradictions(alone, methods.facts, Work(networks=(network,))):
        return None
    method = methods.predict(network, sync)
    return None if method is None else SyncCandidate(sync, network.batch / method.pictures_per_s)


def _is_tunable(sync: NetworkSync) -> bool:
    """Tell whether an entry has no keys beside those that are chosen and those that are kept."""
    plain = NetworkSync(name=sync.name)
    return sync.when != "background" and all(
        getattr(sync, key) == getattr(plain, key)
        for key in sync.__struct_fields__
        if key not in (*_CHOSEN, *_KEPT)
    )


def _base(sync: NetworkSync, name: str) -> NetworkSync:
    """The keys of an entry that are kept."""
    return NetworkSync(name=name, by=sync.by, step_size=sync.step_size)


def _shape(network: NetworkWork, crew: Sequence[str], facts: Facts) -> tuple[object, ...]:
    """Facts of a network that its candidates and their seconds follow from."""
    known = tuple(pace(facts.of(name), network) > 0 for name in crew)
    return (
        network.name == "teacher", network.start, network.size_bytes, network.pictures,
        network.batch, network.gflop_per_picture, network.activation_bytes, network.blocks, known,
    )  # fmt: skip


def candidates(
    methods: Methods, network: NetworkWork, base: NetworkSync
) -> Iterator[SyncCandidate]:
    """The ways that rules and facts allow for the crew of `base`, whose other keys they have.

    Of ways that come to the same for this network, as buckets larger than it, the first one.
    """
    crew = base.by or methods.facts.names
    seen = set[tuple[object, ...]]()
    for way in methods.candidates(network, crew):
        for variant in _variants(way):
            chosen = {key: getattr(variant, key) for key in _CHOSEN}
            sync = replace(base, **chosen)
            effect = _effect(methods, network, crew, sync)
            if effect in seen:
                continue
            seen.add(effect)
            if (found := _predict(methods, network, sync)) is not None:
                yield found


def _variants(way: NetworkSync) -> Iterator[NetworkSync]:
    """A way with each size of buckets, shares and shards that it may have."""
    shards = _SHARDS if way.way == "two_phase" else _SHARDS[:1]
    if way.what == "parameters":
        yield from (replace(way, shards=size) for size in shards)
        return
    for size, bucket_bytes, shares in product(shards, _BUCKETS, _SHARES):
        yield replace(way, shards=size, bucket_bytes=bucket_bytes, shares=shares)


def _effect(
    methods: Methods, network: NetworkWork, crew: Sequence[str], sync: NetworkSync
) -> tuple[object, ...]:
    """The part of a way that this network and crew notice."""
    paces = [pace(methods.facts.of(name), network) for name in crew]
    if sync.shares == "equal" or not any(paces):
        paces = [1.0] * len(crew)
    gradients = sync.what == "gradients"
    buckets = (
        math.ceil(network.size_bytes / (sync.bucket_bytes or BUCKET_BYTES)) if gradients else 0
    )
    pictures = tuple(by_pace(paces, network.batch)) if gradients else ()
    shards = tuple(round(share, 3) for share in methods.links.shares(crew, sync.shards))
    ways = sync.what, sync.codec, sync.way, sync.when
    return *ways, sync.every_pictures, buckets, pictures, shards


def shortlist(found: Iterable[SyncCandidate], most: int = TRIALS) -> list[SyncCandidate]:
    """The `most` candidates with the least predicted seconds, in this order."""
    return sorted(found, key=lambda candidate: candidate.predicted_s)[:most]


def trials_of(alike: Sequence[Alike]) -> list[NetworkSync]:
    """The trials of a tuning, one after another."""
    return [candidate.sync for one in alike for candidate in one.candidates]


def trial_name(number: int) -> str:
    """The job that is trial `number`, from 0."""
    return f"trial-{number}"


def trial_jobs(trials: Sequence[NetworkSync], names: Sequence[str]) -> list[Job]:
    """A job for each trial, one after another, and then one of all `names`.

    The last one begins when everybody has told its part of the trials.
    """
    jobs: list[Job] = []
    before: tuple[str, ...] = ()
    for number, sync in enumerate(trials):
        jobs.append(Job(name=trial_name(number), by=sync.crew or tuple(names), after=before))
        before = (jobs[-1].name,)
    return [*jobs, Job(name="end", by=tuple(names), after=before)]


def trial_schedule(
    job: str, sync: NetworkSync, batch: int, members: set[Rank], trainers: int
) -> RoundSchedule:
    """The meetings of a trial: every step, or after the steps before those timed, and after these.

    batch: pictures of a step of all `trainers`, of whom each takes a part.
    """
    if sync.what == "gradients":
        return SynchronousSchedule(job, 1, expected=members)
    claims = (WARM_UP + TIMED) * trainers
    return LocalSgdSchedule(
        job, RoundLengths(batch, claims, 1, period=_trial_period(batch, trainers)), members
    )


def _trial_period(batch: int, trainers: int) -> Period:
    # The batches claimed are those of the round that goes on, too.
    return lambda claimed: batch * (WARM_UP if claimed <= WARM_UP * trainers else TIMED)


def step_s(sync: NetworkSync, batch: int, parts: Sequence[Part]) -> float:
    """Measured seconds of a step of a whole batch, from the parts of all trainers of a trial.

    A round's mean, with the waiting for it, counts by a step's share of a round of the plan.
    """
    steps = [part for part in parts if isinstance(part, StepTime)]
    if steps:
        return max(part.seconds for part in steps)
    rounds = [part for part in parts if isinstance(part, RoundTime) and part.pictures]
    together = sum(part.pictures / part.busy_s for part in rounds)
    training_s = sum(part.pictures for part in rounds) / together
    mean_s = max(0.0, max(part.seconds for part in rounds) - training_s)
    return batch / together + mean_s * batch / sync.round_pictures


def judge(alike: Sequence[Alike], parts: Sequence[Sequence[Part]]) -> list[Tried]:
    """All that was tried, the quickest of each network kept; `parts` are those of each trial."""
    found: list[Tried] = []
    told = iter(parts)
    for one in alike:
        seconds = [step_s(c.sync, one.network.batch, next(told)) for c in one.candidates]
        best = quickest(seconds)
        found += [
            Tried(
                networks=one.names,
                predicted_s=_round(candidate.predicted_s),
                measured_s=_round(took_s),
                kept=number == best,
                sync=candidate.sync,
            )
            for number, (candidate, took_s) in enumerate(zip(one.candidates, seconds, strict=True))
        ]
    return found


def quickest(seconds: Sequence[float]) -> int:
    """The place of the least seconds; of equals the first, which was predicted to be quicker."""
    return min(range(len(seconds)), key=seconds.__getitem__)


def tuned_plan(plan: SyncPlan, tried: Sequence[Tried], facts: Facts, work: Work) -> SyncPlan:
    """The plan with what was kept of the trials; other networks, crews and answers as they are."""
    kept: Mapping[str, NetworkSync] = {
        name: replace(one.sync, name=name) for one in tried if one.kept for name in one.networks
    }
    networks = tuple(kept.get(n.name, plan.of(n.name)) for n in work.networks)
    return replace(plan, facts=facts.digest, network=networks)


def _round(seconds: float) -> float:
    """Round to four digits, as the file is read by people."""
    return float(f"{seconds:.4g}")
