"""How long computing takes, by the number of pictures at once: running estimates. Pure."""

from collections.abc import Mapping

#: Weight of the newest computation in the running estimate.
_NEWEST = 0.2
#: A computation that takes more than so many times what was expected counts for that, and the
#: estimate doubles: one during which the process was stopped would shut the door for long. If the
#: next one is long as well, this device has become slow, and that counts in full.
_LONGEST = 6.0
#: Each refusal lowers what its client is judged by, so that one slow spell cannot shut the door for
#: good. What is computed then shows whether the estimates were too high.
FORGET = 0.95
#: A batch pays if it takes at most this share of the time of its pictures one by one. What is
#: gained has to be worth more than that the first of them waits for the last.
PAYS = 0.95
#: A size that was possible and not chosen is taken for a little quicker each time, so that one slow
#: spell does not rule it out for good.
_DOUBT = 0.999


class ComputeTimes:
    """Estimated seconds of one computation, for 1 to `most` pictures at once."""

    __slots__ = ("_batches_s", "_was_long", "most", "one_s")

    def __init__(self, most: int = 1) -> None:
        self.most = most
        #: Of one picture; 0 as long as nothing is known.
        self.one_s = 0.0
        #: Of several, as far as they are known.
        self._batches_s: dict[int, float] = {}
        #: Whether the last computation took much longer than expected.
        self._was_long = False

    def of(self, pictures: int) -> float:
        """Seconds of so many at once; 0 as long as nothing is known."""
        known = None if pictures == 1 else self._batches_s.get(pictures)
        return pictures * self.one_s if known is None else known

    def of_queue(self, pictures: int) -> float:
        """Seconds until the last of so many has its answer, in batches of the best size."""
        size = self.best(range(1, self.most + 1))
        whole, rest = divmod(pictures, size)
        return whole * self.of(size) + (self.of(rest) if rest else 0.0)

    def best(self, sizes: range) -> int:
        """The size out of `sizes`, which begin with 1, that takes least time a picture.

        Only sizes that have been seen to pay, else 1.
        """
        known = self._batches_s
        paying = [
            size for size in sizes[1:] if size in known and known[size] <= PAYS * size * self.one_s
        ]
        return min(paying, key=lambda size: (known[size] / size, -size), default=1)

    def choose(self, sizes: range) -> int:
        """As `best`; the sizes that were not chosen get a little of their credit back."""
        chosen = self.best(sizes)
        for size in sizes[1:]:
            if size != chosen and size in self._batches_s:
                self._batches_s[size] *= _DOUBT
        return chosen

    def learn(self, pictures: int, took_s: float, trust: float = 1.0) -> None:
        """A computation of so many has taken so long.

        It was admitted by `trust` times the estimates, which are lowered as far as it confirms.
        """
        known = self.one_s if pictures == 1 else self._batches_s.get(pictures, 0.0)
        if trust < 1.0 and took_s < known:
            share = max(trust, took_s / known)
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

    def renew(self, most: int, seconds: Mapping[int, float]) -> None:
        """From now on another model is computed, of which this has been measured."""
        self.most, self._was_long = most, False
        self.one_s = seconds.get(1, 0.0)
        self._batches_s = {size: each for size, each in seconds.items() if size != 1}
