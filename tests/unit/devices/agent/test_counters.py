"""Counters of an agent, and when people are told."""

from devices.agent.counters import REPORT_EVERY_S, Counters

NEVER = float("inf")


def test_what_is_fine_is_counted_and_not_reported() -> None:
    counters = Counters()
    for outcome in ("answered", "answered", "renewed"):
        counters.count(outcome)
    counters.count_rejected({})
    assert (counters.counts["answered"], counters.counts["renewed"]) == (2, 1)
    assert counters.due_s == NEVER
    assert counters.report(1e9) == ""


def test_the_first_is_reported_at_once_and_others_together() -> None:
    counters = Counters()
    counters.count("too_late")
    assert counters.due_s <= 0.0
    assert counters.report(0.0) == "not answered: 1 too_late"
    assert counters.due_s == NEVER
    counters.count("too_late")
    counters.count_rejected({"unknown key": 2})
    assert counters.due_s == REPORT_EVERY_S
    assert counters.report(REPORT_EVERY_S - 1) == ""
    assert counters.report(REPORT_EVERY_S) == "not answered: 1 too_late, 2 unknown key"
    assert counters.counts["too_late"] == 2
    assert counters.due_s == NEVER
