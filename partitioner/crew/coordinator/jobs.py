"""Assignment of trainers to networks: the jobs of a run, given out and taken back. Pure.

A job is one network's training, or one shared pass of a frozen network. The plan names its
trainers; where none of them is left, any free trainer takes it, from the beginning. A job ends
with the first of its trainers that hands in its outcome: all of a crew end with the same network.
Where all of them end without one, it begins again.
"""

from collections.abc import Iterable, Mapping

import msgspec

from partitioner.crew.messages import Gone, Joined, Made, Rank, Start


class Job(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One piece of the run: `by` are names of trainers, `after` names of jobs."""

    name: str
    by: tuple[str, ...]
    after: tuple[str, ...] = ()


class Jobs:
    """The jobs of a run and the trainers that are there; raises ValueError for impossible ones."""

    def __init__(self, jobs: Iterable[Job], finished: Iterable[str] = ()) -> None:
        self._jobs: Mapping[str, Job] = {job.name: job for job in jobs}
        known = set(self._jobs)
        for job in self._jobs.values():
            if not set(job.after) <= known:
                raise ValueError(f"{job.name}: after {sorted(set(job.after) - known)}: no such job")
        self._finished = set(finished) & known
        self._names: dict[Rank, str] = {}
        #: Planned trainers that have not joined yet: their jobs wait for them.
        self.awaited = {name for job in self._jobs.values() for name in job.by}
        #: Ranks that came too late for a job, and rest until it is finished.
        self._resting: set[tuple[str, Rank]] = set()
        #: Ranks at work, by job.
        self._running: dict[str, set[Rank]] = {}

    @property
    def by(self) -> dict[str, tuple[str, ...]]:
        """Names of the planned trainers of each job."""
        return {job.name: job.by for job in self._jobs.values()}

    @property
    def is_finished(self) -> bool:
        """Tell whether every job has an outcome."""
        return self._finished == set(self._jobs)

    def running(self, job: str) -> set[Rank]:
        """The trainers of a job."""
        return set(self._running.get(job, ()))

    def working(self, rank: Rank) -> str | None:
        """The job of a trainer."""
        return next((job for job, ranks in self._running.items() if rank in ranks), None)

    def handle(self, event: Joined | Gone | Made) -> list[Start]:
        """Take an event; returns the jobs that start with it."""
        rank = event.rank
        if isinstance(event, Joined):
            self._names[rank] = event.name
            self.awaited.discard(event.name)
        elif isinstance(event, Gone):
            self._names.pop(rank, None)
            job = self.working(rank)
            self._free(rank)
            if job not in self._running:  # who rests has to begin it anew
                self._resting = {one for one in self._resting if one[0] != job}
        elif event.network in self._jobs and rank in self._names:
            if event.said:
                self._finished.add(event.network)
            else:
                self._resting.add((event.network, rank))
            self._free(rank)
        return self._starts()

    def give_up(self) -> list[Start]:
        """Go on without the trainers that have not joined."""
        self.awaited.clear()
        return self._starts()

    def _free(self, rank: Rank) -> None:
        for job, ranks in list(self._running.items()):
            ranks.discard(rank)
            if not ranks:
                del self._running[job]
                self._resting = {one for one in self._resting if one[0] != job}

    def _starts(self) -> list[Start]:
        starts = []
        for job in self._jobs.values():
            if job.name in self._finished or not self._finished.issuperset(job.after):
                continue
            crew = self._crew(job)
            if job.name in self._running:
                crew -= self._running[job.name]  # who joins late
            elif self.awaited & set(job.by) or any(self.working(rank) is not None for rank in crew):
                continue
            for rank in sorted(crew):
                if self.working(rank) is None and (job.name, rank) not in self._resting:
                    self._running.setdefault(job.name, set()).add(rank)
                    starts.append((job.name, rank))
        return [
            Start(rank=rank, network=name, alone=self._alone(name, rank)) for name, rank in starts
        ]

    def _alone(self, job: str, rank: Rank) -> bool:
        by = self._jobs[job].by
        return len(by) == 1 or self._names[rank] not in by

    def _crew(self, job: Job) -> set[Rank]:
        """The planned trainers that are there; else the free one that joined first."""
        planned = {rank for rank, name in self._names.items() if name in job.by}
        running = self._running.get(job.name, set())
        if not running <= planned:
            return set()  # another one trains it alone
        if planned or running:
            return planned
        free = [rank for rank in self._names if self.working(rank) is None]
        return set(sorted(free)[:1])
