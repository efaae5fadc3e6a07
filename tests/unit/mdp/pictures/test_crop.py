"""Every picture becomes the same upright RGB square, or a PictureError."""

import io
import os
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mdp.errors import PictureError
from mdp.formats.plan import MIN_REGION, Region
from mdp.pictures.crop import (
    MAX_SCANS,
    Pixels,
    crop,
    decode_jpeg,
    encode_jpeg,
    load_picture,
    region_box,
)
from mdp.testing.processes import PATIENCE_S
from tests.support.pictures import (
    chunk,
    encode_picture,
    exif_segment,
    exif_that_warns,
    four_corners,
    icon_with,
    jpeg_that_claims,
    png_that_claims,
    segment,
    with_more_scans,
    with_orientation,
    with_segments,
)

WHOLE = Region()
GREY = np.linspace(0, 255, 32 * 32, dtype=np.uint8).reshape(32, 32)


def file(folder: Path, data: bytes, name: str = "picture") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def pixels_of(picture: Image.Image | Pixels) -> Pixels:
    return np.asarray(picture)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_turned_upright(tmp_path: Path, orientation: int) -> None:
    path = file(tmp_path, with_orientation(orientation))
    upright = load_picture(path)
    np.testing.assert_array_equal(pixels_of(upright), four_corners())
    with Image.open(path) as picture:
        np.testing.assert_array_equal(pixels_of(load_picture(picture)), four_corners())


def load_from_pipe(data: bytes) -> Image.Image | Pixels:
    """Picture that is loaded from a pipe that holds `data`."""
    reader, writer = os.pipe()
    try:
        # Few enough bytes for the pipe's own buffer.
        os.write(writer, data)
        os.close(writer)
        return load_picture(f"/dev/fd/{reader}")
    finally:
        os.close(reader)


def test_a_jpeg_from_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode_jpeg(four_corners())
    same = load_picture(file(tmp_path, data))
    np.testing.assert_array_equal(pixels_of(load_from_pipe(data)), pixels_of(same))
    monkeypatch.setattr("mdp.pictures.sources.MAX_PIPE_BYTES", len(data) - 1)
    with pytest.raises(PictureError, match=r"/dev/fd/\d+: expected at most \d+ bytes from a pipe"):
        load_from_pipe(data)


def test_what_is_no_picture_at_all() -> None:
    for given_, kind in ((None, "NoneType"), (7, "int"), (["cat.jpg"], "list")):
        with pytest.raises(PictureError, match=f"expected a path, .* got {kind}$"):
            load_picture(given_)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_impossible_orientation_is_ignored(tmp_path: Path, value: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = value
    path = file(tmp_path, encode_picture(four_corners(), "PNG", exif=exif))
    np.testing.assert_array_equal(pixels_of(load_picture(path)), four_corners())


def test_greyscale_gets_three_equal_channels(tmp_path: Path) -> None:
    loaded = pixels_of(load_picture(file(tmp_path, encode_picture(GREY, "PNG"))))
    np.testing.assert_array_equal(loaded, np.stack([GREY] * 3, axis=-1))


def test_16_bit_greyscale_is_scaled_and_not_clipped(tmp_path: Path) -> None:
    wide: Any = (GREY.astype(np.uint16) << 8) | GREY
    loaded = pixels_of(load_picture(file(tmp_path, encode_picture(wide, "PNG"))))
    assert loaded.shape == (32, 32, 3)
    np.testing.assert_allclose(loaded[..., 0].astype(int), GREY, atol=1)


@pytest.mark.parametrize(
    ("dtype", "top"), [(np.float32, 255.0), (np.float32, 1.0), (np.int32, 1), (np.float32, np.nan)]
)
def test_other_wide_greyscales_become_pictures(dtype: type, top: float) -> None:
    values: np.ndarray = (GREY / 255 * top).astype(dtype)
    loaded = pixels_of(load_picture(Image.fromarray(values)))
    assert loaded.shape == (32, 32, 3)
    assert loaded.dtype == np.uint8
    assert not np.isnan(top) or (loaded == 0).all()


def test_transparency_is_laid_on_white(tmp_path: Path) -> None:
    rgba, grey = np.zeros((8, 8, 4), dtype=np.uint8), np.zeros((8, 8, 2), dtype=np.uint8)
    rgba[:, :4], grey[:, :4] = (200, 30, 30, 255), (100, 255)
    for data, colour in (
        (encode_picture(rgba, "PNG"), (200, 30, 30)),
        (encode_picture(rgba, "WEBP", lossless=True), (200, 30, 30)),
        (encode_picture(Image.fromarray(grey, "LA"), "PNG"), (100, 100, 100)),
    ):
        loaded = pixels_of(load_picture(file(tmp_path, data)))
        assert (loaded[:, :4] == colour).all()
        assert (loaded[:, 4:] == 255).all()


def test_a_palette_with_a_transparent_colour(tmp_path: Path) -> None:
    picture = Image.new("P", (8, 8), 0)
    picture.putpalette([10, 20, 30, 200, 30, 30])
    picture.paste(1, (0, 0, 4, 8))
    for format_ in ("PNG", "GIF"):
        data = encode_picture(picture, format_, transparency=0)
        loaded = pixels_of(load_picture(file(tmp_path, data)))
        assert (loaded[:, :4] == (200, 30, 30)).all()
        assert (loaded[:, 4:] == 255).all()
    loaded = pixels_of(load_picture(file(tmp_path, encode_picture(picture, "PNG"))))
    assert (loaded[:, 4:] == (10, 20, 30)).all()


def test_cmyk(tmp_path: Path) -> None:
    data = encode_picture(Image.fromarray(four_corners()).convert("CMYK"), "JPEG", quality=95)
    loaded = pixels_of(load_picture(file(tmp_path, data)))
    np.testing.assert_allclose(loaded[8, 8], (200, 30, 30), atol=12)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "YCbCr", "HSV", "I", "F", "LAB"])
