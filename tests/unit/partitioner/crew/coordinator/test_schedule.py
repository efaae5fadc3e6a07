"""Rounds of a crew, event by event."""

from collections.abc import Sequence

import pytest

from partitioner.crew.coordinator.claims import Claims
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.schedule import (
    ATTEMPTS,
    LocalSgdSchedule,
    RoundSchedule,
    SynchronousSchedule,
)
from partitioner.crew.messages import (
    Accepted,
    AnyAction,
    AnyEvent,
    Close,
    Commit,
    Done,
    Finished,
    Gone,
    GoOn,
    Joined,
    Meet,
    MeetingFailed,
    Ready,
    Refused,
    Waiting,
)

NET = "member-0"


def told(schedule: RoundSchedule | MembershipMachine, *events: AnyEvent) -> list[AnyAction]:
    """Actions that the last of some events brings about."""
    actions: list[AnyAction] = []
    for event in events:
        actions = schedule.handle(event)
    return actions


def waiting(rank: int, pictures: int = 0, since: int = 0) -> Waiting:
    return Waiting(rank=rank, network=NET, pictures=pictures, since=since)


def ready(rank: int, pictures: int, since: int, *claims: int) -> Ready:
    return Ready(rank=rank, network=NET, pictures=pictures, since=since, claims=claims)


def finished(rank: int, pictures: int, since: int, *claims: int) -> Finished:
    return Finished(rank=rank, network=NET, pictures=pictures, since=since, claims=claims)


def done(rank: int, seq: int) -> Done:
    return Done(rank=rank, network=NET, seq=seq)


def failed(rank: int, seq: int, blamed: int | None = None) -> MeetingFailed:
    return MeetingFailed(rank=rank, network=NET, seq=seq, blamed=blamed)


def met(actions: Sequence[AnyAction]) -> tuple[int, dict[int, float]]:
    """Number and weights of the one meeting that all its members are told of."""
    meets = [action for action in actions if isinstance(action, Meet)]
    assert [meet.rank for meet in meets] == list(meets[0].members)
    return meets[0].seq, dict(zip(meets[0].members, meets[0].weights, strict=True))


def started(trainers: int, batches: int = 100, every: int = 8) -> LocalSgdSchedule:
    """All have the first one's parameters by meeting 2, and train epoch 0."""
    schedule = LocalSgdSchedule(NET, RoundLengths(every, batches, epochs=2))
    told(schedule, *(waiting(rank) for rank in range(trainers)), done(0, 1))
    assert met(told(schedule, waiting(0, since=1)))[1] == {0: 1.0} | dict.fromkeys(
        range(1, trainers), 0.0
    )
    told(schedule, *(done(rank, 2) for rank in range(trainers)))
    return schedule


def test_a_round_ends_by_the_pictures_of_all_together() -> None:
    crew = started(3)
    assert told(crew, ready(0, 3, 2, 0), ready(1, 2, 2, 1), ready(2, 2, 2, 2)) == []
    closed = told(crew, ready(0, 6, 2, 3))
    assert closed == [Close(rank=rank, network=NET) for rank in (0, 1, 2)]
    assert told(crew, waiting(0, 6, 2), waiting(1, 2, 2)) == []
    assert met(told(crew, waiting(2, 4, 2))) == (3, {0: 6.0, 1: 2.0, 2: 4.0})
    assert told(crew, done(0, 3), done(1, 3)) == []
    committed = told(crew, done(2, 3))
    assert committed == [Commit(rank=rank, network=NET, seq=3, epoch=0) for rank in (0, 1, 2)]
    assert crew.claims.committed == {0, 1, 2, 3}


def test_a_crew_goes_on_with_the_one_that_has_most_epochs_behind_it() -> None:
    crew = LocalSgdSchedule(NET, RoundLengths(8, 100, epochs=6), expected=range(4))
    for rank, epoch in enumerate((0, 3, 5)):
        entering = Waiting(rank=rank, network=NET, pictures=0, epoch=epoch)
        assert told(crew, entering) == []
    entering = Waiting(rank=3, network=NET, pictures=0, epoch=5)
    assert met(told(crew, entering)) == (1, {0: 0.0, 1: 0.0, 2: 1.0, 3: 0.0})
    # The first that has most is lost as it gives: the next one does.
    gone = Gone(rank=2)
    assert told(crew, failed(0, 1), failed(1, 1), failed(3, 1)) == []
    assert met(told(crew, gone)) == (2, {0: 0.0, 1: 0.0, 3: 1.0})
    committed = told(crew, done(0, 2), done(1, 2), done(3, 2))
    assert committed == [Commit(rank=rank, network=NET, seq=2, epoch=5) for rank in (0, 1, 3)]
    # Who comes later with more behind it has what the others have from then on.
    late = Waiting(rank=4, network=NET, pictures=0, epoch=6)
    assert {type(action) for action in told(crew, late)} == {Close}
    assert crew.epoch == 5


