"""Vectors that neighbours send each other over gloo, in threads."""

import threading
from collections.abc import Callable
from queue import Queue
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402

from mdp.errors import MDPError  # noqa: E402
from partitioner.crew.averaging.mean import Meeting  # noqa: E402
from partitioner.crew.averaging.neighbours import NewestVectors  # noqa: E402
from tests.support.gloo import PlainGroups, in_threads  # noqa: E402

pytestmark = pytest.mark.torch
MEMBERS, SIZE, PATIENCE_S = (3, 5, 8), 4, 20.0


def vector(number: int) -> Tensor:
    found: Tensor = torch.full((SIZE,), number, dtype=torch.uint8)
    return found


class Losing:
    """A group that has lost the member at one place."""

    def __init__(self, group: Any, lost: int) -> None:
        self.group, self.lost = group, lost

    def recv(self, tensors: list[Tensor], place: int, tag: int) -> Any:
        if place == self.lost:
            raise RuntimeError("Connection closed by peer")
        return self.group.recv(tensors, place, tag)

    def send(self, tensors: list[Tensor], place: int, tag: int) -> Any:
        if place == self.lost:
            raise RuntimeError("Connection closed by peer")
        return self.group.send(tensors, place, tag)


class Trainer:
    """Lines of one of three, and what is reported of them."""

    def __init__(
        self, store: HashStore, place: int, neighbours: tuple[int, ...], lost: int = -1
    ) -> None:
        group: Any = Losing(PlainGroups(store, place).of("net", 1, range(len(MEMBERS))), lost)
        meeting = Meeting(group=group, members=MEMBERS, weights=(1.0,) * 3, rank=MEMBERS[place])
        self.receipts: Queue[tuple[int, int | None]] = Queue()
        self.vectors = NewestVectors(meeting, 7, neighbours, SIZE, self.report)

    def report(self, rank: int, number: int | None) -> None:
        self.receipts.put((rank, number))

    def next(self) -> tuple[int, int | None]:
        return self.receipts.get(timeout=PATIENCE_S)


def path(store: HashStore, lost: int = -1) -> list[Trainer]:
    """3 between 5 and 8, of which it may have lost one, by its place."""
    neighbours = ((5, 8), (3,), (3,))
    return in_threads(
        3, lambda place: Trainer(store, place, neighbours[place], lost if place == 0 else -1)
    )


@pytest.fixture
def join_lines() -> Callable[[], None]:
    """A function that waits for the end of all lines of a test."""
    before = set(threading.enumerate())

    def join() -> None:
        for thread in set(threading.enumerate()) - before:
            if thread.name.startswith("crew-neighbour"):
                thread.join(PATIENCE_S)
                assert not thread.is_alive()

    return join


def test_vectors_come_by_number_and_older_ones_are_dropped(join_lines: Callable[[], None]) -> None:
    store = HashStore()
    middle, left, right = path(store)
    for number in (4, 6, 9):
        left.vectors.publish(number, vector(number))
        assert middle.next() == (5, number)
    right.vectors.publish(5, vector(50))
    assert middle.next() == (8, 5)
    assert middle.vectors.take(5, 6).tolist() == [6] * SIZE
    with pytest.raises(KeyError):
        middle.vectors.take(5, 4)
    # The same may be taken again.
    assert middle.vectors.take(5, 6).tolist() == [6] * SIZE
    assert middle.vectors.take(5, 9).tolist() == [9] * SIZE
    assert middle.vectors.take(8, 5).tolist() == [50] * SIZE
    for trainer in (left, right):
        trainer.vectors.end()
    middle.vectors.end()
    join_lines()
    assert left.vectors.sent_bytes == {3: 3 * (8 + SIZE) + 8}
    assert middle.vectors.sent_bytes == {5: 8, 8: 8}
    assert middle.receipts.empty()


def test_after_the_end_nothing_is_reported(join_lines: Callable[[], None]) -> None:
    store = HashStore()
    middle, left, right = path(store)
    middle.vectors.end()
    left.vectors.publish(4, vector(4))
    left.vectors.end()
    right.vectors.end()
    join_lines()
    assert middle.receipts.empty()


def test_a_lost_neighbour_is_reported_and_the_others_go_on() -> None:
    store = HashStore()
    middle, _, right = path(store, lost=1)
    assert middle.next() == (5, None)
    right.vectors.publish(4, vector(4))
    assert middle.next() == (8, 4)
    middle.vectors.publish(6, vector(6))
    assert right.next() == (3, 6)
    for trainer in (middle, right):
        trainer.vectors.end()


def test_a_line_ends_with_what_its_report_raises() -> None:
    store = HashStore()
    middle, left, right = path(store)
    failed = threading.Event()

    def fail(rank: int, number: int | None) -> None:
        failed.set()
        raise MDPError("the coordinator is lost")

    middle.vectors._on_receipt = fail
    left.vectors.publish(4, vector(4))
    assert failed.wait(PATIENCE_S)
    for trainer in (middle, right):
        trainer.vectors.end()
