"""Trials: what is tried, what was measured, and what is kept."""

from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from partitioner.crew.coordinator.schedule import LocalSgdSchedule, SynchronousSchedule
from partitioner.crew.messages import Done, Meet, Ready, Waiting
from partitioner.crew.planning.facts import Facts
from partitioner.crew.planning.methods import Methods
from partitioner.crew.planning.syncplan import (
    Answers,
    NetworkSync,
    ShuffledGroups,
    Stage,
    SyncPlan,
    contradictions,
    is_exact,
)
from partitioner.crew.planning.tuning import (
    TIMED,
    TRIALS,
    WARM_UP,
    Alike,
    RoundTime,
    StepTime,
    SyncCandidate,
    Tried,
    candidates,
    judge,
    quickest,
    shortlist,
    step_s,
    to_tune,
    trial_jobs,
    trial_schedule,
    trials_of,
    tuned_plan,
)
from partitioner.crew.planning.work import NetworkWork, Work
from tests.unit.partitioner.crew.planning.fleets import three, two_sites

NAMES = ("coordinator", "tower", "nuc")
SITES = NetworkWork(name="member-0", size_bytes=23e6, pictures=50_000, epochs=1)


def network(name: str, size_bytes: float = 23e6, epochs: int = 20) -> NetworkWork:
    return NetworkWork(name=name, size_bytes=size_bytes, pictures=50_000, epochs=epochs)


def test_measuring_twelve_regrets_a_twentieth_of_trusting_predictions() -> None:
    """500 fleets of 40 candidates whose predictions are wrong by 15 %, measurements by 3 %."""
    random = np.random.default_rng(1)
    regrets: dict[str, list[float]] = {"predicted": [], "tried": [], "random": []}
    for _ in range(500):
        true = np.exp(random.normal(0, 0.5, 40))
        predicted = true * np.exp(random.normal(0, 0.15, 40))
        told = true * np.exp(random.normal(0, 0.03, 40))
        found = [
            SyncCandidate(NetworkSync(name="member-0", bucket_bytes=1 + i), float(seconds))
            for i, seconds in enumerate(predicted)
        ]

        def regret(of: int, true: np.ndarray = true) -> float:
            return float(true[of] / true.min() - 1)

        def keep(
            some: list[SyncCandidate],
            told: np.ndarray = told,
            regret: Callable[[int], float] = regret,
        ) -> float:
            places = [(one.sync.bucket_bytes or 0) - 1 for one in some]
            return regret(places[quickest([float(told[place]) for place in places])])

        regrets["predicted"].append(keep(shortlist(found, 1)))
        regrets["tried"].append(keep(shortlist(found)))
        regrets["random"].append(keep([found[i] for i in random.permutation(40)[:TRIALS]]))
    means = {name: 100 * float(np.mean(some)) for name, some in regrets.items()}
    highest = {name: 100 * float(np.quantile(some, 0.95)) for name, some in regrets.items()}
    assert means["predicted"] == pytest.approx(5.6, abs=1.5)
    assert highest["predicted"] == pytest.approx(32, abs=7)
    assert means["tried"] == pytest.approx(0.2, abs=0.1)
    assert highest["tried"] == pytest.approx(1.0, abs=0.8)
    assert means["random"] == pytest.approx(37, abs=6)
    assert highest["random"] == pytest.approx(131, abs=20)


@pytest.mark.parametrize(("facts", "by"), [(three(), ("coordinator", "nuc")), (two_sites(), ())])
def test_candidates_are_legal_and_differ(facts: Facts, by: tuple[str, ...]) -> None:
    base = NetworkSync(name="member-0", by=by)
    found = list(candidates(Methods(facts, "any"), SITES, base))
    assert len({one.sync for one in found}) == len(found) > TRIALS
    work = Work(networks=(SITES,))
    for one in found:
        assert contradictions(SyncPlan(network=(one.sync,)), facts, work) == []
        assert one.sync.by == by
    ways = {(one.sync.what, one.sync.codec, one.sync.route) for one in found}
    assert {("gradients", "fp32", "ring"), ("parameters", "int8", "two_phase")} <= ways
    assert (("gradients", "fp32", "two_tier") in ways) == (facts != three())
    # A network of 23 MB is one bucket from 25 MiB on.
    sizes = {one.sync.bucket_bytes for one in found if one.sync.what == "gradients"}
    assert sizes == {2**20 * megabytes for megabytes in (1, 2, 5, 10, 25)}
    # Pairs have equal shards, and equal paces equal shares.
    assert {one.sync.shards for one in found} == {"equal"}
    shares = {one.sync.shares for one in found if one.sync.what == "gradients"}
    assert shares == ({"pace", "equal"} if by else {"pace"})
    short = shortlist(found)
    assert len(short) == TRIALS
    assert short == sorted(found, key=lambda one: one.predicted_s)[:TRIALS]


