"""Means over gloo: values, bytes, error feedback and numbers that are not finite."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch._C._distributed_c10d import HashStore  # noqa: E402
from torch.distributed import ProcessGroup  # noqa: E402

from partitioner.crew.averaging.codecs import CODECS, Codec, Largest  # noqa: E402
from partitioner.crew.averaging.mean import Mask, Mean, Means, Meeting, NotFinite, Segment  # noqa: E402
from partitioner.crew.coordinator.sizes import CodecName  # noqa: E402
from partitioner.crew.planning.costs import RATIO, sent_ratio  # noqa: E402
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
    # Shards fill all blocks.
    count, members = 8 * 5 * 256, (0, 1, 2, 3)
    size = 4 * count * RATIO[codec]

    def sent(means: Means) -> list[int]:
        def run(meeting: Meeting) -> int:
            mean = Mean(segments([(codec, count)]), means)
            mean.of(vector(count, meeting.rank), meeting)
            return mean.sent_bytes

        return meet(members, (1, 1, 1, 1), run)

    ring, equal, link, tiers = WAYS
    if codec in ("fp32", "fp16"):
        assert sent(ring) == [2 * 3 / 4 * size] * 4
    assert sent(equal) == [size * (1 + 2 / 4)] * 4
    # Links of 100, 50, 50 and 25 own 3/4, 1/8, 1/8 and nothing.
    assert sent(link) == [size * (1 + 2 * w) for w in (3 / 4, 1 / 8, 1 / 8, 0)]
    if codec == "top4":
        return
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


def differences(
    members: Sequence[int],
    segments_of: Sequence[Segment],
    means: Means,
    masks: Sequence[Mask],
    given: Callable[[int, int], Tensor],
    weights: Sequence[float] = (1, 1, 1),
) -> list[tuple[Tensor, Tensor, list[Tensor]]]:
    """x, G, and the means of members that average x - G, as `Rounds` does; `given` adds to x.

    The last mean is of every number, where `masks` ends with one of stride 1.
    """

    def run(meeting: Meeting) -> tuple[Tensor, Tensor, list[Tensor]]:
        mean, found = Mean(segments_of, means), []
        x, common = given(meeting.rank, -1).clone(), given(-1, -1).clone()
        for t, mask in enumerate(masks):
            x = x + given(meeting.rank, t)
            for _ in range(2):  # an attempt that is not committed leaves no trace
                shards = mean.collect(x - common, meeting, mask, whole=mask.stride == 1)
                got = mean.spread(shards)
            mean.commit()
            x, common = x + got - shards.sent, common + got
            found.append(got)
        return x, common, found

    return meet(members, weights, run)


@pytest.mark.parametrize(
    ("masks", "x0", "x1", "common"),
    [
        (1, [3, 2, 3, 4, 5, 6, 7, 8, 9, 10], [1, 2, 5, 0, 5, 8, 7, 6, 9, 8], [3, *[5] * 7, 9, 5]),
        (
            2,
            [3, 2, 3, 1.5, 5, 6, 7, 8, 9, 5],
            [1, 2, 5, 2.5, 5, 8, 7, 6, 9, 8],
            [3, 2, 5, 2.5, 5, 5, 5, 5, 9, 5],
        ),
    ],
)
def test_what_a_mask_and_the_largest_leave_out_stays(
    masks: int, x0: list[float], x1: list[float], common: list[float]
) -> None:
    """Two trainers, and a third with the best link that counts for nothing and owns the vector."""
    uplink = {0: 1.0, 1: 1.0, 2: 1000.0}
    means = Means(route="two_phase", shards="link", uplink=uplink.__getitem__)
    start = {0: torch.arange(1.0, 11.0), 1: torch.tensor([3.0, 2, 1, 0, 5, 8, 7, 6, 9, 8])}
    found = differences(
        (0, 1, 2), [Segment(0, 10, Largest(0.4, CODECS["fp32"]))], means,
        [Mask(2, t) for t in range(masks)],
        lambda rank, t: start.get(rank, torch.full((10,), 5.0)) if t < 0 else torch.zeros(10),
        weights=(1, 1, 0),
    )  # fmt: skip
    assert [x.tolist() for x, _, _ in found[:2]] == [x0, x1]
    assert [reference.tolist() for _, reference, _ in found] == [common] * 3


SPARSE: list[Codec] = [CODECS["fp32"], CODECS["int8"], CODECS["top4"]]


@pytest.mark.parametrize("codec", SPARSE, ids=["fp32", "int8", "top4"])
@pytest.mark.parametrize("means", WAYS[1:3], ids=["equal", "link"])
def test_every_number_comes_with_the_last_mean(means: Means, codec: Codec) -> None:
    """Numbers travel when it is their turn, statistics always, and nothing is lost for good."""
    count, stats, stride, times, members = 600, 7, 5, 11, (0, 1, 2)
    layout = [Segment(0, count, codec), Segment(count, count + stats, CODECS["fp32"], whole=True)]
    zeros = torch.zeros(count + stats)

    def given(rank: int, t: int) -> Tensor:
        return zeros if t < 0 else vector(count + stats, 100 * rank + t)

    found = differences(
        members, layout, means, [*(Mask(stride, 3 + t) for t in range(times)), Mask()], given
    )
    x, common, got = found[0]
    for _, other, means_of in found:
        assert torch.equal(other, common), "not the same bits everywhere"
        assert all(torch.equal(a, b) for a, b in zip(got, means_of, strict=True))
    for t, one in enumerate(got[:-1]):
        travels = torch.arange(count) % stride == (3 + t) % stride
        assert not bool(one[:count][~travels].any())
        assert bool(one[count:].all())
        share = float((one[:count][travels] != 0).float().mean())
        assert share > 0.95 if codec.name != "top4" else 0.1 < share <= 0.21
    expected = sum(
        (given(rank, t) for rank in members for t in range(times + 1)), torch.zeros(count + stats)
    )
    # The last mean is in int8, or exact.
    bound = 1e-5 if codec.name == "fp32" else 3 * 20 / 254
    assert float((common - expected / 3).abs().max()) < bound
    assert max(float((own - common).abs().max()) for own, _, _ in found) < bound
    assert float(x.abs().max()) > 1


def test_a_mean_of_masked_numbers_has_the_bytes_of_the_formula() -> None:
    """0.1825 bit a number and phase: a tenth travels, a fifth of it in 4 bits beside the bitmap."""
    count, members = 3 * 10 * 5 * 256, (0, 1, 2)

    def run(meeting: Meeting) -> tuple[int, int]:
        mean, counts = Mean(segments([("top4", count)]), WAYS[1]), []
        for t in range(2):
            mean.spread(mean.collect(vector(count, meeting.rank), meeting, Mask(10, t)))
            counts.append(mean.sent_bytes)
        return counts[0], counts[1] - counts[0]

    each = 4 * (160 + 128 + 4)
    assert meet(members, (1, 1, 1), run) == [(each, each)] * 3
    assert each == pytest.approx(0.1825 / 8 * count * (1 + 1 / 3), rel=1e-9)
    assert each == pytest.approx(sent_ratio("top4", 10) * 4 * count * (1 + 1 / 3), rel=1e-9)


@pytest.mark.parametrize("place", [7, 8])
def test_a_number_that_does_not_travel_is_found_out(place: int) -> None:
    def run(meeting: Meeting) -> int | None:
        mean = Mean(segments([("fp32", 50)]), WAYS[1])
        x = vector(50, meeting.rank)
        if meeting.rank == 2:
            x[place] = float("nan")
        found = mean.spread(mean.collect(x, meeting, Mask(2, 1)))
        with pytest.raises(NotFinite) as caught:
            mean.check(found, x, meeting)
        return caught.value.blamed

    assert meet((0, 1, 2), (1, 1, 1), run) == [2, 2, 2]


@pytest.mark.parametrize("means", [WAYS[0], WAYS[3]], ids=["ring", "two_tier"])
def test_parts_of_vectors_travel_in_two_phases_alone(means: Means) -> None:
    with pytest.raises(ValueError, match="use two_phase"):
        Mean(segments([("top4", 5)]), means)

    def run(meeting: Meeting) -> None:
        with pytest.raises(ValueError, match=f"a mask in {means.route}: use two_phase"):
            Mean(segments([("fp32", 5)]), means).collect(vector(5, 0), meeting, Mask(2, 0))

    meet((0, 1), (1, 1), run)


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
