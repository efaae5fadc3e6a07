"""The weighted mean of a flat vector over the members of a process group; counts bytes sent.

A mean has two phases. `Mean.collect` brings the mean of every shard to its owner, who may change
it, and `Mean.spread` sends the shards to all. Routes: `ring` is gloo's all-reduce, after which
every member owns the whole. `two_phase` sends every shard to its owner, encoded, which sends it to
all, encoded again. `two_tier` does that among the best connected members of each site, to which
the others send their vectors before, and which send the result on.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mdp.errors import MDPError
from partitioner.crew.averaging.codecs import Codec
from partitioner.crew.coordinator.shares import by_pace, link_shares

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Route = Literal["ring", "two_phase", "two_tier"]
ShardSizes = Literal["equal", "link"]


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
    shards: ShardSizes = "equal"
    #: Bytes per second that each trainer can send, by rank: two_tier, and shards by link.
    uplink: Callable[[int], float] = lambda rank: 1.0
    #: Site of each trainer, by rank: two_tier.
    site: Callable[[int], str] = str


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
    def shares(self) -> list[float]:
        """The weights with sum 1."""
        total = sum(self.weights)
        return [w / total if total else 1 / len(self.weights) for w in self.weights]


#: Segments of the vector, each a part of one of its own.
Shard = Sequence[Segment]
#: Change of a shard at its owner, before it is sent to all: (numbers in a row, their segments).
Owner = Callable[[Tensor, Shard], Tensor]


@dataclass(slots=True, kw_only=True)
class Shards:
    """The mean of a meeting between its two phases: every shard is at its owner."""

    meeting: Meeting
    #: By place of their owner, in the order of the vector; of a ring the own place alone.
    by_place: Mapping[int, Shard]
    #: Numbers of the own shard in a row; none at a place that owns nothing.
    own: Tensor
    #: The own vector as the others have it; what a codec left out of it is missing.
    sent: Tensor

    @property
    def segments(self) -> Shard:
        """Segments of the own shard."""
        return self.by_place.get(self.meeting.place, ())


class Mean:
    """Takes means of vectors of one layout.

    What a codec leaves out of the vectors is the caller's to send again (`Shards.sent`); what it
    leaves out of means, at their owner and at the leader of a site, comes with the next mean.
    """

    def __init__(self, segments: Sequence[Segment], means: Means) -> None:
        if means.route == "ring" and any(s.codec.feeds_back for s in segments):
            raise ValueError("int8 over a ring: sums of codes overflow; use two_phase")
        self._segments, self._means = segments, means
        self._feeding = any(s.codec.feeds_back for s in segments)
        count = max((s.stop for s in segments), default=0)
        #: What was left out of a site's mean at its leader, and of the own shard's.
        self._errors = [torch.zeros(count if self._feeding else 0) for _ in range(2)]
        self._pending = self._errors
        self.sent_bytes = 0

    def of(self, vector: Tensor, meeting: Meeting) -> Tensor:
        """The weighted mean, the same bits on every member; `vector` stays as it is.

        Raises as `check` and `collect` do.
        """
        found = self.spread(self.collect(vector, meeting))
        self.check(found, vector, meeting)
        return found

    def collect(self, vector: Tensor, meeting: Meeting) -> Shards:
        """Bring the weighted mean of every shard to its owner; `vector` stays as it is.

        Errors fed back are kept by `commit` alone, so that a mean can be repeated. Raises
        RuntimeError where a member is lost.
        """
        self._pending = [error.clone() for error in self._errors]
        if len(meeting.members) == 1 or self._means.route == "ring" or not self._segments:
            own = self._ring(vector, meeting) if len(meeting.members) > 1 else vector.clone()
            return Shards(
                meeting=meeting, by_place={meeting.place: self._segments}, own=own, sent=vector
            )
        leaders = self._leaders(meeting.members)
        above = sorted(set(leaders))
        site = [p for p, leader in enumerate(leaders) if leader == meeting.place]
        sent = vector.clone() if self._feeding else vector
        vector = self._up(vector, meeting, leaders, site, sent)
        shares = self._shares([meeting.members[p] for p in above])
        shards = dict(zip(above, self._cut(shares), strict=True))
        weights = dict.fromkeys(above, 0.0)
        for leader, weight in zip(leaders, meeting.shares, strict=True):
            weights[leader] += weight
        takes_part = meeting.place in shards
        others = [p for p in above if p != meeting.place] if takes_part else []
        as_sent = vector.clone() if self._feeding and len(site) > 1 else sent
        parts = {p: self._encode(vector, shards[p], as_sent) for p in others}
        shard = shards.get(meeting.place, ())
        received = self._exchange(meeting, parts, dict.fromkeys(others, _bytes_of(shard)))
        own = vector.new_zeros(0)
        if takes_part:
            if len(site) > 1 and self._feeding and weights[meeting.place]:
                self._pending[0] = vector - as_sent
            known = {p: self._decode([data], [shard]) for p, data in received.items()}
            known[meeting.place] = torch.cat([vector[s.start : s.stop] for s in shard])
            own = _weigh([(weights[p], known[p]) for p in above])
        return Shards(meeting=meeting, by_place=shards, own=own, sent=sent)

    def _up(
        self,
        vector: Tensor,
        meeting: Meeting,
        leaders: Sequence[int],
        site: Sequence[int],
        sent: Tensor,
    ) -> Tensor:
        """The mean of the site `site` at its leader; elsewhere, and of one alone, the vector."""
        leader, whole = leaders[meeting.place], self._cut([1.0])[0]
        others = [p for p in site if p != meeting.place]
        parts = {} if site else {leader: self._encode(vector, whole, sent)}
        received = self._exchange(meeting, parts, dict.fromkeys(others, _bytes_of(whole)))
        if not others:
            return vector
        scaled = meeting.shares
        total = sum(scaled[p] for p in site)
        known = {p: self._decode([data], [whole]) for p, data in received.items()}
        known[meeting.place] = vector
        mean = _weigh([(scaled[p] / total if total else 1 / len(site), known[p]) for p in site])
        return mean + self._errors[0] if self._feeding else mean

    def spread(self, shards: Shards) -> Tensor:
        """Send the own shard to all; returns the mean, the same bits on every member.

        Raises RuntimeError where a member is lost.
        """
        meeting, place = shards.meeting, shards.meeting.place
        if len(meeting.members) == 1 or self._means.route == "ring" or not self._segments:
            return shards.own
        takes_part = place in shards.by_place
        others = [p for p in shards.by_place if p != place] if takes_part else []
        data = self._encode_mean(shards.own, shards.segments)
        sizes = {p: _bytes_of(shard) for p, shard in shards.by_place.items()}
        wanted = {p: sizes[p] for p in others}
        received = self._exchange(meeting, dict.fromkeys(others, data), wanted) | {place: data}
        # What the leaders received goes on to their sites as it is.
        leaders = self._leaders(meeting.members)
        whole = torch.cat([received[p] for p in shards.by_place]) if takes_part else data
        down = {p: whole for p, above in enumerate(leaders) if above == place and p != place}
        wanted = {} if takes_part else {leaders[place]: sum(sizes.values())}
        for message in self._exchange(meeting, down, wanted).values():
            whole = message
        return self._decode(torch.split(whole, [*sizes.values()]), [*shards.by_place.values()])

    def check(self, found: Tensor, vector: Tensor, meeting: Meeting) -> None:
        """Raise NotFinite, on every member alike, for a mean that is not finite.

        vector: the own one.
        """
        if not bool(found.isfinite().all()):
            raise NotFinite(self._find_culprit(vector, meeting))

    def commit(self) -> None:
        """Keep the errors of the last mean for the next one."""
        self._errors = self._pending

    def _ring(self, vector: Tensor, meeting: Meeting) -> Tensor:
        weight, n = meeting.shares[meeting.place], len(meeting.members)
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

    def _encode(self, vector: Tensor, shard: Shard, as_sent: Tensor) -> Tensor:
        """A shard of a vector as bytes; `as_sent` is given the numbers that others receive."""
        parts = []
        for s in shard:
            parts.append(s.codec.encode(vector[s.start : s.stop]))
            if s.codec.feeds_back:
                as_sent[s.start : s.stop] = s.codec.decode(parts[-1], s.stop - s.start)
        return torch.cat(parts) if parts else vector.new_zeros(0, dtype=torch.uint8)

    def _encode_mean(self, mean: Tensor, shard: Shard) -> Tensor:
        """The mean of the own shard, its segments in a row, as bytes; error added and noted."""
        parts, at = [mean.new_zeros(0, dtype=torch.uint8)], 0
        for s in shard:
            part = mean[at : at + s.stop - s.start]
            at += s.stop - s.start
            if s.codec.feeds_back:
                part = part + self._errors[1][s.start : s.stop]
            parts.append(s.codec.encode(part))
            if s.codec.feeds_back:
                lost = part - s.codec.decode(parts[-1], s.stop - s.start)
                self._pending[1][s.start : s.stop] = lost
        return torch.cat(parts)

    def _decode(self, data: Sequence[Tensor], shards: Sequence[Shard]) -> Tensor:
        """Encoded shards as numbers: the whole vector, or of one shard its segments in a row."""
        pieces: list[tuple[int, Tensor]] = []
        for message, shard in zip(data, shards, strict=True):
            parts = torch.split(message, [s.codec.bytes_of(s.stop - s.start) for s in shard])
            for s, part in zip(shard, parts, strict=True):
                pieces.append((s.start, s.codec.decode(part, s.stop - s.start)))
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

    def _cut(self, shares: Sequence[float]) -> list[list[Segment]]:
        """Every segment cut by `shares`; returns the shard of each owner."""
        shards: list[list[Segment]] = [[] for _ in shares]
        for s in self._segments:
            start = s.start
            for shard, length in zip(shards, by_pace(shares, s.stop - s.start), strict=True):
                shard.append(Segment(start, start + length, s.codec))
                start += length
        return shards

    def _shares(self, members: Sequence[int]) -> list[float]:
        if self._means.shards == "equal":
            return [1 / len(members)] * len(members)
        return link_shares([self._means.uplink(m) for m in members])

    def _leaders(self, members: Sequence[int]) -> list[int]:
        """For each place that of its site's leader: the best connected, the first of equals.

        In two phases everybody is a site.
        """
        if self._means.route == "two_phase":
            return list(range(len(members)))
        best: dict[str, int] = {}
        uplink, site = self._means.uplink, self._means.site
        for place, member in enumerate(members):
            known = best.setdefault(site(member), place)
            if uplink(member) > uplink(members[known]):
                best[site(member)] = place
        return [best[site(member)] for member in members]

    def _find_culprit(self, vector: Tensor, meeting: Meeting) -> int | None:
        """The first member whose vector, as sent, is not finite; asked by all after a failure."""
        odd = meeting.shares[meeting.place] > 0 and not all(
            bool(s.codec.decode(s.codec.encode(part), part.numel()).isfinite().all())
            for s in self._segments
            for part in [vector[s.start : s.stop]]
        )
        if len(meeting.members) == 1:
            return meeting.rank if odd else None
        flags = [torch.zeros(1, dtype=torch.uint8) for _ in meeting.members]
        meeting.group.allgather([flags], [torch.tensor([odd], dtype=torch.uint8)]).wait()
        return next((m for m, f in zip(meeting.members, flags, strict=True) if f.item()), None)


def _weigh(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The sum of vectors times weights; what weighs nothing is left out."""
    total = torch.zeros_like(parts[0][1])
    for weight, vector in parts:
        if weight:
            total.add_(vector, alpha=weight)
    return total


def _bytes_of(shard: Shard) -> int:
    return sum(s.codec.bytes_of(s.stop - s.start) for s in shard)
