"""The agent's queue: bounded, fair between clients, deadline-aware, in batches where they pay."""

from collections import Counter, defaultdict
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from devices.agent.clients import REMEMBERED
from devices.agent.queue import CAPACITY, Admission, Job
from mdp.protocol.messages import Infer

INFER = Infer(request_id=1, digest="0" * 64, k=0, budget_ms=1.0, image_size=4, encoding="raw")
MODEST = msgspec.structs.replace(INFER, digest="1" * 64)


def job(deadline_s: float = 1e9, client: str = "one", infer: Infer = INFER) -> Job:
    return Job(
        peer=client.encode(),
        client=client,
        infer=infer,
        pixels=b"",
        arrived_s=0.0,
        deadline_s=deadline_s,
    )


def says(admission: Admission, new: Job, now_s: float = 0.0) -> str | None:
    """What the newcomer alone is told; None if it is queued."""
    sent_back = admission.offer(new, now_s=now_s)
    assert [refused for refused, _ in sent_back] in ([], [new])
    return sent_back[0][1] if sent_back else None


def take(admission: Admission, now_s: float = 0.0) -> tuple[Job | None, list[Job]]:
    """The next job where they are computed one by one."""
    jobs, dropped = admission.take(now_s=now_s)
    assert len(jobs) <= 1
    return jobs[0] if jobs else None, dropped


def ran(admission: Admission, took_s: float, now_s: float = 0.0) -> None:
    """Let one request through, so that the estimate is known."""
    assert says(admission, job(), now_s) is None
    taken, _ = take(admission, now_s)
    assert taken is not None
    admission.done(took_s=took_s)


def test_first_come_first_served_one_at_a_time() -> None:
    admission, jobs = Admission(), [job() for _ in range(3)]
    for each in jobs:
        assert says(admission, each) is None
    assert admission.waiting == 3
    for each in jobs:
        assert take(admission) == (each, [])
        assert take(admission) == (None, []), "one is running"
        assert not admission.idle
        admission.done(took_s=0.001)
    assert admission.idle
    assert take(admission) == (None, [])


def test_the_queue_is_bounded() -> None:
    admission = Admission(capacity=2)
    assert says(admission, job()) is None
    assert says(admission, job()) is None
    assert says(admission, job()) == "overloaded"
    admission.take(now_s=0.0)
    assert says(admission, job()) is None, "the running one does not wait"
    assert Admission().capacity == CAPACITY


def test_nothing_is_too_late_as_long_as_nothing_is_known() -> None:
    admission = Admission()
    assert says(admission, job(deadline_s=1.0), 1.0) is None
    assert says(admission, job(deadline_s=0.9), 1.0) == "too_late"


def test_too_late_counts_those_ahead() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    assert admission.estimate_s == pytest.approx(0.1)
    assert says(admission, job(deadline_s=0.11)) is None
    admission.take(now_s=0.0)
    # One runs: this one would end at 0.2.
    assert says(admission, job(deadline_s=0.19)) == "too_late"
    assert says(admission, job(deadline_s=0.21)) is None
    assert says(admission, job(deadline_s=0.25)) == "too_late"


def test_what_waited_too_long_is_dropped_when_its_turn_comes() -> None:
    admission = Admission()
    jobs = [job(deadline_s=0.5), job(deadline_s=0.6), job(deadline_s=9.0), job(deadline_s=0.1)]
    for each in jobs[:3]:
        assert says(admission, each) is None
    assert take(admission, 1.0) == (jobs[2], jobs[:2])
    admission.done(took_s=None)
    assert says(admission, jobs[3]) is None
    assert take(admission, 1.0) == (None, [jobs[3]])
    assert admission.idle


def test_what_cannot_be_done_in_the_time_left_is_dropped_too() -> None:
    admission, tight = Admission(), job(deadline_s=0.15)
    ran(admission, took_s=0.1)
    assert says(admission, tight) is None
    assert take(admission, 0.06) == (None, [tight])
    assert says(admission, tight) is None
    assert take(admission, 0.05) == (tight, [])


def test_the_estimate_follows_what_runs_took() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    ran(admission, took_s=0.2)
    assert admission.estimate_s == pytest.approx(0.12)
    ran(admission, took_s=0.12)
    assert admission.estimate_s == pytest.approx(0.12)


