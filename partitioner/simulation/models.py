"""What the simulator takes devices, links, failures and callers to be like. Plain values.

Every random number is determined by the seed, the device's name, its purpose and how many of its
kind came before: the n-th request to a device costs the same in every what-if, so that two of them
differ by what was changed and not by luck.
"""

import hashlib
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np
from numpy.random import Generator, Philox
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.requests.hedging import DEFAULT_SHARE

#: A lost packet is sent again by TCP after at least this long, doubled each time (Linux's
#: TCP_RTO_MIN): over a link that loses packets, messages are late and not lost.
RETRANSMIT_S = 0.2
#: Numbers are drawn in blocks, as numpy is only fast for many at once; small ones first, for with
#: thousands of devices most of them are never used up.
_FIRST_BLOCK, _LARGEST_BLOCK = 16, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Seconds around `median_s`; `sigma` is the standard deviation of their logarithm."""

    median_s: float
    sigma: float = 0.0

    def draw(self, random: Generator, size: int) -> NDArray[np.float64]:
        """Seconds `[size]`."""
        if self.sigma == 0:
            return np.full(size, self.median_s)
        return random.lognormal(math.log(self.median_s), self.sigma, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds as they were measured; each is as likely as every other."""

    values_s: tuple[float, ...]
    #: What was measured together is drawn together, where it has the same name here: the n-th draw
    #: of each is of the same moment. Empty: independent of everything else.
    together: str = ""

    def draw(self, random: Generator, size: int) -> NDArray[np.float64]:
        """Seconds `[size]`."""
        return np.array(self.values_s)[random.integers(0, len(self.values_s), size)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Jittered:
    """Half a round trip each way, and for each message an exponential delay on top."""

    round_trip_s: float
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSpells:
    """Now and then a device takes `factor` times as long: exponential pauses and durations."""

    every_s: float
    lasts_s: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """One agent and the link to it."""

    name: str
    k: int
    compute: LogNormal | Measured
    #: The way there and back, beyond what the bytes take.
    delay: Jittered | Measured
    request_bytes: float = 0.0
    reply_bytes: float = 0.0
    bandwidth_bps: float = math.inf
    #: Coding and sending a reply keeps the agent from the next request for so long.
    turnaround_s: float = 0.0
    #: Mean seconds between two losses of the device, and until it is back.
    mean_up_s: float = math.inf
    mean_down_s: float = 0.0
    #: Share of the messages, each way, of which a packet is lost.
    loss: float = 0.0
    slow: SlowSpells | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Who asks: clients that wait for their answer, or requests that come at a rate."""

    requests: int
    clients: int = 1
    #: Requests a second of all clients together, as a Poisson process; None: each client asks
    #: `think_s` after it was answered.
    rate_per_s: float | None = None
    think_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that one run of the simulator depends on."""

    #: Replicas of one member are asked in this order, by each client from another one on.
    devices: tuple[DeviceModel, ...]
    load: Load
    deadline_ms: float
    seed: int = 0
    hedge_after_s: float | None = None
    #: What hedging may add to the requests of a client at most.
    hedge_share: float = DEFAULT_SHARE
    #: A cascade: the members that are asked before the others, and the share of the requests of
    #: which these are not sure. Empty: all are asked at once.
    first: frozenset[int] = frozenset()
    escalated: float = 0.0
    #: Devices that are not there at all.
    lost: frozenset[str] = frozenset()
    #: What a client needs before it has sent, and after the decision, within the reserve.
    before: LogNormal | Measured = LogNormal(median_s=0.0)
    after_s: float = 0.0
    #: How late the client notices that it has to decide, drawn for every call: the operating system
    #: wakes it, and beside busy agents on the same cores it waits for one. An answer that it gives
    #: later than the reserve allows is late, as a real one is.
    late_s: float | LogNormal | Measured = 0.0
    #: What each client's own port carries: all its crops leave through it.
    client_bps: float = math.inf
    #: From a device's loss until clients know, and from its return until they are connected.
    detect_s: float = 3.0
    reconnect_s: float = 0.5

    def __post_init__(self) -> None:
        if self.load.requests < 1:
            raise InputError(f"requests: expected at least 1, got {self.load.requests}")
        if not self.client_bps > 0:
            raise InputError(f"expected a client's port above 0 bit/s, got {self.client_bps:g}")
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise InputError(f"devices: one is named twice: {', '.join(names)}")
        unknown = sorted(self.lost - set(names))
        if unknown:
            raise InputError(
                f"{unknown[0]!r} cannot be lost: expected one of {', '.join(names[:20])}"
            )

    def members(self) -> dict[int, list[str]]:
        """Index k -> the devices that serve it, in order of preference."""
        members: dict[int, list[str]] = {}
        for device in self.devices:
            members.setdefault(device.k, []).append(device.name)
        return dict(sorted(members.items()))


#: Draws `[size]` from a generator.
Draw = Callable[[Generator, int], NDArray[np.float64]]


class Dice:
    """Random numbers by what they are for: the n-th block of each kind is always the same.

    One counter-based generator (Salmon and others, Parallel random numbers: as easy as 1, 2, 3,
    2011) serves all: setting its key and counter costs a fifth of making a generator.
    """

    def __init__(self, seed: int) -> None:
        self._bits = Philox(key=seed)
        self._generator = Generator(self._bits)
        self._state: Any = self._bits.state
        self._state["buffer_pos"] = len(self._state["buffer"])
        self._key, self._counter = (self._state["state"][part] for part in ("key", "counter"))

    def at(self, kind: int, block: int) -> Generator:
        """The generator at the start of a block; good until the next call."""
        self._key[1], self._counter[3] = kind, block
        self._bits.state = self._state
        return self._generator


def kind_of(name: str, purpose: str) -> int:
    """The number of one device's (or of the callers') random numbers of one purpose."""
    digest = hashlib.blake2b(f"{purpose} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)


class Draws:
    """Numbers without end of one kind, out of blocks that grow as more are asked for."""

    __slots__ = ("next",)

    def __init__(
        self, dice: Dice, name: str, purpose: str, draw: Draw, first: int = _FIRST_BLOCK
    ) -> None:
        #: The next of them; it costs a quarter of what a method of ours would.
        self.next = chain.from_iterable(_blocks(dice, name, purpose, draw, first)).__next__


def _blocks(dice: Dice, name: str, purpose: str, draw: Draw, size: int) -> Iterator["array[float]"]:
    kind = kind_of(name, purpose)
    for block in count():
        # Arrays take a quarter of the memory of lists. From its end on, as ever: a seed's luck.
        yield array("d", draw(dice.at(kind, block), size)[::-1].tobytes())
        size = min(2 * size, _LARGEST_BLOCK)


def seconds(distribution: LogNormal | Measured, dice: Dice, name: str, purpose: str) -> Draws:
    """Draws from the distribution."""
    if isinstance(distribution, Measured) and distribution.together:
        name, purpose = distribution.together, "together"
    return Draws(dice, name, purpose, distribution.draw)


def chance(dice: Dice, number: int) -> Callable[[], float]:
    """Numbers from 0 to 1, with which one client chooses among replicas."""
    return Draws(dice, str(number), "chance", uniform).next


def uniform(random: Generator, size: int) -> NDArray[np.float64]:
    """From 0 to 1."""
    return random.random(size)


def exponential(random: Generator, size: int) -> NDArray[np.float64]:
    """Of mean 1."""
    return random.standard_exponential(size)


class Rotated(Sequence[str]):
    """A client's own order of the same names: from `offset` on, and round."""

    __slots__ = ("_count", "_names", "_shift")

    def __init__(self, names: list[str], offset: int) -> None:
        self._names, self._count = names, len(names)
        self._shift = self._count - offset % self._count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        first = self._count - self._shift
        return chain(islice(self._names, first, None), islice(self._names, first))

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            cut = self._count - self._shift
            return (self._names[cut:] + self._names[:cut])[index]
        if not 0 <= index < self._count:
            raise IndexError(index)
        # Below zero a list counts from its end, which is how the order goes round.
        return self._names[index - self._shift]
