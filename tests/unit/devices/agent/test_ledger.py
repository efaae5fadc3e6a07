"""What is counted, and when people are told."""

from devices.agent.counters import REPORT_EVERY_S, Ledger

NEVER = float("inf")


def test_what_is_fine_is_counted_and_not_reported() -> None:
    ledger = Ledger()
    for outcome in ("answered", "answered", "renewed"):
        ledger.count(outcome)
    ledger.turned_away({})
    assert (ledger.counts["answered"], ledger.counts["renewed"]) == (2, 1)
    assert ledger.due_s == NEVER
    assert ledger.report(1e9) == ""


def test_the_first_is_reported_at_once_and_others_together() -> None:
    ledger = Ledger()
    ledger.count("too_late")
    assert ledger.due_s <= 0.0
    assert ledger.report(0.0) == "not answered: 1 too_late"
    assert ledger.due_s == NEVER
    ledger.count("too_late")
    ledger.turned_away({"unknown key": 2})
    assert ledger.due_s == REPORT_EVERY_S
    assert ledger.report(REPORT_EVERY_S - 1) == ""
    assert ledger.report(REPORT_EVERY_S) == "not answered: 1 too_late, 2 unknown key"
    assert ledger.counts["too_late"] == 2
    assert ledger.due_s == NEVER
