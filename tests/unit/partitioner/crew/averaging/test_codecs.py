"""Codecs: their bytes, the bound of their error, and what error feedback conserves."""

from fractions import Fraction

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch import Tensor  # noqa: E402

from partitioner.crew.averaging.codecs import CODECS, FourBit, Int8, Largest  # noqa: E402
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
    [
        ("fp32", 5, 20),
        ("fp16", 5, 10),
        ("int8", 0, 0),
        ("int8", 256, 260),
        ("int8", 257, 265),
        # A bit each, half a byte of a fifth, and two bytes of each 128 of these.
        ("top4", 0, 0),
        ("top4", 1, 1 + 1 + 2),
        ("top4", 15, 2 + 2 + 2),
        ("top4", 645, 81 + 65 + 4),
    ],
)
def test_bytes_are_known_beforehand(name: CodecName, count: int, expected: int) -> None:
    codec = CODECS[name]
    assert codec.bytes_of(count) == expected == codec.encode(torch.ones(count)).numel()


@settings(max_examples=60, deadline=None)
@given(vectors, st.sampled_from(["fp16", "fp32", "int8"]))
def test_errors_are_bounded(what: tuple[int, int, float], name: CodecName) -> None:
    x, codec = drawn(what), CODECS[name]
    found = codec.decode(codec.encode(x), x.numel())
    assert found.shape == x.shape
    for block, was in zip(torch.split(found, 256), torch.split(x, 256), strict=True):
        scale = float(was.abs().max()) if was.numel() else 0.0
        bound = {"fp32": 0.0, "fp16": scale * 2**-11 + 2**-25, "int8": scale / 254}[name]
        assert float((block - was).abs().max() if was.numel() else 0.0) <= bound * (1 + 1e-4)


@settings(max_examples=30, deadline=None)
@given(vectors, st.integers(1, 8), st.sampled_from(["int8", "top4"]))
def test_nothing_is_lost_for_good_with_error_feedback(
    what: tuple[int, int, float], steps: int, name: CodecName
) -> None:
    # Halves of more than 65,504 are no numbers.
    size = what[2] if name == "int8" else min(what[2], 1.0)
    codec, count = CODECS[name], what[0]
    given_, sent = torch.zeros(count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    error = torch.zeros(count)
    for step in range(steps):
        x = drawn((count, what[1] + step, size))
        decoded = codec.decode(codec.encode(x + error), count)
        error = x + error - decoded
        given_, sent = given_ + x, sent + decoded
    assert torch.allclose(sent + error, given_, rtol=0, atol=size * 1e-5)


def test_codes_of_four_bits_are_those_of_the_formula() -> None:
    x = torch.tensor([0.5, -1, 0.25, 0, 0.75, -0.1, 1, -0.6])
    data = FourBit().encode(x)
    assert data[:2].view(torch.float16).item() == 1
    assert data[2:].tolist() == [28, 138, 125, 79]
    expected = [0.5714, -1, 0.2857, 0, 0.7143, -0.1429, 1, -0.5714]
    assert FourBit().decode(data, 8).tolist() == pytest.approx(expected, abs=1e-4)
    # An odd count fills its last byte with a 0, and blocks have scales of their own.
    more = torch.cat([torch.full((128,), 2.0), torch.tensor([-3e-4])])
    again = FourBit().decode(FourBit().encode(more), 129)
    assert FourBit().encode(more).numel() == FourBit().bytes_of(129) == 65 + 4
    assert again.tolist() == pytest.approx(more.tolist(), rel=1e-3)


@pytest.mark.parametrize("size", [1e-7, 3e-8, 1e-9])
def test_codes_of_what_half_precision_hardly_has_stay_in_their_range(size: float) -> None:
    x = torch.tensor([size, -size / 2])
    assert float((FourBit().decode(FourBit().encode(x), 2) - x).abs().max()) <= 6e-8


def test_the_largest_are_sent_and_of_equals_the_first() -> None:
    codec = Largest(0.4, CODECS["fp32"])
    x = torch.tensor([-3.0, -1, 1, 3, 5])
    data = codec.encode(x)
    assert data[0].item() == 0b10001
    assert data[1:].clone().view(torch.float32).tolist() == [-3, 5]
    assert codec.decode(data, 5).tolist() == [-3, 0, 0, 0, 5]
    assert codec.bytes_of(5) == data.numel() == 9
    assert Largest(0.01).decode(Largest(0.01).encode(x), 5).tolist() == [0, 0, 0, 0, 5]


@settings(max_examples=60, deadline=None)
@given(vectors, st.sampled_from([0.001, 0.2, 0.29, 1.0]))
def test_what_is_left_out_is_smaller_than_what_is_sent(
    what: tuple[int, int, float], keep: float
) -> None:
    x, codec = drawn((what[0], what[1], min(what[2], 1.0))), Largest(keep, CODECS["fp32"])
    found = codec.decode(codec.encode(x), x.numel())
    sent = found == x
    assert int(sent.sum()) == min(x.numel(), max(1, int(Fraction(str(keep)) * x.numel())))
    assert bool((found[~sent] == 0).all())
    if 0 < int(sent.sum()) < x.numel():
        assert x[~sent].abs().max() <= x[sent].abs().min()
    four = Largest(keep)
    coded = four.decode(four.encode(x), x.numel())
    assert bool((coded[~sent] == 0).all())
    # Half a code of the largest, and what half precision loses of the scale.
    bound = float(x.abs().max() if x.numel() else 0.0) / 14 * 1.01 + 1e-7
    assert float((coded - found).abs().max() if x.numel() else 0.0) <= bound


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(name: CodecName, odd: float) -> None:
    codec, x = CODECS[name], torch.ones(300)
    x[280] = odd
    assert not codec.decode(codec.encode(x), 300).isfinite().all()
