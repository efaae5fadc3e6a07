"""The frame of the devices' own cameras that a call asks for, and when those seen were taken. Pure.

A moment is a reading of the client's clock; on the wire it is an age, as the clocks of two machines
are never compared.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, NamedTuple

from msgspec.structs import replace

from mdp.arguments import check_number
from mdp.errors import InputError
from mdp.requests.reason import Reason
from mdp.requests.session import Arrival, Finish

#: How far a frame may be from the moment that was asked for, unless the caller says otherwise.
DEFAULT_WITHIN_MS = 2000.0
#: How often `watch` asks, unless the caller says otherwise.
DEFAULT_EVERY_MS = 100.0
MAX_AGO_MS = 1e9

#: `latest`, or a reading of `time.monotonic()`.
Moment = Literal["latest"] | float


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameQuery:
    """The frame that is asked for; a moment of None is the newest."""

    moment_s: float | None = None
    within_ms: float = DEFAULT_WITHIN_MS

    def ago_ms(self, now_s: float) -> float:
        """Milliseconds since the moment, for a request that leaves now."""
        return 0.0 if self.moment_s is None else max(0.0, now_s - self.moment_s) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSeen:
    """The frame that one device looked at, as far as its reply tells."""

    number: int
    #: How old it was as the request arrived at the device.
    age_ms: float
    #: When the reply came.
    heard_s: float
    #: Whether the device says that its picture never changes, or that another client's looks
    #: suspect its camera.
    frozen: bool = False
    suspected: bool = False

    def capture_s(self, part: Arrival) -> float:
        """Moment of the frame on the client's clock; off by half of the network time at most.

        Half of that is taken for the way back, as NTP does (RFC 5905).
        """
        since_ms = self.age_ms + part.queue_ms + part.compute_ms + part.network_ms / 2
        return self.heard_s - since_ms / 1e3


class FrameInAnswer(NamedTuple):
    """The frame that one device contributed, its age as of the answer."""

    number: int
    age_ms: float
    frozen: bool = False
    suspected: bool = False


#: By device.
FramesSeen = Mapping[str, FrameInAnswer]


def frames_of(
    seen: Mapping[str, FrameSeen], arrived: Mapping[int, Arrival], now_s: float
) -> FramesSeen:
    """The frames of all that is in an answer, their ages as of now."""
    return {
        part.device: FrameInAnswer(
            seen[part.device].number,
            (now_s - seen[part.device].capture_s(part)) * 1e3,
            seen[part.device].frozen,
            seen[part.device].suspected,
        )
        for part in arrived.values()
    }


def together(finish: Finish, frames: FramesSeen, most_ms: float) -> Finish:
    """`finish` with most members whose frames are at most `most_ms` apart; the others are missing.

    Of as many members, those with the newer frames.
    """
    ages_ms = sorted(frames[part.device].age_ms for part in finish.arrived.values())
    if not ages_ms or ages_ms[-1] - ages_ms[0] <= most_ms:
        return finish
    # The first of the largest is the newest.
    newest_ms = max(
        ages_ms, key=lambda first: sum(first <= age <= first + most_ms for age in ages_ms)
    )
    oldest_ms = max(age for age in ages_ms if age <= newest_ms + most_ms)
    arrived, missing = dict(finish.arrived), dict(finish.missing)
    for k, part in finish.arrived.items():
        age_ms = frames[part.device].age_ms
        if newest_ms <= age_ms <= oldest_ms:
            continue
        off = f"{age_ms - newest_ms:.0f} ms older than the newest"
        if age_ms < newest_ms:
            off = f"{oldest_ms - age_ms:.0f} ms newer than the oldest"
        text = f"its frame is {off} in the answer: expected at most {most_ms:g} ms"
        missing[part.device] = Reason("apart", text)
        del arrived[k]
    return replace(finish, arrived=arrived, missing=missing)


def frame_query(at: Moment, *, within_ms: float, now_s: float) -> FrameQuery:
    """The frame to ask for; raises InputError for a moment to come, or one that is none."""
    _check_age("within_ms", within_ms)
    if at == "latest":
        return FrameQuery(within_ms=float(within_ms))
    if not isinstance(at, Real) or not math.isfinite(at):
        raise InputError(f"at: expected 'latest' or a reading of time.monotonic(), got {at!r}")
    ago_ms = (now_s - at) * 1e3
    if not 0 <= ago_ms <= MAX_AGO_MS:
        raise InputError(
            f"at: expected a moment up to {MAX_AGO_MS:g} ms ago, got one {ago_ms:g} ms ago"
        )
    return FrameQuery(moment_s=float(at), within_ms=float(within_ms))


def check_every_ms(every_ms: float) -> float:
    """`every_ms` if one can look so often; raises InputError."""
    _check_age("every_ms", every_ms)
    return float(every_ms)


def _check_age(name: str, value_ms: float) -> None:
    expected = f"0 to {MAX_AGO_MS:g}"
    check_number(name, value_ms, expected, lambda value: 0 <= value <= MAX_AGO_MS)
