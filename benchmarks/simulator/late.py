"""How late a client is woken at its deadline, from calls that were cut by it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mdp.requests.deadline import reserve_s
from partitioner.estimates.latency_quantiles import CLIENT_FUSE_MS

#: The distribution is handed on as so many values, all equally likely.
_VALUES = 1000


@dataclass(frozen=True, slots=True)
class End:
    """How one call ended: after how long, and whether its deadline cut it."""

    latency_ms: float
    cut: bool


def woken_late_s(ends: Sequence[End], deadline_ms: float) -> tuple[float, ...]:
    """By how much the client was woken after the moment to decide; nothing if no call was cut.

    Of a call that was cut this is what its latency tells. Of one that ended by itself after that
    moment, as the last reply came, it is known that the client would have been woken later still:
    the later, the likelier such an end. Without these, wake-ups would look too early (the
    product-limit estimate of Kaplan and Meier, 1958).
    """
    decided_ms = deadline_ms - reserve_s(deadline_ms) * 1e3 + CLIENT_FUSE_MS
    after = sorted(
        (max(0.0, end.latency_ms - decided_ms), not end.cut)
        for end in ends
        if end.cut or end.latency_ms > decided_ms
    )
    late_ms, upto, left = [], [], 1.0
    for place, (ms, by_itself) in enumerate(after):
        if not by_itself:
            left -= left / (len(after) - place)
            late_ms.append(ms)
            upto.append(1.0 - left)
    if not late_ms:
        return ()
    # Nothing is known beyond the latest.
    upto[-1] = 1.0
    quantiles = (np.arange(_VALUES) + 0.5) / _VALUES
    return tuple((np.array(late_ms)[np.searchsorted(upto, quantiles)] / 1e3).tolist())
