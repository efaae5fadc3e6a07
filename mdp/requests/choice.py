"""Devices that a new call may ask, and when a cascade's second stage has to be asked. Pure."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from mdp.requests.health import CircuitBreaker
from mdp.requests.latency import SlowDevice
from mdp.requests.reason import PROBATION, Reason


class Choice(Struct, frozen=True):
    """The devices that a new call may ask."""

    #: Index k -> the devices that serve it, best first.
    members: Mapping[int, Iterable[str]]
    #: Device -> why it is not to be asked.
    unavailable: Mapping[str, Reason]
    #: Half-open device -> k: to be asked beside the others, and not waited for.
    probing: Mapping[str, int]
    #: Device -> why it is not asked, one for every member at least: the call as a whole would be
    #: late. Empty: it would not.
    too_late: Mapping[str, Reason] = {}

    def first_to_ask(self, k: int) -> str | None:
        """The device that member `k` will be asked of, and waited for; None if there is none."""
        for device in self.members[k]:
            if device not in self.unavailable and device not in self.probing:
                return device
        return None


class Ranked(Struct, frozen=True):
    """`devices` with the two of `first` before the others; thousands of others are not copied."""

    first: tuple[str, str]
    devices: Sequence[str]

    def __iter__(self) -> Iterator[str]:
        yield from self.first
        yield from (device for device in self.devices if device not in self.first)


def exclude(
    k_of: Mapping[str, int],
    gone: Mapping[str, Reason],
    breakers: Mapping[str, CircuitBreaker],
    slow: Mapping[str, SlowDevice],
    tests: Collection[str],
    now_s: float,
    budget_s: float,
) -> tuple[Mapping[str, Reason], Mapping[str, int]]:
    """Device -> why a call with `budget_s` does not ask it; device -> k of those it only tests.

    `k_of` has all devices, `gone` those without a connection, `tests` those with a test under way.
    Where no other device is left, half-open and slow ones are waited for, or else open ones asked.
    """
    out = {d: b.reason for d, b in breakers.items() if b.reason and d not in gone}
    # In order, and each of them once.
    half_open = {d: None for d, b in breakers.items() if b.half_open and d not in gone}
    late = {d: s for d, s in slow.items() if d not in gone and s.is_late_for(budget_s)}
    if not out and not half_open and not late:
        return gone, {}
    suspects = len(out.keys() | half_open.keys() | late.keys())
    if len(k_of) == len(gone) + suspects:
        if suspects > len(out):
            return {**gone, **out}, {}
        return gone, {device: k_of[device] for device in out}
    for device, known in late.items():
        if device in out:
            continue
        if now_s < known.paused_until_s:
            half_open.pop(device, None)
            out[device] = known.reason(budget_s)
        else:
            half_open[device] = None
    unavailable, probing = {**gone, **out}, dict[str, int]()
    for device in half_open:
        if device in tests or k_of[device] in probing.values():
            unavailable[device] = PROBATION
        else:
            probing[device] = k_of[device]
    return unavailable, probing


def others_by_s(
    choice: Choice,
    first: Collection[int],
    slow_s: Callable[[str], float],
    now_s: float,
    decide_s: float,
) -> float:
    """Latest moment at which to ask the members that are not in `first`; -inf: now.

    So late that they are still in time where each device needs `slow_s`; one of which too little
    is known (infinity) is taken to need half of what is left. Now, where the devices of the first
    stage are not likely to have answered by then.
    """
    left_s = decide_s - now_s
    needed_s = {True: 0.0, False: 0.0}
    for k in choice.members:
        device = choice.first_to_ask(k)
        if device is not None:
            known_s = slow_s(device)
            stage = k in first
            needed_s[stage] = max(needed_s[stage], known_s if known_s < math.inf else left_s / 2)
    enough = needed_s[True] + needed_s[False] <= left_s
    return decide_s - needed_s[False] if enough else -math.inf
