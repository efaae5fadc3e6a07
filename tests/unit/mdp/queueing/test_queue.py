"""The agent's queue: bounded, fair between clients, deadline-aware, in batches where they pay."""

from collections import Counter, defaultdict
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import Struct

from mdp.queueing.accounts import REMEMBERED
from mdp.queueing.queue import CAPACITY_BYTES, LEAST_BYTES, AgentQueue

FORMER, NEWER = "0" * 64, "1" * 64


class Job(Struct, frozen=True, eq=False):
    deadline_s: float
    client: str
    digest: str
    size_bytes: int = 0
    arrived_s: float = 0.0


Queue = AgentQueue[Job]


def job(
    deadline_s: float = 1e9, client: str = "one", digest: str = FORMER, size_bytes: int = 0
) -> Job:
    return Job(deadline_s, client, digest, size_bytes)


def of_places(places: int) -> Queue:
    """A queue with room for so many small requests."""
    return Queue(places * LEAST_BYTES)


def says(queue: Queue, new: Job, now_s: float = 0.0) -> str | None:
    """Refusal of the newcomer alone; None if it is queued."""
    sent_back = queue.offer(new, now_s)
    assert [refused for refused, _ in sent_back] in ([], [new])
    return sent_back[0][1] if sent_back else None


def take(queue: Queue, now_s: float = 0.0) -> tuple[Job | None, list[Job]]:
    """The next job where they are computed one by one."""
    jobs, dropped = queue.take(now_s)
    assert len(jobs) <= 1
    return jobs[0] if jobs else None, dropped


def ran(queue: Queue, took_s: float, now_s: float = 0.0) -> None:
    """Let one request through, so that the estimate is known."""
    assert says(queue, job(), now_s) is None
    taken, _ = take(queue, now_s)
    assert taken is not None
    queue.done(took_s=took_s)


def test_the_queue_is_bounded_in_memory() -> None:
    queue = of_places(2)
    assert says(queue, job()) is None
    assert says(queue, job(size_bytes=LEAST_BYTES)) is None, "the first counted as much"
    assert says(queue, job()) == "overloaded"
    queue.take(0.0)
    assert says(queue, job(size_bytes=LEAST_BYTES + 1)) == "overloaded"
    assert says(queue, job()) is None, "the running one does not wait"
    assert Queue().capacity_bytes == CAPACITY_BYTES


def test_whatever_can_be_answered_in_time_waits() -> None:
    queue = Queue()
    ran(queue, took_s=0.01)
    pictures = [job(3.0, size_bytes=224 * 224 * 3) for _ in range(300)]
    assert [queue.offer(each, 0.0) for each in pictures] == [[]] * 300
    # Three hundred take the three seconds.
    assert says(queue, job(3.0)) == "too_late"
    now_s, answered = 0.0, 0
    while queue.waiting:
        taken, dropped = take(queue, now_s)
        assert taken is pictures[answered]
        assert dropped == []
        now_s, answered = now_s + 0.01, answered + 1
        queue.done(took_s=0.01)
    assert answered == 300


def test_clients_with_most_memory_make_room_for_a_large_picture() -> None:
    queue = of_places(8)
    jobs = fill(queue, a=6, b=2)
    large = job(client="c", size_bytes=2 * LEAST_BYTES)
    assert queue.offer(large, 0.0) == [(jobs["a"][4], "overloaded"), (jobs["a"][5], "overloaded")]
    # Three clients hold 4, 2 and 2; the first one is to keep as much as the newcomer would have.
    assert says(queue, job(client="c", size_bytes=LEAST_BYTES + 1)) == "overloaded"
    assert queue.held_bytes == queue.capacity_bytes
    assert len(serve_all(queue)) == 7
    assert queue.held_bytes == 0


def test_what_has_no_room_though_all_others_left_changes_nothing() -> None:
    queue = of_places(2)
    jobs = fill(queue, a=2)
    assert says(queue, job(client="b", size_bytes=queue.capacity_bytes + 1)) == "overloaded"
    assert serve_all(queue) == jobs["a"]
    assert says(queue, job(client="b", size_bytes=queue.capacity_bytes + 1)) == "overloaded"


def test_more_clients_than_are_remembered_may_wait() -> None:
    queue = Queue()
    jobs = fill(queue, **{f"client {number}": 1 for number in range(REMEMBERED + 20)})
    assert serve_all(queue) == [own for (own,) in jobs.values()]
    assert says(queue, job(client="late")) is None


