"""Running estimates of the computing time, by batch size, and the choice among rungs. Pure."""

from collections.abc import Iterable, Mapping, Sequence

#: Weight of the newest computation in the running estimate.
_NEWEST = 0.2
#: A computation longer than so many estimates counts as so many, which doubles the estimate: the
#: process may have been suspended. If the next one is as long, the device has become slow, and it
#: counts in full.
_LONGEST = 6.0
#: By which each refusal multiplies its client's factor, so that estimates from a slow period do not
#: refuse requests for ever. A later computation shows whether they were too high.
FORGET = 0.95
#: A batch pays if it takes at most this share of the time of its pictures one by one: its first
#: picture waits for its last.
PAYS = 0.95
#: By which the estimate of a possible size that was not chosen is multiplied, so that one slow
#: period does not rule it out for ever.
_DECAY = 0.999
#: Share of its budget in which a rung above the lowest has to answer each request that waits. The
#: rest is for those that come meanwhile, and for what times vary (docs/lab-log.md: 0.4 to 1 differ
#: little where they do not).
RUNG_SHARE = 0.6


class ComputeTimes:
    """Estimated seconds of one computation, for 1 to `most` pictures at once."""

    __slots__ = ("_batches_s", "_was_long", "most", "one_s")

    def __init__(self, most: int = 1) -> None:
        self.most = most
        #: Of one picture; 0 before the first measurement.
        self.one_s = 0.0
        #: Of several, by their number.
        self._batches_s: dict[int, float] = {}
        #: Whether the last computation took much longer than expected.
        self._was_long = False

    def of(self, pictures: int) -> float:
        """Seconds of a batch; 0 before the first measurement."""
        return self._seconds_of(pictures) or pictures * self.one_s

    def _seconds_of(self, pictures: int) -> float:
        """Seconds of a batch of this size as measured; 0 if it never was."""
        return self.one_s if pictures == 1 else self._batches_s.get(pictures, 0.0)

    def of_queue(self, pictures: int, size: int = 0) -> float:
        """Seconds until the last of `pictures` is computed, in batches of `size`; 0: the best."""
        size = size or self.best(range(1, self.most + 1))
        whole, rest = divmod(pictures, size)
        return whole * self.of(size) + (self.of(rest) if rest else 0.0)

    def best(self, sizes: range) -> int:
        """The size out of `sizes`, which begin with 1, with the least time a picture.

        Only sizes that were measured to pay, else 1.
        """
        known = self._batches_s
        paying = [
            size for size in sizes[1:] if size in known and known[size] <= PAYS * size * self.one_s
        ]
        return min(paying, key=lambda size: (known[size] / size, -size), default=1)

    def choose(self, sizes: range) -> int:
        """As `best`; the estimates of sizes that were not chosen decay."""
        chosen = self.best(sizes)
        for size in sizes[1:]:
            if size != chosen and size in self._batches_s:
                self._batches_s[size] *= _DECAY
        return chosen

    def learn(self, pictures: int, took_s: float, factor: float = 1.0) -> float:
        """Update the estimates with a batch that took `took_s`; returns by what its own changed.

        It was admitted by `factor` times the estimates, which are lowered as far as it confirms.
        """
        before = known = self._seconds_of(pictures)
        if factor < 1.0 and took_s < known:
            share = max(factor, took_s / known)
            self.one_s *= share
            self._batches_s = {size: share * each for size, each in self._batches_s.items()}
            known *= share
        longest_s = _LONGEST * (known or self.of(pictures))
        is_long = 0 < longest_s < took_s
        if is_long and not self._was_long:
            took_s = longest_s
        self._was_long = is_long
        learnt = took_s if not known else known + _NEWEST * (took_s - known)
        if pictures == 1:
            self.one_s = learnt
        else:
            self._batches_s[pictures] = learnt
        return learnt / before if before else 1.0

    def follow(self, pictures: int, ratio: float) -> None:
        """Change the estimate of one size as another rung's has changed.

        A device that has become slow is so at every rung, and a rung that is not run is not
        measured: without this one slow period would rule it out for ever.
        """
        if pictures == 1:
            self.one_s *= ratio
        elif pictures in self._batches_s:
            self._batches_s[pictures] *= ratio

    def renew(self, most: int, seconds: Mapping[int, float]) -> None:
        """Reset to the measurements of another model."""
        self.most, self._was_long = most, False
        self.one_s = seconds.get(1, 0.0)
        self._batches_s = {size: each for size, each in seconds.items() if size != 1}


def highest_rung(
    waiting: Iterable[tuple[float, float, float]], now_s: float, rungs: Sequence[ComputeTimes]
) -> int:
    """The first of `rungs`, from the top, that answers all who wait well in time; else the last.

    `waiting` has arrival, deadline and seconds of decoding of each request, in the order in which
    they run. After Academus, which drops students under bursts (docs/explanation/agent.md).
    """
    sizes = [times.best(range(1, times.most + 1)) for times in rungs]
    rung, last, decoding_s = 0, len(rungs) - 1, 0.0
    for count, (arrived_s, deadline_s, own_s) in enumerate(waiting, 1):
        decoding_s += own_s
        by_s = arrived_s + RUNG_SHARE * (deadline_s - arrived_s) - decoding_s
        while now_s + rungs[rung].of_queue(count, sizes[rung]) > by_s:
            if rung == last:
                return last
            rung += 1
    return rung
