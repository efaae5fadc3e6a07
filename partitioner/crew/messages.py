"""Messages of a crew, between its trainers and its coordinator.

`AnyEvent` is what the coordinator writes to its log and decides by, and `AnyAction` what it then
tells; the others carry heartbeats, the shares of frozen passes, and files.

The log is append-only and its order is the only order there is. A schedule is a pure machine,
`handle(event) -> actions`; the same machine runs at the coordinator, in the simulator and in
replays. Ranks are numbered by joining, from 0 (the coordinator), and never used again. Every number
`seq` of a network is used once: by a `Meet`, or by a `GoOn`.

A trainer's side of a network: it enters by `Waiting` with no pictures, meets, and from `Commit` on
trains: claim a batch, train it, `Ready`. `Close` ends that by `Waiting`, a claim behind the last
batch by `Finished`; either way it then rests until it is told `Meet`, `Commit` or `GoOn`, and
ignores `Close`.
"""

from typing import Annotated, NamedTuple, Protocol

import msgspec

from partitioner.run.settings import Autocast

Rank = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Chunk(NamedTuple):
    """Pictures `start` to `stop` of one variant."""

    variant: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """Base of all messages."""


class Event(Message, frozen=True):
    """Something that a trainer reports, or that the coordinator finds out about it."""

    rank: Rank


class Joined(Event, frozen=True, tag="joined"):
    """A trainer asks to take part; `digest` is that of its pictures, settings and version."""

    name: str
    digest: str


class Gone(Event, frozen=True, tag="gone"):
    """A trainer left, was lost, or has reported nothing for too long."""


class TrainerReport(Event, frozen=True):
    """A trainer's progress in a network.

    `since` is the `seq` of the last Commit or GoOn that it has taken, `claims` are the batches that
    it has done since its last report. `CoordinatorClient` fills in both.
    """

    network: str
    pictures: Count
    since: Count = 0
    claims: tuple[Count, ...] = ()


class Ready(TrainerReport, frozen=True, tag="ready"):
    """A trainer finished a step: `pictures` done since the network's last committed mean."""


class Waiting(TrainerReport, frozen=True, tag="waiting"):
    """A trainer has closed its round and waits to meet, with `pictures` since the last mean.

    One that enters says with how many epochs behind it, by its checkpoint.
    """

    epoch: Count = 0


class Finished(TrainerReport, frozen=True, tag="finished"):
    """No batch of the network's epoch is left for this trainer."""


class Done(Event, frozen=True, tag="done"):
    """A trainer has the mean of meeting `seq`, and has not yet taken it over."""

    network: str
    seq: Count


class MeetingFailed(Event, frozen=True, tag="failed"):
    """A trainer could not finish meeting `seq`; `blamed` sent a number that is not finite."""

    network: str
    seq: Count
    blamed: Rank | None = None


class Receipt(Event, frozen=True, tag="receipt"):
    """A trainer has what its neighbour `source` published, in rest after Commit or GoOn `since`.

    Where `lost`, nothing more comes of it: `since` is the Commit that has made them neighbours. Of
    a trainer itself: its parameters are not finite, so that it publishes no more and all meet.
    """

    network: str
    source: Rank
    since: Count
    lost: bool = False


class Waited(Event, frozen=True, tag="waited"):
    """The coordinator waits no longer for trainers that are planned and have not joined."""

    network: str = ""


class Made(Event, frozen=True, tag="made"):
    """A trainer has handed in the outcome of a job; `said` is what it tells the coordinator of it.

    Empty where it has no outcome, or another one's counts: it is free. `sent_bytes` are those of
    means, rows and files that other trainers get.
    """

    network: str
    said: Annotated[str, msgspec.Meta(max_length=1_000_000)] = ""
    #: For others, in this job; and bytes sent since the last such report.
    waited_s: float = 0.0
    sent_bytes: Count = 0


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The present work of a trainer."""

    #: Empty: it waits for one.
    job: str = ""
    #: Done of the job's step in hand, from 0 to 1.
    share: float = 0.0
    #: Trained or answered in the job so far, and each second.
    pictures: float = 0.0
    pictures_per_s: float = 0.0
    said: str = ""
    #: For other trainers, before a mean.
    waits: bool = False
    sent_bytes: int = 0


class Heartbeat(Event, frozen=True, tag="heartbeat"):
    """A heartbeat, every second, and what the trainer does."""

    state: State


class Hello(Event, frozen=True, tag="hello"):
    """A process asks for the Description, before it joins."""


class PassReport(Event, frozen=True):
    """A trainer's word in the frozen pass `work`."""

    work: str


class Offer(PassReport, frozen=True, tag="offer"):
    """A trainer would take part; `reference` are its outputs for the first pictures, float32."""

    arithmetic: Autocast
    reference: bytes


class Ask(PassReport, frozen=True, tag="ask"):
    """A trainer is free."""


class Rows(PassReport, frozen=True, tag="rows"):
    """One of `parts` pieces of a chunk's rows, output by output."""

    chunk: Chunk
    part: int
    parts: int
    took_s: float
    data: bytes


class Broken(PassReport, frozen=True, tag="broken"):
    """A trainer's outputs are of no use."""

    reason: str


class FileMessage(Message, frozen=True):
    """A message about the file `name`, from or to the trainer `rank`."""

    rank: Rank
    name: str


class FileHead(FileMessage, frozen=True, tag="file"):
    """The sender has this file: a trainer hands it in, and the coordinator says what all get."""

    bytes: Count
    sha256: str


