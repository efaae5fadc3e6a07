"""Proposals: in order, legal, with the best trainer alone, and refused where that is better."""

import dataclasses
from collections.abc import Mapping
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mdp.errors import PlanRefused
from partitioner.crew.planning.facts import Facts, Line
from partitioner.crew.planning.methods import Methods, round_pictures
from partitioner.crew.planning.propose import Proposal, choose, predict, propose, quickest_alone
from partitioner.crew.planning.syncplan import (
    Answers,
    Neighbourhood,
    NetworkSync,
    RequestedGroups,
    ShuffledGroups,
    Stage,
    SyncPlan,
    WholeGroup,
    contradictions,
    is_exact,
    is_exact_plan,
)
from partitioner.crew.planning.work import FrozenPasses, NetworkWork, Work
from tests.unit.partitioner.crew.planning.fleets import MBIT, lines, three, trainers, two_sites

TWO = Work(
    networks=(
        NetworkWork(name="member-0", size_bytes=23e6, pictures=20_000, epochs=20),
        NetworkWork(name="member-1", size_bytes=6e6, pictures=20_000, epochs=14),
    )
)


def members(count: int, size_bytes: float = 23e6) -> tuple[NetworkWork, ...]:
    return tuple(
        NetworkWork(
            name=f"member-{k}",
            size_bytes=size_bytes,
            pictures=20_000,
            epochs=14 if k else 20,
            gflop_per_picture=3.5,
        )
        for k in range(count)
    )


def fleet(gflops: Mapping[str, float], mbit: float, memory_bytes: int = 64 * 10**9) -> Facts:
    """Trainers of known arithmetic at one switch."""
    rates = dict.fromkeys(gflops, mbit * MBIT)
    named = trainers({name: {} for name in gflops}, memory_bytes, rates)
    paced = tuple(
        type(t)(name=t.name, address=t.address, memory_bytes=t.memory_bytes, gflops=gflops[t.name])
        for t in named
    )
    return Facts(trainer=paced, line=lines(rates, 0.0002))


def test_plans_come_in_order_with_the_best_trainer_alone() -> None:
    facts = three()
    found = propose(facts, TWO)
    seconds = [proposal.seconds for proposal in found]
    assert seconds == sorted(seconds)
    alone = quickest_alone(found)
    assert alone is not None
    assert alone.words == "coordinator alone"
    assert alone.seconds == pytest.approx(1311, rel=0.001)
    # Rounds of at most an eighth of an epoch: those of 4,096 pictures would take 849 s.
    assert seconds[0] == pytest.approx(911.9, rel=0.001)
    assert found[0].plan.network[0].every_pictures == 39 * 64
    assert choose(found, facts, TWO) is found[0]
    assert found[0].plan.facts == facts.digest
    assert all(contradictions(p.plan, facts, TWO) == [] for p in found)


def test_exact_plans_alone_on_demand() -> None:
    facts = three()
    found = propose(facts, TWO, allowed="exact")
    assert all(is_exact_plan(proposal.plan) for proposal in found)
    assert any(len(proposal.trainers) == 3 for proposal in found)
    assert not is_exact_plan(propose(facts, TWO)[0].plan)
    assert propose(facts, TWO, allowed="any")[0].seconds <= propose(facts, TWO)[0].seconds


def test_star_needs_no_links_while_members_are_trained() -> None:
    work = Work(networks=members(4))
    facts = fleet(dict.fromkeys("abcd", 27.0), mbit=0.1)
    best = propose(facts, work)[0]
    assert best.plan.chain == "star"
    crews = {s.by for s in best.plan.network[1:]}
    assert [len(crew) for crew in crews] == [1, 1, 1]
    alone = quickest_alone(propose(facts, work))
    assert alone is not None
    # 1 + 3 x 0.7 units in 1 + 0.7, and the last weights have to reach the coordinator.
    sending_s = 0.0002 + 23e6 / (0.85 * 0.1 * MBIT)
    assert best.seconds - sending_s == pytest.approx(alone.seconds * 1.7 / 3.1)
    assert choose(propose(facts, work), facts, work).plan == best.plan


