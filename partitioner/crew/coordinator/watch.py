"""Detection of lost trainers: pure, with the times handed in; the log then has `Gone`."""

from dataclasses import dataclass

from partitioner.crew.messages import (
    AnyAction,
    AnyEvent,
    Commit,
    Finished,
    Gone,
    GoOn,
    Meet,
    Rank,
    Ready,
    Receipt,
)

#: A trainer's process is heard of every second; after so long without it is lost.
SILENT_S = 10.0
#: A step may take so many times its longest so far, and so much more.
STEPS, SLACK_S = 3.0, 10.0


@dataclass(slots=True)
class _Watched:
    heard_s: float
    #: Its longest step; 0 until it has done one, which may take minutes.
    step_s: float = 0.0
    #: The start of its step, while it trains; until when it owes a report, if it does.
    began_s: float | None = None
    owes_s: float | None = None
    finished: bool = False
    #: The network that it trains, and the epoch that it was last told to go on with.
    network: str = ""
    epoch: int = 0


class Watch:
    """A trainer is lost when its process is silent, or when it owes a report for too long.

    The process: nothing at all for `silent_s`, which a killed, stopped or disconnected one shows.
    The training: a step of 3 times its longest and `slack_s`, or a meeting of `meeting_s` and
    `slack_s`, which one that hangs shows. Nothing is owed at rest, after the end of an epoch until
    the next step is reported (validation may take long), and before the first step is. A meeting in
    the background ends by its group's timeout: what is owed then is the next step.

    Where the coordinator itself has slept for `silent_s` / 2, everybody is given that time.

    meeting_s: the timeout of the groups in which trainers meet.
    """

    def __init__(
        self, meeting_s: float, silent_s: float = SILENT_S, slack_s: float = SLACK_S
    ) -> None:
        self.meeting_s, self.silent_s, self.slack_s = meeting_s, silent_s, slack_s
        self._watched: dict[Rank, _Watched] = {}
        self._asked_s: float | None = None

    def on_heartbeat(self, rank: Rank, now_s: float) -> None:
        """A heartbeat."""
        self._watched.setdefault(rank, _Watched(now_s)).heard_s = now_s

    def on_event(self, event: AnyEvent, now_s: float) -> None:
        """An event of the log."""
        if isinstance(event, Gone):
            self._watched.pop(event.rank, None)
            return
        self.on_heartbeat(event.rank, now_s)
        watched = self._watched[event.rank]
        if isinstance(event, Receipt):
            return  # of a thread of its own, whatever the training does
        # Of gradients no step is reported: all else is the end of more than a step.
        if watched.began_s is not None and isinstance(event, Ready):
            watched.step_s = max(watched.step_s, now_s - watched.began_s)
        watched.began_s = watched.owes_s = None
        watched.finished = isinstance(event, Finished) or (
            watched.finished and not isinstance(event, Ready)
        )
        if isinstance(event, Ready):
            self._trains(watched, now_s)

    def on_action(self, action: AnyAction, now_s: float) -> None:
        """An action that was posted."""
        watched = self._watched.get(action.rank)
        if watched is None:
            return
        if isinstance(action, Meet) and not action.background:
            watched.owes_s = now_s + self.meeting_s + self.slack_s
            return
        if isinstance(action, Commit | GoOn):
            if action.network != watched.network:
                watched.network, watched.epoch, watched.step_s = action.network, 0, 0.0
            # Who rests as its round was closed, not behind the last batch, ends the epoch too.
            watched.finished |= action.epoch > watched.epoch
            watched.epoch = action.epoch
        if isinstance(action, Meet | Commit | GoOn) and not watched.finished:
            self._trains(watched, now_s)

    def _trains(self, watched: _Watched, now_s: float) -> None:
        watched.began_s = now_s
        if watched.step_s:
            watched.owes_s = now_s + STEPS * watched.step_s + self.slack_s

    def find_lost(self, now_s: float) -> list[Rank]:
        """The trainers that are lost by now, in order of rank; to be asked every second."""
        slept_s = 0.0 if self._asked_s is None else now_s - self._asked_s
        self._asked_s = now_s
        if slept_s > self.silent_s / 2:
            for watched in self._watched.values():
                watched.heard_s += slept_s
                watched.owes_s = None if watched.owes_s is None else watched.owes_s + slept_s
        return sorted(
            rank
            for rank, watched in self._watched.items()
            if now_s - watched.heard_s > self.silent_s
            or (watched.owes_s is not None and now_s > watched.owes_s)
        )
