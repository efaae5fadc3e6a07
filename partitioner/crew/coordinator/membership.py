"""The trainers that take part in a training together, and the machines of their events. Pure."""

from collections.abc import Mapping

from partitioner.crew.messages import (
    Accepted,
    AnyAction,
    AnyEvent,
    Gone,
    Joined,
    MeetingSchedule,
    Rank,
    Refused,
)


class MembershipMachine:
    """Membership in all networks of a plan: who takes part, and whose events are whose.

    crews: for each network the names of its trainers. networks: their schedules. `digest` is what
    every trainer's pictures, settings and version have to give.
    """

    def __init__(
        self,
        digest: str,
        crews: Mapping[str, tuple[str, ...]],
        networks: Mapping[str, MeetingSchedule],
    ) -> None:
        self.digest, self.crews, self.networks = digest, crews, networks
        #: Trainers that take part; a rank that has left never does again.
        self.living: dict[Rank, str] = {}
        self._refused: set[Rank] = set()

    def handle(self, event: AnyEvent, now_s: float = 0.0) -> list[AnyAction]:
        """Take the log's next event, of this time; returns what trainers are told, in order."""
        rank = event.rank
        match event:
            case Joined():
                return self._join(event, now_s)
            case Gone() if rank in self.living:
                reason = "it has left, or was silent for too long: join again"
                return [*self._leave(rank, now_s), *self._refuse(rank, reason)]
        if isinstance(event, Gone) or rank not in self.living:
            return []
        if self.living[rank] not in self.crews.get(event.network, ()):
            network = event.network
            return self._refuse(rank, f"{self.living[rank]} is not in the crew of {network}")
        schedule = self.networks.get(event.network)
        return schedule.handle(event, now_s) if schedule else []

    def _join(self, event: Joined, now_s: float) -> list[AnyAction]:
        rank, name = event.rank, event.name
        if rank in self.living or rank in self._refused:
            return []
        names = sorted({name for crew in self.crews.values() for name in crew})
        if name not in names:
            known = ", ".join(names)
            return self._refuse(rank, f"{name} is in no crew of the plan: expected one of {known}")
        if event.digest != self.digest:
            expected = f"expected {self.digest}, got {event.digest}"
            return self._refuse(
                rank,
                f"pictures, settings or version of {name} differ from the coordinator's: "
                f"{expected}",
            )
        if self.living.get(0) == name:
            return self._refuse(rank, f"{name} is the coordinator's name: expected a trainer's")
        actions: list[AnyAction] = []
        for other in [other for other, taken in self.living.items() if taken == name]:
            actions += self._leave(other, now_s)
            actions += self._refuse(other, f"another trainer joined as {name}")
        self.living[rank] = name
        return [*actions, Accepted(rank=rank, network="")]

    def _leave(self, rank: Rank, now_s: float) -> list[AnyAction]:
        del self.living[rank]
        gone = Gone(rank=rank)
        networks = self.networks.values()
        return [action for network in networks for action in network.handle(gone, now_s)]

    def _refuse(self, rank: Rank, reason: str) -> list[AnyAction]:
        self._refused.add(rank)
        return [Refused(rank=rank, network="", reason=reason)]
