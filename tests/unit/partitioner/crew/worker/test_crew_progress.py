"""Progress that trainers report to the coordinator, its table, and a log's costs."""

import io
from collections.abc import Iterator

import msgspec
import pytest

pytest.importorskip("torch")

from partitioner.crew.bus.control import LogLine
from partitioner.crew.history import TrainerCost, costs_of, parts_of, spans_of
from partitioner.crew.messages import Accepted, AnyAction, Gone, Joined, Leave, Made, Start, State
from partitioner.crew.planning.costs import Span
from partitioner.crew.planning.tuning import RoundTime, StepTime
from partitioner.crew.worker.progress import Told, WorkAccount, lines, rows
from partitioner.run.progress import Progress

pytestmark = pytest.mark.torch


def test_a_row_says_job_share_pace_and_what_it_waits_for() -> None:
    at_work = State(
        job="member-1",
        share=0.456,
        pictures_per_s=1234.5,
        said="epoch 2 of 4",
        sent_bytes=2_500_000,
    )
    table = rows(
        {
            "coordinator": at_work,
            "tower": msgspec.structs.replace(at_work, waits=True),
            "nuc": State(sent_bytes=1000),
            "late": None,
        }
    )
    assert table == [
        ("coordinator", "member-1", "46%", "1,234", "epoch 2 of 4", "2.5"),
        ("tower", "member-1", "46%", "1,234", "waits for others", "2.5"),
        ("nuc", "", "", "", "waits for a job", "0.0"),
        ("late", "", "", "", "not there", ""),
    ]
    assert lines(table) == [
        "coordinator: member-1 46%, 1,234 pictures/s, epoch 2 of 4, 2.5 MB sent",
        "tower: member-1 46%, 1,234 pictures/s, waits for others, 2.5 MB sent",
        "nuc: waits for a job, 0.0 MB sent",
        "late: not there",
    ]


def test_an_account_counts_a_job_and_its_waits_and_bytes() -> None:
    now_s, rows_bytes = 100.0, 7
    account, notes = WorkAccount(lambda: rows_bytes, lambda: now_s), list[str]()
    account.begin("teacher")
    account.follow(lambda: 30)
    told = Told(account, notes.append, Progress(io.StringIO()))
    with told.task("training the teacher", 4) as advance:
        assert account.state().said == "training the teacher"
        now_s += 2.0
        advance(1, "epoch 1 of 2")
        told.count(50)
        advance(1, "")  # another trainer's
    assert account.state() == State(
        job="teacher",
        share=0.5,
        pictures=50,
        pictures_per_s=25.0,
        said="training the teacher",
        sent_bytes=37,
    )
    with account.waiting():
        now_s += 3.0
        assert account.state().waits
    # Reports add up to what progress says, bytes between two jobs included.
    assert account.end() == (3.0, 37)
    rows_bytes += 100
    account.begin("member-0")
    account.follow(lambda: 5)  # the bytes of the one before stay
    assert account.end() == (0.0, 105)
    assert account.bytes_sent == 142
    assert account.state().job == ""
    told.note("stopped early")
    assert notes == ["stopped early"]


def log() -> Iterator[LogLine]:
    """Two trainers, one of which dies in its second job; the other takes it."""

    def made(rank: int, job: str, waited_s: float, sent_bytes: int, said: str = "{}") -> Made:
        return Made(rank=rank, network=job, said=said, waited_s=waited_s, sent_bytes=sent_bytes)

    def start(rank: int, job: str) -> Start:
        return Start(rank=rank, network=job, alone=True)

    yield LogLine(
        10.0, Joined(rank=0, name="coordinator", digest=""), [Accepted(rank=0, network="")]
    )
    begun: list[AnyAction] = [
        Accepted(rank=1, network=""),
        start(0, "teacher"),
        start(1, "teacher"),
    ]
    yield LogLine(12.0, Joined(rank=1, name="tower", digest=""), begun)
    yield LogLine(20.0, made(0, "teacher", 1.0, 50), [start(0, "member-0")])
    # The coordinator's outcome counts; what this trainer has sent for it counts as well.
    yield LogLine(21.0, made(1, "teacher", 2.0, 70, said=""), [start(1, "member-1")])
    yield LogLine(25.0, Gone(rank=1), [])
    yield LogLine(30.0, made(0, "member-0", 0.0, 5), [start(0, "member-1")])
    leave = Leave(rank=0, network="")
    yield LogLine(40.0, made(0, "member-1", 0.0, 0), [leave])


def test_the_schedule_and_what_it_cost_follow_from_the_log() -> None:
    assert spans_of(log()) == [
        Span("coordinator", 2.0, 10.0, "teacher"),
        Span("tower", 2.0, 11.0, "teacher"),
        Span("tower", 11.0, 15.0, "member-1"),
        Span("coordinator", 10.0, 20.0, "member-0"),
        Span("coordinator", 20.0, 30.0, "member-1"),
    ]
    assert costs_of(log()) == [
        TrainerCost(trainer="coordinator", work_s=27.0, waited_s=3.0, sent_bytes=55),
        TrainerCost(trainer="tower", work_s=11.0, waited_s=2.0, sent_bytes=70),
    ]
    assert costs_of([]) == []


def test_parts_of_trials_are_those_of_all_trainers() -> None:
    told = [
        ("trial-1", StepTime(0.5)), ("trial-0", RoundTime(8, 1.0, 2.0)),
        ("trial-0", RoundTime(4, 1.5, 2.0)), ("end", {}),
    ]  # fmt: skip
    log = [
        LogLine(0.0, Made(rank=0, network=job, said=msgspec.json.encode(part).decode()), [])
        for job, part in told
    ]
    log.insert(0, LogLine(0.0, Gone(rank=7), []))
    assert parts_of(log, ["trial-0", "trial-1"]) == [
        [RoundTime(8, 1.0, 2.0), RoundTime(4, 1.5, 2.0)], [StepTime(0.5)],
    ]  # fmt: skip
