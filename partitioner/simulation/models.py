"""What the simulator takes devices, links, failures and callers to be like. Plain values.

Every random number comes from a generator of its own for each device and purpose, seeded by the
seed and the device's name: the n-th request to a device costs the same in every what-if, so that
two of them differ by what was changed and not by luck.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from mdp.errors import InputError

#: A lost packet is sent again by TCP after at least this long, doubled each time (Linux's
#: TCP_RTO_MIN): over a link that loses packets, messages are late and not lost.
RETRANSMIT_S = 0.2
_FIRST_BLOCK, _LARGEST_BLOCK = 64, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class LogNormal:
    """Seconds around `median_s`; `sigma` is the standard deviation of their logarithm."""

    median_s: float
    sigma: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds as they were measured; each is as likely as every other."""

    values_s: tuple[float, ...]
    #: What was measured together is drawn together, where it has the same name here: the n-th draw
    #: of each is of the same moment. Empty: independent of everything else.
    together: str = ""


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
    #: Devices that are not there at all.
    lost: frozenset[str] = frozenset()
    #: What a client needs before it has sent, and after the decision, within the reserve.
    before: LogNormal | Measured = LogNormal(median_s=0.0)
    after_s: float = 0.0
    #: How late the client notices that it has to decide: it sleeps in whole milliseconds.
    late_s: float = 0.0
    #: From a device's loss until clients know, and from its return until they are connected.
    detect_s: float = 3.0
    reconnect_s: float = 0.5

    def __post_init__(self) -> None:
        if self.load.requests < 1:
            raise InputError(f"requests: expected at least 1, got {self.load.requests}")
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


def generator(seed: int, name: str, purpose: str) -> Generator:
    """The generator of one device's (or of the callers') random numbers of one kind."""
    return np.random.default_rng([seed, zlib.crc32(name.encode()), zlib.crc32(purpose.encode())])


def seconds(
    distribution: LogNormal | Measured, seed: int, name: str, purpose: str
) -> Iterator[float]:
    """Draws without end; the generator of `name` and `purpose` is made with the first of them."""
    if isinstance(distribution, Measured):
        if distribution.together:
            name, purpose = distribution.together, "together"
        random = generator(seed, name, purpose)
        values = np.array(distribution.values_s)
        yield from endless(lambda size: values[random.integers(0, len(values), size)])
    elif distribution.sigma == 0:
        yield from repeat(distribution.median_s)
    else:
        random = generator(seed, name, purpose)
        location, sigma = math.log(distribution.median_s), distribution.sigma
        yield from endless(lambda size: random.lognormal(location, sigma, size))


def ways(delay: Jittered | Measured, seed: int, name: str) -> Iterator[tuple[float, float]]:
    """Pairs of seconds there and back without end; what was measured is split evenly."""
    if isinstance(delay, Measured):
        for trip_s in seconds(delay, seed, name, "ways"):
            yield trip_s / 2, trip_s / 2
        return
    half_s, jitter_s = delay.round_trip_s / 2, delay.jitter_s
    if jitter_s == 0:
        yield from repeat((half_s, half_s))
    random = generator(seed, name, "ways")
    messages = endless(lambda size: half_s + random.exponential(jitter_s, size))
    yield from zip(messages, messages, strict=True)


def shares(seed: int, name: str, purpose: str) -> Iterator[float]:
    """Numbers from 0 to 1 without end."""
    yield from endless(generator(seed, name, purpose).random)


def endless(draw: Callable[[int], NDArray[np.float64]]) -> Iterator[float]:
    """Single numbers out of blocks: numpy is only fast for many at once."""
    size = _FIRST_BLOCK
    while True:
        yield from draw(size).tolist()
        size = min(2 * size, _LARGEST_BLOCK)


class Rotated(Sequence[str]):
    """A client's own order of the same names: from `offset` on, and round."""

    __slots__ = ("_count", "_names", "_shift")

    def __init__(self, names: list[str], offset: int) -> None:
        self._names, self._count = names, len(names)
        self._shift = self._count - offset % self._count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if isinstance(index, slice):
            cut = self._count - self._shift
            return (self._names[cut:] + self._names[:cut])[index]
        if not 0 <= index < self._count:
            raise IndexError(index)
        # Below zero a list counts from its end, which is how the order goes round.
        return self._names[index - self._shift]
