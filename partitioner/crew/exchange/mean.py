"""The weighted mean of a flat vector over the members of a process group; counts bytes sent.

Routes: `ring` is gloo's all-reduce. `two_phase` sends every shard to its owner, encoded, which
sends the mean of it to all, encoded again. `two_tier` sends vectors to the best connected member
of each site, averages those in two phases and sends the result down.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mdp.errors import MDPError
from partitioner.crew.exchange.codecs import Codec
from partitioner.crew.machine.shares import by_pace, link_shares

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Route = Literal["ring", "two_phase", "two_tier"]
Shards = Literal["equal", "link"]


class NotFinite(MDPError):
    """A mean is not finite; `blamed` is the rank of a member that sent such a number, if any."""

    def __init__(self, blamed: int | None) -> None:
        who = "no trainer alone" if blamed is None else f"trainer {blamed}"
        super().__init__(f"a mean is not a finite number; sent by {who}")
        self.blamed = blamed


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the flat vector, `start` to `stop`, and its codec."""

    start: int
    stop: int
    codec: Codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The way in which a network's means are taken."""

    route: Route = "ring"
    shards: Shards = "equal"
    #: Bytes per second that each trainer can send, by rank: two_tier, and shards by link.
    uplink: Mapping[int, float] = field(default_factory=dict)
    #: Site of each trainer, by rank: two_tier.
    sites: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """The members of one mean: their group, in the order of `members`, and their weights."""

    group: "ProcessGroup"
    members: tuple[int, ...]
    #: Not negative, unscaled; all zero counts as all equal. What weighs nothing may be anything.
    weights: tuple[float, ...]
    rank: int

    @property
    def place(self) -> int:
        """The own rank in the group."""
        return self.members.index(self.rank)

    @property
    def scaled(self) -> list[float]:
        """The weights with sum 1."""
        total = sum(self.weights)
        return [w / total if total else 1 / len(self.weights) for w in self.weights]


#: A shard: for each segment its start, stop and codec.
_Pieces = list[tuple[int, int, Codec]]


