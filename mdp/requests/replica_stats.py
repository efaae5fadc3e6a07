"""What one client has seen of one replica: a record, as small as it can be. Pure.

A client of hundreds keeps one of each, and most of them say little.
"""

from msgspec import Struct

#: Weight of the newest round trip in a replica's usual one.
NEWEST = 0.2
#: What is known of a replica's time counts this much less with every request given to another one,
#: so that one slow spell is not held against it for good.
_FADE = 0.98


class Replica(Struct, gc=False):
    """Its requests under way, and what became of those before; nothing in it refers to it."""

    #: When it was last heard of, or else first thought of.
    seen_s: float
    #: Requests under way, and since when there have been any.
    load: int = 0
    owes_s: float = 0.0
    #: The turn it last took, of all that its client has given, and how many went to others before.
    turn: int = 0
    age: int = 0
    #: What a round trip takes of late, as a running mean; 0 before the first.
    usual_s: float = 0.0

    def cost_s(self, turn: int, now_s: float) -> float:
        """Requests under way and one more, times what one takes, if it is given this `turn`."""
        usual_s: float = self.usual_s * _FADE ** (turn - self.turn)
        if self.load:
            # Whoever has owed answers for so long, and given none, is likely to take as long again.
            usual_s = max(usual_s, now_s - max(self.owes_s, self.seen_s))
        return (self.load + 1) * usual_s

    def asked(self, now_s: float, turn: int) -> None:
        """It has been given a request, the client's `turn`-th."""
        if not self.load:
            self.owes_s = now_s
        self.load += 1
        self.age = turn - self.turn
        self.turn = turn

    def looked_at(self, now_s: float) -> None:
        """It has been asked how it is."""
        self.owes_s = now_s
        self.load += 1

    def took(self, seconds: float, now_s: float) -> None:
        """A round trip of so many seconds has ended."""
        self.seen_s = now_s
        if not self.usual_s:
            self.usual_s = seconds
        else:
            # The longer ago it was asked before, the less that tells.
            self.usual_s += max(NEWEST, 1 - _FADE**self.age) * (seconds - self.usual_s)
