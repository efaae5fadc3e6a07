"""The published score of groups, and the table of links."""

import numpy as np
import pytest
from msgspec.structs import replace

from benchmarks.crew.assignment import published_score
from benchmarks.crew.links import facts, row
from benchmarks.crew.net import SIZE, TRAINERS, plans
from benchmarks.crew.tune import ROUND_STEPS, WORK, case_of, compare, gives_weights_of_one
from benchmarks.harness.results import read_result
from partitioner.crew.planning.assign import search
from partitioner.crew.planning.syncplan import NetworkSync, SyncPlan
from partitioner.crew.planning.tuning import Tried, to_tune, trials_of


def test_the_published_score_of_two_sites() -> None:
    same = np.equal.outer([0, 0, 1, 1], [0, 0, 1, 1])
    late, rate = np.where(same, 0.001, 0.020), np.where(same, 1e9, 20e6) / 8
    score = published_score(late, rate, gradients=23e6, activations=2e6)
    assert score((0, 0, 1, 1)) == pytest.approx((1.826,))
    assert score((0, 1, 0, 1)) == pytest.approx((9.274,), rel=1e-3)
    assert search([(0, 1, 0, 1)], score, seed=0) in ((0, 0, 1, 1), (1, 1, 0, 0))


def test_the_table_of_links_is_that_of_the_planner() -> None:
    known = {(one["network"], one["gflops"]): one for one in read_result("crew-links")["rows"]}
    assert row("96 x 3 at 32 px", 110.0) == known["96 x 3 at 32 px", 110.0]


def test_candidates_are_trained_as_the_plans_made_by_hand() -> None:
    known = facts(27.0, 10.0, TRAINERS)
    paced = tuple(replace(t, pictures_per_s={"member-0": 10.0}) for t in known.trainer)
    known = replace(known, trainer=paced)
    by_hand = {(case.how, case.route, case.codec, case.steps, case.every): case for case in plans()}
    trials = trials_of(to_tune(SyncPlan(), known, WORK, "any", most=1000))
    compared = set[str]()
    for sync in trials:
        case = case_of("tuned", sync, known)
        twin = by_hand.get((case.how, case.route, case.codec, case.steps, case.every))
        if twin is not None and case.how == "rounds":
            assert replace(case, name=twin.name, uplink=twin.uplink) == twin
            compared.add(twin.name)
        assert case.steps == (ROUND_STEPS if sync.what == "parameters" else 6)
        assert case.how == "gradients" or case.every == ROUND_STEPS * WORK.networks[0].batch
    # Those of 16 steps; two tiers need sites, which these facts have not.
    assert len(compared) == 4
    assert {sync.what for sync in trials} == {"gradients", "parameters"}
    assert WORK.networks[0].size_bytes == SIZE


def test_plans_made_by_hand_that_give_the_weights_of_one_process() -> None:
    assert len(plans()) == 16
    exact = [case.name for case in plans() if gives_weights_of_one(case)]
    assert exact == [
        "gradients, ring, fp32, 1 buckets", "gradients, ring, fp32, 4 buckets",
        "gradients, two_phase, fp32, 4 buckets",
    ]  # fmt: skip


def test_what_was_kept_is_compared_with_the_best_that_was_allowed() -> None:
    took = {case.name: 2.0 for case in plans()}
    took |= {
        "parameters, two_phase, int8, every 16 steps": 0.5,
        "gradients, ring, fp32, 4 buckets": 1,
    }
    took |= {"tuned, any": 0.4, "tuned, exact": 1.25}
    sync = NetworkSync(name="member-0", bucket_bytes=2**20)
    one = Tried(networks=("member-0",), predicted_s=1, measured_s=1.1, kept=True, sync=sync)
    rows = compare({"any": one, "exact": one}, took)
    assert [(row["best"], row["pace"]) for row in rows] == [
        ("parameters, two_phase, int8, every 16 steps", 1.25),
        ("gradients, ring, fp32, 4 buckets", 0.8),
    ]
    assert rows[0]["words"] == "gradients fp32, ring, buckets of 1 MiB"