def test_any_mode_of_pillow(mode: str) -> None:
    loaded = load_picture(Image.new(mode, (6, 4)))
    assert isinstance(loaded, Image.Image)
    assert (loaded.mode, loaded.size) == ("RGB", (6, 4))


def test_a_mode_that_cannot_be_converted_is_refused() -> None:
    with pytest.raises(PictureError, match="the given picture: cannot be decoded: conversion from"):
        load_picture(Image.new("La", (4, 4)))


@pytest.mark.parametrize(
    ("height", "width"), [(1, 1), (1, 5000), (5000, 1), (3, 2000), (2000, 3), (7, 7)]
)
def test_any_shape_gives_a_view(tmp_path: Path, height: int, width: int) -> None:
    pixels = np.full((height, width, 3), (30, 60, 90), dtype=np.uint8)
    for picture in (pixels, file(tmp_path, encode_picture(pixels, "PNG"))):
        view = crop(load_picture(picture, smallest_side=8), WHOLE, 8)
        assert view.shape == (8, 8, 3)
        assert view.dtype == np.uint8
        assert (view == (30, 60, 90)).all()


@pytest.mark.parametrize(("height", "width"), [(64, 2000), (2000, 64), (64, 64), (65, 101)])
def test_the_view_is_the_centred_square(tmp_path: Path, height: int, width: int) -> None:
    pixels = np.full((height, width, 3), 200, dtype=np.uint8)
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    pixels[top : top + side, left : left + side] = (30, 60, 90)
    for picture in (pixels, file(tmp_path, encode_picture(pixels, "PNG"))):
        view = crop(load_picture(picture), WHOLE, 8)
        np.testing.assert_allclose(view[1:-1, 1:-1] - np.array((30, 60, 90)), 0, atol=5)


