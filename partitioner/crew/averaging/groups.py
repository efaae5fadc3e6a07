"""Groups of trainers that meet: gloo directly on the coordinator's store, without a fixed world."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo

from partitioner.crew.bus.store import SignedStore
from partitioner.crew.messages import Rank

#: A group's collectives end by then where a member is lost, and by so many times the seconds that
#: its members are predicted to wait for each other.
TIMEOUT_S, PREDICTED = 20.0, 4.0
#: A group is kept for so many further meetings of its network.
KEPT_MEETINGS = 64


class GroupBroken(RuntimeError):
    """A member did not come, or was lost on the way; as gloo's own errors a RuntimeError."""


@dataclass(slots=True)
class _Kept:
    group: ProcessGroupGloo
    #: The last meeting in it.
    seq: int


def timeout_s(predicted_s: float) -> float:
    """The timeout of groups whose members are predicted to wait for each other so long."""
    return TIMEOUT_S + PREDICTED * predicted_s


class TrainerGroups:
    """One trainer's groups, by their networks and members; used by one thread.

    A group serves another meeting of the same members if the last one in it was committed and is
    not long ago: all of them know that alike (`committed`, a CoordinatorClient's). Otherwise it is
    freed and made anew, which takes a connection to every member.

    store: a connection of its own whose timeout is `timeout_s`. host: this trainer's address, which
    its groups listen on.
    """

    def __init__(
        self,
        store: SignedStore,
        rank: Rank,
        host: str,
        committed: Callable[[str, int], bool],
        timeout_s: float,
    ) -> None:
        self._store, self._rank, self._committed = store, rank, committed
        self._timeout = timedelta(seconds=timeout_s)
        self._device = ProcessGroupGloo.create_device(hostname=host)
        self._kept: dict[tuple[str, tuple[Rank, ...]], _Kept] = {}
        #: How often a group was made.
        self.made = 0

    def of(self, network: str, seq: int, members: Sequence[Rank]) -> ProcessGroupGloo:
        """The group of meeting `seq`, in the order of `members`; raises GroupBroken."""
        key = network, tuple(members)
        kept = self._kept.get(key)
        if kept and kept.seq >= seq - KEPT_MEETINGS and self._committed(network, kept.seq):
            kept.seq = seq
            return kept.group
        for other, one in list(self._kept.items()):
            if other == key or (other[0] == network and one.seq < seq - KEPT_MEETINGS):
                del self._kept[other]
        # torch.distributed.new_group, the public way, needs a default group of fixed members.
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [self._device]
        options._timeout = self._timeout
        store = PrefixStore(f"g/{network}/{seq}", self._store)
        try:
            group = ProcessGroupGloo(store, members.index(self._rank), len(members), options)
        except RuntimeError as error:
            names = ", ".join(map(str, members))
            raise GroupBroken(f"{network}: meeting {seq} of {names}: {error}") from error
        self.made += 1
        self._kept[key] = _Kept(group, seq)
        return group

    def drop(self, network: str, members: Sequence[Rank]) -> None:
        """Free a group; members that still wait in it fail at once.

        To be called where a collective has failed, so that all know it.
        """
        self._kept.pop((network, tuple(members)), None)

    def close(self) -> None:
        """Free all groups."""
        self._kept.clear()