def test_a_run_that_was_stopped_on_the_way_hardly_counts() -> None:
    admission = Admission()
    ran(admission, took_s=0.001)
    ran(admission, took_s=8.0)
    assert admission.estimate_s == pytest.approx(0.002)
    ran(admission, took_s=0.002)
    ran(admission, took_s=8.0)
    assert admission.estimate_s == pytest.approx(0.004)


def test_a_device_that_has_become_slow_is_known_to_be_soon() -> None:
    admission = Admission()
    ran(admission, took_s=0.001)
    ran(admission, took_s=1.0)
    assert admission.estimate_s == pytest.approx(0.002)
    ran(admission, took_s=1.0)
    assert admission.estimate_s == pytest.approx(0.2016)
    ran(admission, took_s=1.0)
    assert admission.estimate_s == pytest.approx(0.36128)


def test_a_failed_run_teaches_nothing() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    admission.offer(job(), now_s=0.0)
    admission.take(now_s=0.0)
    admission.done(took_s=None)
    assert admission.estimate_s == pytest.approx(0.1)
    assert admission.idle


@pytest.mark.parametrize("slow_s", [1.0, 60.0, 3600.0])
def test_one_slow_run_does_not_shut_the_door_for_good(slow_s: float) -> None:
    admission, refused, now_s = Admission(), 0, 0.0
    ran(admission, took_s=slow_s)
    while says(admission, job(deadline_s=now_s + 0.1), now_s) == "too_late":
        refused += 1
        now_s += 0.1
        assert refused < 300
    taken, _ = take(admission, now_s)
    assert taken is not None


def test_clear_hands_back_what_waits() -> None:
    admission, jobs = Admission(), [job() for _ in range(3)]
    for each in jobs:
        admission.offer(each, now_s=0.0)
    admission.take(now_s=0.0)
    assert admission.clear() == jobs[1:]
    assert admission.waiting == 0
    assert not admission.idle, "one still runs"


def filled(admission: Admission, **clients: int) -> dict[str, list[Job]]:
    """Queue so many requests of each client, one client after the other."""
    jobs = {client: [job(client=client) for _ in range(n)] for client, n in clients.items()}
    for each in [each for mine in jobs.values() for each in mine]:
        assert admission.offer(each, now_s=0.0) == []
    return jobs


def served(admission: Admission) -> list[Job]:
    """Everything that waits, in the order in which it is run."""
    order: list[Job] = []
    while True:
        jobs, dropped = admission.take(now_s=0.0)
        assert dropped == []
        if not jobs:
            return order
        order += jobs
        admission.done(took_s=0.001)


def test_clients_that_use_the_same_time_take_turns() -> None:
    admission = Admission()
    jobs = filled(admission, greedy=4, second=2, third=1)
    a, b, c = jobs.values()
    assert admission.clients == 3
    assert served(admission) == [a[0], b[0], c[0], a[1], b[1], a[2], a[3]]
    assert admission.clients == 0, "nobody is remembered who has nothing waiting"


def test_whoever_comes_again_waits_for_one_turn_of_each_other() -> None:
    admission = Admission()
    filled(admission, greedy=8)
    for _ in range(4):
        modest = job(client="modest")
        assert admission.offer(modest, now_s=0.0) == []
        order = [take(admission)[0]]
        admission.done(took_s=0.001)
        order.append(take(admission)[0])
        admission.done(took_s=0.001)
        assert modest in order


def test_a_flood_cannot_keep_another_client_out() -> None:
    admission = Admission(capacity=4)
    flood = filled(admission, greedy=4)["greedy"]
    assert says(admission, job(client="greedy")) == "overloaded"
    first, second = job(client="modest"), job(client="modest")
    assert admission.offer(first, now_s=0.0) == [(flood[3], "overloaded")]
    assert admission.offer(second, now_s=0.0) == [(flood[2], "overloaded")]
    # Each has its half by now.
    assert says(admission, job(client="modest")) == "overloaded"
    assert says(admission, job(client="greedy")) == "overloaded"
    assert admission.waiting == 4
    assert served(admission) == [flood[0], first, flood[1], second]


def test_as_many_clients_as_places_keep_one_each() -> None:
    admission = Admission(capacity=3)
    filled(admission, a=1, b=1, c=1)
    assert says(admission, job(client="d")) == "overloaded"
    assert admission.clients == 3


