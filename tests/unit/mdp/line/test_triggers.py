"""Triggers from outside: ids as text, as JSON, counted, twice, and none that can be read."""

import math
import threading
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mdp.errors import InputError
from mdp.line.triggers import MAX_ITEM, DuplicateItemError, TriggerQueue, item_of


def test_ids_are_read() -> None:
    for payload, item in (
        (b"17", "17"),
        (b" belt 2/17 \n", "belt 2/17"),
        (b'{"item": "17", "speed": 3}', "17"),
        (b'{"item": 17}', "17"),
        ("Stück".encode(), "Stück"),
        (b"<b>17</b>", "<b>17</b>"),
        (b"", None),
        (b"{}", None),
        (b'{"item": null}', None),
        (b'{"item": ""}', None),
    ):
        assert item_of(payload) == item


def test_what_is_no_id_is_one_line() -> None:
    for payload, part in (
        (b"\xff\xd8\x00", "got \ufffd\ufffd?"),
        (b"a\x1b[2Jb", "got a?[2Jb"),
        (b"x" * (MAX_ITEM + 1), "got xxxx"),
        (b"x" * 5000, "got 5,000 bytes"),
        (b'{"item": ["17"]}', 'got {"item"'),
        (b'{"item": true}', "got {"),
        (b'{"item": 1.5}', "got {"),
        (b'{"item": "a\\nb"}', "got {"),
        (b"{broken", "got {broken"),
        (b"{" * 4000, "got {{{"),
    ):
        with pytest.raises(InputError, match="expected an id of 1 to 128") as caught:
            item_of(payload)
        assert part in str(caught.value)
        assert str(caught.value).isprintable()


@given(st.binary(max_size=200))
def test_any_message_has_an_id_or_is_refused(payload: bytes) -> None:
    with suppress(InputError):
        item = item_of(payload)
        assert item is None or (0 < len(item) <= MAX_ITEM and item.isprintable())


def test_an_item_that_comes_twice_is_refused() -> None:
    queue = TriggerQueue(remembered=2)
    first = queue.add("a", 1.0, "t1")
    with pytest.raises(DuplicateItemError, match="item a came twice: it has one record"):
        queue.add("a", 2.0, "t2")
    counted = [queue.add(None, 3.0, "t3"), queue.add(None, 4.0, "t4")]
    assert queue.take(0.0) == [first, *counted]
    assert queue.take(0.0) == []
    assert (queue.next_after(3.0), queue.next_after(4.0)) == (4.0, math.inf)
    assert len({one.ticket for one in (first, *counted)}) == 3


def test_a_trigger_ends_a_wait() -> None:
    queue = TriggerQueue()
    threading.Timer(0.01, queue.add, ("a", 0.0, "")).start()
    assert [one.item for one in queue.take(60.0)] == ["a"]
