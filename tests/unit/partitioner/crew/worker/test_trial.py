"""The timed round of a trial, by the clock that is handed in; networks and losses as trained."""

from collections.abc import Iterator

import numpy as np
import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")

from partitioner.build.inputs import TrainingInputs  # noqa: E402
from partitioner.build.settings import run_settings  # noqa: E402
from partitioner.crew.messages import AnyAction, AnyEvent, Commit, Meet, Ready, Waiting  # noqa: E402
from partitioner.crew.planning.tuning import RoundTime  # noqa: E402
from partitioner.crew.worker.trial import RoundClock, draw_network  # noqa: E402
from partitioner.data.datasets import DIGITS, open_dataset  # noqa: E402
from partitioner.run.settings import Settings  # noqa: E402
from tests.support.models.runs import config_of, tiny_plan  # noqa: E402

pytestmark = pytest.mark.torch


class ScriptedControl:
    """A control that gives its actions in order, and keeps what it is told."""

    rank = 1

    def __init__(self, *actions: AnyAction) -> None:
        self.actions, self.events, self.claims = list(actions), list[AnyEvent](), list[str]()

    def report(self, event: AnyEvent) -> None:
        self.events.append(event)

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        return self.actions.pop(0) if self.actions else None

    def claim(self, counter: str) -> int:
        self.claims.append(counter)
        return 7


def commit(seq: int) -> Commit:
    return Commit(rank=1, network="trial-0", seq=seq)


def ready(pictures: int) -> Ready:
    return Ready(rank=1, network="trial-0", pictures=pictures, since=1)


def test_the_timed_round_is_the_last_one() -> None:
    def times() -> Iterator[float]:
        # Entered, warmed up, its mean, two steps, the mean after them.
        yield from (0.0, 5.0, 6.0, 8.0, 9.5, 12.0)

    meet = Meet(rank=1, network="trial-0", seq=2, members=(0, 1), weights=(1.0, 1.0))
    ticks, control = times(), ScriptedControl(commit(1), meet, commit(2), commit(3))
    clock = RoundClock(control, lambda: next(ticks))
    assert clock.poll() == commit(1)
    clock.report(ready(8))
    assert (clock.poll(), clock.poll(1.0)) == (meet, commit(2))
    clock.report(ready(8))
    clock.report(ready(16))
    clock.report(Waiting(rank=1, network="trial-0", pictures=16, since=2))
    assert (clock.poll(), clock.poll()) == (commit(3), None)
    assert clock.last_round() == RoundTime(pictures=16, busy_s=3.5, seconds=6.0)
    assert [type(event) for event in control.events] == [Ready, Ready, Ready, Waiting]
    assert (clock.rank, clock.claim("cursor/trial-0/0"), control.claims) == (
        1, 7, ["cursor/trial-0/0"],
    )  # fmt: skip


def test_a_round_without_a_step_of_ones_own() -> None:
    ticks = iter((0.0, 1.0, 4.0))
    clock = RoundClock(ScriptedControl(commit(1), commit(2)), lambda: next(ticks))
    clock.poll()
    clock.poll()
    assert clock.last_round() == RoundTime(pictures=0, busy_s=0.0, seconds=1.0)


@pytest.fixture(scope="module")
def settings() -> Settings:
    data, plan = open_dataset(DIGITS, limit_train=20), tiny_plan()
    found = run_settings(TrainingInputs.of(config_of(DIGITS), data, plan.teacher))
    boosted = replace(found.schedule, boost_weight=0.5, stack_weight=0.5, batch_size=6)
    return replace(found, schedule=boosted)


@pytest.mark.parametrize("name", ["teacher", "member-0", "member-1"])
def test_a_loss_of_any_pictures_reaches_every_parameter(name: str, settings: Settings) -> None:
    network, loss_of, schedule, autocast = draw_network(tiny_plan(), settings, name)
    size = settings.teacher_schedule.batch_size if name == "teacher" else 6
    assert (schedule.batch_size, autocast) == (size, settings.autocast)
    # Of more pictures than a batch has: the sixth step's.
    losses = loss_of(network, np.arange(5 * size, 6 * size), 0)
    assert torch.isfinite(losses["loss"])
    losses["loss"].backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in network.parameters())