def test_nobody_gives_way_to_a_request_that_is_too_late_itself() -> None:
    admission = Admission(capacity=2)
    ran(admission, took_s=0.1)
    filled(admission, greedy=2)
    # Its turn would be the second.
    assert says(admission, job(0.19, client="modest")) == "too_late"
    assert admission.waiting == 2
    sent_back = admission.offer(job(0.21, client="modest"), now_s=0.0)
    assert [code for _, code in sent_back] == ["overloaded"]


def test_whoever_cannot_be_on_time_behind_a_newcomer_is_told_at_once() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    mine = [job(0.15), job(0.25), job(0.45), job(0.45)]
    for each in mine:
        assert admission.offer(each, now_s=0.0) == []
    newcomer = job(0.25, client="newcomer")
    # It goes second; the second of the others would end at 0.3, those after it have time enough.
    assert admission.offer(newcomer, now_s=0.0) == [(mine[1], "too_late")]
    assert served(admission)[:2] == [mine[0], newcomer]


def test_what_runs_is_expected_to_end() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    assert says(admission, job()) is None
    take(admission)
    # At 0.08, what runs has some 0.02 left.
    assert says(admission, job(0.19), 0.08) == "too_late"
    assert says(admission, job(0.21), 0.08) is None


class Sharing(RuleBasedStateMachine):
    """Any history of offers, takes and ends of four clients; fairness is judged from outside."""

    CAPACITY = 5

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(capacity=self.CAPACITY)
        self.now_s = 0.0
        self.waiting: list[Job] = []
        self.running: Job | None = None

    def held(self) -> Counter[str]:
        return Counter(each.client for each in self.waiting)

    @rule(client=st.sampled_from("abcd"), budget_s=st.floats(0, 3), step_s=st.floats(0, 1))
    def offer(self, client: str, budget_s: float, step_s: float) -> None:
        self.now_s += step_s
        new = job(self.now_s + budget_s, client)
        before, estimate_s = self.held(), self.admission.estimate_s
        share = self.CAPACITY // len(before | Counter([client]))
        self.waiting.append(new)
        for refused, code in self.admission.offer(new, now_s=self.now_s):
            self.waiting.remove(refused)
            if code == "overloaded":
                assert before.total() == self.CAPACITY, "there was room"
                lost = before[refused.client] - (refused is not new)
                assert lost >= share, "nobody loses a place within its share to others"
            elif refused is new:
                assert estimate_s > 0 or budget_s == 0
        assert self.admission.estimate_s <= estimate_s

    @rule(step_s=st.floats(0, 1))
    def take(self, step_s: float) -> None:
        self.now_s += step_s
        before = self.held()
        taken, dropped = take(self.admission, self.now_s)
        for each in dropped + ([taken] if taken else []):
            mine = [other for other in self.waiting if other.client == each.client]
            assert each is mine[0], "each client's come in their order"
            self.waiting.remove(each)
        if taken is not None:
            assert self.running is None
            assert taken.deadline_s - self.now_s >= self.admission.takes_s([taken]) - 1e-9
            self.running = taken
        elif self.running is None:
            assert not self.waiting
        else:
            assert before == self.held()

    @rule(took_s=st.one_of(st.none(), st.floats(0, 2)))
    def done(self, took_s: float | None) -> None:
        if self.running is not None:
            self.admission.done(took_s=took_s)
            self.running = None

    @invariant()
    def bounded(self) -> None:
        assert self.admission.waiting == len(self.waiting) <= self.CAPACITY
        assert self.admission.clients == len(self.held())
        assert self.admission.idle == (not self.waiting and self.running is None)


TestAnySharing: Any = Sharing.TestCase
TestAnySharing.settings = settings(max_examples=80, stateful_step_count=40)


def test_under_any_flood_a_modest_client_is_served_every_other_time() -> None:
    """One client keeps the queue full; the other always has one request waiting."""
    admission = Admission(capacity=4)
    modest = 0
    for round_ in range(100):
        while says(admission, job(client="greedy")) != "overloaded":
            pass
        if not admission.holds(MODEST.digest):
            sent_back = admission.offer(job(client="modest", infer=MODEST), now_s=0.0)
            assert [code for _, code in sent_back] in (["overloaded"], [])
            assert admission.holds(MODEST.digest), f"kept out in round {round_}"
        taken, _ = take(admission)
        assert taken is not None
        modest += taken.client == "modest"
        admission.done(took_s=0.001)
    assert modest >= 49


