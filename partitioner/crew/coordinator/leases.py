"""Chunks of frozen work, such as a teacher's answers, that several trainers share out.

A chunk is leased to the trainer that asks. The first result of a chunk counts; a trainer that dies
or hangs loses its lease, and near the end a chunk is also given to a trainer that is expected to be
done with it earlier. Chunks shrink towards the end, so that all finish at about the same time:
guided self-scheduling (Polychronopoulos and Kuck, IEEE Transactions on Computers 36, 1987).
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from partitioner.crew.messages import Chunk

#: Pictures of a chunk, at most, and of the first one of a trainer, which shows its pace. Chunks
#: start at multiples of FIRST: batches of this size are those that a single process makes.
CHUNK, FIRST = 1024, 256
#: A lease lasts so many times the trainer's own seconds for the chunk, and so many seconds more.
LEASE_FACTOR, LEASE_S = 3.0, 30.0
#: Weight of the newest chunk in the estimate of a trainer's pace.
_NEWEST = 0.5


@dataclass(slots=True)
class _Lease:
    """Seconds at which a chunk was given out, is expected back, and is held no longer."""

    taken_s: float
    expected_s: float | None
    until_s: float


class Leases:
    """Assignment of chunks to trainers; times are the caller's, in seconds."""

    def __init__(self, variants: Sequence[int], pictures: int) -> None:
        """`variants` in the order in which they are needed, with `pictures` each."""
        self._uncut = deque(Chunk(variant, 0, pictures) for variant in variants if pictures)
        self._returned: deque[Chunk] = deque()
        self._out: dict[Chunk, dict[int, _Lease]] = {}
        self._done: dict[Chunk, bytes] = {}
        self._left = pictures * len(self._uncut)
        self._pace: dict[int, float] = {}
        #: Results of chunks that another trainer had finished, and those that differed from it.
        self.repeated = self.unequal = 0

    @property
    def is_done(self) -> bool:
        """Tell whether every chunk has a result."""
        return self._left == 0

    def pace(self, rank: int) -> float | None:
        """Pictures per second of a trainer, None before its first result."""
        return self._pace.get(rank)

    def take(self, rank: int, now_s: float) -> Chunk | None:
        """The next chunk for a trainer; None while there is none for it."""
        self.expire(now_s)
        chunk = self._next(rank) or self._late(rank, now_s)
        if chunk is not None:
            pace = self._pace.get(rank)
            own_s = len(chunk) / pace if pace else None
            expected_s = None if own_s is None else now_s + own_s
            until_s = now_s + LEASE_FACTOR * (own_s or 0.0) + LEASE_S
            self._out.setdefault(chunk, {})[rank] = _Lease(now_s, expected_s, until_s)
        return chunk

    def renew(self, rank: int, now_s: float) -> None:
        """Prolong a trainer's leases: it has been heard of."""
        for chunk, holders in self._out.items():
            if rank in holders:
                own_s = len(chunk) / self._pace[rank] if rank in self._pace else 0.0
                holders[rank].until_s = now_s + LEASE_FACTOR * own_s + LEASE_S

    def finish(self, rank: int, chunk: Chunk, took_s: float, digest: bytes) -> bool:
        """A trainer's result, whose content has this digest; whether it is the first and counts.

        `took_s` are the seconds of computing it. Raises ValueError for what is no chunk.
        """
        pace = len(chunk) / max(took_s, 1e-9)
        known = self._pace.get(rank, pace)
        self._pace[rank] = known + _NEWEST * (pace - known)
        before = self._done.get(chunk)
        if before is not None:
            self._out.get(chunk, {}).pop(rank, None)
            self.repeated += 1
            self.unequal += before != digest
            return False
        if self._out.pop(chunk, None) is None:
            if chunk not in self._returned:
                raise ValueError(f"{chunk}: expected a chunk that was given out")
            self._returned.remove(chunk)
        self._done[chunk] = digest
        self._left -= len(chunk)
        return True

    def drop(self, rank: int) -> None:
        """Take back what a trainer holds that is gone."""
        self._pace.pop(rank, None)
        self._take_back(rank, math.inf)

    def expire(self, now_s: float) -> None:
        """Take back what has been held for too long."""
        for rank in {rank for holders in self._out.values() for rank in holders}:
            self._take_back(rank, now_s)

    def _take_back(self, rank: int, now_s: float) -> None:
        for chunk, holders in list(self._out.items()):
            if rank in holders and holders[rank].until_s <= now_s:
                del holders[rank]
                if not holders:
                    del self._out[chunk]
                    self._returned.append(chunk)

    def _next(self, rank: int) -> Chunk | None:
        """A chunk that nobody holds."""
        if self._returned:
            return self._returned.popleft()
        if not self._uncut:
            return None
        variant, start, stop = self._uncut[0]
        size = min(self._size(rank), stop - start)
        self._uncut.popleft()
        if start + size < stop:
            self._uncut.appendleft(Chunk(variant, start + size, stop))
        return Chunk(variant, start, start + size)

    def _size(self, rank: int) -> int:
        """Half of the trainer's share by pace of what nobody holds, from FIRST to CHUNK."""
        pace = self._pace.get(rank)
        if pace is None:
            return FIRST
        share = 0.5 * sum(map(len, self._uncut)) * pace / sum(self._pace.values())
        return max(FIRST, min(CHUNK, FIRST * round(share / FIRST)))

    def _late(self, rank: int, now_s: float) -> Chunk | None:
        """The chunk out for longest that this trainer is expected to be done with earlier.

        A holder without a pace is taken to be as quick as this trainer; one that is late is
        expected to be as late again.
        """
        pace = self._pace.get(rank)
        if pace is None:
            return None

        def earlier(chunk: Chunk, lease: _Lease) -> bool:
            own_s = len(chunk) / pace
            expected_s = lease.taken_s + own_s if lease.expected_s is None else lease.expected_s
            return own_s < abs(expected_s - now_s)

        able = [
            (min(lease.taken_s for lease in holders.values()), chunk)
            for chunk, holders in self._out.items()
            if rank not in holders and all(earlier(chunk, lease) for lease in holders.values())
        ]
        return min(able)[1] if able else None
