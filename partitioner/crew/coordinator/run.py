"""A whole run: who takes part, who works on what, and when those of one network meet. Pure."""

from collections.abc import Callable, Mapping

from partitioner.crew.coordinator.jobs import Jobs
from partitioner.crew.coordinator.membership import MembershipMachine
from partitioner.crew.coordinator.schedule import RoundSchedule
from partitioner.crew.messages import (
    AnyAction,
    AnyEvent,
    Gone,
    Joined,
    Leave,
    Made,
    Rank,
    Refused,
    Start,
    Waited,
)


class CrewRun:
    """The coordinator's machine: membership and rounds by `machine`, jobs by `jobs`.

    `schedule_of` makes the schedule of a network that several trainers share, from its name, these,
    and the names of all that take part, as they come and go; the rounds begin anew where all of
    them were lost. A network that cannot be trained ends the run: all are told why. So does, in a
    `whole` run, a trainer that is lost or does not come.
    """

    def __init__(
        self,
        machine: MembershipMachine,
        jobs: Jobs,
        schedule_of: Callable[[str, set[Rank], Mapping[Rank, str]], RoundSchedule],
        *,
        whole: bool = False,
    ) -> None:
        self._machine, self._jobs, self._schedule_of = machine, jobs, schedule_of
        self._whole = whole
        self._networks: dict[str, RoundSchedule] = {}
        #: What trainers said of finished jobs: the first to finish each.
        self.said: dict[str, str] = {}
        machine.networks = self._networks

    @property
    def living(self) -> Mapping[Rank, str]:
        """Names of the trainers that take part."""
        return self._machine.living

    @property
    def is_finished(self) -> bool:
        """Tell whether every job has an outcome."""
        return self._jobs.is_finished

    def handle(self, event: AnyEvent, now_s: float = 0.0) -> list[AnyAction]:
        """Take the log's next event, of this time; returns what trainers are told, in order."""
        if isinstance(event, Waited):
            if self._whole and (missing := sorted(self._jobs.awaited)):
                return self._end(f"{', '.join(missing)}: not there in time")
            return self._begin(self._jobs.give_up())
        if isinstance(event, Made):
            if event.rank not in self._machine.living:
                return []
            ended: list[AnyAction] = []
            if event.said:
                self.said.setdefault(event.network, event.said)
                # One that joined as the others stopped early would wait for them.
                if (schedule := self._networks.get(event.network)) is not None:
                    ended = schedule.end(f"{event.network} is trained")
            return ended + self._begin(self._jobs.handle(event))
        before = dict(self._machine.living)
        actions = self._machine.handle(event, now_s)
        living = self._machine.living
        if reason := next((one.failed for one in self._networks.values() if one.failed), ""):
            return actions + self._end(reason)
        if self._whole and not self.is_finished and (lost := before.keys() - living.keys()):
            names = ", ".join(sorted(before[rank] for rank in lost))
            return actions + self._end(f"{names}: lost")
        starts: list[Start] = []
        for rank in sorted(before.keys() - living.keys()):
            starts += self._jobs.handle(Gone(rank=rank))
        for rank in sorted(living.keys() - before.keys()):
            starts += self._jobs.handle(Joined(rank=rank, name=living[rank], digest=""))
        return actions + self._begin(starts)

    def _end(self, reason: str) -> list[AnyAction]:
        """Tell all that take part why the run ends."""
        return [Refused(rank=rank, network="", reason=reason) for rank in self.living]

    def _begin(self, starts: list[Start]) -> list[AnyAction]:
        for network in dict.fromkeys(start.network for start in starts if not start.alone):
            begun = {start.rank for start in starts if start.network == network}
            if begun == self._jobs.running(network):
                schedule = self._schedule_of(network, begun, self.living)
                if (former := self._networks.get(network)) is not None:
                    schedule.go_on_from(former)
                self._networks[network] = schedule
        if not self.is_finished:
            return [*starts]
        return [Leave(rank=rank, network="") for rank in self._machine.living]