def damage(data: bytes) -> bytes:
    return data[: len(data) // 2]


NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("half.jpg", damage(encode_picture(NOISE, "JPEG")), "cannot be decoded: .*truncated"),
        ("half.png", damage(encode_picture(NOISE, "PNG")), "cannot be decoded: .*truncated"),
        ("text.jpg", b"I am not a picture\n", "expected a picture, found no format that is read"),
        ("empty.png", b"", "expected a picture, found no format that is read"),
        ("head.png", b"\x89PNG\r\n\x1a\n", "expected a picture|cannot be decoded"),
        (
            "huge.png",
            png_that_claims(20_000, 20_000),
            "at most 100,000,000 pixels, got 20000x20000",
        ),
        (
            "wide.png",
            png_that_claims(100_000_001, 1),
            "at most 100,000,000 pixels, got 100000001x1",
        ),
        ("huge.jpg", jpeg_that_claims(65_500, 65_500), "100,000,000 pixels, got 65500x65500"),
        ("zero.png", png_that_claims(0, 10), "expected a picture|at least 1x1|cannot be decoded"),
        ("flat.png", png_that_claims(10, 0), "expected a picture|at least 1x1|cannot be decoded"),
        ("none.png", png_that_claims(10, 10), "cannot be decoded"),
    ],
)
def test_what_is_no_usable_file(tmp_path: Path, name: str, data: bytes, expected: str) -> None:
    with pytest.raises(PictureError, match=rf"{name}: .*({expected})"):
        load_picture(file(tmp_path, data, name))


def test_a_picture_of_the_largest_size_is_not_refused_for_its_size(tmp_path: Path) -> None:
    # Pillow would warn of it, and warnings are errors here.
    path = file(tmp_path, png_that_claims(10_000, 10_000))
    with pytest.raises(PictureError, match="cannot be decoded"):
        load_picture(path)


JPEG, PNG = encode_picture(four_corners(), "JPEG"), encode_picture(four_corners(), "PNG")
TEXT, PROFILE = chunk(b"tEXt", b"k\0v"), chunk(b"iCCP", b"n\0\0" + zlib.compress(bytes(999)))
#: After the signature and the size.
PNG_START = 8 + 25