@pytest.mark.parametrize(
    ("gflops", "mbit", "reason"),
    [
        ({"coordinator": 100.0, "nuc": 2.0}, 1000.0, "all others have 2% of its pace for member-0"),
        (
            {"coordinator": 100.0, "nuc": 60.0},
            0.5,
            r"means of member-0 \(23 MB\) over 0 Mbit/s to nuc",
        ),
        (
            {"coordinator": 100.0, "nuc": 90.0},
            1.0,
            r"member-0 .* over 1 Mbit/s to nuc take what further",
        ),
        ({"coordinator": 100.0}, 1.0, "there is no other trainer"),
    ],
)
def test_no_plan_that_is_hardly_quicker_than_one_trainer(
    gflops: dict[str, float], mbit: float, reason: str
) -> None:
    facts, work = fleet(gflops, mbit), Work(networks=members(1))
    with pytest.raises(PlanRefused, match=f"{reason}.*; train on coordinator alone"):
        choose(propose(facts, work), facts, work)


def test_a_plan_a_little_quicker_is_refused_with_both_times() -> None:
    facts, work = fleet({"coordinator": 100.0, "nuc": 9.0}, 1000), Work(networks=members(1))
    message = (
        r"coordinator and nuc \(\w+\) would take [\d,]+ s, "
        r"coordinator alone [\d,]+ s; .* 10% quicker"
    )
    with pytest.raises(PlanRefused, match=message):
        choose(propose(facts, work), facts, work)


def test_a_trainer_that_delays_each_round_is_left_out() -> None:
    facts = fleet({"coordinator": 100.0, "tower": 100.0, "board": 1.0}, 1000)
    work = Work(networks=members(1))
    assert choose(propose(facts, work), facts, work).trainers == {"coordinator", "tower"}


@pytest.mark.parametrize(("shares", "kept"), [("equal", 0.40), ("pace", 1.0)])
def test_a_given_plan_is_predicted(shares: str, kept: float) -> None:
    """One of four is three times slower, over quick lines."""
    facts = fleet({"a": 27.0, "b": 27.0, "c": 27.0, "d": 9.0}, mbit=1e6)
    work = Work(networks=members(1))
    sync = NetworkSync(name="member-0", shares=shares)  # type: ignore[arg-type]
    found = predict(SyncPlan(network=(sync,)), facts, work)
    assert found is not None
    together = sum(t.gflops or 0.0 for t in facts.trainer) / 3.5
    assert found.methods[0].pictures_per_s / together == pytest.approx(kept, abs=0.01)
    assert found.words == "a, b, c and d (strict)"


def test_rounds_that_grow_take_less_time() -> None:
    facts, work = fleet(dict.fromkeys("abcd", 27.0), mbit=20), Work(networks=members(1))
    plain = NetworkSync(
        name="member-0", what="parameters", codec="int8", every_pictures=1024, step_size="auto"
    )
    took = []
    for sync in (plain, replace(plain, period="grows")):
        found = predict(SyncPlan(network=(sync,)), facts, work)
        assert found is not None
        took.append(found.seconds)
    alone_s = 400_000 * 3.5 / 27 / 4
    # 16 steps a round: of 6,250 / 16 = 390 means, and an epoch's end each, about half are left.
    assert 0.3 < (took[1] - alone_s) / (took[0] - alone_s) < 0.6


def test_an_empty_plan_is_that_of_all() -> None:
    found = predict(SyncPlan(), three(), TWO)
    assert found is not None
    assert found.trainers == set(three().names)
    assert predict(SyncPlan(), Facts(trainer=three().trainer), TWO) is None  # no lines


def test_nobody_can() -> None:
    work = Work(networks=members(2))
    for facts in (fleet({"a": 10.0, "b": 10.0}, 100, memory_bytes=10**6), three()):
        unknown = Work(networks=(NetworkWork(name="teacher", size_bytes=1, pictures=9, epochs=1),))
        asked = unknown if facts == three() else work
        assert propose(facts, asked) == []
        with pytest.raises(PlanRefused, match="no trainers together have the memory"):
            choose([], facts, asked)


TEACHER = NetworkWork(
    name="teacher",
    size_bytes=349e6,
    pictures=5_000,
    epochs=2,
    gflop_per_picture=105.0,
    activation_bytes=175e6,
    boundary_bytes=6e5,
    blocks=12,
)


