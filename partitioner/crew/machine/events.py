"""Reports of trainers and orders to them: the messages of a crew's log and mailboxes.

The log is append-only and its order is the only order there is. A schedule is a pure machine,
`handle(event) -> actions`; the same machine runs at the desk, in the simulator and in replays.
Ranks are numbered by joining, from 0 (the desk), and never used again. Every number `seq` of a
network is used once: by a `Meet`, or by a `GoOn`.

A trainer's side of a network: it enters by `Waiting` with no pictures, meets, and from `Commit` on
trains: claim a batch, train it, `Ready`. `Close` ends that by `Waiting`, a claim behind the last
batch by `Finished`; either way it then rests until it is told `Meet`, `Commit` or `GoOn`, and
ignores `Close`.
"""

from typing import Annotated, Protocol

import msgspec

Rank = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """Base of all messages."""


class Event(Message, frozen=True):
    """Something that a trainer reports, or that the desk finds out about it."""

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
    it has done since its last report. `Hand` fills in both.
    """

    network: str
    pictures: Count
    since: Count = 0
    claims: tuple[Count, ...] = ()


class Ready(TrainerReport, frozen=True, tag="ready"):
    """A trainer finished a step: `pictures` done since the network's last committed mean."""


class Waiting(TrainerReport, frozen=True, tag="waiting"):
    """A trainer has closed its round and waits to meet, with `pictures` since the last mean."""


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


class Waited(Event, frozen=True, tag="waited"):
    """The desk waits no longer for trainers that are planned and have not joined."""

    network: str = ""


class Made(Event, frozen=True, tag="made"):
    """A trainer has handed in the outcome of a job; `said` is what it tells the desk of it.

    Empty where it has no outcome, or another one's counts: it is free.
    """

    network: str
    said: Annotated[str, msgspec.Meta(max_length=1_000_000)] = ""


class Action(Message, frozen=True):
    """Something that one trainer, `rank`, is told; `network` is empty where it concerns all."""

    rank: Rank
    network: str


class Accepted(Action, frozen=True, tag="accepted"):
    """Take part."""


class Start(Action, frozen=True, tag="start"):
    """Begin the job `network`; not `alone`, take part in its rounds, which others may join."""

    alone: bool


class Leave(Action, frozen=True, tag="leave"):
    """All is done."""


class Close(Action, frozen=True, tag="close"):
    """Finish the step in hand, then report Waiting."""


class Meet(Action, frozen=True, tag="meet"):
    """Average with `members`, in a group of its own for `seq`; weights are pictures, unscaled.

    Who has weight 0 receives the mean and adds nothing to it: it sends zeros, not 0 times its
    parameters, which need not be finite. For an exact network the members of weight 1 are furthest
    on and have the same state, which the first of them sends to all.

    In the background, members go on at once as after a GoOn of this `seq`, and take the mean over
    with Commit wherever they are then; without one they keep what they have.
    """

    seq: Count
    members: tuple[Rank, ...]
    weights: tuple[float, ...]
    background: bool = False


class Commit(Action, frozen=True, tag="commit"):
    """Take the mean of `seq` over and go on with `epoch`, one above the last at the end."""

    seq: Count
    epoch: Count = 0


class GoOn(Action, frozen=True, tag="go_on"):
    """Go on without a mean, with the own parameters, with `epoch`.

    `claims` are batches that were lost with other trainers: `Hand.claim` returns them first.
    """

    seq: Count = 0
    epoch: Count = 0
    claims: tuple[Count, ...] = ()


class Refused(Action, frozen=True, tag="refused"):
    """Take no part, or no longer; `reason` is one sentence."""

    reason: str


AnyReport = Ready | Waiting | Finished
AnyEvent = Joined | Gone | AnyReport | Done | MeetingFailed | Made | Waited
AnyAction = Accepted | Start | Leave | Close | Meet | Commit | GoOn | Refused


def cursor(network: str, epoch: int) -> str:
    """The counter of an epoch's batches, for `TrainerControl.claim`."""
    return f"cursor/{network}/{epoch}"


class MeetingSchedule(Protocol):
    """The schedule of meetings. Pure: no clock, no chance that is not handed in."""

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take the log's next event; returns what trainers are told, in order."""


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
