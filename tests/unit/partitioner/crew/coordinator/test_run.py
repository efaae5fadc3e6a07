"""One machine for a whole run: jobs, membership, and rounds of the networks that crews share."""

from partitioner.crew.coordinator.jobs import Job, Jobs
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.rounds import RoundLengths
from partitioner.crew.coordinator.run import CrewRun
from partitioner.crew.coordinator.schedule import ATTEMPTS, LocalSgdSchedule
from partitioner.crew.messages import (
    Accepted,
    AnyAction,
    AnyEvent,
    Close,
    Commit,
    Done,
    Finished,
    Gone,
    Joined,
    Leave,
    Made,
    Meet,
    MeetingFailed,
    Ready,
    Refused,
    Start,
    Waited,
    Waiting,
)

JOBS = [
    Job(name="member-0", by=("coordinator", "tower")),
    Job(name="member-1", by=("nuc",), after=("member-0",)),
]


def new_run() -> CrewRun:
    machine = MembershipMachine("d", {job.name: job.by for job in JOBS}, {})
    return CrewRun(
        machine, Jobs(JOBS), lambda network, *_: LocalSgdSchedule(network, RoundLengths(4, 2, 1))
    )


def told(run: CrewRun, *events: AnyEvent) -> list[AnyAction]:
    return [action for event in events for action in run.handle(event)]


def met(run: CrewRun, event: AnyEvent) -> list[AnyAction]:
    """The same, where every meeting succeeds at once."""
    actions = run.handle(event)
    for action in actions:
        if isinstance(action, Meet):
            done = Done(rank=action.rank, network=action.network, seq=action.seq)
            actions.extend(run.handle(done))
    return actions


def join(rank: int, name: str, digest: str = "d") -> Joined:
    return Joined(rank=rank, name=name, digest=digest)


def test_a_crew_trains_in_rounds_and_then_the_next_network_starts() -> None:
    run = new_run()
    assert told(run, join(0, "coordinator"), join(1, "tower")) == [
        Accepted(rank=0, network=""),
        Accepted(rank=1, network=""),
        Start(rank=0, network="member-0", alone=False),
        Start(rank=1, network="member-0", alone=False),
    ]
    assert told(run, join(2, "nuc")) == [Accepted(rank=2, network="")]
    seqs: dict[int, int] = {}
    actions: list[AnyAction] = []
    for rank in (0, 1):
        actions += met(run, Waiting(rank=rank, network="member-0", pictures=0))
    seqs |= {a.rank: a.seq for a in actions if isinstance(a, Commit)}
    # The second one waits until the first has closed its round.
    actions += met(run, Ready(rank=0, network="member-0", pictures=4, since=seqs[0], claims=(0,)))
    assert Close(rank=0, network="member-0") in actions
    actions = met(run, Waiting(rank=0, network="member-0", pictures=4, since=seqs[0]))
    seqs |= {action.rank: action.seq for action in actions if isinstance(action, Commit)}
    assert seqs[0] == seqs[1]
    for rank in (0, 1):
        claims = (1,) if rank else ()
        actions = met(
            run,
            Finished(rank=rank, network="member-0", pictures=2, since=seqs[rank], claims=claims),
        )
    assert [action.rank for action in actions if isinstance(action, Commit)] == [0, 1]
    assert told(run, Made(rank=0, network="member-0", said="{}")) == [
        Start(rank=2, network="member-1", alone=True)
    ]
    assert not run.is_finished
    left = told(run, Made(rank=1, network="member-0"), Made(rank=2, network="member-1", said="{}"))
    assert left == [Leave(rank=rank, network="") for rank in range(3)]
    assert run.is_finished
    assert run.said == {"member-0": "{}", "member-1": "{}"}


def test_a_crew_that_was_lost_as_a_whole_begins_anew() -> None:
    run = new_run()
    told(run, join(0, "coordinator"), join(1, "tower"), join(2, "nuc"))
    for rank in (0, 1):
        met(run, Waiting(rank=rank, network="member-0", pictures=0))
    told(run, Gone(rank=0))
    assert Start(rank=2, network="member-0", alone=True) in told(run, Gone(rank=1))
    # Who comes back does not disturb the one that trains it now.
    assert told(run, join(3, "coordinator")) == [Accepted(rank=3, network="")]


def test_a_crew_begins_anew_where_all_were_lost_and_nobody_is_free() -> None:
    run = new_run()
    told(run, join(0, "coordinator"), join(1, "tower"))
    for rank in (0, 1):
        met(run, Waiting(rank=rank, network="member-0", pictures=0))
    told(run, Gone(rank=0), Gone(rank=1))
    assert Start(rank=2, network="member-0", alone=False) in told(run, join(2, "coordinator"))
    entered = met(run, Waiting(rank=2, network="member-0", pictures=0))
    # No number of a network's meetings is used twice.
    assert Commit(rank=2, network="member-0", seq=2, epoch=0) in entered