@pytest.mark.parametrize(
    ("data", "most"),
    [
        # Pillow joins these pieces one by one, and copies the first, large one each time.
        (with_segments(JPEG, exif_segment(bytes(60_000)), *[exif_segment(b"x")] * 16), "16 Exif"),
        (with_segments(JPEG, *[segment(0xEF, b"")] * 260), "256 segments before its pixels"),
        (
            with_segments(JPEG, segment(0xFE, b""), b"\0" * ((1 << 20) + 1)),
            "1 MiB between its segments",
        ),
        (PNG[:PNG_START] + TEXT * 260 + PNG[PNG_START:], "256 chunks besides its pixels"),
        # Those that follow the pixels are read as well.
        (PNG[:-12] + TEXT * 260 + PNG[-12:], "256 chunks besides its pixels"),
        (PNG[:PNG_START] + PROFILE * 2 + PNG[PNG_START:], "1 colour profile"),
        (PNG[:-12] + chunk(b"prVt", bytes(1 << 24)) + PNG[-12:], "16 MiB besides the pixels"),
        (PNG[:-12] + chunk(b"IDAT") * 200_001 + PNG[-12:], "200,000 chunks of pixels"),
        (b"P6 #" + b" " * 9000 + b"\n1 1 255\nxyz", "8,192 parts"),
        (b"GIF89a\1\0\1\0\0\0\0!\xfe" + (b"\xff" + b"c" * 255) * 9000 + b"\0;", "8,192 parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headers_that_take_long_to_read_are_refused(tmp_path: Path, data: bytes, most: str) -> None:
    with pytest.raises(PictureError, match=f"/picture: expected .*at most .*{most}"):
        load_picture(file(tmp_path, data))


def test_usual_headers_are_read(tmp_path: Path) -> None:
    extra = [exif_segment(b"x"), segment(0xEE, b""), *[segment(0xE2, bytes(60_000))] * 200]
    picture = pixels_of(load_picture(file(tmp_path, with_segments(JPEG, *extra))))
    np.testing.assert_array_equal(picture, pixels_of(load_picture(file(tmp_path, JPEG))))
    many = PNG[:PNG_START] + PROFILE + TEXT * 100 + PNG[PNG_START:]
    np.testing.assert_array_equal(pixels_of(load_picture(file(tmp_path, many))), four_corners())


def test_a_slow_header_delays_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, limit = file(tmp_path, PNG, "good.png"), Image.MAX_IMAGE_PIXELS
    Image.preinit()
    read_bmp, is_bmp = Image.OPEN["BMP"]
    seen: list[object] = []

    def takes_long(*args: Any) -> Any:
        seen.append(Image.MAX_IMAGE_PIXELS)
        other = threading.Thread(target=lambda: seen.append(load_picture(good)), daemon=True)
        other.start()
        other.join(PATIENCE_S)
        return read_bmp(*args)

    monkeypatch.setitem(Image.OPEN, "BMP", (takes_long, is_bmp))
    load_picture(file(tmp_path, encode_picture(NOISE, "BMP")))
    assert seen[0] == limit, "the process keeps its protection"
    assert len(seen) == 2, "the other one is read meanwhile"


def test_broken_tags_are_not_told_on_the_application_s_stderr(tmp_path: Path) -> None:
    path = file(tmp_path, with_segments(JPEG, exif_that_warns(100)))
    code = "import sys, mdp.pictures.crop; mdp.pictures.crop.load_picture(sys.argv[1])"
    command = [sys.executable, "-c", code, str(path)]
    assert subprocess.run(command, check=True, capture_output=True).stderr == b""


_PEAK = """
import pathlib, sys
from mdp.pictures.crop import load_picture
# Not the maximum of getrusage, which begins with the parent's.
def peak():
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
load_picture(sys.argv[1], smallest_side=32)
before = peak()
load_picture(sys.argv[2], smallest_side=32)
print(peak() - before)
"""


@pytest.mark.parametrize(("mode", "most"), [("RGBA", 6), ("LA", 6), ("I;16", 4), ("RGB", 6)])
def test_memory_is_that_of_the_pixels_once(tmp_path: Path, mode: str, most: int) -> None:
    side = 4200
    small, large = (
        file(tmp_path, encode_picture(Image.new(mode, (n, n)), "PNG", compress_level=1), f"{n}.png")
        for n in (100, side)
    )
    command = [sys.executable, "-c", _PEAK, str(small), str(large)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(printed) < most * side**2


@pytest.mark.parametrize(
    ("format_", "options"), [("WEBP", {}), ("JPEG", {"progressive": True, "subsampling": 0})]
)
def test_a_picture_whose_decoder_takes_much_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_: str, options: dict[str, object]
) -> None:
    path = file(tmp_path, encode_picture(NOISE, format_, **options))
    load_picture(path, smallest_side=8)
    monkeypatch.setattr("mdp.pictures.crop.MAX_DECODED_BYTES", 64 * 64 * 5)
    with pytest.raises(PictureError, match=f"at most 0 MB while it is decoded, got .*{format_}"):
        load_picture(path, smallest_side=8)


def test_a_large_picture_is_reduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mdp.pictures.crop.LARGE_PIXELS", 99_999)
    monkeypatch.setattr("mdp.pictures.crop._BAND_PIXELS", 10_000)
    pixels = four_corners(420, 430)
    clear = Image.fromarray(pixels).convert("RGBA")
    clear.putalpha(Image.new("L", clear.size, 128))
    grey = Image.fromarray(pixels[..., 1].astype(np.uint16) * 257)
    exif = Image.Exif()
    exif[0x0112] = 6
    for picture in (clear, grey, Image.fromarray(pixels[..., 1] / np.float32(99))):
        turned = {"exif": exif} if picture.mode == "RGBA" else {}
        format_ = "TIFF" if picture.mode == "F" else "PNG"
        path = file(tmp_path, encode_picture(picture, format_, **turned))
        whole, reduced = load_picture(path), load_picture(path, smallest_side=30)
        assert isinstance(reduced, Image.Image)
        assert min(reduced.size) == 105
        difference = crop(whole, WHOLE, 30).astype(int) - crop(reduced, WHOLE, 30)
        # Only where two colours meet does it show.
        assert abs(difference).mean() < 2
        assert pixels_of(load_picture(reduced)).shape == pixels_of(reduced).shape


def test_paths_that_lead_to_no_file(tmp_path: Path) -> None:
    for path, expected in (
        (tmp_path / "gone.jpg", r"gone\.jpg: No such file or directory"),
        (str(tmp_path), "Is a directory"),
        (file(tmp_path, b"x") / "below", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(PictureError, match=expected):
            load_picture(path)


def test_a_pillow_picture_that_was_not_read_yet(tmp_path: Path) -> None:
    path = file(tmp_path, damage(encode_picture(NOISE, "PNG")))
    with (
        Image.open(path) as lazy,
        pytest.raises(PictureError, match=r"the given picture: cannot be decoded: .*truncated"),
    ):
        load_picture(lazy)


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (np.zeros((4, 4, 3), np.float32), r"\[H, W, 3\] or \[H, W, 4\], got float32 \[4, 4, 3\]"),
        (np.zeros((4, 4, 3), np.int64), "got int64"),
        (np.zeros((4, 4, 3), bool), "got bool"),
        (np.zeros(4, np.uint8), r"got uint8 \[4\]"),
        (np.zeros((4, 4, 2), np.uint8), r"got uint8 \[4, 4, 2\]"),
        (np.zeros((1, 4, 4, 3), np.uint8), r"got uint8 \[1, 4, 4, 3\]"),
        (np.zeros((3, 4, 5), np.uint8), r"got uint8 \[3, 4, 5\]"),
        (np.zeros((0, 4, 3), np.uint8), "expected 1 to 100,000,000 pixels, got 4x0"),
        (np.zeros((4, 0, 3), np.uint8), "expected 1 to 100,000,000 pixels, got 0x4"),
        (
            np.broadcast_to(np.zeros(3, np.uint8), (20_000, 20_000, 3)),
            "expected 1 to 100,000,000 pixels, got 20000x20000",
        ),
    ],
)
def test_arrays_that_are_no_picture(array: np.ndarray, expected: str) -> None:
    with pytest.raises(PictureError, match=expected):
        load_picture(array)


def test_grey_and_transparent_arrays_are_what_their_files_are(tmp_path: Path) -> None:
    clear = np.dstack([four_corners(), np.full(four_corners().shape[:2], 100, np.uint8)])
    for array in (GREY, clear):
        same = load_picture(file(tmp_path, encode_picture(array, "PNG")))
        np.testing.assert_array_equal(pixels_of(load_picture(array)), pixels_of(same))
    np.testing.assert_array_equal(
        pixels_of(load_picture(GREY[..., None])), pixels_of(load_picture(GREY))
    )


class InParts:
    """A file object that gives a byte at a time, as a slow socket may, and has no name."""

    def __init__(self, content: bytes) -> None:
        self.rest = content

    def read(self, size: int, /) -> bytes:
        part, self.rest = self.rest[:1], self.rest[1:]
        return part


def test_bytes_and_file_objects_are_what_their_file_is(tmp_path: Path) -> None:
    data = encode_jpeg(four_corners())
    path = file(tmp_path, data)
    same = pixels_of(load_picture(path))
    with path.open("rb") as opened, path.open("rb", buffering=0) as raw:
        sources = (data, bytearray(data), memoryview(data), io.BytesIO(data), InParts(data))
        for source in (*sources, opened, raw):
            np.testing.assert_array_equal(pixels_of(load_picture(source)), same)
        with pytest.raises(PictureError, match=f"^{path}: expected a picture, found no format"):
            load_picture(opened)  # which is read to its end


def test_bytes_that_are_no_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.BytesIO(b"x")
    closed.close()
    text: Any = io.StringIO("x")
    for source, expected in (
        (b"text", "the given bytes: expected a picture, found no format that is read"),
        (b"", "the given bytes: expected a picture, found no format that is read"),
        (closed, "the given file: cannot be read: I/O operation on closed file."),
        (text, "the given file: expected a file that gives bytes, this one gives str"),
    ):
        with pytest.raises(PictureError) as told:
            load_picture(source)
        assert str(told.value) == expected
    monkeypatch.setattr("mdp.pictures.sources.MAX_PIPE_BYTES", 3)
    with pytest.raises(PictureError, match="given file: expected at most 3 bytes from a file obj"):
        load_picture(io.BytesIO(b"text"))


@pytest.mark.torch
def test_tensors_are_what_their_arrays_are() -> None:
    torch = pytest.importorskip("torch")
    pixels = four_corners()
    tensor = torch.from_numpy(pixels.transpose(2, 0, 1).copy())
    floats = (tensor / 255).requires_grad_()
    for given_ in (tensor, floats, floats.double()):
        np.testing.assert_array_equal(pixels_of(load_picture(given_)), pixels)
    halved = pixels_of(load_picture((tensor / 255).bfloat16()))
    assert np.abs(halved.astype(int) - pixels).max() <= 1
    grey = pixels_of(load_picture(torch.from_numpy(GREY)[None]))
    np.testing.assert_array_equal(grey, pixels_of(load_picture(GREY)))
    for wrong, expected in (
        (tensor.permute(1, 2, 0), r"\[4, H, W\] of uint8, or .* got torch.uint8 \[\d+, \d+, 3\]"),
        (tensor.int(), r"got torch.int32 \[3, "),
        (tensor[None], r"got torch.uint8 \[1, 3, "),
        (floats - 1, r"floats from 0 to 1, got -[\d.]+ to -[\d.]+: one that was normalised"),
        (floats * float("nan"), "floats from 0 to 1, got nan to nan"),
        (floats[:, :0], "expected 1 to 100,000,000 pixels"),
    ):
        with pytest.raises(PictureError, match=expected):
            load_picture(wrong)


@given(
    st.integers(1, 10_000),
    st.integers(1, 10_000),
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
)
def test_a_region_never_leaves_the_picture(
    width: int, height: int, corners: tuple[float, float, float, float]
) -> None:
    (left, right), (top, bottom) = sorted(corners[:2]), sorted(corners[2:])
    if right - left < MIN_REGION or bottom - top < MIN_REGION:
        return
    box = region_box(width, height, Region(left=left, top=top, right=right, bottom=bottom))
    assert 0 <= box[0] <= box[2] <= width
    assert 0 <= box[1] <= box[3] <= height


@pytest.mark.parametrize(
    ("region", "colour"),
    [
        (Region(right=0.5, bottom=0.5), (200, 30, 30)),
        (Region(left=0.5, bottom=0.5), (30, 200, 30)),
        (Region(right=0.5, top=0.5), (30, 30, 200)),
        (Region(left=0.5, top=0.5), (200, 200, 30)),
    ],
)
def test_the_view_of_a_region(tmp_path: Path, region: Region, colour: tuple[int, int, int]) -> None:
    for picture in (four_corners(), file(tmp_path, encode_picture(four_corners(), "PNG"))):
        view = crop(load_picture(picture), region, 8)
        np.testing.assert_allclose(view[1:-1, 1:-1] - np.array(colour), 0, atol=5)


def test_an_array_of_the_right_size_is_passed_through() -> None:
    pixels = four_corners(32, 32)
    view = crop(load_picture(pixels), WHOLE, 32)
    assert np.shares_memory(view, pixels)
    np.testing.assert_array_equal(view, pixels)


@pytest.mark.parametrize("side", [24, 32])
def test_a_region_from_the_corner_on_is_cut_where_nothing_has_to_be_resized(side: int) -> None:
    pixels = four_corners(32, 32)
    view = crop(pixels, Region(right=side / 32, bottom=side / 32), side)
    np.testing.assert_array_equal(view, pixels[:side, :side])


def test_an_array_in_another_order_of_memory_is_passed_on_contiguous() -> None:
    mirrored = four_corners(32, 32)[:, ::-1]
    view = crop(load_picture(mirrored), WHOLE, 32)
    assert view.flags.c_contiguous
    np.testing.assert_array_equal(view, mirrored)
    smaller = crop(load_picture(mirrored), WHOLE, 16)
    np.testing.assert_allclose(smaller[3, 3].astype(int), mirrored[6, 6], atol=2)


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("wanted", [16, 100, 224])
def test_a_reduced_jpeg_keeps_enough_pixels(tmp_path: Path, orientation: int, wanted: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.fromarray(four_corners(1200, 1600))
    path = file(tmp_path, encode_picture(picture, "JPEG", exif=exif, quality=95))
    whole, reduced = load_picture(path), load_picture(path, smallest_side=wanted)
    assert isinstance(whole, Image.Image)
    assert isinstance(reduced, Image.Image)
    assert min(whole.size) == 1200
    assert 2 * wanted <= min(reduced.size) < 1200 or wanted == 224
    difference = crop(whole, WHOLE, 16).astype(int) - crop(reduced, WHOLE, 16)
    # Only where two colours meet does the decoder's own averaging show.
    assert abs(difference).mean() < 2
    small = load_picture(
        file(tmp_path, encode_picture(four_corners(200, 300), "JPEG")), smallest_side=224
    )
    assert isinstance(small, Image.Image)
    assert small.size == (300, 200)


def test_jpeg_there_and_back() -> None:
    view = four_corners(32, 32)
    back = decode_jpeg(encode_jpeg(view), 32)
    assert back.shape == view.shape
    np.testing.assert_allclose(back[4, 4].astype(int), view[4, 4], atol=8)
    np.testing.assert_array_equal(back, decode_jpeg(memoryview(encode_jpeg(view)), 32))


def test_postscript_is_refused_before_anything_runs_it(tmp_path: Path) -> None:
    path = tmp_path / "page.eps"
    Image.new("RGB", (20, 20), "red").save(path)
    with pytest.raises(PictureError, match=r"page\.eps: expected a picture, found no format that"):
        load_picture(path)


@pytest.mark.parametrize("shown", [16, 0])
def test_a_picture_inside_another_is_not_decoded(tmp_path: Path, shown: int) -> None:
    # Pillow would decode the inner one as it opens the file, whatever its size.
    path = file(tmp_path, icon_with(png_that_claims(50_000, 50_000), shown), "icon.ico")
    with pytest.raises(PictureError, match=r"icon\.ico: expected a picture, found no format that"):
        load_picture(path)


@pytest.mark.parametrize("preamble", [b"", b"\xff" * (1 << 20)])
def test_a_jpeg_that_passes_over_its_pixels_too_often(tmp_path: Path, preamble: bytes) -> None:
    progressive = encode_picture(four_corners(), "JPEG", progressive=True)
    scans = progressive.count(b"\xff\xda")
    assert 1 < scans < 20
    assert load_picture(file(tmp_path, progressive, "fine.jpg")) is not None
    header, rest = progressive[:2], progressive[2:]
    often = header + preamble + with_more_scans(rest, MAX_SCANS - scans)
    assert load_picture(file(tmp_path, often, "often.jpg")) is not None
    bomb = header + preamble + with_more_scans(rest, MAX_SCANS - scans + 1)
    with pytest.raises(PictureError, match=r"bomb\.jpg: expected a JPEG of at most 100 scans"):
        load_picture(file(tmp_path, bomb, "bomb.jpg"))


CROP = encode_jpeg(NOISE[:32, :32])


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encode_jpeg(four_corners(16, 16)), r"expected a JPEG of 32x32, got \(16, 16\)"),
        (encode_jpeg(four_corners(32, 48)), r"expected a JPEG of 32x32, got \(48, 32\)"),
        (damage(encode_jpeg(NOISE[:32, :32])), "not a complete JPEG: .*truncated"),
        (encode_picture(four_corners(32, 32), "PNG"), "not a complete JPEG: cannot identify"),
        (jpeg_that_claims(65_500, 65_500), "not a complete JPEG|expected a JPEG of 32x32"),
        (b"", "not a complete JPEG"),
        (b"\xff\xd8\xff\xe0" + bytes(range(64)), "not a complete JPEG"),
        (with_segments(CROP, exif_segment(b"x")), "got one of 0xFFE1"),
        (with_segments(CROP, exif_that_warns(100)), "got one of 0xFFE1"),
        (with_segments(CROP, segment(0xFE, b"comment")), "got one of 0xFFFE"),
        (with_segments(CROP, segment(0xE2, b"ICC_PROFILE")), "got one of 0xFFE2"),
        (with_segments(CROP, *[segment(0xE0, b"")] * 8), "at most 16 segments"),
        (with_segments(CROP, b"\xff" * 99), "got one of 0xFFFF"),
        (
            with_segments(CROP, segment(0xE0, b""), b"\0" * 99),
            "its header is truncated or has gaps",
        ),
        (CROP[:2] + CROP[CROP.index(b"\xff\xda") :], "a scan before its frame"),
        (
            encode_picture(four_corners(32, 32), "JPEG", progressive=True),
            "expected a JPEG of one scan, got 10",
        ),
    ],
)
def test_jpeg_crops_that_are_refused(data: bytes, expected: str) -> None:
    with pytest.raises(PictureError, match=expected):
        decode_jpeg(data, 32)