def test_refusing_looks_at_few_of_the_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flood of requests that cannot be in time costs little, however many wait."""
    queue, looked = Queue(), 0
    ran(queue, took_s=0.01)
    fill(queue, a=500, b=500)
    turn = Queue.__origin__._turn  # type: ignore[attr-defined]

    def counted(*arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return turn(*arguments)

    monkeypatch.setattr(AgentQueue, "_turn", counted)
    assert says(queue, job(5.0, client="a")) == "too_late"
    assert 0 < looked < 50


def test_what_waited_too_long_is_dropped_when_its_turn_comes() -> None:
    queue = Queue()
    jobs = [job(deadline_s=0.5), job(deadline_s=0.6), job(deadline_s=9.0), job(deadline_s=0.1)]
    for each in jobs[:3]:
        assert says(queue, each) is None
    assert take(queue, 1.0) == (jobs[2], jobs[:2])
    queue.done(took_s=None)
    assert says(queue, jobs[3]) is None
    assert take(queue, 1.0) == (None, [jobs[3]])
    assert queue.idle


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param([(0.1, 0.1), (0.2, 0.12), (0.12, 0.12)], id="follows"),
        pytest.param(
            [(0.001, 0.001), (8.0, 0.002), (0.002, 0.002), (8.0, 0.004)], id="one outlier"
        ),
        pytest.param(
            [(0.001, 0.001), (1.0, 0.002), (1.0, 0.2016), (1.0, 0.36128)], id="has slowed"
        ),
    ],
)
def test_the_estimate_follows_runs_not_outliers(runs: list[tuple[float, float]]) -> None:
    queue = Queue()
    for took_s, estimate_s in runs:
        ran(queue, took_s=took_s)
        assert queue.times.one_s == pytest.approx(estimate_s)


@pytest.mark.parametrize("slow_s", [1.0, 60.0, 3600.0])
def test_one_slow_run_does_not_shut_the_door_for_good(slow_s: float) -> None:
    queue, refused, now_s = Queue(), 0, 0.0
    ran(queue, took_s=slow_s)
    while says(queue, job(deadline_s=now_s + 0.1), now_s) == "too_late":
        refused += 1
        now_s += 0.1
        assert refused < 300
    taken, _ = take(queue, now_s)
    assert taken is not None


def test_clear_hands_back_what_waits() -> None:
    queue, jobs = Queue(), [job() for _ in range(3)]
    for each in jobs:
        queue.offer(each, 0.0)
    queue.take(0.0)
    assert queue.clear() == jobs[1:]
    assert queue.waiting == 0
    assert not queue.idle, "one still runs"


def fill(queue: Queue, **clients: int) -> dict[str, list[Job]]:
    """Queue so many requests of each client, one client after the other."""
    jobs = {client: [job(client=client) for _ in range(n)] for client, n in clients.items()}
    for each in [each for mine in jobs.values() for each in mine]:
        assert queue.offer(each, 0.0) == []
    return jobs


def serve_all(queue: Queue) -> list[Job]:
    """Everything that waits, in the order in which it is run."""
    order: list[Job] = []
    while True:
        jobs, dropped = queue.take(0.0)
        assert dropped == []
        if not jobs:
            return order
        order += jobs
        queue.done(took_s=0.001)


def test_clients_that_use_the_same_time_take_turns() -> None:
    queue = Queue()
    jobs = fill(queue, greedy=4, second=2, third=1)
    a, b, c = jobs.values()
    assert queue.clients == 3
    assert serve_all(queue) == [a[0], b[0], c[0], a[1], b[1], a[2], a[3]]
    assert queue.clients == 0, "nobody is remembered who has nothing waiting"


def test_whoever_comes_again_waits_for_one_turn_of_each_other() -> None:
    queue = Queue()
    fill(queue, greedy=8)
    for _ in range(4):
        modest = job(client="modest")
        assert queue.offer(modest, 0.0) == []
        order = [take(queue)[0]]
        queue.done(took_s=0.001)
        order.append(take(queue)[0])
        queue.done(took_s=0.001)
        assert modest in order


def test_as_many_clients_as_places_keep_one_each() -> None:
    queue = of_places(3)
    fill(queue, a=1, b=1, c=1)
    assert says(queue, job(client="d")) == "overloaded"
    assert queue.clients == 3


def test_nobody_gives_way_to_a_request_that_is_too_late_itself() -> None:
    queue = of_places(2)
    ran(queue, took_s=0.1)
    fill(queue, greedy=2)
    # Its turn would be the second.
    assert says(queue, job(0.19, client="modest")) == "too_late"
    assert queue.waiting == 2
    sent_back = queue.offer(job(0.21, client="modest"), 0.0)
    assert [code for _, code in sent_back] == ["overloaded"]


def test_whoever_cannot_be_on_time_behind_a_newcomer_is_told_at_once() -> None:
    queue = Queue()
    ran(queue, took_s=0.1)
    mine = [job(0.15), job(0.25), job(0.45), job(0.45)]
    for each in mine:
        assert queue.offer(each, 0.0) == []
    newcomer = job(0.25, client="newcomer")
    # It goes second; the second of the others would end at 0.3, those after it have time enough.
    assert queue.offer(newcomer, 0.0) == [(mine[1], "too_late")]
    assert serve_all(queue)[:2] == [mine[0], newcomer]


class Sharing(RuleBasedStateMachine):
    """Any history of offers, takes and ends of four clients; fairness is judged from outside.

    Requests are of one or two places.
    """

    CAPACITY = 5

    def __init__(self) -> None:
        super().__init__()
        self.queue = of_places(self.CAPACITY)
        self.now_s = 0.0
        self.waiting: list[Job] = []
        self.running: Job | None = None

    def places_held(self) -> Counter[str]:
        """Client -> how many places its requests hold."""
        held = Counter[str]()
        for each in self.waiting:
            held[each.client] += max(1, each.size_bytes // LEAST_BYTES)
        return held

    @rule(
        client=st.sampled_from("abcd"),
        budget_s=st.floats(0, 3),
        step_s=st.floats(0, 1),
        places=st.integers(1, 2),
    )
    def offer(self, client: str, budget_s: float, step_s: float, places: int) -> None:
        self.now_s += step_s
        new = job(self.now_s + budget_s, client, size_bytes=places * LEAST_BYTES)
        before, estimate_s = self.places_held(), self.queue.times.one_s
        own = before[client] + places
        self.waiting.append(new)
        for refused, code in self.queue.offer(new, self.now_s):
            self.waiting.remove(refused)
            if code == "overloaded":
                assert before.total() + places > self.CAPACITY, "there was room"
                left = self.places_held()[refused.client]
                if refused is not new:
                    assert left >= own, "nobody loses a place to one who then holds more"
                elif places == 1:
                    assert own + 1 >= max(before.values()), "another held more than its share"
            elif refused is new:
                assert estimate_s > 0 or budget_s == 0
        assert self.queue.times.one_s <= estimate_s

    @rule(step_s=st.floats(0, 1))
    def take(self, step_s: float) -> None:
        self.now_s += step_s
        before = self.places_held()
        taken, dropped = take(self.queue, self.now_s)
        for each in dropped + ([taken] if taken else []):
            mine = [other for other in self.waiting if other.client == each.client]
            assert each is mine[0], "each client's come in their order"
            self.waiting.remove(each)
        if taken is not None:
            assert self.running is None
            assert taken.deadline_s >= self.queue._busy_until_s - 1e-9
            self.running = taken
        elif self.running is None:
            assert not self.waiting
        else:
            assert before == self.places_held()

    @rule(took_s=st.one_of(st.none(), st.floats(0, 2)))
    def done(self, took_s: float | None) -> None:
        if self.running is not None:
            self.queue.done(took_s=took_s)
            self.running = None

    @invariant()
    def bounded(self) -> None:
        assert self.queue.waiting == len(self.waiting)
        held = self.places_held()
        assert self.queue.held_bytes == held.total() * LEAST_BYTES <= self.queue.capacity_bytes
        assert self.queue.clients == len(held)
        assert self.queue.idle == (not self.waiting and self.running is None)


TestAnySharing: Any = Sharing.TestCase
TestAnySharing.settings = settings(max_examples=80, stateful_step_count=40)


def test_under_any_flood_a_modest_client_is_served_every_other_time() -> None:
    """One client keeps the queue full; the other always has one request waiting."""
    queue = of_places(4)
    modest = 0
    for round_ in range(100):
        while says(queue, job(client="greedy")) != "overloaded":
            pass
        if not queue.holds(NEWER):
            sent_back = queue.offer(job(client="modest", digest=NEWER), 0.0)
            assert [code for _, code in sent_back] in (["overloaded"], [])
            assert queue.holds(NEWER), f"kept out in round {round_}"
        taken, _ = take(queue)
        assert taken is not None
        modest += taken.client == "modest"
        queue.done(took_s=0.001)
    assert modest >= 49


def test_computing_time_decides_who_is_next_and_not_turns() -> None:
    """Both always have requests waiting; one picture of the hog's takes ten times as long."""
    queue, used_s = Queue(), defaultdict[str, float](float)
    for _ in range(220):
        for client in ("hog", "modest"):
            while queue.offer(job(client=client), 0.0) == [] and queue.waiting < 6:
                pass
        taken, _ = take(queue)
        assert taken is not None
        decoding_s = 0.09 if taken.client == "hog" else 0.0
        queue.done(took_s=0.01, decoding_s=[decoding_s])
        used_s[taken.client] += 0.01 + decoding_s
        assert abs(used_s["hog"] - used_s["modest"]) <= 0.11
    assert used_s["hog"] == pytest.approx(2.0, rel=0.1)