def test_a_generation_gets_the_checkpoint_of_who_has_most_epochs() -> None:
    crew = SynchronousSchedule(NET, 1, expected=range(2))
    assert told(crew, Waiting(rank=0, network=NET, pictures=0)) == []
    entering = Waiting(rank=1, network=NET, pictures=0, epoch=5)
    assert met(told(crew, entering)) == (1, {0: 0.0, 1: 1.0})
    # Epochs are the checkpoint's: what is counted here is generations that have ended.
    told(crew, done(0, 1), done(1, 1))
    assert (crew.epoch, crew.ended) == (0, "")


def test_members_are_told_that_a_mean_ends_the_epoch() -> None:
    crew = started(2, batches=3)
    told(crew, ready(0, 4, 2, 0), ready(1, 4, 2, 1), waiting(0, 4, 2))
    meets = told(crew, waiting(1, 4, 2))
    assert [isinstance(meet, Meet) and meet.ends for meet in meets] == [False, False]
    told(crew, done(0, 3), done(1, 3))
    # Whoever has no batch left waits, or has finished.
    told(crew, ready(0, 4, 3, 2), finished(1, 0, 3, 3))
    last = told(crew, waiting(0, 4, 3))
    assert [isinstance(meet, Meet) and meet.ends for meet in last] == [True, True]
    # Without the work of who is blamed it does not.
    told(crew, failed(1, 4, blamed=0))
    again = told(crew, failed(0, 4, blamed=0))
    assert [isinstance(meet, Meet) and meet.ends for meet in again] == [False, False]


def test_the_quick_train_on_while_a_slow_one_ends_its_step() -> None:
    crew = started(3)
    told(crew, ready(0, 2, 2, 0), ready(1, 2, 2, 1), ready(0, 3, 2, 2), ready(1, 3, 2, 3))
    assert told(crew, ready(0, 4, 2, 4)) == []
    assert told(crew, ready(1, 4, 2, 5)) == [Close(rank=2, network=NET)]
    assert told(crew, ready(0, 5, 2, 6), ready(2, 1, 2, 7)) == []
    closed = told(crew, waiting(2, 1, 2))
    assert closed == [Close(rank=rank, network=NET) for rank in (0, 1)]


def test_the_quick_do_not_train_on_for_ever() -> None:
    crew = started(2)
    told(crew, ready(0, 2, 2, 0), ready(0, 4, 2, 1), ready(0, 6, 2, 2))
    assert told(crew, ready(0, 8, 2, 3)) == [Close(rank=1, network=NET)]
    assert told(crew, ready(0, 10, 2, 4)) == []
    assert told(crew, ready(0, 12, 2, 5)) == [Close(rank=0, network=NET)]


def test_a_trainer_lost_in_a_meeting_costs_a_retry_without_it() -> None:
    crew = started(3)
    told(crew, ready(0, 8, 2, 0), ready(2, 1, 2, 1))
    told(crew, waiting(0, 8, 2), waiting(1, 0, 2), waiting(2, 1, 2))
    assert told(crew, failed(0, 3), failed(1, 3)) == []
    assert met(told(crew, Gone(rank=2))) == (4, {0: 8.0, 1: 0.0})
    # A late answer of the meeting that failed, and of who is gone, mean nothing.
    assert told(crew, done(1, 3), done(2, 4)) == []
    told(crew, done(0, 4), done(1, 4))
    assert crew.claims.committed == {0}


def test_a_trainer_lost_after_all_others_have_the_mean_is_in_it() -> None:
    crew = started(2)
    told(crew, ready(0, 4, 2, 0), ready(1, 4, 2, 1), waiting(0, 4, 2), waiting(1, 4, 2), done(0, 3))
    committed = told(crew, Gone(rank=1))
    assert committed == [Commit(rank=0, network=NET, seq=3, epoch=0)]
    assert crew.claims.committed == {0, 1}