def test_a_teacher_that_fits_nowhere_whole_is_cut_into_stages() -> None:
    work = Work(networks=(TEACHER, *members(2)))
    facts = fleet({"coordinator": 200.0, "tower": 100.0, "nuc": 50.0}, 1000, memory_bytes=4 * 10**9)
    best = propose(facts, work)[0]
    stages = best.plan.network[0].stage
    assert len(stages) > 1
    assert sum(stage.blocks for stage in stages) == 12
    assert tuple(stage.in_flight for stage in stages) == best.plan.network[0].in_flight
    assert contradictions(best.plan, facts, work) == []
    assert choose([best], facts, work) is best  # nobody can alone
    roomy = fleet({"coordinator": 200.0, "tower": 100.0, "nuc": 50.0}, 1000)
    assert all(not p.plan.network[0].stage for p in propose(roomy, work))


def test_stages_keep_fewer_micro_batches_where_memory_is_small() -> None:
    """With all that never waits in flight, no stages of these fit."""
    work = Work(networks=(TEACHER, *members(1)))
    facts = fleet(
        dict.fromkeys(("coordinator", "tower", "nuc"), 100.0), 1000, memory_bytes=900 * 10**6
    )
    plan = choose(propose(facts, work), facts, work).plan
    sync = plan.network[0]
    assert contradictions(plan, facts, work) == []
    longest = replace(sync, stage=tuple(replace(stage, in_flight=None) for stage in sync.stage))
    assert sync.in_flight < longest.in_flight
    unlimited = SyncPlan(network=(longest, *plan.network[1:]))
    assert "the stage of " in "".join(contradictions(unlimited, facts, work))
    # What somebody wrote stays.
    slower = replace(sync, stage=tuple(replace(stage, in_flight=1) for stage in sync.stage))
    found = predict(SyncPlan(network=(slower, *plan.network[1:])), facts, work)
    assert found is not None
    assert found.plan.network[0].in_flight == (1,) * len(sync.stage)


@pytest.mark.parametrize(("mbit", "when"), [(1000, "at_once"), (30, "next_forward")])
def test_halves_of_means_are_proposed_where_lines_are_as_slow_as_passes(
    mbit: float, when: str
) -> None:
    """Passes of 64 pictures take 2.7 s; means of 10 MB some 0.1 s or 4 s."""
    network = NetworkWork(
        name="member-0", size_bytes=1e7, pictures=5000, epochs=1, gflop_per_picture=1.0
    )
    names = ("coordinator", "tower", "nuc")
    facts = fleet(dict.fromkeys(names, 8.0), mbit)
    best = Methods(facts, "exact").best(network, names)
    assert best is not None
    assert best.sync.when == when
    assert is_exact(best.sync)


def test_two_pipelines_share_a_batch_and_average_their_stages() -> None:
    names = ("coordinator", "tower", "nuc", "den")
    facts = fleet(dict.fromkeys(names, 100.0), 1000)
    work = Work(networks=(TEACHER, *members(1)))

    def pictures_per_s(*by: tuple[str, ...], micro_batches: int) -> float:
        stages = tuple(Stage(blocks=6, by=trainers) for trainers in by)
        sync = NetworkSync(name="teacher", micro_batches=micro_batches, stage=stages)
        plan = SyncPlan(network=(sync, NetworkSync(name="member-0", by=("coordinator",))))
        found = predict(plan, facts, work)
        assert found is not None
        return found.methods[0].pictures_per_s

    # Micro-batches of as many pictures, half as many in each of the two.
    one = pictures_per_s(("coordinator",), ("tower",), micro_batches=8)
    two = pictures_per_s(("coordinator", "nuc"), ("tower", "den"), micro_batches=4)
    passes_s = TEACHER.batch / one * (4 + 1) / (8 + 1)
    mean_s = TEACHER.batch / two - passes_s
    links = Methods(facts).links
    size_bytes = TEACHER.size_bytes / 2
    assert mean_s == pytest.approx(
        max(links.mean("ring", pair).of(size_bytes) for pair in (names[::2], names[1::2])), rel=0.1
    )


def test_as_many_pipelines_are_proposed_as_are_worth_their_trainers() -> None:
    work = Work(networks=(TEACHER, *members(1)))
    names = ("coordinator", *(f"t{i}" for i in range(5)))
    facts = fleet(dict.fromkeys(names, 100.0), 1000, memory_bytes=1500 * 10**6)
    plan = choose(propose(facts, work), facts, work).plan
    assert contradictions(plan, facts, work) == []
    assert len(plan.network[0].pipelines) == 2
    assert sorted(plan.network[0].crew) == sorted(names)
    # Over slow lines averaging takes more than the second pipeline brings.
    slow = fleet(dict.fromkeys(names, 100.0), 20, memory_bytes=1500 * 10**6)
    assert len(choose(propose(slow, work), slow, work).plan.network[0].pipelines) == 1