def test_a_place_that_is_given_up_ahead_of_the_newcomer_makes_it_earlier() -> None:
    queue = of_places(2)
    ran(queue, took_s=0.1)
    assert says(queue, job(client="spent")) is None
    take(queue)
    first, second = job(client="greedy"), job(client="greedy")
    assert says(queue, first) is None
    # One of two that compete has used 1.1 s, of which half is ahead of its share.
    queue.done(took_s=0.1, decoding_s=[1.0])
    assert says(queue, second) is None
    late = job(0.45, client="spent")
    # It is expected to be decoded in 0.2 s, behind one of the other client's.
    assert queue.offer(late, 0.0) == [(second, "overloaded")]
    assert take(queue) == (first, [])


def test_newcomers_without_end_keep_nobody_waiting_and_are_not_remembered() -> None:
    queue = Queue()
    ran(queue, took_s=0.1)
    for number in range(2 * REMEMBERED):
        for _ in range(2):
            queue.offer(job(client=f"new {number} {_}"), 0.0)
        if number == 9:
            queue.offer(job(), 0.0)
        take(queue)
        queue.done(took_s=0.1)
        assert number < 20 or "one" not in {each.client for each, _ in queue._in_order()}
    while queue.waiting:
        take(queue)
        queue.done(took_s=0.1)
    queue.offer(job(client="last"), 0.0)
    assert len(queue._accounts) == REMEMBERED


