"""The played means of parts, beside the real ones."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import cast

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sklearn")

from torch import Tensor  # noqa: E402
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo  # noqa: E402
from torch.distributed import ProcessGroup  # noqa: E402

from benchmarks.crew.parts import CodedCopies  # noqa: E402
from benchmarks.crew.spread import TRAINERS  # noqa: E402
from partitioner.crew.averaging.codecs import CODECS  # noqa: E402
from partitioner.crew.averaging.mean import EVERY_NUMBER, Mask, Mean, Means, Meeting, Segment  # noqa: E402
from partitioner.crew.coordinator.sizes import CodecName, whole_codec  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("codec", "stride"), [("int8", 1), ("top4", 10), ("int8", 10)])
def test_played_means_are_those_of_gloo(codec: CodecName, stride: int) -> None:
    copies, store = CodedCopies(0, 0.01, codec, stride), HashStore()
    count, masks = copies._common.numel(), [Mask(stride, 0), Mask(stride, 1), EVERY_NUMBER]
    drawn = torch.randn(len(masks), TRAINERS, count, generator=torch.Generator().manual_seed(0))

    def member(rank: int) -> tuple[list[tuple[Tensor, Tensor]], int]:
        gloo = ProcessGroupGloo(store, rank, TRAINERS, timedelta(seconds=20))
        meeting = Meeting(
            group=cast(ProcessGroup, gloo),
            members=tuple(range(TRAINERS)),
            weights=(1.0,) * TRAINERS,
            rank=rank,
        )
        mean, found = Mean([Segment(0, count, CODECS[codec])], Means(route="two_phase")), []
        for t, mask in enumerate(masks):
            ends = mask is EVERY_NUMBER
            shards = mean.collect(drawn[t, rank], meeting, mask, whole=ends)
            found.append((mean.spread(shards), shards.sent))
            mean.commit()
        return found, mean.sent_bytes

    with ThreadPoolExecutor(TRAINERS) as pool:
        real = list(pool.map(member, range(TRAINERS)))
    for t, mask in enumerate(masks):
        name = whole_codec(codec) if mask is EVERY_NUMBER else codec
        found, sent = copies.average(list(drawn[t]), [0.25] * TRAINERS, name, mask)
        for rank, (means, _) in enumerate(real):
            assert torch.equal(means[t][0], found)
            assert torch.equal(means[t][1], sent[rank])
    assert copies.sent_bytes == sum(sent_bytes for _, sent_bytes in real)
