"""Trainers that are taken for lost, with times handed in."""

from partitioner.crew.coordinator.watch import Watch
from partitioner.crew.messages import Commit, Finished, Gone, Joined, Meet, Ready, Receipt, Waiting

NET = "member-0"


def watched() -> Watch:
    """Trainers 0 and 1 that are training since second 0; whoever is asked for is heard of."""
    watch = Watch(meeting_s=20.0)
    for rank in (0, 1):
        watch.on_event(Joined(rank=rank, name="nuc", digest="d"), 0.0)
        watch.on_action(Commit(rank=rank, network=NET, seq=1), 0.0)
    return watch


def lost_at(watch: Watch, start_s: float, until_s: float, silent: int | None = None) -> float:
    """The second in which trainer 1 is lost, asked every second; `silent` has no process."""
    now_s = start_s
    while now_s < until_s:
        now_s += 1.0
        for rank in {0, 1} - {silent}:
            watch.on_heartbeat(rank, now_s)
        if watch.find_lost(now_s):
            assert watch.find_lost(now_s) == [1]
            return now_s
    return 0.0


def ready(rank: int) -> Ready:
    return Ready(rank=rank, network=NET, pictures=1)


def test_a_silent_process_is_lost_after_ten_seconds() -> None:
    assert lost_at(watched(), 0.0, 100.0, silent=1) == 11.0


def test_the_first_step_may_take_long_and_later_ones_thrice_as_long_as_the_longest() -> None:
    watch = watched()
    assert lost_at(watch, 0.0, 600.0) == 0.0
    watch.on_event(ready(0), 600.0)
    watch.on_event(ready(1), 600.0)
    assert lost_at(watch, 600.0, 1800.0) == 0.0
    watch = watched()
    watch.on_event(ready(0), 4.0)
    watch.on_event(ready(1), 4.0)
    watch.on_event(Waiting(rank=0, network=NET, pictures=1), 5.0)
    # 3 x 4 s + 10 s after the last report; trainer 0 is at rest and owes nothing.
    assert lost_at(watch, 4.0, 100.0) == 27.0


def test_a_meeting_has_the_timeout_of_its_group_and_the_end_of_an_epoch_none() -> None:
    watch = watched()
    watch.on_event(Finished(rank=1, network=NET, pictures=1), 5.0)
    meet = Meet(rank=1, network=NET, seq=2, members=(0, 1), weights=(1.0, 1.0))
    watch.on_action(meet, 6.0)
    assert lost_at(watch, 5.0, 100.0) == 37.0
    watch = watched()
    watch.on_event(Finished(rank=1, network=NET, pictures=1), 5.0)
    watch.on_action(Commit(rank=1, network=NET, seq=2, epoch=1), 6.0)
    assert lost_at(watch, 5.0, 3600.0) == 0.0


def test_who_closed_its_round_before_the_last_batch_may_validate_as_long_as_the_others() -> None:
    watch = watched()
    watch.on_event(ready(1), 4.0)
    watch.on_event(Waiting(rank=1, network=NET, pictures=1), 5.0)
    watch.on_action(Commit(rank=1, network=NET, seq=2, epoch=1), 6.0)
    assert lost_at(watch, 5.0, 3600.0) == 0.0
    # Within an epoch the next step is owed: 3 x 4 s + 10 s.
    watch.on_event(ready(1), 3600.0)
    watch.on_event(Waiting(rank=1, network=NET, pictures=1), 3601.0)
    watch.on_action(Commit(rank=1, network=NET, seq=3, epoch=1), 3601.0)
    assert lost_at(watch, 3601.0, 3700.0) == 3624.0


def test_a_generation_of_gradients_is_no_step() -> None:
    """In it nothing is reported until it ends, or breaks."""
    watch = watched()
    watch.on_event(Waiting(rank=1, network=NET, pictures=0), 600.0)
    watch.on_action(Commit(rank=1, network=NET, seq=2), 603.0)
    assert lost_at(watch, 603.0, 7200.0) == 0.0
    # Nor does the next network owe steps as short as those of this one.
    watch = watched()
    watch.on_event(ready(1), 1.0)
    watch.on_event(Waiting(rank=1, network="member-1", pictures=0), 2.0)
    watch.on_action(Commit(rank=1, network="member-1", seq=1), 2.0)
    assert lost_at(watch, 1.0, 600.0) == 0.0


def test_in_the_background_a_step_may_take_longer_than_the_meeting() -> None:
    watch = watched()
    watch.on_event(ready(1), 50.0)
    watch.on_event(ready(1), 100.0)
    watch.on_event(Waiting(rank=1, network=NET, pictures=2), 100.0)
    meet = Meet(rank=1, network=NET, seq=2, members=(0, 1), weights=(1.0, 1.0), background=True)
    watch.on_action(meet, 100.0)
    # 3 x 50 s + 10 s, as after a Commit; the meeting alone would end it after 30 s.
    assert lost_at(watch, 100.0, 600.0) == 261.0


def test_a_coordinator_that_has_slept_blames_nobody() -> None:
    watch = watched()
    watch.on_event(ready(1), 1.0)
    assert watch.find_lost(1.0) == []
    assert watch.find_lost(3600.0) == []
    assert lost_at(watch, 3600.0, 3700.0) == 3614.0


def test_what_comes_of_neighbours_says_nothing_of_a_step() -> None:
    watch = watched()
    watch.on_event(ready(0), 4.0)
    watch.on_event(ready(1), 4.0)
    watch.on_event(Waiting(rank=0, network=NET, pictures=1), 5.0)
    watch.on_event(Receipt(rank=1, network=NET, source=0, since=1), 20.0)
    # The step is still owed.
    assert lost_at(watch, 20.0, 100.0) == 27.0


def test_who_is_gone_is_watched_no_longer() -> None:
    watch = watched()
    watch.on_event(Gone(rank=1), 1.0)
    assert lost_at(watch, 0.0, 100.0, silent=1) == 100.0 or watch.find_lost(100.0) == []