def test_what_is_asked_for_limits_what_is_tried() -> None:
    facts, plan = three(), SyncPlan(network=(NetworkSync(name="member-0"),))
    work = Work(networks=(network("member-0"),))
    exact = trials_of(to_tune(plan, facts, work, "exact"))
    assert exact
    assert all(map(is_exact, exact))
    every = candidates(Methods(facts), work.networks[0], plan.network[0])
    assert {one.sync.shards for one in every} == {"equal", "link"}
    assert {sync.what for sync in trials_of(to_tune(plan, facts, work))} >= {"parameters"}
    # A step size that only parameters have is kept, and leaves these.
    plan = SyncPlan(network=(NetworkSync(name="member-0", what="parameters", step_size="auto"),))
    (rounds,) = to_tune(plan, facts, work)
    assert {(c.sync.what, c.sync.step_size) for c in rounds.candidates} == {("parameters", "auto")}
    assert to_tune(plan, facts, work, "exact") == []


def test_an_entry_s_own_way_is_tried_whatever_is_predicted_of_it() -> None:
    """A codec that is never proposed, and buckets so small that twelve ways are quicker."""
    facts, work = three(), Work(networks=(network("member-0"),))
    for own in (
        NetworkSync(name="member-0", what="parameters", codec="fp16", every_pictures=2048),
        NetworkSync(name="member-0", bucket_bytes=4096),
    ):
        (alike,) = to_tune(SyncPlan(network=(own,)), facts, work)
        assert len(alike.candidates) == TRIALS
        assert own in [one.sync for one in alike.candidates]
        seconds = [one.predicted_s for one in alike.candidates]
        assert seconds == sorted(seconds)


def test_means_in_the_next_forward_pass_are_tried_beside_those_at_once() -> None:
    facts, work = three(), Work(networks=(network("member-0"),))
    own = NetworkSync(name="member-0", when="next_forward", shares="pace", bucket_bytes=25 * 2**20)
    (alike,) = to_tune(SyncPlan(network=(own,)), facts, work, "exact")
    assert {one.sync.when for one in alike.candidates} == {"at_once", "next_forward"}
    halved = next(one.sync for one in alike.candidates if one.sync.when == "next_forward")
    tried = Tried(
        networks=("member-0",), predicted_s=1.0, measured_s=1.0, kept=True, sync=halved
    )  # fmt: skip
    assert "in the next forward pass" in tried.words
    assert tuned_plan(SyncPlan(network=(own,)), [tried], facts, work).of("member-0") == halved
    # What no candidate has is left as it is.
    background = replace(own, what="parameters", when="background", shares="equal",
                         bucket_bytes=None)  # fmt: skip
    assert to_tune(SyncPlan(network=(background,)), facts, work) == []


def test_networks_alike_are_tried_once_and_others_left() -> None:
    facts = three()
    given = (
        NetworkSync(name="teacher", micro_batches=2,
                    stage=(Stage(blocks=1, by="coordinator"), Stage(blocks=1, by="nuc"))),
        NetworkSync(name="member-0", by=NAMES),
        NetworkSync(name="member-1", by=NAMES),
        NetworkSync(name="member-2", by=("coordinator", "nuc")),
        NetworkSync(name="member-3", by=("coordinator",)),
        NetworkSync(name="member-4", by=NAMES, what="parameters", meet=ShuffledGroups()),
    )  # fmt: skip
    works = tuple(network(sync.name, epochs=20 - i) for i, sync in enumerate(given))
    paces = {sync.name: 100.0 for sync in given}
    facts = replace(
        facts, trainer=tuple(replace(one, pictures_per_s=paces) for one in facts.trainer)
    )
    plan = SyncPlan(chain="star", answers=Answers(by=("nuc",)), network=given)
    found = to_tune(plan, facts, Work(networks=works))
    assert [(one.names, one.crew) for one in found] == [
        (("member-0", "member-1"), NAMES), (("member-2",), ("coordinator", "nuc")),
    ]  # fmt: skip
    told = [[StepTime(1.0 + i), StepTime(0.5)] for i in range(len(trials_of(found)))][::-1]
    kept = judge(found, told)
    after = tuned_plan(plan, kept, facts, Work(networks=works))
    assert (after.chain, after.answers, after.facts) == ("star", plan.answers, facts.digest)
    # The last of each was told to be the quickest.
    ends = [one.candidates[-1].sync for one in found]
    assert after.network == (
        given[0], ends[0], replace(ends[0], name="member-1"), ends[1], *given[4:],
    )  # fmt: skip
    assert [(one.kept, one.networks) for one in kept if one.kept] == [
        (True, one.names) for one in found
    ]
    unmeasured = replace(facts, line=())
    assert to_tune(plan, unmeasured, Work(networks=works)) == []