@pytest.mark.parametrize("boundary_bytes", [6e4, 6e6])
def test_places_in_pipelines_are_the_best_of_all(boundary_bytes: float) -> None:
    """By what lines carry, a stage's trainers are of one site, or a pipeline's."""
    network = dataclasses.replace(TEACHER, boundary_bytes=boundary_bytes, size_bytes=2e7)
    facts = two_sites()
    paces = {"a0": 10.0, "a1": 9.0, "b0": 8.0, "b1": 7.0}
    facts = Facts(
        trainer=trainers({n: {"teacher": pace} for n, pace in paces.items()}),
        line=facts.line,
        trunk=facts.trunk,
    )
    methods = Methods(facts)
    found = methods.in_stages(network)
    assert found is not None
    sync = found.sync
    assert len(sync.pipelines) == 2

    def placed(names: tuple[str, ...]) -> float:
        stages = zip(sync.stage, (names[:2], names[2:]), strict=True)
        method = methods.predict(
            network, replace(sync, stage=tuple(replace(one, by=by) for one, by in stages))
        )
        assert method is not None
        return method.pictures_per_s

    everywhere = {names: placed(names) for names in permutations(paces)}
    assert found.pictures_per_s == pytest.approx(max(everywhere.values()))
    assert min(everywhere.values()) < 0.9 * found.pictures_per_s
    together = {frozenset(stage.trainers) for stage in sync.stage}
    of_sites = {frozenset({"a0", "a1"}), frozenset({"b0", "b1"})}
    assert (together == of_sites) == (boundary_bytes < 1e6)


def test_a_teacher_that_fits_in_no_stages_is_refused_with_its_memory() -> None:
    # With a micro-batch of 4 pictures, a block needs (4 x 349 MB + 4 x 175 MB) / 12 = 175 MB, and
    # a stage 85 MB besides: the others have two blocks each or none.
    work = Work(networks=(TEACHER, *members(1)))
    for mb, needed, has in ((600, 1.5, 0.6), (100, 2.2, 0.1)):
        facts = fleet(
            {"coordinator": 200.0, "tower": 100.0, "nuc": 50.0}, 1000, memory_bytes=mb * 10**6
        )
        assert propose(facts, work) == []
        with pytest.raises(
            PlanRefused,
            match="^no plan: teacher fits in no stages: with one micro-batch in flight at each, "
            f".* coordinator needs about {needed} GB, it has {has} GB$",
        ):
            choose([], facts, work)


def test_fewer_bytes_of_answers_are_sooner_at_the_coordinator() -> None:
    """2 Mbit/s carry 125 answers of 1,000 classes a second, and 1,923 of 32 logits of each."""
    paces = {"coordinator": 10.0, "tower": 1000.0}
    named = trainers({n: {"answers": p, "member-0": 10.0} for n, p in paces.items()})
    facts = Facts(trainer=named, line=lines(dict.fromkeys(paces, 2 * MBIT)))
    work = Work(networks=members(1), answers=FrozenPasses(pictures=10_000, numbers=1000))
    sync = NetworkSync(name="member-0", by=("coordinator",))
    for keep, rate in ((None, 135), (32, 1010)):
        found = predict(SyncPlan(answers=Answers(keep=keep), network=(sync,)), facts, work)
        assert found is not None
        passes = next(span for span in found.spans if span.what == "answers")
        assert passes.end_s == pytest.approx(10_000 / rate)


