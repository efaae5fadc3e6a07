"""Plans of training together in the order of their predicted seconds, and the refusal. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from mdp.errors import PlanRefused
from partitioner.crew.planning.assign import EXACT, best_crew, side_by_side
from partitioner.crew.planning.costs import Chain, CrewJob, Span, makespan_s, timeline
from partitioner.crew.planning.facts import ANSWERS, Facts
from partitioner.crew.planning.methods import WORTH, Allowed, Method, Methods
from partitioner.crew.planning.syncplan import Answers, SyncPlan, contradictions, is_exact_plan
from partitioner.crew.planning.work import NetworkWork, Work

#: A plan has to be this much quicker than the quickest trainer alone.
LEAST_SPEED_UP = 1.1


@dataclass(frozen=True, slots=True)
class Proposal:
    """A plan with its predicted schedule."""

    plan: SyncPlan
    #: In the order of the work.
    methods: tuple[Method, ...]
    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """From the start to the end of the last network."""
        return makespan_s(self.spans)

    @property
    def trainers(self) -> frozenset[str]:
        """The trainers that take part."""
        return frozenset(span.trainer for span in self.spans)

    @property
    def words(self) -> str:
        """Its trainers and its chain."""
        names = sorted(self.trainers)
        if len(names) == 1:
            return f"{names[0]} alone"
        return f"{', '.join(names[:-1])} and {names[-1]} ({self.plan.chain})"


def propose(
    facts: Facts,
    work: Work,
    *,
    allowed: Allowed = "recorded",
    chains: Sequence[Chain] = ("strict", "star"),
    seed: int = 0,
) -> list[Proposal]:
    """Plans, the quickest first; of equals those with fewer trainers.

    The best trainer alone, if one can do it, and everybody in one crew that averages gradients are
    among them. Empty where no trainers together can do the work. With `allowed` = "exact", plans
    that do not give the weights of one process are left out.
    """
    maker = _Maker(facts, work, Methods(facts, allowed), seed)
    exactly = _Maker(facts, work, Methods(facts, "exact"), seed)
    found = [maker.alone(name) for name in facts.names]
    alone = min((p for p in found if p is not None), key=_rank, default=None)
    plans = [alone, exactly.together(facts.names), exactly.chain("strict")]
    plans += [maker.chain(chain) for chain in chains]
    different: dict[tuple[object, ...], Proposal] = {}
    for proposal in plans:
        if proposal is not None and (allowed != "exact" or is_exact_plan(proposal.plan)):
            plan = proposal.plan
            different.setdefault((plan.chain, plan.network, plan.answers), proposal)
    return sorted(different.values(), key=_rank)


def predict(plan: SyncPlan, facts: Facts, work: Work) -> Proposal | None:
    """A given plan, without contradictions, with its schedule; None where one is not predictable.

    That is: it needs a pace or a line that was not measured, or a round shorter than four steps.
    """
    methods = Methods(facts, "any")
    if plan.answers.keep is not None and work.answers is not None:
        sent = 2 * plan.answers.keep + 1
        work = replace(work, answers=replace(work.answers, numbers=sent))
    found = {n.name: methods.predict(n, plan.of(n.name)) for n in work.networks}
    proposal = _proposal(found, facts, work, plan.chain, plan.answers.by)
    return proposal and replace(proposal, plan=plan)


def _rank(proposal: Proposal) -> tuple[float, int]:
    return proposal.seconds, len(proposal.trainers)


def quickest_alone(proposals: Sequence[Proposal]) -> Proposal | None:
    """The quickest of one trainer, if any."""
    alone = [proposal for proposal in proposals if len(proposal.trainers) == 1]
    return min(alone, key=_rank, default=None)


def choose(proposals: Sequence[Proposal], facts: Facts, work: Work) -> Proposal:
    """The quickest plan whose trainers are each worth it.

    Raises PlanRefused, with the reason and what to do instead.
    """
    if not proposals:
        if lacking := _lacking_memory(facts, work):
            raise PlanRefused(f"no plan: {lacking}")
        raise PlanRefused(
            "no plan: no trainers together have the memory, the measured paces and the measured "
            "lines for every network"
        )
    best = min(proposals, key=lambda p: p.seconds * WORTH ** (len(p.trainers) - 1))
    alone = quickest_alone(proposals)
    if reason := reason_to_refuse(best, alone, facts, work):
        raise PlanRefused(reason)
    return best


def _lacking_memory(facts: Facts, work: Work) -> str:
    """The memory that a teacher lacks which fits on no crew whole; empty where that is not it."""
    methods = Methods(facts)
    for network in work.networks:
        if network.name == "teacher":
            fitting = partial(_fits_or_not, methods, network)
            if fitting("", best_crew("teacher", facts.names, fitting)):
                return methods.lacking_memory(network)
    return ""


def _fits_or_not(methods: Methods, network: NetworkWork, _: str, crew: tuple[str, ...]) -> float:
    """Seconds for a choice of crews: infinite where a crew has no method for a network."""
    return 0.0 if methods.best(network, crew) else math.inf


def reason_to_refuse(proposal: Proposal, alone: Proposal | None, facts: Facts, work: Work) -> str:
    """The reason to prefer the quickest trainer alone to a plan; empty where there is none."""
    if alone is None or alone.seconds >= LEAST_SPEED_UP * proposal.seconds:
        return ""
    name = next(iter(alone.trainers))
    needed = f"a plan has to be {LEAST_SPEED_UP - 1:.0%} quicker"
    if len(proposal.trainers) == 1:
        said = f"no plan of several trainers is quicker than {proposal.words}"
    else:
        said = (
            f"{proposal.words} would take {proposal.seconds:,.0f} s, "
            f"{alone.words} {alone.seconds:,.0f} s; {needed}"
        )
    return f"{said}: {_what_hinders(name, facts, work)}; train on {alone.words}"


def _what_hinders(name: str, facts: Facts, work: Work) -> str:
    """Slow trainers, or slow lines, for the network that takes longest."""
    methods = Methods(facts, "any")
    network = max(work.networks, key=lambda n: n.all_pictures / _rate(methods.best(n, (name,))))
    own = _rate(methods.best(network, (name,)))
    others = [other for other in facts.names if other != name]
    if not others:
        return "there is no other trainer"
    paces = {other: _rate(methods.best(network, (other,))) for other in others}
    if sum(paces.values()) < (LEAST_SPEED_UP - 1) * own:
        return f"all others have {sum(paces.values()) / own:.0%} of its pace for {network.name}"
    second = max(paces, key=lambda other: paces[other])
    line = methods.links.lines.get((name, second))
    if line is None:
        return f"no line between it and {second} was measured"
    return (
        f"means of {network.name} ({network.size_bytes / 1e6:,.0f} MB) over "
        f"{line[1] * 8 / 1e6:,.0f} Mbit/s to {second} take what further trainers save"
    )


def _rate(method: Method | None) -> float:
    return method.pictures_per_s if method else 1e-9


class _Maker:
    """Proposals of one set of methods."""

    def __init__(self, facts: Facts, work: Work, methods: Methods, seed: int) -> None:
        self._facts, self._work, self._seed = facts, work, seed

        self._places = {name: i for i, name in enumerate(facts.names)}

        @cache
        def best(name: str, crew: tuple[str, ...]) -> Method | None:
            return methods.best(work.of(name), crew)

        @cache
        def in_stages(name: str) -> Method | None:
            return methods.in_stages(work.of(name))

        self._best, self._in_stages = best, in_stages
        self._hand_in_s = methods.hand_in_s

    def _seconds(self, name: str, crew: tuple[str, ...]) -> float:
        """Seconds of training and sending the weights, and what trainers have to be worth."""
        method, network = self._best(name, self._in_order(crew)), self._work.of(name)
        if method is None:
            return math.inf
        seconds = network.all_pictures / method.pictures_per_s + self._hand_in_s(
            network, method.sync
        )
        return seconds * WORTH ** (len(crew) - 1)

    def _in_order(self, crew: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(sorted(crew, key=self._places.__getitem__))

    def alone(self, name: str) -> Proposal | None:
        """Everything on one trainer."""
        crew = (name,)
        return self._proposal(self._all(crew), answering=crew)

    def together(self, crew: tuple[str, ...]) -> Proposal | None:
        """Every network on the same crew."""
        return self._proposal(self._all(crew))

    def _all(self, crew: tuple[str, ...]) -> dict[str, Method | None]:
        return {network.name: self._best(network.name, crew) for network in self._work.networks}

    def _proposal(
        self,
        methods: Mapping[str, Method | None],
        chain: Chain = "strict",
        answering: tuple[str, ...] = (),
    ) -> Proposal | None:
        return _proposal(methods, self._facts, self._work, chain, answering=answering)

    def chain(self, chain: Chain) -> Proposal | None:
        """The best crews for a chain."""
        names = self._facts.names
        members = [n.name for n in self._work.networks if n.name != "teacher"]
        at_once = members[1:] if chain == "star" else []
        by_site = names
        if len(names) > EXACT:
            by_site = tuple(name for site in self._facts.sites for name in site)
        found = side_by_side(at_once, by_site, self._seconds, self._seed)
        methods: dict[str, Method | None] = {}
        for network in self._work.networks:
            name = network.name
            crew = found.get(name) or best_crew(name, names, self._seconds)
            methods[name] = self._best(name, self._in_order(crew)) or self._whole_or_in_stages(
                network
            )
        return self._proposal(methods, chain)

    def _whole_or_in_stages(self, network: NetworkWork) -> Method | None:
        return self._in_stages(network.name) if network.name == "teacher" else None


def _proposal(
    methods: Mapping[str, Method | None],
    facts: Facts,
    work: Work,
    chain: Chain = "strict",
    answering: tuple[str, ...] = (),
) -> Proposal | None:
    """A plan with its schedule; None where a network has no method, or nobody answers.

    That includes no measured line to the coordinator. Frozen passes are of `answering`, or of all;
    a trainer alone is its own coordinator.
    """
    jobs: list[CrewJob] = []
    predicting = Methods(facts)
    crews = [method.sync.crew or facts.names for method in methods.values() if method]
    several = len(set(answering).union(*crews)) > 1
    chosen: list[Method] = []
    for network in work.networks:
        method = methods[network.name]
        if method is None:
            return None
        chosen.append(method)
        crew = method.sync.crew or facts.names
        sending_s = predicting.hand_in_s(network, method.sync) if several else 0.0
        if sending_s == math.inf:
            return None
        jobs.append(
            CrewJob(network.name, crew, network.all_pictures / method.pictures_per_s + sending_s)
        )
    by: tuple[str, ...] = ()
    if work.answers is not None:
        # Who answers has the whole of a teacher that was trained in stages.
        whole = max((work.of(m.sync.name).size_bytes for m in chosen if m.sync.stage), default=0.0)
        names = [n for n in answering or facts.names if facts.of(n).memory_bytes >= whole]
        coordinator = names[0] if len(names) == 1 else facts.names[0]
        by, rate = predicting.answers(work.answers, names, coordinator)
        if not by:
            return None
        place = sum(job.name == "teacher" for job in jobs)
        jobs.insert(place, CrewJob(ANSWERS, by, work.answers.pictures / rate))
        for passes in work.outputs[: 1 if chain == "star" else None]:
            _, rate = Methods(facts).answers(passes, by, coordinator)
            if not rate:
                return None
            place = [job.name for job in jobs].index(passes.network) + 1
            seconds = passes.pictures / rate
            jobs.insert(place, CrewJob(f"outputs of {passes.network}", by, seconds))
    plan = SyncPlan(
        facts=facts.digest,
        chain=chain,
        answers=Answers(by=by),
        network=tuple(method.sync for method in chosen),
    )
    if any(method.sync.stage for method in chosen) and contradictions(plan, facts, work):
        return None  # memory for the whole once it is trained
    return Proposal(plan, tuple(chosen), tuple(timeline(jobs, chain)))
