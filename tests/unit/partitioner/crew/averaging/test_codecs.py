"""Codecs: their bytes, the bound of their error, and what error feedback conserves."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from partitioner.crew.averaging.codecs import CODECS, Int8  # noqa: E402
from partitioner.crew.coordinator.sizes import CodecName  # noqa: E402

pytestmark = pytest.mark.torch

vectors = st.tuples(st.integers(0, 700), st.integers(0, 2**31), st.sampled_from([1e-30, 1.0, 1e4]))


def drawn(what: tuple[int, int, float]) -> Tensor:
    count, seed, size = what
    generator = torch.Generator().manual_seed(seed)
    found: Tensor = torch.randn(count, generator=generator).mul(size)
    return found


def test_int8_codes_are_those_of_the_formula() -> None:
    x = torch.tensor([0.5, -1, 0.25, 0, 0.75, -0.1, 1, -0.6])
    data = Int8().encode(x)
    assert data[:4].view(torch.float32).item() == 1
    assert data[4:].view(torch.int8).tolist() == [64, -127, 32, 0, 95, -13, 127, -76]


@pytest.mark.parametrize(
    ("name", "count", "expected"),
    [("fp32", 5, 20), ("fp16", 5, 10), ("int8", 0, 0), ("int8", 256, 260), ("int8", 257, 265)],
)
def test_bytes_are_known_beforehand(name: CodecName, count: int, expected: int) -> None:
    codec = CODECS[name]
    assert codec.bytes_of(count) == expected == codec.encode(torch.ones(count)).numel()


@settings(max_examples=60, deadline=None)
@given(vectors, st.sampled_from(sorted(CODECS)))
def test_errors_are_bounded(what: tuple[int, int, float], name: CodecName) -> None:
    x, codec = drawn(what), CODECS[name]
    found = codec.decode(codec.encode(x), x.numel())
    assert found.shape == x.shape
    for block, was in zip(torch.split(found, 256), torch.split(x, 256), strict=True):
        scale = float(was.abs().max()) if was.numel() else 0.0
        bound = {"fp32": 0.0, "fp16": scale * 2**-11 + 2**-25, "int8": scale / 254}[name]
        assert float((block - was).abs().max() if was.numel() else 0.0) <= bound * (1 + 1e-4)


@settings(max_examples=30, deadline=None)
@given(vectors, st.integers(1, 8))
def test_nothing_is_lost_for_good_with_error_feedback(
    what: tuple[int, int, float], steps: int
) -> None:
    codec, count = Int8(), what[0]
    given_, sent = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    error = torch.zeros(count)
    for step in range(steps):
        x = drawn((count, what[1] + step, what[2]))
        decoded = codec.decode(codec.encode(x + error), count)
        error = x + error - decoded
        given_, sent = given_ + x, sent + decoded
    assert torch.allclose(sent + error, given_, rtol=0, atol=what[2] * 1e-5)


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(name: CodecName, odd: float) -> None:
    codec, x = CODECS[name], torch.ones(300)
    x[280] = odd
    assert not codec.decode(codec.encode(x), 300).isfinite().all()