def test_frozen_passes_are_shared_out_after_the_teacher() -> None:
    paces = {"coordinator": 40.0, "tower": 20.0, "nuc": 10.0}
    named = trainers(
        {n: {"answers": p, "member-0": 10 * p, "member-1": 10 * p} for n, p in paces.items()}
    )
    facts = Facts(trainer=named, line=lines(dict.fromkeys(paces, 20 * MBIT)))
    work = Work(networks=members(1), answers=FrozenPasses(pictures=100_000, numbers=1000))
    by, rate = Methods(facts).answers(
        FrozenPasses(pictures=1, numbers=1000), facts.names, "coordinator"
    )
    assert (by, rate) == (("coordinator", "tower", "nuc"), 70)
    best = propose(facts, work)[0]
    spans = {(s.trainer, s.what): s for s in best.spans}
    assert spans["nuc", "answers"].end_s == pytest.approx(100_000 / 70)
    assert spans["coordinator", "member-0"].start_s == pytest.approx(100_000 / 70)
    assert best.plan.answers.by == ("coordinator", "tower", "nuc")
    # 20 Mbit/s carry 1,250 answers of 1,000 classes a second.
    quick = Facts(
        trainer=trainers({n: {"answers": 5000.0} for n in paces}),
        line=lines(dict.fromkeys(paces, 20 * MBIT)),
    )
    assert (
        Methods(quick).answers(FrozenPasses(pictures=1, numbers=1000), quick.names, "coordinator")[
            1
        ]
        == 6250
    )
    alone = quickest_alone(propose(facts, work))
    assert alone is not None
    assert alone.plan.answers.by == ("coordinator",)
    # A forward pass is a third of a step.
    learned = FrozenPasses(pictures=2100, numbers=10, network="member-0")
    chained = propose(facts, Work(networks=members(2), answers=work.answers, outputs=(learned,)))
    job = "outputs of member-0"
    shared = next(p for p in chained if len([s for s in p.spans if s.what == job]) == 3)
    span = next(s for s in shared.spans if s.what == job)
    assert span.end_s - span.start_s == pytest.approx(2100 / 2100)


def test_weights_of_a_crew_without_the_coordinator_are_sent_to_it() -> None:
    facts, (network,) = three(), members(1)
    methods, nuc_s = Methods(facts), 23e6 / (0.85 * 100 * MBIT)
    assert (
        methods.hand_in_s(network, NetworkSync(name="member-0", by=("nuc", "coordinator"))) == 0.0
    )
    sent = methods.hand_in_s(network, NetworkSync(name="member-0", by=("tower", "nuc")))
    assert sent == pytest.approx(nuc_s)
    away = NetworkSync(name="member-0", by=("nuc",))
    # A trainer alone is its own coordinator; without a measured line nothing is predicted.
    sole, rest = TWO.networks[0], NetworkSync(name="member-1", by=("coordinator",))
    found = predict(SyncPlan(network=(away,)), facts, Work(networks=(sole,)))
    assert found is not None
    assert found.seconds == pytest.approx(20_000 * 20 / 100)
    found = predict(SyncPlan(network=(away, rest)), facts, TWO)
    assert found is not None
    assert found.spans[0].end_s == pytest.approx(20_000 * 20 / 100 + nuc_s)
    assert predict(SyncPlan(network=(away, rest)), Facts(trainer=facts.trainer), TWO) is None


def test_sites_are_averaged_in_two_tiers() -> None:
    network = NetworkWork(name="member-0", size_bytes=4e6, pictures=50_000, epochs=1)
    method = Methods(two_sites(), "exact").best(network, two_sites().names)
    assert method is not None
    assert method.sync.way == "two_tier"


@pytest.mark.parametrize(
    ("meet", "mean_s"),
    [
        (ShuffledGroups(cross_every=1), 0.80),  # one pair crosses the trunk
        (ShuffledGroups(cross_every=4), 0.75 * 0.08 + 0.25 * 0.80),
        (ShuffledGroups(size=4, cross_every=1000), 0.08),  # no group is larger than its site
        (RequestedGroups(), 0.80),  # any two may meet
        (RequestedGroups(size=3), 4 / 3 * 0.80),  # a ring of three crosses it once each way
        (Neighbourhood(), 1.60),  # a ring has two lines over the trunk, a path one
        (Neighbourhood(pairs=(("a0", "a1"), ("a1", "b0"), ("b0", "b1"))), 0.80),
        (Neighbourhood(pairs=(("a0", "a1"), ("b0", "b1"))), 1.60),
    ],
)
def test_groups_of_some_are_predicted_by_their_worst_lines(
    meet: ShuffledGroups | RequestedGroups | Neighbourhood, mean_s: float
) -> None:
    network = NetworkWork(name="member-0", size_bytes=4e6, pictures=50_000, epochs=1)
    sync = NetworkSync(name="member-0", what="parameters", every_pictures=4096, meet=meet)
    method = Methods(two_sites(), "any").predict(network, sync)
    assert method is not None
    # Lines reach 0.85 of their rates.
    assert method.mean_s == pytest.approx(mean_s / 0.85, rel=0.02)