def test_decoding_is_its_client_s_own_and_no_part_of_the_estimate() -> None:
    queue = Queue()
    ran(queue, took_s=0.1)
    for _ in range(50):
        assert says(queue, job(client="hog")) is None
        take(queue)
        queue.done(took_s=0.1, decoding_s=[3.0])
    assert queue.times.one_s == pytest.approx(0.1)
    assert says(queue, job(0.15, client="modest")) is None
    queue.clear()
    assert says(queue, job(2.0, client="hog")) == "too_late"
    assert says(queue, job(4.0, client="hog")) is None


def test_one_client_s_tiny_budgets_change_nothing_for_others() -> None:
    queue = Queue()
    ran(queue, took_s=0.1)
    for _ in range(1000):
        if queue.offer(job(1e-6, client="hasty"), 0.0) == []:
            take(queue)
            queue.done(took_s=0.1)
    assert queue.times.one_s == pytest.approx(0.1)
    assert says(queue, job(0.09, client="other")) == "too_late"


def at_once(queue: Queue, new: Job, now_s: float = 0.0, longest_s: float = 1.0) -> bool:
    return queue.takes_at_once(new, now_s, longest_s)


def test_what_is_short_passes_an_empty_queue() -> None:
    queue = Queue()
    assert not at_once(queue, job()), "nothing is known yet"
    ran(queue, took_s=0.1)
    assert not at_once(queue, job(), longest_s=0.09), "it is not short"
    assert at_once(queue, job())
    assert not queue.idle
    assert queue.waiting == queue.clients == 0
    assert not at_once(queue, job()), "one is running"
    waiting = job()
    assert says(queue, waiting) is None
    assert take(queue) == (None, [])
    queue.done(took_s=0.1)
    assert not at_once(queue, job()), "another one waits"
    assert take(queue) == (waiting, [])


@given(
    took_s=st.floats(0.0, 1.0),
    most=st.integers(1, 4),
    now_s=st.floats(0.0, 10.0),
    budget_s=st.floats(0.0, 2.0),
    next_budget_s=st.floats(0.0, 3.0),
)
def test_passing_the_queue_decides_as_going_through_it(
    took_s: float, most: int, now_s: float, budget_s: float, next_budget_s: float
) -> None:
    passing, queueing = (batching(most, one=took_s, two=1.5 * took_s) for _ in range(2))
    new = job(now_s + budget_s)
    passed = at_once(passing, new, now_s)
    if took_s == 0:
        assert not passed, "nothing is known"
        return
    assert passed == (queueing.offer(new, now_s) == [])
    assert passed == (queueing.take(now_s) == ([new], []))
    if passed:
        # What comes next is told the same.
        follower = job(now_s + next_budget_s)
        assert says(passing, follower, now_s) == says(queueing, follower, now_s)