def test_computing_time_decides_who_is_next_and_not_turns() -> None:
    """Both always have requests waiting; one picture of the hog's takes ten times as long."""
    admission, used_s = Admission(), defaultdict[str, float](float)
    for _ in range(220):
        for client in ("hog", "modest"):
            while admission.offer(job(client=client), now_s=0.0) == [] and admission.waiting < 6:
                pass
        taken, _ = take(admission)
        assert taken is not None
        decoding_s = 0.09 if taken.client == "hog" else 0.0
        admission.done(took_s=0.01, decoding_s=[decoding_s])
        used_s[taken.client] += 0.01 + decoding_s
        assert abs(used_s["hog"] - used_s["modest"]) <= 0.11
    assert used_s["hog"] == pytest.approx(2.0, rel=0.1)


def test_a_place_that_is_given_up_ahead_of_the_newcomer_makes_it_earlier() -> None:
    admission = Admission(capacity=2)
    ran(admission, took_s=0.1)
    assert says(admission, job(client="spent")) is None
    take(admission)
    first, second = job(client="greedy"), job(client="greedy")
    assert says(admission, first) is None
    # One of two that compete has used 1.1 s, of which half is ahead of its share.
    admission.done(took_s=0.1, decoding_s=[1.0])
    assert says(admission, second) is None
    late = job(0.45, client="spent")
    # It is expected to be decoded in 0.2 s, behind one of the other client's.
    assert admission.offer(late, now_s=0.0) == [(second, "overloaded")]
    assert take(admission) == (first, [])


def test_newcomers_without_end_keep_nobody_waiting_and_are_not_remembered() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    for number in range(2 * REMEMBERED):
        for _ in range(2):
            admission.offer(job(client=f"new {number} {_}"), now_s=0.0)
        if number == 9:
            admission.offer(job(), now_s=0.0)
        take(admission)
        admission.done(took_s=0.1)
        assert number < 20 or "one" not in {each.client for each in admission._in_order()}
    assert len(admission._clients) <= REMEMBERED


def test_decoding_is_its_client_s_own_and_no_part_of_the_estimate() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    for _ in range(50):
        assert says(admission, job(client="hog")) is None
        take(admission)
        admission.done(took_s=0.1, decoding_s=[3.0])
    assert admission.estimate_s == pytest.approx(0.1)
    assert says(admission, job(0.15, client="modest")) is None
    admission.clear()
    assert says(admission, job(2.0, client="hog")) == "too_late"
    assert says(admission, job(4.0, client="hog")) is None
    assert not admission.is_quick(1.0)


def test_one_client_s_tiny_budgets_change_nothing_for_others() -> None:
    admission = Admission()
    ran(admission, took_s=0.1)
    for _ in range(1000):
        if admission.offer(job(1e-6, client="hasty"), now_s=0.0) == []:
            take(admission)
            admission.done(took_s=0.1)
    assert admission.estimate_s == pytest.approx(0.1)
    assert not admission.is_quick(0.001)
    assert says(admission, job(0.09, client="other")) == "too_late"


def at_once(admission: Admission, new: Job, now_s: float = 0.0, longest_s: float = 1.0) -> bool:
    return admission.takes_at_once(new, longest_s, now_s=now_s)


def test_what_is_short_passes_an_empty_queue() -> None:
    admission = Admission()
    assert not at_once(admission, job()), "nothing is known yet"
    ran(admission, took_s=0.1)
    assert not at_once(admission, job(), longest_s=0.09), "it is not short"
    assert at_once(admission, job())
    assert not admission.idle
    assert admission.waiting == admission.clients == 0
    assert not at_once(admission, job()), "one is running"
    waiting = job()
    assert says(admission, waiting) is None
    assert take(admission) == (None, [])
    admission.done(took_s=0.1)
    assert not at_once(admission, job()), "another one waits"
    assert take(admission) == (waiting, [])


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
    assert passed == (queueing.offer(new, now_s=now_s) == [])
    assert passed == (queueing.take(now_s=now_s) == ([new], []))
    if passed:
        # What comes next is told the same.
        follower = job(now_s + next_budget_s)
        assert says(passing, follower, now_s) == says(queueing, follower, now_s)


