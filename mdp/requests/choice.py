"""Whom a new request may ask, and by when the members of a second stage have to be. Pure."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct


class Choice(Struct, frozen=True):
    """Whom a new request may ask."""

    #: Index k -> the devices that serve it, best first.
    members: Mapping[int, Sequence[str]]
    #: Device -> why it is not to be asked.
    unavailable: Mapping[str, str]
    #: Device on probation -> k: to be asked beside, and not waited for.
    probing: Mapping[str, int]

    def asked_first(self, k: int) -> str | None:
        """The device that member `k` will be asked of, and waited for; None if there is none."""
        for device in self.members[k]:
            if device not in self.unavailable and device not in self.probing:
                return device
        return None


def others_by_s(
    choice: Choice,
    first: Collection[int],
    slow_s: Callable[[str], float],
    now_s: float,
    decide_s: float,
) -> float:
    """When the members that are not in `first` have to be asked at the latest; -inf: now.

    So late that they are still in time where each device needs `slow_s`. A device of which too
    little is known (infinity) is taken to need half of what is left. Now, where the devices of the
    first stage are not likely to have answered by then.
    """
    left_s = decide_s - now_s
    needed_s = {True: 0.0, False: 0.0}
    for k in choice.members:
        device = choice.asked_first(k)
        if device is not None:
            known_s = slow_s(device)
            stage = k in first
            needed_s[stage] = max(needed_s[stage], known_s if known_s < math.inf else left_s / 2)
    enough = needed_s[True] + needed_s[False] <= left_s
    return decide_s - needed_s[False] if enough else -math.inf