class Mean:
    """Takes means of vectors of one layout, with the error feedback of this member."""

    def __init__(self, segments: Sequence[Segment], means: Means) -> None:
        if means.route == "ring" and any(s.codec.feeds_back for s in segments):
            raise ValueError("int8 over a ring: sums of codes overflow; use two_phase")
        self._segments, self._means = segments, means
        feeding = any(s.codec.feeds_back for s in segments)
        count = max((s.stop for s in segments), default=0)
        #: What this member's encodings have lost, as a sender and as an owner.
        self._errors = [torch.zeros(count if feeding else 0) for _ in range(2)]
        self._pending = self._errors
        self.sent_bytes = 0

    def of(self, vector: Tensor, meeting: Meeting, *, checked: bool = True) -> Tensor:
        """The weighted mean, the same bits on every member; `vector` stays as it is.

        Errors fed back are kept by `commit` alone, so that a mean can be repeated. Raises, where
        `checked`, NotFinite on every member alike; RuntimeError where a member is lost.
        """
        if len(meeting.members) == 1 or not self._segments:
            found = vector.clone()
        elif self._means.route == "ring":
            found = self._ring(vector, meeting)
        else:
            self._pending = [error.clone() for error in self._errors]
            if self._means.route == "two_phase":
                found = self._two_phase(vector, meeting)
            else:
                found = self._two_tier(vector, meeting)
            if meeting.scaled[meeting.place] == 0:
                self._pending[0] = self._errors[0]
        if checked and not bool(found.isfinite().all()):
            raise NotFinite(self._blamed(vector, meeting))
        return found

    def commit(self) -> None:
        """Keep the errors of the last mean for the next one."""
        self._errors = self._pending

    def _ring(self, vector: Tensor, meeting: Meeting) -> Tensor:
        weight, n = meeting.scaled[meeting.place], len(meeting.members)
        found = torch.empty_like(vector)
        for s in self._segments:
            kind = torch.float16 if s.codec.lossy else torch.float32
            part = vector[s.start : s.stop].mul(weight) if weight else found.new_zeros(1)
            part = part.expand(s.stop - s.start).to(kind).contiguous()
            meeting.group.allreduce([part]).wait()
            found[s.start : s.stop] = part
            # Of gloo's ring; the two halves of it send n - 1 of n parts each.
            self.sent_bytes += 2 * (n - 1) * part.nbytes // n
        return found

    def _two_phase(self, vector: Tensor, meeting: Meeting) -> Tensor:
        owners = range(len(meeting.members))
        shards = self._cut(self._shares(meeting.members))
        data = self._among(vector, meeting, owners, meeting.scaled, shards)
        return self._decoded(data, shards)

    def _two_tier(self, vector: Tensor, meeting: Meeting) -> Tensor:
        leaders = self._leaders(meeting.members)
        mine, n = leaders[meeting.place], len(meeting.members)
        site = [p for p in range(n) if leaders[p] == mine]
        above = sorted(set(leaders))
        whole = self._cut([1.0])[0]
        leads = mine == meeting.place
        # Up: the weighted mean of the site, at its leader.
        vector = vector + self._errors[0] if self._errors[0].numel() else vector
        parts = {} if leads else {mine: self._sent(vector, whole)}
        size = _bytes_of(whole)
        received = self._exchange(meeting, parts, {p: size for p in site if leads and p != mine})
        scaled = meeting.scaled
        sites = [sum(scaled[p] for p in range(n) if leaders[p] == leader) for leader in above]
        shards = self._cut([1 / len(above)] * len(above))
        data: list[Tensor] = []
        if leads:
            own = {p: self._decoded([d], [whole]) for p, d in received.items()} | {mine: vector}
            total = sites[above.index(mine)]
            vector = _weighted(
                [(scaled[p] / total if total else 1 / len(site), own[p]) for p in site]
            )
        # Across: among the leaders; the others take part with nothing.
        data = self._among(vector, meeting, above, sites, shards, fed=True)
        # Down: what the leaders received, as it is.
        down = torch.cat(data) if leads else vector.new_zeros(0)
        size = sum(map(_bytes_of, shards))
        parts = {p: down for p in site if leads and p != mine}
        received = self._exchange(meeting, parts, {} if leads else {mine: size})
        if not leads:
            data = list(torch.split(received[mine], [_bytes_of(s) for s in shards]))
        return self._decoded(data, shards)

    def _among(
        self,
        vector: Tensor,
        meeting: Meeting,
        owners: Sequence[int],
        weights: Sequence[float],
        shards: Sequence[_Pieces],
        *,
        fed: bool = False,
    ) -> list[Tensor]:
        """Both phases among the places `owners`; returns the encoded means, by owner.

        `fed` says that the sender's error has been added already. Empty for all other places.
        """
        place = meeting.place
        takes_part = place in owners
        others = [p for p in owners if p != place] if takes_part else []
        sent: dict[int, Tensor] = {}
        sizes: dict[int, int] = {}
        shard: _Pieces = []
        if takes_part:
            if not fed and self._errors[0].numel():
                vector = vector + self._errors[0]
            shard = shards[owners.index(place)]
            for start, stop, codec in shard:  # nothing of the own shard is lost
                if codec.feeds_back:
                    self._pending[0][start:stop] = 0
            sent = {p: self._sent(vector, shards[owners.index(p)]) for p in others}
            sizes = dict.fromkeys(others, _bytes_of(shard))
        received = self._exchange(meeting, sent, sizes)
        if takes_part:
            own = {p: self._decoded([data], [shard]) for p, data in received.items()}
            own[place] = torch.cat([vector[a:b] for a, b, _ in shard])
            mean = _weighted([(w, own[p]) for p, w in zip(owners, weights, strict=True)])
            data = self._sent_by_owner(mean, shard)
            sent = dict.fromkeys(others, data)
            sizes = {p: _bytes_of(shards[owners.index(p)]) for p in others}
        received = self._exchange(meeting, sent, sizes)
        if not takes_part:
            return []
        received[place] = data
        return [received[p] for p in owners]

    def _sent(self, vector: Tensor, shard: _Pieces) -> Tensor:
        """A shard of a vector, error added, as bytes; notes what is lost."""
        parts = []
        for start, stop, codec in shard:
            part = vector[start:stop]
            parts.append(codec.encode(part))
            if codec.feeds_back:
                self._pending[0][start:stop] = part - codec.decode(parts[-1], stop - start)
        return torch.cat(parts)

    def _sent_by_owner(self, mean: Tensor, shard: _Pieces) -> Tensor:
        """The mean of the own shard, its pieces in a row, as bytes; error added and noted."""
        parts, at = [], 0
        for start, stop, codec in shard:
            part = mean[at : at + stop - start]
            at += stop - start
            if codec.feeds_back:
                part = part + self._errors[1][start:stop]
            parts.append(codec.encode(part))
            if codec.feeds_back:
                self._pending[1][start:stop] = part - codec.decode(parts[-1], stop - start)
        return torch.cat(parts)

    def _decoded(self, data: Sequence[Tensor], shards: Sequence[_Pieces]) -> Tensor:
        """Encoded shards as numbers: the whole vector, or of one shard its pieces in a row."""
        pieces: list[tuple[int, Tensor]] = []
        for message, shard in zip(data, shards, strict=True):
            parts = torch.split(message, [codec.bytes_of(b - a) for a, b, codec in shard])
            for (a, b, codec), part in zip(shard, parts, strict=True):
                pieces.append((a, codec.decode(part, b - a)))
        return torch.cat([part for _, part in sorted(pieces, key=lambda piece: piece[0])])

    def _exchange(
        self, meeting: Meeting, sent: Mapping[int, Tensor], sizes: Mapping[int, int]
    ) -> dict[int, Tensor]:
        """Send bytes to places and receive `sizes` of them from places.

        In stages of one message to and one from each place: `alltoall_base`, all at once, takes
        1.2 to 1.5 times as long on links of 20 Mbit/s.
        """
        group, place, n = meeting.group, meeting.place, len(meeting.members)
        received = {p: torch.empty(size, dtype=torch.uint8) for p, size in sizes.items()}
        for far in range(1, n):
            source, to = (place - far) % n, (place + far) % n
            works = [group.recv([received[source]], source, 0)] if sizes.get(source) else []
            if to in sent and sent[to].numel():
                works.append(group.send([sent[to]], to, 0))
                self.sent_bytes += sent[to].numel()
            for work in works:
                work.wait()
        return received

    def _cut(self, shares: Sequence[float]) -> list[_Pieces]:
        """Every segment cut by `shares`; returns the shard of each owner."""
        shards: list[_Pieces] = [[] for _ in shares]
        for s in self._segments:
            start = s.start
            for shard, length in zip(shards, by_pace(shares, s.stop - s.start), strict=True):
                shard.append((start, start + length, s.codec))
                start += length
        return shards

    def _shares(self, members: Sequence[int]) -> list[float]:
        if self._means.shards == "equal":
            return [1 / len(members)] * len(members)
        return link_shares([self._means.uplink[m] for m in members])

    def _leaders(self, members: Sequence[int]) -> list[int]:
        """For each place that of its site's leader: the best connected, the first of equals."""
        best: dict[str, int] = {}
        uplink, sites = self._means.uplink, self._means.sites
        for place, member in enumerate(members):
            known = best.setdefault(sites[member], place)
            if uplink[member] > uplink[members[known]]:
                best[sites[member]] = place
        return [best[sites[member]] for member in members]

    def _blamed(self, vector: Tensor, meeting: Meeting) -> int | None:
        """The first member whose vector, as sent, is not finite; asked by all after a failure."""
        odd = meeting.scaled[meeting.place] > 0 and not all(
            bool(s.codec.decode(s.codec.encode(part), part.numel()).isfinite().all())
            for s in self._segments
            for part in [vector[s.start : s.stop]]
        )
        if len(meeting.members) == 1:
            return meeting.rank if odd else None
        flags = [torch.zeros(1, dtype=torch.uint8) for _ in meeting.members]
        meeting.group.allgather([flags], [torch.tensor([odd], dtype=torch.uint8)]).wait()
        return next((m for m, f in zip(meeting.members, flags, strict=True) if f.item()), None)


def _weighted(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The sum of vectors times weights; what weighs nothing is left out."""
    total = torch.zeros_like(parts[0][1])
    for weight, vector in parts:
        if weight:
            total.add_(vector, alpha=weight)
    return total


def _bytes_of(shard: _Pieces) -> int:
    return sum(codec.bytes_of(stop - start) for start, stop, codec in shard)
