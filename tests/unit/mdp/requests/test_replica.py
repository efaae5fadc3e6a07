"""Observations of one replica, and what it costs to ask it."""

import math

from mdp.requests.replicas import ObservedReplica


def ask_and_answer(replica: ObservedReplica, turn: int, took_s: float) -> None:
    replica.on_request(0.0, turn)
    replica.load -= 1
    replica.took(took_s, took_s)


def test_the_longer_ago_it_was_asked_before_the_more_its_newest_answer_tells() -> None:
    soon, late = ObservedReplica(seen_s=0.0), ObservedReplica(seen_s=0.0)
    for replica, turn in ((soon, 2), (late, 1000)):
        ask_and_answer(replica, 1, 0.010)
        ask_and_answer(replica, turn, 0.030)
    assert math.isclose(soon.usual_s, 0.014)
    assert math.isclose(late.usual_s, 0.030, rel_tol=0.01)


def test_what_is_known_of_it_fades_while_others_are_asked() -> None:
    replica = ObservedReplica(seen_s=0.0)
    assert replica.cost_s(7, 0.0, 0) == 0.0
    ask_and_answer(replica, 1, 0.100)
    costs = [replica.cost_s(turn, 1.0, 0) for turn in (1, 50, 500)]
    assert costs[0] == 0.100
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < 0.001


def test_it_costs_what_it_has_owed_for_so_long_unless_it_was_heard_of() -> None:
    replica = ObservedReplica(seen_s=0.0)
    ask_and_answer(replica, 1, 0.010)
    replica.on_request(5.0, 2)
    assert math.isclose(replica.cost_s(2, 6.0, 0), 2 * 1.0)
    replica.seen_s = 5.9
    assert math.isclose(replica.cost_s(2, 6.0, 0), 2 * 0.1)
    replica.on_request(6.0, None)
    assert math.isclose(replica.cost_s(2, 6.0, 0), 3 * 0.010)
