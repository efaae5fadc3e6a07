"""Decisions about a gateway's workers: when another starts, and what is said of it."""

import itertools

from mdp.gateway.workers import FIRST_PAUSE_S, LIVED_S, LONGEST_PAUSE_S, pause_s, why_it_ended


def test_pauses_grow_while_workers_die_young() -> None:
    pauses = [*itertools.accumulate(range(8), lambda former, _: pause_s(0.1, former), initial=0.0)]
    assert pauses[1] == FIRST_PAUSE_S
    doubled = [min(2 * pause, LONGEST_PAUSE_S) for pause in pauses[1:-1]]
    assert pauses[2:] == doubled
    assert pauses[-1] == LONGEST_PAUSE_S
    assert pause_s(LIVED_S, LONGEST_PAUSE_S) == 0.0


def test_ends_in_words() -> None:
    assert why_it_ended(-9) == "signal 9"
    assert why_it_ended(1) == "exit code 1"
    assert why_it_ended(None) == "it was ended, as it did not answer"
