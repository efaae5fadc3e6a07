"""Means over gloo: values, bytes, error feedback and numbers that are not finite."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402
from torch.distributed import ProcessGroup  # noqa: E402

from partitioner.crew.averaging.codecs import CODECS  # noqa: E402
from partitioner.crew.averaging.mean import Mean, Means, Meeting, NotFinite, Segment  # noqa: E402
from partitioner.crew.coordinator.sizes import CodecName  # noqa: E402
from partitioner.crew.planning.costs import RATIO  # noqa: E402
from tests.support.gloo import PlainGroups, in_threads, vector  # noqa: E402

pytestmark = pytest.mark.torch
UPLINK = {0: 100.0, 1: 50.0, 2: 50.0, 3: 25.0, 7: 25.0}
SITES = {0: "office", 1: "office", 2: "shed", 3: "shed", 7: "shed"}
WAYS = [
    Means(),
    Means(route="two_phase"),
    Means(route="two_phase", shards="link", uplink=UPLINK.__getitem__),
    Means(route="two_tier", uplink=UPLINK.__getitem__, site=SITES.__getitem__),
]
#: Codec and count of numbers of each segment.
Parts = Sequence[tuple[str, int]]


def segments(parts: Parts) -> list[Segment]:
    found, start = [], 0
    for name, count in parts:
        found.append(Segment(start, start + count, CODECS[name]))  # type: ignore[index]
        start += count
    return found


def meet(
    members: Sequence[int], weights: Sequence[float], run: Callable[[Meeting], Any]
) -> list[Any]:
    store = HashStore()

    def member(place: int) -> Any:
        made = PlainGroups(store, members[place]).of("net", 0, members)
        group = cast(ProcessGroup, made)
        return run(
            Meeting(
                group=group, members=tuple(members), weights=tuple(weights), rank=members[place]
            )
        )

    return in_threads(len(members), member)


@pytest.mark.parametrize("means", WAYS, ids=["ring", "equal", "link", "two_tier"])
@pytest.mark.parametrize(
    ("members", "weights"),
    [((0, 1, 2), (1, 1, 1)), ((0, 2, 3, 7), (3.0, 0.0, 5.0, 8.0)), ((3, 1), (0, 0)), ((1,), (4,))],
)
def test_means_are_those_of_numpy(
    means: Means, members: tuple[int, ...], weights: tuple[float, ...]
) -> None:
    cases = [[("fp32", 1)], [("fp32", 1000), ("fp16", 513)], [("fp32", 2)], []]
    if means.route != "ring":
        cases += [[("fp16", 3), ("int8", 2000)]]
    drawn = [[vector(sum(c for _, c in parts), rank) for parts in cases] for rank in members]

    def run(meeting: Meeting) -> list[np.ndarray[Any, Any]]:
        return [
            Mean(segments(parts), means).of(drawn[meeting.place][i], meeting).numpy()
            for i, parts in enumerate(cases)
        ]

    found = meet(members, weights, run)
    for i, parts in enumerate(cases):
        vectors = [rows[i].numpy() for rows in drawn]
        scaled = np.array(weights if any(weights) else [1.0] * len(members))
        expected = (scaled / scaled.sum()) @ np.stack(vectors)
        codecs = {name for name, _ in parts} if len(members) > 1 else set()
        bound = 0.03 if "int8" in codecs else 3e-3 if "fp16" in codecs else 1e-6
        for rows in found:
            assert np.array_equal(rows[i], found[0][i]), "not the same bits everywhere"
            assert np.abs(rows[i] - expected).max(initial=0) <= bound


@pytest.mark.parametrize("codec", sorted(RATIO))
def test_bytes_are_those_of_the_formulas(codec: CodecName) -> None:
    count, members = 4 * 16 * 256, (0, 1, 2, 3)
    size = 4 * count * RATIO[codec]

    def sent(means: Means) -> list[int]:
        def run(meeting: Meeting) -> int:
            mean = Mean(segments([(codec, count)]), means)
            mean.of(vector(count, meeting.rank), meeting)
            return mean.sent_bytes

        return meet(members, (1, 1, 1, 1), run)

    ring, equal, link, tiers = WAYS
    if codec != "int8":
        assert sent(ring) == [2 * 3 / 4 * size] * 4
    assert sent(equal) == [size * (1 + 2 / 4)] * 4
    # Links of 100, 50, 50 and 25 own 3/4, 1/8, 1/8 and nothing.
    assert sent(link) == [size * (1 + 2 * w) for w in (3 / 4, 1 / 8, 1 / 8, 0)]
    # The leaders, 0 and 2, halve the vector, and each sends the mean to the other of its site.
    assert sent(tiers) == [2 * size, size, 2 * size, size]


@pytest.mark.parametrize("means", WAYS[1:], ids=["equal", "link", "two_tier"])
def test_what_an_encoding_loses_comes_with_the_next_means(means: Means) -> None:
    count, times, members = 600, 12, (0, 1, 2, 3)
    drawn = {rank: [vector(count, 100 * rank + t) for t in range(times)] for rank in members}

    def run(meeting: Meeting) -> Tensor:
        mean = Mean(segments([("int8", count)]), means)
        total: Tensor = torch.zeros(count)
        left: Tensor = torch.zeros(count)
        for x in drawn[meeting.rank]:
            mean.of(x + left, meeting)  # an attempt that is not committed leaves no trace
            shards = mean.collect(x + left, meeting)
            total.add_(mean.spread(shards))
            left = x + left - shards.sent
            mean.commit()
        return total

    found = meet(members, (1, 1, 1, 1), run)[0]
    expected = sum(sum(drawn[rank][1:], drawn[rank][0]) for rank in members) / 4
    # No more is missing than one encoding loses at either end, however many means there were.
    assert float((found - expected).abs().max()) < 3 * 4 / 254


@pytest.mark.parametrize("means", WAYS, ids=["ring", "equal", "link", "two_tier"])
def test_owners_change_the_mean_before_all_have_it(means: Means) -> None:
    """Every number is doubled once, by who owns it."""
    members, count = (0, 1, 2, 3), 50

    def run(meeting: Meeting) -> tuple[Tensor, list[Segment]]:
        mean = Mean(segments([("fp32", count), ("fp16", 7)]), means)
        shards = mean.collect(vector(count + 7, meeting.rank), meeting)
        assert shards.own.numel() == sum(s.stop - s.start for s in shards.segments)
        shards.own = 2 * shards.own
        return mean.spread(shards), list(shards.segments)

    found = meet(members, (1, 1, 1, 1), run)
    expected = 2 * sum(vector(count + 7, rank) for rank in members) / 4
    assert all(torch.equal(mean, found[0][0]) for mean, _ in found)
    assert float((found[0][0] - expected).abs().max()) < 2e-3
    owned = [place for _, shard in found for s in shard for place in range(s.start, s.stop)]
    times = len(members) if means.route == "ring" else 1
    assert sorted(owned) == sorted([*range(count + 7)] * times)


@pytest.mark.parametrize("means", WAYS, ids=["ring", "equal", "link", "two_tier"])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_who_sends_what_is_no_number_is_blamed_by_all(means: Means, odd: float) -> None:
    def run(meeting: Meeting) -> tuple[int | None, bool]:
        mean = Mean(segments([("fp32", 50)]), means)
        x = vector(50, meeting.rank)
        if meeting.rank == 2:
            x[7] = odd
        with pytest.raises(NotFinite) as caught:
            mean.of(x, meeting)
        weightless = Meeting(
            group=meeting.group, members=meeting.members, weights=(1, 1, 0), rank=meeting.rank
        )
        return caught.value.blamed, bool(mean.of(x, weightless).isfinite().all())

    assert meet((0, 1, 2), (1, 1, 1), run) == [(2, True)] * 3


def test_codes_do_not_go_over_a_ring() -> None:
    with pytest.raises(ValueError, match="int8 over a ring: sums of codes overflow"):
        Mean(segments([("int8", 5)]), Means())


def test_a_lost_member_fails_the_others() -> None:
    def run(meeting: Meeting) -> str:
        if meeting.rank == 1:
            return "left"
        with pytest.raises(RuntimeError):
            Mean(segments([("fp32", 5000)]), Means(route="two_phase")).of(vector(5000, 0), meeting)
        return "failed"

    assert meet((0, 1, 2), (1, 1, 1), run) == ["failed", "left", "failed"]
