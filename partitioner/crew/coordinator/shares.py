"""Uneven parts of a whole: pictures by pace, and shards by link."""

from collections.abc import Sequence


def by_pace(rates: Sequence[float], total: int) -> list[int]:
    """`total` cut in proportion to `rates`, by largest remainder; ties go to the lower index.

    `rates` are not negative and not all 0.
    """
    whole = sum(rates)
    exact = [total * rate / whole for rate in rates]
    parts = [int(part) for part in exact]
    order = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts


def link_shares(bandwidths: Sequence[float]) -> list[float]:
    """The shares of a vector that trainers average for all, such that the slowest link ends first.

    In a two-phase mean of n trainers, trainer i sends and receives 1 + (n - 2) w_i vectors over a
    link of `bandwidths[i]`, in any unit. The greatest of (1 + (n - 2) w_i) / b_i is least where
    all trainers with a share end together; the linear program is that of hivemind's averager.
    """
    n = len(bandwidths)
    if n <= 2:
        return [1 / n] * n
    order = sorted(range(n), key=lambda i: (-bandwidths[i], i))
    shares = [0.0] * n
    for count in range(n, 0, -1):
        quickest = order[:count]
        seconds = (n - 2 + count) / sum(bandwidths[i] for i in quickest)
        found = [(seconds * bandwidths[i] - 1) / (n - 2) for i in quickest]
        if min(found) >= 0:
            for i, share in zip(quickest, found, strict=True):
                shares[i] = share
            break
    return shares
