"""Batches of an epoch that are in the committed parameters: each exactly once.

Trainers take batches from a counter that all share (`store.add`), so no two take the same one, and
report what they have done. A batch is *pending* from its report until the mean that contains it is
committed. When nobody trains any more, whatever is neither committed nor pending was lost with a
trainer, whether it had reported it or not, and is given out again.
"""

from collections.abc import Iterable

from partitioner.crew.messages import Rank


class Claims:
    """The book of one epoch of `total` batches, 0 to total - 1."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.committed: set[int] = set()
        self._pending: dict[Rank, set[int]] = {}
        #: Of pending batches those that are in a mean under way, while their trainers go on.
        self._meeting: dict[Rank, set[int]] = {}

    def report(self, rank: Rank, claims: Iterable[int]) -> None:
        """A trainer reports batches; raises ValueError for one that is another's or committed.

        Numbers from `total` on are those of a counter that has run out, and no batches.
        """
        batches = {claim for claim in claims if claim < self.total}
        others = [done for other, done in self._pending.items() if other != rank]
        others += self._meeting.values()
        for batch in batches:
            if any(batch in done for done in (self.committed, *others)):
                raise ValueError(f"trainer {rank}: batch {batch} is done already")
        self._pending.setdefault(rank, set()).update(batches)

    def meet(self, rank: Rank) -> None:
        """Take in that a trainer's work is being averaged while it goes on."""
        self._meeting[rank] = self._pending.pop(rank, set())

    def fail(self, rank: Rank) -> None:
        """Take in that a trainer has its work, and the mean has failed."""
        self._pending.setdefault(rank, set()).update(self._meeting.pop(rank, set()))

    def commit(self, rank: Rank) -> None:
        """Take in that the work that a trainer gave to a mean is in the committed parameters."""
        bucket = self._meeting if rank in self._meeting else self._pending
        self.committed |= bucket.pop(rank, set())

    def lose(self, rank: Rank) -> None:
        """Take in that a trainer's work is in no parameters that are left."""
        self._pending.pop(rank, None)
        self._meeting.pop(rank, None)

    def missing(self) -> list[int]:
        """Batches that are neither committed nor pending, in order."""
        seen = self.committed.union(*self._pending.values(), *self._meeting.values())
        return [] if len(seen) == self.total else sorted(set(range(self.total)) - seen)

    @property
    def count(self) -> int:
        """Batches that are committed or pending."""
        open_ = (*self._pending.values(), *self._meeting.values())
        return len(self.committed) + sum(map(len, open_))

    @property
    def complete(self) -> bool:
        """Tell whether every batch is committed."""
        return len(self.committed) == self.total


class SpreadClaims(Claims):
    """The same where only some meet at a time: a batch is in the parameters of all it came to.

    Pending are, of each trainer, the batches that its parameters have and not all others', as bits
    of a number. A batch is lost with the last trainer that has it.
    """

    def __init__(self, total: int) -> None:
        super().__init__(total)
        self._bits: dict[Rank, int] = {}

    def report(self, rank: Rank, claims: Iterable[int]) -> None:
        """A trainer reports batches; raises ValueError for one that another has or that is done."""
        own, others = self._bits.get(rank, 0), self._anywhere
        for batch in claims:
            if batch >= self.total or own >> batch & 1:
                continue
            if others >> batch & 1 or batch in self.committed:
                raise ValueError(f"trainer {rank}: batch {batch} is done already")
            own |= 1 << batch
        self._bits[rank] = own

    def spread(self, ranks: Iterable[Rank], living: Iterable[Rank]) -> None:
        """Take in that some have met: those that are left have the batches of all of them."""
        found = 0
        for rank in ranks:
            found |= self._bits.pop(rank, 0)
        self._bits |= dict.fromkeys(living, found)

    def of(self, rank: Rank) -> int:
        """The batches that a trainer's parameters have, and not all others', as bits."""
        return self._bits.get(rank, 0)

    def take(self, rank: Rank, bits: int) -> None:
        """Take in that a trainer has what another one's parameters had: `of` it, earlier."""
        self._bits[rank] = self.of(rank) | bits

    def commit(self, rank: Rank) -> None:
        """Take in that the work of a trainer is in the parameters of all."""
        self.committed |= _batches(self._bits.pop(rank, 0))

    def lose(self, rank: Rank) -> None:
        """Take in that a trainer's parameters are lost."""
        self._bits.pop(rank, None)

    def missing(self) -> list[int]:
        """Batches that are in nobody's parameters, in order."""
        seen = self.committed | _batches(self._anywhere)
        return [] if len(seen) == self.total else sorted(set(range(self.total)) - seen)

    @property
    def count(self) -> int:
        """Batches that are committed or pending."""
        return len(self.committed) + self._anywhere.bit_count()

    @property
    def _anywhere(self) -> int:
        found = 0
        for bits in self._bits.values():
            found |= bits
        return found


def _batches(bits: int) -> set[int]:
    """The batches whose bits are set."""
    return {batch for batch, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"}