def test_who_sends_a_number_that_is_not_finite_is_left_out_once() -> None:
    crew = started(2)
    told(crew, ready(0, 4, 2, 0), ready(1, 4, 2, 1), waiting(0, 4, 2), waiting(1, 4, 2))
    told(crew, failed(0, 3, blamed=1))
    assert met(told(crew, failed(1, 3))) == (4, {0: 4.0, 1: 0.0})
    told(crew, done(0, 4), done(1, 4))
    assert crew.claims.committed == {0}
    told(crew, ready(0, 4, 4, 2), ready(1, 4, 4, 3), waiting(0, 4, 4), waiting(1, 4, 4))
    told(crew, failed(0, 5, blamed=1))
    reason = "member-0: trainer 1 sent a number that is not finite"
    refused = [Refused(rank=rank, network=NET, reason=reason) for rank in (0, 1)]
    assert told(crew, failed(1, 5)) == refused


def test_means_that_fail_again_and_again_end() -> None:
    crew = started(2)
    told(crew, ready(0, 8, 2, 0), waiting(0, 8, 2), waiting(1, 0, 2))
    for attempt in range(ATTEMPTS):
        actions = told(crew, failed(0, 3 + attempt), failed(1, 3 + attempt))
    assert {type(action) for action in actions} == {Refused}
    assert crew.ended == "member-0: 5 means of 0, 1 failed: they do not all reach each other"


def test_an_epoch_ends_when_all_that_was_lost_is_done_again() -> None:
    crew = started(3, batches=4, every=100)
    told(crew, ready(0, 1, 2, 0), ready(1, 1, 2, 1), ready(2, 1, 2, 2))
    # Trainer 2 is lost with batch 2, which it has reported, and batch 3, which it has not.
    told(crew, Gone(rank=2), finished(0, 1, 2, 4))
    assert told(crew, finished(1, 1, 2, 5)) == [
        GoOn(rank=0, network=NET, seq=3, epoch=0, claims=(2,)),
        GoOn(rank=1, network=NET, seq=3, epoch=0, claims=(3,)),
    ]
    told(crew, ready(0, 2, 3, 2), finished(0, 2, 3), ready(1, 2, 3, 3))
    assert met(told(crew, finished(1, 2, 3))) == (4, {0: 2.0, 1: 2.0})
    told(crew, done(0, 4))
    ended = told(crew, done(1, 4))
    assert ended == [Commit(rank=rank, network=NET, seq=4, epoch=1) for rank in (0, 1)]
    assert crew.claims.missing() == [0, 1, 2, 3]


def test_a_batch_that_two_report_is_a_contradiction() -> None:
    claims = Claims(3)
    claims.report(0, [0, 3])
    claims.report(0, [0])
    for _ in range(2):
        with pytest.raises(ValueError, match="trainer 1: batch 0 is done already"):
            claims.report(1, [0])
        claims.commit(0)
    assert claims.missing() == [1, 2]


def test_without_a_trainer_that_has_the_parameters_a_network_ends() -> None:
    crew = started(1)
    told(crew, waiting(1))
    assert told(crew, Gone(rank=0)) == [Refused(rank=1, network=NET, reason=crew.ended)]
    assert crew.ended.startswith("no trainer that has the parameters of member-0 is left")
    assert told(crew, waiting(2)) == [Refused(rank=2, network=NET, reason=crew.ended)]


def test_the_furthest_on_of_an_exact_crew_give_their_state() -> None:
    crew = SynchronousSchedule(NET, epochs=1)
    told(crew, *(waiting(rank) for rank in range(3)), done(0, 1), ready(0, 1, 1))
    # Newcomers wait for the end of the epoch, or for a generation that is made anyway.
    assert met(told(crew, waiting(0, 1, 1)))[1] == {0: 1.0, 1: 0.0, 2: 0.0}
    told(crew, done(0, 2), done(1, 2), done(2, 2))
    told(crew, ready(0, 5, 2), ready(1, 5, 2), ready(2, 5, 2), ready(1, 6, 2))
    closed = told(crew, Gone(rank=2))
    assert closed == [Close(rank=0, network=NET), Close(rank=1, network=NET)]
    assert met(told(crew, waiting(0, 5, 2), waiting(1, 6, 2))) == (3, {0: 0.0, 1: 1.0})
    told(crew, done(0, 3), done(1, 3), finished(0, 9, 3))
    ended = told(crew, finished(1, 9, 3))
    assert ended == [GoOn(rank=rank, network=NET, seq=4, epoch=1) for rank in (0, 1)]
    assert crew.ended == "member-0 is trained"


def test_an_exact_generation_without_a_member_is_made_anew() -> None:
    crew = SynchronousSchedule(NET, epochs=1)
    told(crew, waiting(0), waiting(1), done(0, 1), waiting(0, 0, 1), done(0, 2))
    # The state is committed, and the group that it came in has lost a member.
    assert told(crew, Gone(rank=1)) == [
        Commit(rank=0, network=NET, seq=2, epoch=0),
        Close(rank=0, network=NET),
    ]