class FileQuery(FileMessage, frozen=True, tag="query"):
    """A trainer asks for the head of a file, and if it `waits`, for one that is still to come."""

    waits: bool


class PieceQuery(FileMessage, frozen=True, tag="want"):
    """The sender asks for one piece of a file that the other one has."""

    number: Count


class Piece(FileMessage, frozen=True, tag="piece"):
    """One piece of a file."""

    number: Count
    data: bytes


class NoFile(FileMessage, frozen=True, tag="none"):
    """The coordinator has no such file, for a `reason` if it should have one."""

    reason: str = ""


class Action(Message, frozen=True):
    """Something that one trainer, `rank`, is told; `network` is empty where it concerns all."""

    rank: Rank
    network: str


class Description(Action, frozen=True, tag="description"):
    """Facts that a trainer needs before it joins."""

    content: bytes


class Accepted(Action, frozen=True, tag="accepted"):
    """Take part."""


class Start(Action, frozen=True, tag="start"):
    """Begin the job `network`; not `alone`, take part in its rounds, which others may join."""

    alone: bool


class Leave(Action, frozen=True, tag="leave"):
    """Leave: all is done."""


class Close(Action, frozen=True, tag="close"):
    """Finish the step in hand, then report Waiting."""


class Meet(Action, frozen=True, tag="meet"):
    """Average with `members`, in a group of its own for `seq`; weights are pictures, unscaled.

    Who has weight 0 receives the mean and adds nothing to it: it sends zeros, not 0 times its
    parameters, which need not be finite. For an exact network the members of weight 1 are furthest
    on and have the same state, which the first of them sends to all.

    In the background, members go on at once as after a GoOn of this `seq`, and take the mean over
    with Commit wherever they are then; without one they keep what they have.

    Where only some meet, it is not `whole`: differences that a codec sends stay those from the last
    mean of all. Where it `ends` the epoch, unless work is lost, every number travels.
    """

    seq: Count
    members: tuple[Rank, ...]
    weights: tuple[float, ...]
    background: bool = False
    whole: bool = True
    ends: bool = False


class Commit(Action, frozen=True, tag="commit"):
    """Take the mean of `seq` over and go on with `epoch`, one above the last at the end.

    Who has `neighbours` sends them its parameters whenever it reports Waiting, until it meets, and
    reports what comes of them.
    """

    seq: Count
    epoch: Count = 0
    neighbours: tuple[Rank, ...] = ()


class Taken(NamedTuple):
    """Vector that the neighbour `source` published after `since`, with its share in a mean.

    A share of 0: it is only the oldest that may still be asked for.
    """

    source: Rank
    since: int
    share: float


class GoOn(Action, frozen=True, tag="go_on"):
    """Go on without a meeting, with `epoch`, with the own parameters and those of `takes`.

    `claims` are batches that were lost with other trainers: `CoordinatorClient.claim` returns them
    first. What the shares of `takes` leave of 1 is the share of the own parameters.
    """

    seq: Count = 0
    epoch: Count = 0
    claims: tuple[Count, ...] = ()
    takes: tuple[Taken, ...] = ()


class Refused(Action, frozen=True, tag="refused"):
    """Take no part, or no longer; `reason` is one sentence."""

    reason: str


class PassOrder(Message, frozen=True):
    """The coordinator's word to one trainer in the frozen pass `work`."""

    rank: Rank
    work: str


class Compute(PassOrder, frozen=True, tag="compute"):
    """Compute a chunk."""

    chunk: Chunk


class Decline(PassOrder, frozen=True, tag="decline"):
    """Take no part in the pass, for a `reason`."""

    reason: str


class PassOver(PassOrder, frozen=True, tag="over"):
    """Nothing is left to compute."""


AnyReport = Ready | Waiting | Finished
AnyEvent = Joined | Gone | AnyReport | Done | MeetingFailed | Receipt | Made | Waited
AnyAction = Description | Accepted | Start | Leave | Close | Meet | Commit | GoOn | Refused
AnyPassReport = Offer | Ask | Rows | Broken
AnyPassOrder = Compute | Decline | PassOver
AnyFileMessage = FileHead | FileQuery | PieceQuery | Piece | NoFile
#: Messages in the coordinator's mailbox, and in a trainer's.
ToCoordinator = AnyEvent | Heartbeat | Hello | AnyPassReport | AnyFileMessage
ToTrainer = AnyAction | AnyPassOrder | AnyFileMessage


def cursor(network: str, epoch: int) -> str:
    """The counter of an epoch's batches, for `TrainerControl.claim`."""
    return f"cursor/{network}/{epoch}"


class MeetingSchedule(Protocol):
    """The schedule of meetings. Pure: no clock, no chance that is not handed in."""

    def handle(self, event: AnyEvent, now_s: float = 0.0) -> list[AnyAction]:
        """Take the log's next event, of this time; returns what trainers are told, in order."""


class TrainerControl(Protocol):
    """One trainer's end of the control: appends events, receives its actions in order."""

    @property
    def rank(self) -> int:
        """The own rank."""

    def report(self, event: AnyEvent) -> None:
        """Append to the log."""

    def poll(self, timeout_s: float = 0.0) -> AnyAction | None:
        """The next action for this trainer, None when there is none within `timeout_s`."""

    def claim(self, counter: str) -> int:
        """The next number, from 0, of a counter that all trainers share."""