def batching(most: int = 4, **measured_s: float) -> Admission:
    """An admission that knows how long batches take: `one=0.1, two=0.12`."""
    names = {"one": 1, "two": 2, "three": 3, "four": 4}
    admission = Admission(batch=most)
    admission.durations.renew(most, {names[name]: value for name, value in measured_s.items()})
    return admission


PAYING: dict[str, Any] = {"one": 0.1, "two": 0.12, "three": 0.14, "four": 0.16}


def test_as_many_as_wait_are_taken_together() -> None:
    admission = batching(**PAYING)
    jobs = filled(admission, a=4, b=2)
    a, b = jobs.values()
    assert admission.take(now_s=0.0) == ([a[0], b[0], a[1], b[1]], [])
    assert admission.take(now_s=0.0) == ([], []), "one computation at a time"
    admission.done(took_s=0.16, pictures=4)
    assert admission.take(now_s=0.0) == (a[2:], [])
    admission.done(took_s=0.12, pictures=2)
    assert admission.idle


def test_one_alone_does_not_wait_for_more() -> None:
    admission = batching(**PAYING)
    a = filled(admission, a=1)["a"]
    assert admission.take(now_s=0.0) == (a, [])


def test_no_deadline_is_endangered_for_the_sake_of_a_batch() -> None:
    admission = batching(**PAYING)
    jobs = [job(0.13), job(9.0), job(9.0), job(9.0)]
    for each in jobs:
        assert admission.offer(each, now_s=0.0) == []
    # With one more, the first is still on time; with two more it is not.
    assert admission.take(now_s=0.0) == (jobs[:2], [])


def test_a_batch_that_does_not_pay_is_not_made() -> None:
    for four_s in (0.4, 0.39):
        admission = batching(one=0.1, two=0.2, three=0.3, four=four_s)
        filled(admission, a=4)
        assert len(admission.take(now_s=0.0)[0]) == 1
    admission = batching(one=0.1, two=0.15, three=0.3, four=0.35)
    filled(admission, a=4)
    assert len(admission.take(now_s=0.0)[0]) == 2, "two take least time a picture"


def test_nothing_is_taken_together_before_anything_is_known() -> None:
    admission = Admission(batch=4)
    filled(admission, a=4)
    assert len(admission.take(now_s=0.0)[0]) == 1


def test_bundles_are_not_computed_together() -> None:
    admission = batching(**PAYING)
    old = filled(admission, a=2)["a"]
    new = [job(infer=MODEST, client="a") for _ in range(2)]
    for each in new:
        assert admission.offer(each, now_s=0.0) == []
    assert admission.take(now_s=0.0)[0] == old
    admission.done(took_s=0.12, pictures=2)
    assert admission.take(now_s=0.0)[0] == new


def test_who_is_too_late_is_told_with_batches_in_mind() -> None:
    admission = batching(**PAYING)
    filled(admission, a=7)
    # Two batches of four end at 0.32; one by one it would be 0.8.
    assert says(admission, job(0.31, client="a")) == "too_late"
    admission.durations.renew(4, {1: 0.1, 2: 0.12, 3: 0.14, 4: 0.16})
    assert says(admission, job(0.33, client="a")) is None


def test_what_took_long_once_is_tried_again() -> None:
    admission = batching(one=0.1, two=0.12)
    admission.durations.learn(2, 0.6)
    assert admission.durations.choose(range(1, 3)) == 1
    tries = 0
    while admission.durations.choose(range(1, 3)) == 1:
        tries += 1
        assert tries < 1000
    assert admission.durations.of(2) <= 0.19 + 1e-9


@settings(max_examples=300)
@given(
    measured_s=st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4),
    budgets_s=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=8),
    now_s=st.floats(0, 0.5),
)
def test_whatever_is_taken_together_is_predicted_to_be_on_time(
    measured_s: list[float], budgets_s: list[float], now_s: float
) -> None:
    admission = batching(**cast(dict[str, Any], dict(zip(PAYING, measured_s, strict=True))))
    for number, budget_s in enumerate(budgets_s):
        admission.offer(job(budget_s, client=str(number % 3)), now_s=0.0)
    waiting = admission.waiting
    jobs, dropped = admission.take(now_s=now_s)
    assert len(jobs) + len(dropped) + admission.waiting == waiting
    took_s = admission.takes_s(jobs) if jobs else 0.0
    assert all(now_s + took_s <= each.deadline_s for each in jobs)
    assert len(jobs) <= 4
    assert bool(jobs) == (len(dropped) < waiting)