def test_one_left_over_makes_a_group_of_a_site_larger() -> None:
    rates = {"a": 100 * MBIT, "b": 100 * MBIT, "c": 100 * MBIT}
    facts = Facts(trainer=trainers({n: {"member-0": 100.0} for n in rates}), line=lines(rates))
    network = NetworkWork(name="member-0", size_bytes=4e6, pictures=50_000, epochs=1)
    sync = NetworkSync(name="member-0", what="parameters", meet=ShuffledGroups())
    # A ring of three sends 4 / 3 of the vector.
    assert Methods(facts, "any").mean_s(network, sync) == pytest.approx(4 / 3 * 0.32 / 0.85)


def test_the_worst_group_is_that_of_the_bytes_too() -> None:
    """A quick line with a long delay is no worse than a slow one, where megabytes are sent."""
    names = ("a", "b", "c", "d")
    found = []
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            slow = (one, other) == ("c", "d")
            rate, late_s = (10 * MBIT, 0.0) if slow else (1000 * MBIT, 0.01)
            found.append(
                Line(a=one, b=other, latency_s=late_s, bytes_per_s=rate, back_bytes_per_s=rate)
            )
    facts = Facts(trainer=trainers({n: {"member-0": 100.0} for n in names}), line=tuple(found))
    network = NetworkWork(name="member-0", size_bytes=4e6, pictures=50_000, epochs=1)
    sync = NetworkSync(name="member-0", what="parameters", meet=RequestedGroups())
    assert Methods(facts, "any").mean_s(network, sync) == pytest.approx(3.2 / 0.85)


def test_means_of_some_numbers_are_predicted_by_their_bytes() -> None:
    network = NetworkWork(name="member-0", size_bytes=4e7, pictures=64_000, epochs=1)
    plain = NetworkSync(
        name="member-0", what="parameters", every_pictures=640, codec="int8", route="two_phase"
    )
    predict_s = Methods(two_sites(), "any").predict

    def mean_s(sync: NetworkSync) -> float:
        method = predict_s(network, sync)
        assert method is not None
        return method.mean_s

    masked = replace(plain, codec="top4", mask=0.1)
    # One mean of a hundred is of every number, in int8.
    share = (0.99 * 0.1825 + 0.01 * 8.125) / 8.125
    assert mean_s(masked) == pytest.approx(share * mean_s(plain))
    assert mean_s(replace(masked, keep=1.0)) > mean_s(masked)


def test_rounds_are_long_enough_for_their_mean() -> None:
    network = NetworkWork(name="member-0", size_bytes=4e6, pictures=64_000, epochs=1)
    assert round_pictures(network, 100, 0.001) == 16 * 64
    assert round_pictures(network, 100, 2.0) == 2048  # the mean takes a tenth, in whole steps
    assert round_pictures(network, 100, 1e9) == 125 * 64  # an eighth of an epoch
    small = NetworkWork(name="member-0", size_bytes=4e6, pictures=300, epochs=1)
    assert round_pictures(small, 100, 2.0) == 64


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from([5.0, 27.0, 110.0, 500.0]), min_size=1, max_size=4),
    st.sampled_from([1.0, 20.0, 1000.0]),
    st.integers(1, 4),
)
def test_every_proposal_is_legal_and_does_all(gflops: list[float], mbit: float, count: int) -> None:
    facts = fleet({f"t{i}": rate for i, rate in enumerate(gflops)}, mbit)
    work = Work(networks=members(count))
    found = propose(facts, work, allowed="any")
    assert quickest_alone(found) is not None
    for proposal in found:
        assert contradictions(proposal.plan, facts, work) == []
        assert all(n.meet == WholeGroup() for n in proposal.plan.network)
        assert all(n.mask is None and n.codec != "top4" for n in proposal.plan.network)
        assert [s.name for s in proposal.plan.network] == [n.name for n in work.networks]
        assert {span.what for span in proposal.spans} == {n.name for n in work.networks}
        again = predict(proposal.plan, facts, work)
        assert again is not None
        assert again.plan == proposal.plan
        assert again.seconds == pytest.approx(proposal.seconds)
        assert_one_thing_at_a_time(proposal)


def assert_one_thing_at_a_time(proposal: Proposal) -> None:
    for name in proposal.trainers:
        ends = 0.0
        for span in proposal.spans:
            if span.trainer == name:
                assert span.start_s >= ends - 1e-9
                ends = span.end_s
