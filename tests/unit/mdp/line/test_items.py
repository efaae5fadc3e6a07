"""Items between triggers and looks: each ends once, in order, in time, never sure too soon."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdp.line.items import (
    LEAST_LOOK_S,
    DueLook,
    ItemBook,
    ItemOutcome,
    ItemTiming,
    RecentIds,
    StateBook,
    Trigger,
)
from mdp.line.rules import Judgement

TIMING = ItemTiming(equal=2, every_s=0.1, delay_s=0.05, verdict_s=1.0)


def verdict(label: str = "nut", passed: bool = True, **more: Any) -> Judgement:
    decision = more.pop("decision", "fused")
    end = "passed" if passed else "not passed"
    return Judgement(
        label=label, passed=passed, sure=True, decision=decision, text=f"{label}: {end}", **more
    )


def trigger(moment_s: float, item: str | None = None, ticket: int = 0) -> Trigger:
    return Trigger(moment_s=moment_s, time=f"at {moment_s:g}", item=item, ticket=ticket)


def check_idle(book: ItemBook, now_s: float, wake_s: float) -> None:
    """Nothing is due before `wake_s`."""
    assert book.step(now_s) is None
    assert book.wake_s(now_s) == pytest.approx(wake_s)


def test_an_item_ends_with_enough_equal_looks() -> None:
    book = ItemBook(TIMING)
    check_idle(book, 0.0, math.inf)
    book.add(trigger(10.0, "17"), 10.0)
    check_idle(book, 10.0, 10.05)
    due = book.step(10.06)
    assert isinstance(due, DueLook)
    assert due.at_s == 10.05
    assert due.left_s == pytest.approx(0.99)
    book.on_look(verdict("nut"), 10.07, "")
    check_idle(book, 10.07, 10.15)
    assert isinstance(book.step(10.15), DueLook)
    book.on_look(verdict("washer"), 10.16, "")
    assert isinstance(book.step(10.26), DueLook)
    book.on_look(verdict("washer"), 10.27, "")
    end = book.step(10.27)
    assert isinstance(end, ItemOutcome)
    assert (end.trigger.item, end.number, end.looks, end.equal) == ("17", 1, 3, 2)
    assert (end.judgement.label, end.judgement.passed) == ("washer", True)
    assert end.due_from_s == pytest.approx(10.05)
    assert book.step(11.0) is None


def test_an_item_that_was_found_out_late_is_looked_at_as_it_was() -> None:
    book = ItemBook(ItemTiming(verdict_s=0.5))
    book.add(Trigger(moment_s=9.0, heard_s=10.0, time=""), 10.0)
    due = book.step(10.0)
    assert isinstance(due, DueLook)
    assert due.at_s == 9.0
    assert due.left_s == pytest.approx(0.5)
    book.on_look(verdict(), 10.1, "")
    end = book.step(10.1)
    assert isinstance(end, ItemOutcome)
    assert end.due_from_s == 10.0


def test_the_next_item_ends_one_that_is_not_settled() -> None:
    book = ItemBook(TIMING)
    book.add(trigger(0.0, "a"), 0.0)
    assert isinstance(book.step(0.05), DueLook)
    book.on_look(verdict(), 0.06, "")
    book.add(trigger(0.08, "b"), 0.08)
    # The item is still there until the delay of the next one is over.
    check_idle(book, 0.09, 0.13)
    end = book.step(0.13)
    assert isinstance(end, ItemOutcome)
    assert (end.trigger.item, end.judgement.decision) == ("a", "unsettled")
    assert not end.judgement.passed
    assert end.judgement.text == "nut, but only 1 of 2 equal looks: not passed"
    assert end.judgement.why_kept == "unsure"
    due = book.step(0.13)
    assert isinstance(due, DueLook)
    assert due.at_s == pytest.approx(0.13)
    assert due.left_s == pytest.approx(1.0)


def test_triggers_faster_than_looks_leave_an_outcome_each() -> None:
    book = ItemBook(ItemTiming(verdict_s=1.0), most_waiting=3)
    for number in range(6):
        book.add(trigger(0.0, str(number)), 0.0)
    ended: list[ItemOutcome] = []
    while isinstance(step := book.step(0.5), ItemOutcome):
        ended.append(step)
    assert [(one.trigger.item, one.number, one.looks) for one in ended] == [
        ("0", 1, 0), ("1", 2, 0), ("2", 3, 0),
    ]  # fmt: skip
    assert {one.judgement.decision for one in ended} == {"missed"}
    assert isinstance(step, DueLook)
    book.on_look(verdict(), 2.0, "")
    decisions = []
    while isinstance(step := book.step(2.0), ItemOutcome):
        decisions.append(step.judgement.decision)
    assert decisions == ["fused", "missed", "missed"]


def test_a_rest_without_an_item_has_no_outcome() -> None:
    empty = verdict("belt", passed=False, decision="empty")
    for skip_empty in (True, False):
        book = ItemBook(ItemTiming(), skip_empty=skip_empty)
        numbers = []
        for moment_s, seen in ((0.0, empty), (1.0, verdict())):
            book.add(trigger(moment_s), moment_s)
            assert isinstance(book.step(moment_s), DueLook)
            book.on_look(seen, moment_s, "")
            while isinstance(step := book.step(moment_s), ItemOutcome):
                numbers.append(step.number)
        assert numbers == ([1] if skip_empty else [1, 2])


def test_a_camera_that_comes_back_in_the_middle_counts_no_item_twice() -> None:
    book = ItemBook(TIMING)
    book.add(trigger(0.0, "a"), 0.0)
    # By rule: open while two of four cameras are missing, seen once they are back.
    for label, passed, at_s in (("nut", False, 0.06), ("nut", True, 0.2), ("nut", True, 0.3)):
        assert isinstance(book.step(at_s), DueLook)
        book.on_look(verdict(label, passed), at_s, "")
    end = book.step(0.3)
    assert isinstance(end, ItemOutcome)
    assert (end.looks, end.equal, end.judgement.passed) == (3, 2, True)
    assert book.step(5.0) is None


def test_a_state_changes_after_equal_looks() -> None:
    book = StateBook(ItemTiming(equal=3, every_s=1.0), 100.0)
    assert (book.step(99.0), book.wake_s(99.0)) == (None, 100.0)
    began = []
    for number, label in enumerate("osbossssoooo"):
        now_s = 100.0 + number
        assert book.step(now_s) == DueLook(None, math.inf)
        book.on_look(verdict(label), now_s + 0.1, f"at {number}")
        while isinstance(step := book.step(now_s + 0.1), ItemOutcome):
            began.append((step.judgement.label, step.number, step.trigger.time))
    assert began == [("s", 1, "at 4"), ("o", 2, "at 8")]


def test_looks_at_one_item_are_by_one_bundle() -> None:
    book = ItemBook(TIMING)
    assert book.between_items
    book.add(trigger(10.0), 10.0)
    assert isinstance(book.step(10.05), DueLook)
    assert book.between_items
    book.on_look(verdict(), 10.06, "")
    # One look of two.
    assert not book.between_items
    assert isinstance(book.step(10.2), DueLook)
    book.on_look(verdict(), 10.21, "")
    assert not book.between_items, "its outcome is not taken yet"
    assert isinstance(book.step(10.21), ItemOutcome)
    assert book.between_items


def test_looks_at_a_state_begin_anew_with_a_bundle() -> None:
    book = StateBook(ItemTiming(equal=2, every_s=1.0), 0.0)
    book.on_look(verdict(), 0.1, "")
    assert book.between_items
    book.renew()
    book.on_look(verdict(), 1.1, "")
    assert book.step(1.1) is None
    book.on_look(verdict(), 2.1, "")
    assert isinstance(book.step(2.1), ItemOutcome)


def test_states_miss_looks_without_catching_up() -> None:
    book = StateBook(ItemTiming(every_s=1.0), 0.0)
    assert book.step(0.0)
    book.on_look(verdict(), 7.5, "")
    assert isinstance(book.step(7.5), ItemOutcome)
    assert book.wake_s(7.5) == 7.5
    assert isinstance(book.step(7.5), DueLook)
    book.on_look(verdict(), 7.6, "")
    assert book.step(7.6) is None
    assert book.wake_s(7.6) == 8.5


def test_an_id_that_comes_again_is_known() -> None:
    ids = RecentIds(2)
    assert [ids.add(item) for item in "aabcab"] == [True, False, True, True, True, True]


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.floats(0, 0.6),  # until the next trigger
            st.floats(0, 0.4),  # a look takes
            st.sampled_from("ab"),
            st.booleans(),
        ),
        max_size=40,
    ),
    st.integers(1, 4),
    st.floats(0, 0.3),
    st.floats(0.01, 1.0),
    st.integers(1, 5),
)
def test_every_trigger_has_one_outcome_in_order_and_in_time(
    events: list[tuple[float, float, str, bool]],
    equal: int,
    delay_s: float,
    verdict_s: float,
    most_waiting: int,
) -> None:
    timing = ItemTiming(equal=equal, every_s=0.1, delay_s=delay_s, verdict_s=verdict_s)
    book = ItemBook(timing, most_waiting=most_waiting)
    ended: list[ItemOutcome] = []
    now_s = 0.0
    takes = [(took_s, label, passed) for _, took_s, label, passed in events] or [(0.1, "a", True)]
    turn = 0

    def drive(until_s: float) -> None:
        """Do all that is due until then, each look ending before its item's time is over."""
        nonlocal now_s, turn
        while True:
            step = book.step(now_s)
            if isinstance(step, ItemOutcome):
                ended.append(step)
            elif isinstance(step, DueLook):
                assert step.left_s > 0.99 * LEAST_LOOK_S
                assert step.at_s is not None
                assert step.at_s <= now_s
                took_s, label, passed = takes[turn % len(takes)]
                turn += 1
                now_s += min(took_s, step.left_s)
                book.on_look(verdict(label, passed), now_s, "")
            else:
                wake_s = book.wake_s(now_s)
                assert wake_s > now_s
                if wake_s > until_s:
                    now_s = max(now_s, until_s)
                    return
                now_s = wake_s

    arrived_s = 0.0
    for number, (gap_s, *_) in enumerate(events):
        arrived_s += gap_s
        drive(arrived_s)
        # It has come while a look was under way, perhaps.
        book.add(trigger(arrived_s, ticket=number), now_s)
    drive(now_s + 100)
    assert [one.trigger.ticket for one in ended] == list(range(len(events)))
    assert [one.number for one in ended] == list(range(1, len(events) + 1))
    for one in ended:
        judged = one.judgement
        if judged.decision == "missed":
            assert one.looks == 0
        else:
            assert (judged.decision == "unsettled") == (one.equal < equal)
        assert not (judged.passed and one.equal < equal)
        # A look that was under way as its time was over has ended by then.
        if one.looks:
            assert one.closed_s <= one.due_from_s + verdict_s + 1e-9
