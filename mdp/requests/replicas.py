"""Replica selection: which of a member's replicas a call asks first. Pure.

The better of two that are drawn (Mitzenmacher, The Power of Two Choices, IEEE TPDS 2001): fewer
requests in flight times the usual round trip.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from msgspec import Struct

from mdp.requests.choice import Ranked
from mdp.requests.health import CircuitBreakers
from mdp.requests.request import DeviceEvent

#: A replica that has sent nothing for so long is asked for its status, and has so long to tell it.
IDLE_S = 2.0
HEARTBEAT_S = 1.0
#: So many replicas are checked every HEARTBEAT_S, in turns.
CHECKED = 8
#: Of more replicas than this two that are there are drawn until found, not picked from a list.
_FEW, _DRAWS = 16, 16
#: Weight of the newest round trip in a replica's usual one.
NEWEST = 0.2
#: What is known of a replica's time counts this much less with every request given to another one,
#: so that one slow spell is not held against it for good.
_FADE = 0.98

Chance = Callable[[], float]


class ObservedReplica(Struct):
    """One client's observations of one replica."""

    #: Last message, or creation time if there was none.
    seen_s: float
    #: Requests in flight, and since when there have been any.
    load: int = 0
    owes_s: float = 0.0
    #: The client's count of requests to replicas as this one was last asked, and how many had gone
    #: to others since the time before.
    turn: int = 0
    age: int = 0
    #: The running mean of its round trips; 0 before the first.
    usual_s: float = 0.0

    def cost_s(self, turn: int, now_s: float, held: int) -> float:
        """Requests in flight, `held` ones and one more, times what one takes.

        That is if it is given this `turn`.
        """
        usual_s: float = self.usual_s * _FADE ** (turn - self.turn)
        if self.load:
            # A replica that has owed answers for so long is likely to take as long again.
            usual_s = max(usual_s, now_s - max(self.owes_s, self.seen_s))
        return (self.load + held + 1) * usual_s

    def on_request(self, now_s: float, turn: int | None) -> None:
        """The client's `turn`-th request was sent; None: a status request."""
        if turn is None or not self.load:
            self.owes_s = now_s
        self.load += 1
        if turn is not None:
            self.age, self.turn = turn - self.turn, turn

    def took(self, seconds: float, now_s: float) -> None:
        """A round trip of so many seconds has ended."""
        self.seen_s = now_s
        if not self.usual_s:
            self.usual_s = seconds
        else:
            # The longer ago it was asked before, the less that tells.
            self.usual_s += max(NEWEST, 1 - _FADE**self.age) * (seconds - self.usual_s)


class ReplicaSelector:
    """Orders the replicas of the members that have several; `chance` gives numbers from 0 to 1."""

    def __init__(
        self,
        members: Mapping[int, Sequence[str]],
        breakers: CircuitBreakers,
        chance: Chance,
        held: Callable[[str], int],
    ) -> None:
        """`held` says how many requests wait to be sent to a device."""
        self._held = held
        self.members = {k: devices for k, devices in members.items() if len(devices) > 1}
        self._all, self._breakers, self._chance = members, breakers, chance
        #: Replicas that were asked or checked; how often any was asked.
        self._replicas: dict[str, ObservedReplica] = {}
        self._turn = 0
        self._next_check_s = float("-inf")
        self._in_turn = self._round()
        self._checked = min(CHECKED, sum(map(len, self.members.values())))

    def rank(self, out: Collection[str], now_s: float) -> Mapping[int, Iterable[str]]:
        """Index k -> devices, best first; those of `out` are not there."""
        if not self.members:
            return self._all
        ordered: dict[int, Iterable[str]] = dict(self._all)
        for k, devices in self.members.items():
            two = self._two(devices, out)
            if two is not None:
                one, other = two
                if self._cost(other, now_s) < self._cost(one, now_s):
                    one, other = other, one
                ordered[k] = Ranked((one, other), devices)
        return ordered

    def _two(self, devices: Sequence[str], out: Collection[str]) -> tuple[str, str] | None:
        """Two of `devices` that are there, drawn at random; None if there are no two."""
        there = devices
        if out:
            if len(devices) > _FEW and (drawn := self._draw_two(devices, out)):
                return drawn
            there = [device for device in devices if device not in out]
        count = len(there)
        if count < 2:
            return None
        if count == 2:
            return there[0], there[1]
        first, second = int(self._chance() * count), int(self._chance() * (count - 1))
        return there[first], there[second + (second >= first)]

    def _draw_two(self, devices: Sequence[str], out: Collection[str]) -> tuple[str, str] | None:
        """The same without a list of those there; None where most of them are not."""
        found = ""
        for _ in range(_DRAWS):
            device = devices[int(self._chance() * len(devices))]
            if device not in out and device != found:
                if found:
                    return found, device
                found = device
        return None

    def _cost(self, device: str, now_s: float) -> tuple[bool, float, int, int]:
        replica = self._replicas.get(device)
        if replica is None:
            return False, 0.0, 0, 0
        known = self._breakers.get(device)
        # One that missed a request is last until it gives a sign of life.
        silent = known is not None and known.silences > 0
        held = self._held(device)
        cost_s = replica.cost_s(self._turn, now_s, held)
        return silent, cost_s, replica.load + held, replica.turn

    def handle(self, event: DeviceEvent) -> None:
        """Follow one event."""
        what, request, now_s = event.what, event.request, event.now_s
        replica = self._replicas.get(event.device)
        if what == "sent":
            if request is not None and request.k in self.members:
                self._turn += 1
                if replica is None:
                    replica = self._replicas[event.device] = ObservedReplica(seen_s=now_s)
                replica.on_request(now_s, self._turn)
        elif replica is None:
            return
        elif what == "asked":
            replica.on_request(now_s, None)
        else:
            if event.in_flight:
                replica.load -= 1
            if what in ("answered", "refused"):
                replica.took(event.trip_s, now_s)
            elif what in ("late", "full", "no_frame", "told"):
                replica.seen_s = now_s

    def knows(self, device: str) -> bool:
        """Tell whether `device` is a replica that was asked or checked."""
        return device in self._replicas

    def idle(self, now_s: float) -> list[str]:
        """Replicas that have to be asked for their status."""
        if not self._replicas or now_s < self._next_check_s:
            return []
        self._next_check_s = now_s + HEARTBEAT_S
        idle = []
        for device in islice(self._in_turn, self._checked):
            replica = self._replicas.get(device)
            if replica is None:
                self._replicas[device] = ObservedReplica(seen_s=now_s)
            elif now_s >= replica.seen_s + IDLE_S and not replica.load:
                idle.append(device)
        return idle

    def _round(self) -> Iterator[str]:
        """All replicas, again and again."""
        while True:
            for devices in self.members.values():
                yield from devices