def test_who_joins_as_the_others_stop_early_does_not_wait_for_them() -> None:
    run = new_run()
    told(run, join(0, "coordinator"), join(1, "tower"))
    entered = met(run, Waiting(rank=0, network="member-0", pictures=0))
    entered += met(run, Waiting(rank=1, network="member-0", pictures=0))
    assert {a.rank for a in entered if isinstance(a, Commit)} == {0}
    # Trainer 0 stops before the last epoch, and trainer 1 waits for a mean with it.
    actions = told(run, Made(rank=0, network="member-0", said="{}"))
    assert Refused(rank=1, network="member-0", reason="member-0 is trained") in actions
    told(run, Made(rank=1, network="member-0"))
    assert told(run, join(2, "nuc"))[-1] == Start(rank=2, network="member-1", alone=True)


def whole_run() -> CrewRun:
    machine = MembershipMachine("d", {job.name: job.by for job in JOBS}, {})
    schedule = LocalSgdSchedule("member-0", RoundLengths(4, 2, 1))
    return CrewRun(machine, Jobs(JOBS), lambda *_: schedule, whole=True)


def test_a_whole_run_ends_with_the_first_trainer_that_is_lost() -> None:
    run = whole_run()
    told(run, join(0, "coordinator"), join(1, "tower"), join(2, "nuc"))
    # One that has nothing to do yet.
    actions = told(run, Gone(rank=2))
    assert actions[-2:] == [Refused(rank=r, network="", reason="nuc: lost") for r in (0, 1)]
    assert not any(isinstance(action, Start) for action in actions)
    # Another run goes on.
    run = new_run()
    told(run, join(0, "coordinator"), join(1, "tower"), join(2, "nuc"))
    assert {action.rank for action in told(run, Gone(rank=2))} == {2}


def test_a_whole_run_ends_where_somebody_does_not_come() -> None:
    run = whole_run()
    told(run, join(1, "tower"))
    reason = "coordinator, nuc: not there in time"
    assert told(run, Waited(rank=0)) == [Refused(rank=1, network="", reason=reason)]
    run = whole_run()
    told(run, join(0, "coordinator"), join(1, "tower"), join(2, "nuc"))
    assert told(run, Waited(rank=0)) == []


def test_trainers_leave_a_whole_run_that_is_done() -> None:
    run = whole_run()
    told(run, join(0, "coordinator"), join(1, "tower"), join(2, "nuc"))
    told(run, Made(rank=0, network="member-0", said="{}"), Made(rank=1, network="member-0"))
    told(run, Made(rank=2, network="member-1", said="{}"))
    assert run.is_finished
    left = told(run, Gone(rank=1))
    assert {action.rank for action in left if isinstance(action, Refused)} == {1}


def test_a_network_that_cannot_be_trained_ends_the_run() -> None:
    machine = MembershipMachine("d", {job.name: job.by for job in JOBS}, {})
    run = CrewRun(
        machine,
        Jobs(JOBS),
        lambda network, all, _: LocalSgdSchedule(network, RoundLengths(4, 2, 1), expected=all),
    )
    told(run, join(0, "coordinator"), join(1, "tower"), join(2, "nuc"))
    actions: list[AnyAction] = []
    for rank in (0, 1):
        actions = run.handle(Waiting(rank=rank, network="member-0", pictures=0))
    for seq in range(1, ATTEMPTS + 1):
        assert [action.rank for action in actions if isinstance(action, Meet)] == [0, 1]
        for rank in (0, 1):
            actions = run.handle(MeetingFailed(rank=rank, network="member-0", seq=seq))
    reason = "member-0: 5 means of 0, 1 failed: they do not all reach each other"
    assert actions == [
        *(Refused(rank=rank, network="member-0", reason=reason) for rank in (0, 1)),
        *(Refused(rank=rank, network="", reason=reason) for rank in (0, 1, 2)),
    ]


def test_reports_of_a_network_that_nobody_shares_change_nothing() -> None:
    run = new_run()
    told(run, join(2, "nuc"))
    assert told(run, Waiting(rank=2, network="member-1", pictures=0)) == []


def test_a_stranger_is_refused() -> None:
    run = new_run()
    told(run, join(0, "coordinator"))
    refusals = told(run, join(1, "laptop"), join(2, "tower", "other"))
    assert [type(action) for action in refusals] == [Refused, Refused]
    assert told(run, Made(rank=1, network="member-0")) == []
