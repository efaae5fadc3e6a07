"""Models of devices, links, failures and callers, and their random numbers.

A random number depends on the seed, the device's name, its purpose and its index: the n-th request
to a device costs the same in every what-if (common random numbers).
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

#: TCP resends a lost packet after at least this long, doubled each time (Linux's TCP_RTO_MIN), so
#: that messages are late and not lost.
RETRANSMIT_S = 0.2
#: Sizes of the blocks that numbers are drawn in; of thousands of devices most need few.
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
class MeasuredSeconds:
    """Measured seconds, drawn uniformly."""

    values_s: tuple[float, ...]
    #: Distributions with the same name here are drawn jointly: the n-th draw of each has the same
    #: index. Empty: independent.
    together: str = ""

    def draw(self, random: Generator, size: int) -> NDArray[np.float64]:
        """Seconds `[size]`."""
        return np.array(self.values_s)[random.integers(0, len(self.values_s), size)]


def median_s(distribution: LogNormal | MeasuredSeconds) -> float:
    """The median of a distribution of seconds."""
    if isinstance(distribution, LogNormal):
        return distribution.median_s
    return float(np.median(distribution.values_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Jittered:
    """Half a round trip each way, and for each message an exponential delay on top."""

    round_trip_s: float
    jitter_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """One agent and the link to it."""

    name: str
    k: int
    compute: LogNormal | MeasuredSeconds
    #: Network delay without the bytes.
    delay: Jittered | MeasuredSeconds
    request_bytes: float = 0.0
    #: Memory of a request that waits in its agent.
    waiting_bytes: int = 0
    reply_bytes: float = 0.0
    bandwidth_bps: float = math.inf
    #: Time in which the agent encodes and sends a reply, and computes nothing.
    turnaround_s: float = 0.0
    #: Mean seconds up and down, exponential.
    mean_up_s: float = math.inf
    mean_down_s: float = 0.0
    #: Share of the messages, each way, with a lost packet.
    loss: float = 0.0
    #: Computing time at each rung below the top, as a share of that at the top.
    rungs: tuple[float, ...] = ()
    #: The only rung that it runs at, counted from the top; None: as its queue chooses.
    rung: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Closed loop: clients wait for their answers; or open: a Poisson process."""

    requests: int
    clients: int = 1
    #: Requests a second of all clients together; None: closed loop, `think_s` after an answer.
    rate_per_s: float | None = None
    think_s: float = 0.0
    #: By which the rate is multiplied in each tenth second.
    burst: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The whole input of one simulation."""

    #: Replicas of a member in order of preference, rotated from client to client.
    devices: tuple[DeviceModel, ...]
    load: Load
    deadline_ms: float
    seed: int = 0
    hedge_after_s: float | None = None
    #: Share that hedging may add to a client's requests.
    hedge_share: float = DEFAULT_SHARE
    #: A cascade: members of the first stage, and the share of requests that escalate. Empty: no
    #: cascade.
    first: frozenset[int] = frozenset()
    escalated: float = 0.0
    #: Devices that are absent throughout.
    lost: frozenset[str] = frozenset()
    #: Client time before the request is sent, and after the decision, within the reserve.
    before: LogNormal | MeasuredSeconds = LogNormal(median_s=0.0)
    after_s: float = 0.0
    #: Delay between the moment of decision and the client's waking, drawn for every call. One above
    #: the reserve makes the answer late.
    late_s: float | LogNormal | MeasuredSeconds = 0.0
    #: Bandwidth of each client's network port, through which all its crops leave.
    client_bps: float = math.inf
    #: Time from a device's loss until clients know of it, and from its return until they connect.
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
        """Member k -> its devices, in order of preference."""
        members: dict[int, list[str]] = {}
        for device in self.devices:
            members.setdefault(device.k, []).append(device.name)
        return dict(sorted(members.items()))


#: SampleStream `[size]` from a generator.
Draw = Callable[[Generator, int], NDArray[np.float64]]


class RandomStreams:
    """Independent streams of random numbers by kind, in blocks that can be drawn in any order.

    A counter-based generator (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011);
    setting its key and counter takes a fifth of the time of making one.
    """

    def __init__(self, seed: int) -> None:
        self._bits = Philox(key=seed)
        self._generator = Generator(self._bits)
        self._state: Any = self._bits.state
        self._state["buffer_pos"] = len(self._state["buffer"])
        self._key, self._counter = (self._state["state"][part] for part in ("key", "counter"))

    def at(self, kind: int, block: int) -> Generator:
        """The generator at the start of a block; valid until the next call."""
        self._key[1], self._counter[3] = kind, block
        self._bits.state = self._state
        return self._generator


def kind_of(name: str, purpose: str) -> int:
    """The stream number of a device (or the callers) and a purpose."""
    digest = hashlib.blake2b(f"{purpose} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest)


class SampleStream:
    """An endless stream of samples of one kind, drawn in growing blocks."""

    __slots__ = ("next",)

    def __init__(
        self, streams: RandomStreams, name: str, purpose: str, draw: Draw, first: int = _FIRST_BLOCK
    ) -> None:
        #: The next sample; an attribute, since a method would take four times as long.
        self.next = chain.from_iterable(_blocks(streams, name, purpose, draw, first)).__next__


def _blocks(
    streams: RandomStreams, name: str, purpose: str, draw: Draw, size: int
) -> Iterator["array[float]"]:
    kind = kind_of(name, purpose)
    for block in count():
        yield array("d", draw(streams.at(kind, block), size)[::-1].tobytes())
        size = min(2 * size, _LARGEST_BLOCK)


def seconds(
    distribution: LogNormal | MeasuredSeconds, streams: RandomStreams, name: str, purpose: str
) -> SampleStream:
    """Samples of a distribution."""
    if isinstance(distribution, MeasuredSeconds) and distribution.together:
        name, purpose = distribution.together, "together"
    return SampleStream(streams, name, purpose, distribution.draw)


def chance(streams: RandomStreams, number: int) -> Callable[[], float]:
    """The random numbers of one client's replica selection."""
    return SampleStream(streams, str(number), "chance", uniform).next


def uniform(random: Generator, size: int) -> NDArray[np.float64]:
    """Uniform samples in [0, 1)."""
    return random.random(size)


def exponential(random: Generator, size: int) -> NDArray[np.float64]:
    """Exponential samples of mean 1."""
    return random.standard_exponential(size)


class Rotated(Sequence[str]):
    """`names` rotated to begin at `offset`, without a copy."""

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
        # A negative index counts from the end, which completes the rotation.
        return self._names[index - self._shift]
