"""Work of trainers in a training together, from its log: the schedule, and each one's costs."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from partitioner.crew.bus.control import LogLine, log_lines
from partitioner.crew.messages import Accepted, Gone, Joined, Leave, Made, Rank, Refused, Start
from partitioner.crew.planning.costs import Span
from partitioner.crew.planning.tuning import Part


class TrainerCost(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a training for one trainer; seconds of waiting are those without work."""

    trainer: str
    work_s: float
    waited_s: float
    sent_bytes: int

    @property
    def words(self) -> str:
        """Line of text."""
        return (
            f"{self.trainer}: {self.work_s:,.1f} s at work, {self.waited_s:,.1f} s waiting, "
            f"{self.sent_bytes / 1e6:,.1f} MB sent"
        )


def costs(path: Path) -> list[TrainerCost]:
    """Costs of the last training, whose log is `path`, by trainer; none without a log."""
    return costs_of(log_lines(path)) if path.exists() else []


def spans_of(log: Iterable[LogLine]) -> list[Span]:
    """Jobs of each trainer with start and end, in seconds since the first event."""
    return [span for span, _ in _jobs(log)]


def costs_of(log: Iterable[LogLine]) -> list[TrainerCost]:
    """Seconds and bytes of every trainer that took part, in their order.

    It waits while it is there without work.
    """
    entries = list(log)
    present = _presence(entries)
    work, sent = dict.fromkeys(present, 0.0), dict.fromkeys(present, 0)
    for span, made in _jobs(entries):
        work[span.trainer] += span.end_s - span.start_s
        if made is not None:
            work[span.trainer] -= made.waited_s
            sent[span.trainer] += made.sent_bytes
    return [
        TrainerCost(
            trainer=name,
            work_s=round(work[name], 3),
            waited_s=round(max(0.0, there_s - work[name]), 3),
            sent_bytes=sent[name],
        )
        for name, there_s in present.items()
    ]


def _presence(entries: Sequence[LogLine]) -> dict[str, float]:
    """Seconds for which each trainer took part, from each time that it was accepted."""
    here: dict[Rank, tuple[str, float]] = {}
    present: dict[str, float] = {}
    for entry in entries:
        gone = [entry.event.rank] if isinstance(entry.event, Gone) else []
        for action in entry.actions:
            if isinstance(action, Accepted) and isinstance(entry.event, Joined):
                here[action.rank] = entry.event.name, entry.at_s
                present.setdefault(entry.event.name, 0.0)
            elif isinstance(action, Leave) or (isinstance(action, Refused) and not action.network):
                gone.append(action.rank)
        for rank in gone:
            if rank in here:
                name, since_s = here.pop(rank)
                present[name] += entry.at_s - since_s
    for name, since_s in here.values():
        present[name] += entries[-1].at_s - since_s
    return present


def parts_of(log: Iterable[LogLine], trials: Sequence[str]) -> list[list[Part]]:
    """Measured parts of the trials of a tuning, which their trainers told, by trial."""
    found: dict[str, list[Part]] = {name: [] for name in trials}
    for entry in log:
        event = entry.event
        if isinstance(event, Made) and event.network in found:
            found[event.network].append(msgspec.json.decode(event.said, type=Part))
    return [found[name] for name in trials]


def _jobs(log: Iterable[LogLine]) -> Iterator[tuple[Span, Made | None]]:
    """Jobs in the order of their ends, each with its trainer's report, None if it was lost."""
    names: dict[Rank, str] = {}
    began: dict[Rank, tuple[str, float]] = {}
    first_s: float | None = None
    for entry in log:
        first_s = entry.at_s if first_s is None else first_s
        at_s, event = entry.at_s - first_s, entry.event
        if isinstance(event, Joined):
            names[event.rank] = event.name
        ended: dict[Rank, Made | None] = {}
        if isinstance(event, Made):
            ended[event.rank] = event
        elif isinstance(event, Gone):
            ended[event.rank] = None
        for action in entry.actions:
            if isinstance(action, Leave) or (isinstance(action, Refused) and not action.network):
                ended.setdefault(action.rank, None)
        for rank, made in ended.items():
            if rank in began:
                job, start_s = began.pop(rank)
                yield Span(names[rank], start_s, at_s, job), made
        for action in entry.actions:
            if isinstance(action, Start):
                began[action.rank] = action.network, at_s
