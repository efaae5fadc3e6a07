"""The weighted mean of a flat vector over the members of a process group; counts bytes sent.

A mean has two phases. `Mean.collect` brings the mean of every shard to its owner, who may change
it, and `Mean.spread` sends the shards to all. Routes: `ring` is gloo's all-reduce, after which
every member owns the whole. `two_phase` sends every shard to its owner, encoded, which sends it to
all, encoded again. `two_tier` does that among the best connected members of each site, to which
the others send their vectors before, and which send the result on. In two phases some numbers may
travel alone (`Mask`): the mean of the others is 0.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from mdp.errors import MDPError
from partitioner.crew.averaging.codecs import CODECS, Codec
from partitioner.crew.coordinator.shares import by_pace, link_shares
from partitioner.crew.coordinator.sizes import whole_codec

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
    #: Whether all of it travels in every mean, whatever the mask.
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Mask:
    """The numbers that travel in one mean: each `stride`-th of the vector, from `offset` on.

    All members have the same mask, so that it need not be sent; a segment may travel whole.
    """

    stride: int = 1
    offset: int = 0

    def places_of(self, segment: Segment) -> slice:
        """Places in the vector."""
        if segment.whole:
            return slice(segment.start, segment.stop)
        first = segment.start + (self.offset - segment.start) % self.stride
        return slice(min(first, segment.stop), segment.stop, self.stride)

    def count(self, segment: Segment) -> int:
        """Numbers of a segment that travel."""
        places = self.places_of(segment)
        return len(range(places.start, places.stop, places.step or 1))

    def bytes_of(self, shard: "Shard") -> int:
        """Bytes of what travels of a shard."""
        return sum(s.codec.bytes_of(self.count(s)) for s in shard)

    def take(self, vector: Tensor, segment: Segment) -> Tensor:
        """The numbers of a segment that travel, contiguous."""
        part = vector[self.places_of(segment)]
        # One number of a stride is contiguous to torch, and yet has no bytes to view.
        return part.clone(memory_format=torch.contiguous_format) if self.stride > 1 else part

    def select(self, vector: Tensor, shard: "Shard") -> Tensor:
        """The numbers of a shard that travel, in a row."""
        return torch.cat([vector[self.places_of(s)] for s in shard])


#: Every number travels.
EVERY_NUMBER = Mask()


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
    #: Numbers of the own shard that travel, in a row; none at a place that owns nothing.
    own: Tensor
    #: The own vector as the others have it; what a codec or the mask left out of it is missing.
    sent: Tensor
    mask: Mask

    @property
    def segments(self) -> Shard:
        """Segments of the own shard."""
        return self.by_place.get(self.meeting.place, ())


class Mean:
    """Takes means of vectors of one layout.

    What a codec or a mask leaves out of the vectors is the caller's to send again (`Shards.sent`);
    what a codec leaves out of means, at their owner and at the leader of a site, comes with their
    next mean in which these numbers travel.
    """

    def __init__(self, segments: Sequence[Segment], means: Means) -> None:
        if means.route == "ring" and any(s.codec.feeds_back for s in segments):
            names = {s.codec.name for s in segments if s.codec.feeds_back}
            raise ValueError(
                f"{', '.join(sorted(names))} over a ring: sums of codes overflow; use two_phase"
            )
        if means.route == "two_tier" and any(s.codec.sparse for s in segments):
            raise ValueError("top4 between sites: a mean of a site has most numbers; use two_phase")
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

    def collect(
        self, vector: Tensor, meeting: Meeting, mask: Mask = EVERY_NUMBER, *, whole: bool = False
    ) -> Shards:
        """Bring the weighted mean of every shard to its owner; `vector` stays as it is.

        whole: in a codec that leaves no number out. Errors fed back are kept by `commit` alone, so
        that a mean can be repeated. Raises RuntimeError where a member is lost.
        """
        if mask.stride > 1 and self._means.route != "two_phase":
            raise ValueError(f"a mask in {self._means.route}: use two_phase")
        self._pending = [error.clone() for error in self._errors]
        if len(meeting.members) == 1 or self._means.route == "ring" or not self._segments:
            own = self._ring(vector, meeting) if len(meeting.members) > 1 else vector.clone()
            return Shards(
                meeting=meeting,
                by_place={meeting.place: self._segments},
                own=own,
                sent=vector,
                mask=EVERY_NUMBER,
            )
        if mask.stride > 1 and not bool(vector.isfinite().all()):
            # A number that does not travel is found out too: all have to know of it.
            vector = torch.full_like(vector, torch.nan)
        leaders = self._leaders(meeting.members)
        above = sorted(set(leaders))
        site = [p for p, leader in enumerate(leaders) if leader == meeting.place]
        sent = self._to_be_sent(vector, mask)
        vector = self._up(vector, meeting, leaders, site, sent)
        shares = self._shares([meeting.members[p] for p in above])
        shards = dict(zip(above, self._cut(shares, whole=whole), strict=True))
        weights = dict.fromkeys(above, 0.0)
        for leader, weight in zip(leaders, meeting.shares, strict=True):
            weights[leader] += weight
        takes_part = meeting.place in shards
        others = [p for p in above if p != meeting.place] if takes_part else []
        as_sent = vector.clone() if self._feeding and len(site) > 1 else sent
        parts = {p: self._encode(vector, shards[p], as_sent, mask) for p in others}
        shard = shards.get(meeting.place, ())
        received = self._exchange(meeting, parts, dict.fromkeys(others, mask.bytes_of(shard)))
        own = vector.new_zeros(0)
        if takes_part:
            if len(site) > 1 and self._feeding and weights[meeting.place]:
                self._pending[0] = vector - as_sent
            known = {p: self._decode(data, shard, mask) for p, data in received.items()}
            known[meeting.place] = self._own(vector, shard, as_sent, mask)
            own = _weigh([(weights[p], known[p]) for p in above])
        return Shards(meeting=meeting, by_place=shards, own=own, sent=sent, mask=mask)

    def _to_be_sent(self, vector: Tensor, mask: Mask) -> Tensor:
        """The numbers that travel, 0 elsewhere; encoding changes them to what others receive."""
        if mask.stride == 1:
            return vector.clone() if self._feeding else vector
        found = torch.zeros_like(vector)
        for s in self._segments:
            places = mask.places_of(s)
            found[places] = vector[places]
        return found

    def _own(self, vector: Tensor, shard: Shard, as_sent: Tensor, mask: Mask) -> Tensor:
        """The own part of the own shard: what a sparse codec leaves out stays out here too."""
        for s in shard:
            if s.codec.sparse:
                self._encode(vector, [s], as_sent, mask)
        sparse = any(s.codec.sparse for s in shard)
        return mask.select(as_sent if sparse else vector, shard)

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
        parts = {} if site else {leader: self._encode(vector, whole, sent, EVERY_NUMBER)}
        wanted = dict.fromkeys(others, EVERY_NUMBER.bytes_of(whole))
        received = self._exchange(meeting, parts, wanted)
        if not others:
            return vector
        scaled = meeting.shares
        total = sum(scaled[p] for p in site)
        known = {p: self._decode(data, whole, EVERY_NUMBER) for p, data in received.items()}
        known[meeting.place] = vector
        mean = _weigh([(scaled[p] / total if total else 1 / len(site), known[p]) for p in site])
        return mean + self._errors[0] if self._feeding else mean

    def spread(self, shards: Shards) -> Tensor:
        """Send the own shard to all; returns the mean, the same bits on every member.

        Raises RuntimeError where a member is lost.
        """
        meeting, place, mask = shards.meeting, shards.meeting.place, shards.mask
        if len(meeting.members) == 1 or self._means.route == "ring" or not self._segments:
            return shards.own
        takes_part = place in shards.by_place
        others = [p for p in shards.by_place if p != place] if takes_part else []
        data = self._encode_mean(shards.own, shards.segments, mask)
        sizes = {p: mask.bytes_of(shard) for p, shard in shards.by_place.items()}
        wanted = {p: sizes[p] for p in others}
        received = self._exchange(meeting, dict.fromkeys(others, data), wanted) | {place: data}
        # What the leaders received goes on to their sites as it is.
        leaders = self._leaders(meeting.members)
        whole = torch.cat([received[p] for p in shards.by_place]) if takes_part else data
        down = {p: whole for p, above in enumerate(leaders) if above == place and p != place}
        wanted = {} if takes_part else {leaders[place]: sum(sizes.values())}
        for message in self._exchange(meeting, down, wanted).values():
            whole = message
        found = torch.zeros(max(s.stop for s in self._segments))
        for message, shard in zip(
            torch.split(whole, [*sizes.values()]), shards.by_place.values(), strict=True
        ):
            numbers = self._decode(message, shard, mask)
            parts = torch.split(numbers, [mask.count(s) for s in shard])
            for s, part in zip(shard, parts, strict=True):
                found[mask.places_of(s)] = part
        return found

    def check(self, found: Tensor, vector: Tensor, meeting: Meeting) -> None:
        """Raise NotFinite, on every member alike, for a mean that is not finite.

        vector: the own one.
        """
        if not bool(found.isfinite().all()):
            raise NotFinite(self._find_culprit(vector, meeting))

    def encode(self, vector: Tensor) -> Tensor:
        """The whole vector as bytes; what its codecs leave out is noted nowhere."""
        return torch.cat([s.codec.encode(vector[s.start : s.stop]) for s in self._segments])

    def decode(self, data: Tensor) -> Tensor:
        """The inverse of `encode`."""
        return self._decode(data, self._segments, EVERY_NUMBER)

    @property
    def whole_bytes(self) -> int:
        """Bytes of an encoded vector."""
        return EVERY_NUMBER.bytes_of(self._segments)

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

    def _encode(self, vector: Tensor, shard: Shard, as_sent: Tensor, mask: Mask) -> Tensor:
        """The bytes that travel of a shard; `as_sent` is given the numbers that others receive."""
        parts = []
        for s in shard:
            numbers = mask.take(vector, s)
            parts.append(s.codec.encode(numbers))
            if s.codec.feeds_back:
                as_sent[mask.places_of(s)] = s.codec.decode(parts[-1], numbers.numel())
        return torch.cat(parts) if parts else vector.new_zeros(0, dtype=torch.uint8)

    def _encode_mean(self, mean: Tensor, shard: Shard, mask: Mask) -> Tensor:
        """The mean of the own shard, its segments in a row, as bytes; error added and noted."""
        parts, at = [mean.new_zeros(0, dtype=torch.uint8)], 0
        for s in shard:
            places, count = mask.places_of(s), mask.count(s)
            part = mean[at : at + count]
            at += count
            if s.codec.feeds_back:
                part = part + self._errors[1][places]
            parts.append(s.codec.encode(part))
            if s.codec.feeds_back:
                self._pending[1][places] = part - s.codec.decode(parts[-1], count)
        return torch.cat(parts)

    @staticmethod
    def _decode(data: Tensor, shard: Shard, mask: Mask) -> Tensor:
        """An encoded shard as numbers: what travels of its segments, in a row."""
        counts = [mask.count(s) for s in shard]
        sizes = [s.codec.bytes_of(count) for s, count in zip(shard, counts, strict=True)]
        parts = torch.split(data, sizes)
        return torch.cat(
            [s.codec.decode(p, n) for s, p, n in zip(shard, parts, counts, strict=True)]
        )

    def _exchange(
        self, meeting: Meeting, sent: Mapping[int, Tensor], sizes: Mapping[int, int]
    ) -> dict[int, Tensor]:
        self.sent_bytes += sum(data.numel() for data in sent.values())
        return exchange(meeting, sent, sizes)

    def _cut(self, shares: Sequence[float], *, whole: bool = False) -> list[list[Segment]]:
        """Every segment cut by `shares`; returns the shard of each owner.

        whole: in codecs that leave no number out.
        """
        shards: list[list[Segment]] = [[] for _ in shares]
        for s in self._segments:
            start, codec = s.start, CODECS[whole_codec(s.codec.name)] if whole else s.codec
            for shard, length in zip(shards, by_pace(shares, s.stop - s.start), strict=True):
                shard.append(replace(s, start=start, stop=start + length, codec=codec))
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


def exchange(
    meeting: Meeting, sent: Mapping[int, Tensor], sizes: Mapping[int, int]
) -> dict[int, Tensor]:
    """Send bytes to other places and receive `sizes` of them from places.

    In stages of one message to and one from each place: `alltoall_base`, all at once, takes 1.2 to
    1.5 times as long on links of 20 Mbit/s. Raises RuntimeError where a member is lost.
    """
    group, place, n = meeting.group, meeting.place, len(meeting.members)
    received = {p: torch.empty(size, dtype=torch.uint8) for p, size in sizes.items()}
    for far in range(1, n):
        source, to = (place - far) % n, (place + far) % n
        works = [group.recv([received[source]], source, 0)] if sizes.get(source) else []
        if to in sent and sent[to].numel():
            works.append(group.send([sent[to]], to, 0))
        for work in works:
            work.wait()
    return received


def _weigh(parts: Sequence[tuple[float, Tensor]]) -> Tensor:
    """The sum of vectors times weights; what weighs nothing is left out."""
    total = torch.zeros_like(parts[0][1])
    for weight, vector in parts:
        if weight:
            total.add_(vector, alpha=weight)
    return total