class Halves(LocalSgdSchedule):
    """Once all have begun alike, those of lower and of higher ranks meet, each half by itself."""

    def groups(self, resting: Sequence[int]) -> list[dict[int, float]]:
        """Two groups of two."""
        (every,) = super().groups(resting) or ({},)
        if not self._started or len(every) < 4:
            return [every] if every else []
        lower, upper = list(every)[:2], list(every)[2:]
        return [{rank: every[rank] for rank in half} for half in (lower, upper)]


def closed_halves() -> Halves:
    """Four trainers, told of meetings 2 and 3 with a batch of two pictures each."""
    crew = Halves(NET, RoundLengths(8, 100, 2), expected=range(4))
    told(crew, *(waiting(rank) for rank in range(4)), *(done(rank, 1) for rank in range(4)))
    told(crew, *(ready(rank, 2, 1, rank) for rank in range(4)))
    actions = told(crew, *(waiting(rank, 2, 1) for rank in range(4)))
    assert met(actions[:2]) == (2, {0: 2.0, 1: 2.0})
    assert met(actions[2:]) == (3, {2: 2.0, 3: 2.0})
    return crew


def test_two_groups_meet_at_once_and_end_apart() -> None:
    crew = closed_halves()
    assert told(crew, done(0, 3), done(2, 2), done(2, 3)) == []  # the other half's is not theirs
    committed = [Commit(rank=rank, network=NET, seq=3, epoch=0) for rank in (2, 3)]
    assert told(crew, done(3, 3)) == committed
    assert crew.claims.committed == {2, 3}
    # No round closes while a meeting is under way.
    assert told(crew, ready(2, 9, 3, 4)) == []
    assert told(crew, done(0, 2)) == []
    assert told(crew, done(1, 2)) == [
        *(Commit(rank=rank, network=NET, seq=2, epoch=0) for rank in (0, 1)),
        *(Close(rank=rank, network=NET) for rank in (0, 1, 2, 3)),
    ]


def test_a_trainer_lost_in_one_group_leaves_the_other_alone() -> None:
    crew = closed_halves()
    told(crew, failed(0, 2), done(2, 3))
    assert told(crew, Gone(rank=1)) == []  # who is left of its group waits for the others
    assert crew.claims.missing()[:2] == [1, 4]
    committed = told(crew, done(3, 3))
    assert committed[:2] == [Commit(rank=rank, network=NET, seq=3, epoch=0) for rank in (2, 3)]


def test_who_takes_part() -> None:
    crews = {"member-0": ("coordinator", "nuc"), "member-1": ("nuc",)}
    networks = {name: LocalSgdSchedule(name, RoundLengths(8, 10, 1)) for name in crews}
    machine = MembershipMachine("d", crews, networks)

    def join(rank: int, name: str, digest: str = "d") -> list[AnyAction]:
        return machine.handle(Joined(rank=rank, name=name, digest=digest))

    assert join(0, "coordinator") == [Accepted(rank=0, network="")]
    reason = "nas is in no crew of the plan: expected one of coordinator, nuc"
    assert join(1, "nas") == [Refused(rank=1, network="", reason=reason)]
    reason = "pictures, settings or version of nuc differ from the coordinator's: expected d, got e"
    assert join(2, "nuc", "e") == [Refused(rank=2, network="", reason=reason)]
    assert join(3, "nuc") == [Accepted(rank=3, network="")]
    # Each network has its own meetings; the same trainer may be in several.
    assert met(told(machine, waiting(0)))[0] == 1
    assert met(machine.handle(Waiting(rank=3, network="member-1", pictures=0)))[1] == {3: 1.0}
    assert told(machine, waiting(2)) == []
    # A name that joins again is another process: the old one is gone.
    reason = "another trainer joined as nuc"
    assert join(4, "nuc") == [
        Refused(rank=3, network="", reason=reason),
        Accepted(rank=4, network=""),
    ]
    assert networks["member-1"].members == {}
    # That of the coordinator, which leads all others, is nobody else's.
    reason = "coordinator is the coordinator's name: expected a trainer's"
    assert join(5, "coordinator") == [Refused(rank=5, network="", reason=reason)]
    reason = "coordinator is not in the crew of member-1"
    refused = machine.handle(Waiting(rank=0, network="member-1", pictures=0))
    assert refused == [Refused(rank=0, network="", reason=reason)]