def test_the_empty_plan_names_its_networks_once_tuned() -> None:
    facts, work = three(), Work(networks=(network("member-0"), network("member-1", 6e6)))
    found = to_tune(SyncPlan(), facts, work, most=2)
    assert [one.names for one in found] == [("member-0",), ("member-1",)]
    kept = judge(found, [[StepTime(1.0)], [StepTime(2.0)]] * 2)
    after = tuned_plan(SyncPlan(), kept, facts, work)
    assert [sync.name for sync in after.network] == ["member-0", "member-1"]
    assert contradictions(after, facts, work) == []


def test_a_step_takes_as_long_as_its_slowest_trainer() -> None:
    sync = NetworkSync(name="member-0")
    assert step_s(sync, 64, [StepTime(0.5), StepTime(0.7), StepTime(0.6)]) == 0.7


def test_a_rounds_mean_counts_by_the_rounds_of_the_plan() -> None:
    # 100 and 50 pictures/s for 2 s, and a mean of 1 s after it: 0.4 s a batch of 60, and of a round
    # of 600 a tenth.
    sync = NetworkSync(name="member-0", what="parameters", every_pictures=600)
    parts = [RoundTime(200, 2.0, 3.0), RoundTime(100, 2.0, 2.9), RoundTime(0, 0.0, 3.0)]
    assert step_s(sync, 60, parts) == pytest.approx(0.4 + 0.1)
    # One that ended a second earlier waits for the other as long.
    parts = [RoundTime(200, 2.0, 3.0), RoundTime(50, 1.0, 3.0)]
    assert step_s(sync, 60, parts) == pytest.approx(0.4 + (3 - 250 / 150) / 10)


def test_of_equals_the_one_predicted_to_be_quicker_is_kept() -> None:
    some = (
        SyncCandidate(NetworkSync(name="member-0", bucket_bytes=1), 1.0),
        SyncCandidate(NetworkSync(name="member-0", bucket_bytes=2), 2.0),
    )
    alike = [Alike(("member-0",), network("member-0"), NAMES, some)]
    kept = judge(alike, [[StepTime(0.123456)], [StepTime(0.123456)]])
    assert [one.kept for one in kept] == [True, False]
    assert [one.measured_s for one in kept] == [0.1235] * 2
    assert kept[0].words == "gradients fp32, ring, buckets of 9.53674e-07 MiB"


def test_rows_say_what_was_chosen() -> None:
    sync = NetworkSync(
        name="member-0", what="parameters", codec="int8", route="two_phase", shards="link",
        every_pictures=4096,
    )  # fmt: skip
    row = Tried(networks=("member-0",), predicted_s=1, measured_s=1, kept=True, sync=sync)
    assert row.words == "parameters int8, two_phase, shards by link, every 4,096 pictures"
    sync = NetworkSync(name="member-0", shares="pace", bucket_bytes=5 * 2**20)
    row = replace(row, sync=sync)
    assert row.words == "gradients fp32, ring, buckets of 5 MiB, shares by pace"


def test_trials_come_one_after_another_and_all_end_together() -> None:
    trials = [NetworkSync(name="member-0", by=("tower", "nuc")), NetworkSync(name="member-1")]
    first, second, end = trial_jobs(trials, NAMES)
    assert (first.by, second.by, end.by) == (("tower", "nuc"), NAMES, NAMES)
    assert (first.after, second.after, end.after) == ((), (first.name,), (second.name,))


def test_meetings_of_a_trial() -> None:
    assert isinstance(
        trial_schedule("trial-0", NetworkSync(name="member-0"), 64, {0, 1}, 2), SynchronousSchedule
    )
    sync = NetworkSync(name="member-0", what="parameters")
    rounds = trial_schedule("trial-0", sync, 64, {0, 1}, 2)
    assert isinstance(rounds, LocalSgdSchedule)
    assert rounds.claims.total == 2 * (WARM_UP + TIMED)
    facts: Any = {"network": "trial-0"}

    def meet(since: int, pictures: int) -> Meet:
        """The meeting of both, after which they go on."""
        found = [
            rounds.handle(Waiting(rank=k, pictures=pictures, since=since, **facts)) for k in (0, 1)
        ]
        first = next(action for action in found[-1] if isinstance(action, Meet))
        for rank in (0, 1):
            rounds.handle(Done(rank=rank, seq=first.seq, **facts))
        return first

    # All take the parameters of the first one.
    since = meet(0, 0).seq
    claims, met = count(), []
    for steps in (WARM_UP, TIMED):
        for step in range(steps):
            for rank in (0, 1):
                pictures = 32 * (step + 1)
                claimed = (next(claims),)
                actions = rounds.handle(
                    Ready(rank=rank, pictures=pictures, since=since, claims=claimed, **facts)
                )
                # Nobody takes a batch more, nor less.
                assert bool(actions) == (step == steps - 1 and rank == 1)
        met.append(meet(since, 32 * steps))
        since = met[-1].seq
    # A round of the steps before, and one of those that are timed.
    assert [one.weights for one in met] == [(32 * WARM_UP,) * 2, (32 * TIMED,) * 2]
