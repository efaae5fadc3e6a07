"""Crews in virtual time."""

import pytest

from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import LocalSgdSchedule
from partitioner.crew.coordinator.simulate import (
    NETWORK,
    CrewScenario,
    CrewTrace,
    Paced,
    simulate,
    slow_periods,
)
from partitioner.crew.messages import Commit, Gone, Ready


def crew(*paces: float) -> tuple[Paced, ...]:
    return tuple(Paced(name=f"t{rank}", step_s=step_s) for rank, step_s in enumerate(paces))


def batches_of(trace: CrewTrace) -> list[int]:
    """Batches that are reported and committed: those of trainers that are lost are not."""
    pending: dict[int, list[int]] = {}
    committed: list[int] = []
    for _, event, actions in trace.log:
        if isinstance(event, Ready):
            pending.setdefault(event.rank, []).extend(event.claims)
        if isinstance(event, Gone):
            pending.pop(event.rank, None)
        for action in actions:
            if isinstance(action, Commit):
                committed += pending.pop(action.rank, [])
    return sorted(committed)


def test_trainers_of_unlike_paces_share_an_epoch_by_pace() -> None:
    scenario = CrewScenario(
        trainers=crew(1.0, 2.0, 4.0), every_pictures=28, batches=700, mean_s=lambda members: 0.1
    )
    trace = simulate(scenario)
    assert trace.ended == "network is trained"
    assert batches_of(trace) == list(range(700))
    # 700 batches at 1 + 1/2 + 1/4 a second.
    assert 400 < trace.seconds < 425
    assert [round(trace.steps(rank), -1) for rank in range(3)] == [400, 200, 100]
    waits = sum(span.end_s - span.start_s for span in trace.spans if span.kind == "wait")
    assert waits < 0.05 * 3 * trace.seconds


def test_a_schedule_of_ones_own_is_played() -> None:
    class Eager(LocalSgdSchedule):
        """Rounds of half the pictures."""

        def _due(self) -> bool:
            return super()._due() or self._pictures() >= self._round_pictures() / 2

    scenario = CrewScenario(trainers=crew(1.0, 1.0), every_pictures=20, batches=100)

    trace = simulate(scenario, Eager(NETWORK, RoundLengths(20, 100, 1)))
    assert batches_of(trace) == list(range(100))
    # Beside the first meeting and the epoch's end.
    assert (commits(trace) - 2, commits(simulate(scenario)) - 2) == (10, 5)


def test_means_in_the_background_cost_no_time() -> None:
    scenario = CrewScenario(
        trainers=crew(1.0, 1.0), every_pictures=20, batches=200, epochs=2, mean_s=lambda n: 5.0
    )
    schedule = LocalSgdSchedule(NETWORK, RoundLengths(20, 200, 2), background=True)
    trace = simulate(scenario, schedule)
    assert trace.ended == "network is trained"
    # One to begin with, the last one under way in each epoch, and its end are waited for.
    assert 200 + 3 * 5 <= trace.seconds <= 200 + 5 + 2 * 2 * 5 + 2
    assert simulate(scenario).seconds >= 200 + 20 * 5
    assert commits(trace) > 15


def commits(trace: CrewTrace) -> int:
    """Means that were committed."""
    return len({a.seq for _, _, actions in trace.log for a in actions if isinstance(a, Commit)})


def test_losses_and_joins_lose_no_batch() -> None:
    lost = Paced(name="lost", step_s=1.0, lost_s=100.5)
    late = Paced(name="late", step_s=1.0, joins_s=150.0)
    scenario = CrewScenario(trainers=(*crew(1.0, 1.0), lost, late), every_pictures=32, batches=1000)
    trace = simulate(scenario)
    assert trace.ended == "network is trained"
    assert batches_of(trace) == list(range(1000))
    assert trace.steps(2) < 110
    assert trace.steps(3) > 100


def test_the_trace_replays_to_the_same_actions() -> None:
    scenario = CrewScenario(
        trainers=crew(1.0, 1.5), every_pictures=10, batches=50, epochs=2, slowed=slow_periods()
    )
    schedule = LocalSgdSchedule("network", RoundLengths(10, 50, 2))
    for _, event, actions in simulate(scenario).log:
        assert schedule.handle(event) == actions


def test_spells_are_those_of_the_reference() -> None:
    slowed = slow_periods()
    steps = 0
    for rank in range(4):
        at_s = 0.0
        while at_s <= 3000:
            at_s += slowed(rank, at_s)
            steps += 1
    assert steps == 11_108


@pytest.mark.parametrize("trainers", [1, 8])
def test_rounds_keep_nine_tenths_of_the_pace_under_spells(trainers: int) -> None:
    slowed, scenario_s = slow_periods(), 600.0
    trace = simulate(
        CrewScenario(
            trainers=crew(*[1.0] * trainers),
            every_pictures=16 * trainers,
            batches=10**5,
            until_s=scenario_s,
            slowed=slowed,
        )
    )
    best = 0
    for rank in range(trainers):
        at_s = slowed(rank, 0.0)
        while at_s <= scenario_s:
            best += 1
            at_s += slowed(rank, at_s)
    assert trace.steps() >= 0.9 * best
