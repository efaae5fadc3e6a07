"""What trainers report and what they are told: the messages of a crew's log and mailboxes.

The log is append-only and its order is the only order there is. A schedule is a pure machine,
`handle(event) -> actions`; the same machine runs at the desk, in the simulator and in replays.
Ranks are numbered by joining, from 0 (the desk), and never used again.
"""

from typing import Annotated, Protocol

import msgspec

Rank = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind"
):
    """Base of all messages."""


class Event(Message):
    """Something that a trainer reports, or that the desk finds out about it."""

    rank: Rank


class Joined(Event, frozen=True, tag="joined"):
    """A trainer asks to take part; `digest` is that of its pictures, settings and version."""

    name: str
    digest: str


class Gone(Event, frozen=True, tag="gone"):
    """A trainer left, was lost, or has reported nothing for too long."""


class Ready(Event, frozen=True, tag="ready"):
    """A trainer finished a step: `pictures` done since the network's last committed mean."""

    network: str
    pictures: Count


class Waiting(Event, frozen=True, tag="waiting"):
    """A trainer has closed its round and waits to meet, with `pictures` since the last mean."""

    network: str
    pictures: Count


class Done(Event, frozen=True, tag="done"):
    """A trainer has the mean of meeting `seq`, and has not yet taken it over."""

    network: str
    seq: Count


class Failed(Event, frozen=True, tag="failed"):
    """A trainer could not finish meeting `seq`; `blamed` sent a number that is not finite."""

    network: str
    seq: Count
    blamed: Rank | None = None


class Finished(Event, frozen=True, tag="finished"):
    """No batch of the network's epoch is left for this trainer."""

    network: str
    pictures: Count


class Action(Message):
    """Something that one trainer, `rank`, is told."""

    rank: Rank
    network: str


class Close(Action, frozen=True, tag="close"):
    """Finish the step in hand, then report Waiting."""


class Meet(Action, frozen=True, tag="meet"):
    """Average with `members`, in a group of its own for `seq`; weights are pictures, unscaled."""

    seq: Count
    members: tuple[Rank, ...]
    weights: tuple[float, ...]


class Commit(Action, frozen=True, tag="commit"):
    """Take the mean of `seq` over and go on."""

    seq: Count


class GoOn(Action, frozen=True, tag="go_on"):
    """Go on without a mean, with the own parameters."""


class Refused(Action, frozen=True, tag="refused"):
    """Take no part, or no longer; `reason` is one sentence."""

    reason: str


AnyEvent = Joined | Gone | Ready | Waiting | Done | Failed | Finished
AnyAction = Close | Meet | Commit | GoOn | Refused


class Schedule(Protocol):
    """Who meets whom, when. Pure: no clock, no chance that is not handed in."""

    def handle(self, event: AnyEvent) -> list[AnyAction]:
        """Take the log's next event; returns what trainers are told, in order."""


class Trainer(Protocol):
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
