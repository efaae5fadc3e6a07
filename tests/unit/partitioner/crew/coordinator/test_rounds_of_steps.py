"""Step sizes and lengths of rounds."""

from collections.abc import Sequence

import pytest

from partitioner.crew.coordinator.rounds import (
    RoundLengths,
    averages_moments,
    growing_means,
    growing_period,
    lengthen,
    step_factor,
)
from partitioner.crew.coordinator.schedule import LocalSgdSchedule
from partitioner.crew.coordinator.simulate import NETWORK, CrewScenario, Paced, simulate
from partitioner.crew.messages import Meet
from partitioner.run.step_size import learning_rate


@pytest.mark.parametrize(
    ("steps", "factor"),
    [((1, 1, 1, 1), 2), ((4, 2, 1), 1.3472), ((3, 1), 1.1314), ((8, 1), 0.8812), ((5,), 1)],
)
def test_a_mean_moves_as_far_as_averaged_gradients(steps: Sequence[float], factor: float) -> None:
    assert step_factor(steps, len(steps)) == pytest.approx(factor, abs=1e-4)


def test_who_is_left_alone_steps_by_its_part_of_a_batch() -> None:
    assert step_factor([7], 4) == 0.5


def test_moments_are_averaged_now_and_then_whoever_meets() -> None:
    def share(seqs: Sequence[int], every: int, *, whole: bool) -> float:
        return sum(averages_moments(seq, every, whole=whole) for seq in seqs) / len(seqs)

    assert [seq for seq in range(1, 10) if averages_moments(seq, 3, whole=True)] == [3, 6, 9]
    assert share(range(1, 10), 0, whole=True) == share(range(1, 10), 0, whole=False) == 0.0
    # Two sites in turns: of each, every other meeting.
    for first in (1, 2):
        assert share(range(first, 2000, 2), 2, whole=False) == pytest.approx(0.5, abs=0.06)


def test_a_round_grows_as_the_step_size_falls() -> None:
    """At a step size of so much of the peak, from 3 steps."""
    assert [lengthen(3, share) for share in (1, 0.9, 0.75, 0.5, 0.25)] == [3, 3, 5, 12, 48]
    period = growing_period(3, 1000)
    assert {period(done) for done in range(101)} == {3}  # the warm-up
    assert period(501) == lengthen(3, learning_rate(500, 1000, 1.0)) > 3
    assert period(1000) > 1000


def test_the_rounds_of_a_training() -> None:
    """188 steps without an end of an epoch."""
    trainers, steps = (Paced(name="alone", step_s=1.0),), 188
    scenario = CrewScenario(trainers=trainers, every_pictures=3, batches=steps)
    schedule = LocalSgdSchedule(NETWORK, RoundLengths(3, steps, 1, period=growing_period(3, steps)))
    log = simulate(scenario, schedule).log
    meets = [action for _, _, actions in log for action in actions if isinstance(action, Meet)]
    assert [int(meet.weights[0]) for meet in meets[1:]] == [*[3] * 20, 4, 4, 4, 5, 6, 7, 9, 89]


def test_the_means_of_a_training_are_counted() -> None:
    assert growing_means(3, 188, 188) == 28
    assert growing_means(3, 188, 94) == 29
    assert growing_means(500, 188, 94) == 2


def test_a_round_ends_with_its_epoch() -> None:
    trainers, steps = (Paced(name="a", step_s=1.0), Paced(name="b", step_s=1.0)), 40
    scenario = CrewScenario(trainers=trainers, every_pictures=4, batches=steps, epochs=3)
    schedule = LocalSgdSchedule(
        NETWORK, RoundLengths(4, steps, 3, period=growing_period(4, 3 * steps))
    )
    log = simulate(scenario, schedule).log
    meets = {a.seq: a for _, _, actions in log for a in actions if isinstance(a, Meet)}
    rounds = [int(sum(meet.weights)) for meet in meets.values()][1:]
    assert sum(rounds) == 3 * steps
    assert schedule.epoch == 3
    ends = [sum(rounds[: i + 1]) for i in range(len(rounds))]
    assert {steps, 2 * steps, 3 * steps} <= set(ends)
    assert rounds[-1] > 4 * rounds[0]