def batching(most: int = 4, **measured_s: float) -> Queue:
    """An queue that knows how long batches take: `one=0.1, two=0.12`."""
    names = {"one": 1, "two": 2, "three": 3, "four": 4}
    queue = Queue(batch=most)
    queue.times.renew(most, {names[name]: value for name, value in measured_s.items()})
    return queue


PAYING: dict[str, Any] = {"one": 0.1, "two": 0.12, "three": 0.14, "four": 0.16}


def test_no_deadline_is_endangered_for_the_sake_of_a_batch() -> None:
    queue = batching(**PAYING)
    jobs = [job(0.13), job(9.0), job(9.0), job(9.0)]
    for each in jobs:
        assert queue.offer(each, 0.0) == []
    # With one more, the first is still on time; with two more it is not.
    assert queue.take(0.0) == (jobs[:2], [])


def test_a_batch_that_does_not_pay_is_not_made() -> None:
    for four_s in (0.4, 0.39):
        queue = batching(one=0.1, two=0.2, three=0.3, four=four_s)
        fill(queue, a=4)
        assert len(queue.take(0.0)[0]) == 1
    queue = batching(one=0.1, two=0.15, three=0.3, four=0.35)
    fill(queue, a=4)
    assert len(queue.take(0.0)[0]) == 2, "two take least time a picture"


def test_bundles_are_not_computed_together() -> None:
    queue = batching(**PAYING)
    old = fill(queue, a=2)["a"]
    new = [job(digest=NEWER, client="a") for _ in range(2)]
    for each in new:
        assert queue.offer(each, 0.0) == []
    assert queue.take(0.0)[0] == old
    queue.done(took_s=0.12, pictures=2)
    assert queue.take(0.0)[0] == new


def test_who_is_too_late_is_told_with_batches_in_mind() -> None:
    queue = batching(**PAYING)
    fill(queue, a=7)
    # Two batches of four end at 0.32; one by one it would be 0.8.
    assert says(queue, job(0.31, client="a")) == "too_late"
    queue.times.renew(4, {1: 0.1, 2: 0.12, 3: 0.14, 4: 0.16})
    assert says(queue, job(0.33, client="a")) is None


def test_what_took_long_once_is_tried_again() -> None:
    queue = batching(one=0.1, two=0.12)
    queue.times.learn(2, 0.6)
    assert queue.times.choose(range(1, 3)) == 1
    tries = 0
    while queue.times.choose(range(1, 3)) == 1:
        tries += 1
        assert tries < 1000
    assert queue.times.of(2) <= 0.19 + 1e-9


@settings(max_examples=300)
@given(
    measured_s=st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    budgets_s=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8),
    now_s=st.floats(0, 0.5),
)
def test_a_batch_is_on_time(measured_s: list[float], budgets_s: list[float], now_s: float) -> None:
    queue = batching(**cast(dict[str, Any], dict(zip(PAYING, measured_s, strict=True))))
    for number, budget_s in enumerate(budgets_s):
        queue.offer(job(budget_s, client=str(number % 3)), 0.0)
    waiting = queue.waiting
    jobs, dropped = queue.take(now_s)
    assert len(jobs) + len(dropped) + queue.waiting == waiting
    assert all(queue._busy_until_s <= each.deadline_s for each in jobs)
    assert len(jobs) <= 4
    assert bool(jobs) == (len(dropped) < waiting)


def test_a_newcomer_starts_from_an_equal_share_of_what_was_computed() -> None:
    queue = Queue()
    jobs = fill(queue, a=2, b=1)
    for client, took_s in (("a", 1.0), ("b", 0.4)):
        assert take(queue) == (jobs[client][0], [])
        queue.done(took_s=took_s)
    # Two competed each time: c starts from 0.5 + 0.2 s, and a has used 1 s.
    jobs |= fill(queue, c=2)
    assert take(queue) == (jobs["c"][0], [])
    queue.done(took_s=0.4)
    assert take(queue) == (jobs["a"][1], [])


def test_decoding_counts_for_what_is_computed_together() -> None:
    queue = batching(2, one=0.1, two=0.12)
    queue.offer(job(), 0.0)
    queue.take(0.0)
    # From here on, decoding is expected to take 0.2 s for each picture.
    queue.done(0.1, decoding_s=[1.0])
    hasty, patient = job(0.45), job()
    assert queue.offer(hasty, 0.0) == queue.offer(patient, 0.0) == []
    assert queue.take(0.0) == ([hasty], [])
