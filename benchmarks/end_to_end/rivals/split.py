"""Who gets which part of a teacher, and how long devices exchange. Pure."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

#: Bytes of one value on the wire.
FP32_BYTES, FP16_BYTES = 4, 2
#: Sums that a layer with split tensors needs: after attention and after the MLP.
SUMS_PER_LAYER = 2


def dealt(parts: int, speeds: Sequence[float]) -> list[int]:
    """How many of `parts` equal parts each device gets so that the last one is done soonest.

    `speeds` are parts per any unit of time. Giving each part to whoever would be done with it
    first is optimal for equal parts.
    """
    counts = [0] * len(speeds)
    for _ in range(parts):
        soonest = min(range(len(speeds)), key=lambda i: (counts[i] + 1) / speeds[i])
        counts[soonest] += 1
    return counts


def bounds(counts: Sequence[int]) -> list[tuple[int, int]]:
    """First and one after the last of every device's parts, in order."""
    return list(pairwise(accumulate(counts, initial=0)))


def columns(width: int, speeds: Sequence[float], group: int = 16) -> list[tuple[int, int]]:
    """Columns of a hidden layer for each device, dealt in groups that fill a vector register.

    The last device that has any also gets what is left of an incomplete group.
    """
    found = [(first * group, last * group) for first, last in bounds(dealt(width // group, speeds))]
    last = max(i for i, (begin, end) in enumerate(found) if end > begin)
    return [
        (begin, width if i >= last else end) if i <= last else (width, width)
        for i, (begin, end) in enumerate(found)
    ]


def sum_bytes(values: int, value_bytes: int, devices: int) -> float:
    """Bytes that one device sends for one sum over all devices (reduce-scatter, all-gather).

    Each sends every other one its part, and its own part once it is summed up: no scheme sends less
    (Patarasuk and Yuan, J. Parallel Distrib. Comput. 69 (2009)).
    """
    return 2 * (devices - 1) / devices * values * value_bytes


def sum_s(sent_bytes: float, bandwidth_bps: float, round_trip_s: float) -> float:
    """Seconds of one sum: two steps of half a round trip, in which all send at once to all."""
    return sent_bytes * 8 / bandwidth_bps + round_trip_s
