"""Pictures whose data end early, and those that only look so."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from mdp.errors import PictureError
from mdp.pictures import complete
from mdp.pictures import jpeg as quick
from mdp.pictures.crop import Pixels, load_picture
from tests.support.pictures import chunk, encode_picture

#: Colour type -> samples of a pixel.
SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
ADAM7 = (
    (0, 8, 0, 8),
    (0, 8, 4, 8),
    (4, 8, 0, 4),
    (0, 4, 2, 4),
    (2, 4, 0, 2),
    (0, 2, 1, 2),
    (1, 2, 0, 1),
)
COLOURED = np.random.default_rng(3).integers(1, 255, (13, 11, 4), np.uint8)
BLACK_BELOW = COLOURED.copy()
BLACK_BELOW[9:] = 0


@pytest.fixture(autouse=True, params=["simplejpeg", "Pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The library that decodes JPEGs."""
    if request.param == "Pillow":
        monkeypatch.setattr(quick, "simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")
    return str(request.param)


def scanlines(samples: Pixels, bits: int, *, interlaced: bool) -> list[bytes]:
    """Rows of `[H, W, n]` samples of so many bits, pass by pass, each behind its filter byte."""
    rows = []
    for top, down, left, across in ADAM7 if interlaced else ((0, 1, 0, 1),):
        for row in samples[top::down, left::across]:
            if row.size and bits == 16:
                rows.append(b"\0" + np.repeat(row, 2).tobytes())
            elif row.size and bits == 8:
                rows.append(b"\0" + row.tobytes())
            elif row.size:
                parts = np.unpackbits(row.reshape(-1, 1), axis=1)[:, -bits:]
                rows.append(b"\0" + np.packbits(parts).tobytes())
    return rows


def png(
    pixels: Pixels,
    colour: int = 2,
    bits: int = 8,
    *,
    interlaced: bool = False,
    without: int = 0,
    pieces: int = 1,
    damaged_behind: bool = False,
) -> bytes:
    """A file whose data lack `without` rows, in so many chunks.

    `damaged_behind` has more data than pixels, of which no more can be inflated.
    """
    samples = np.right_shift(pixels[..., : SAMPLES[colour]], 8 - min(bits, 8), dtype=np.uint8)
    rows = scanlines(samples, bits, interlaced=interlaced)
    data = zlib.compress(b"".join(rows[: len(rows) - without]))
    if damaged_behind:
        data = zlib.compress(b"".join(rows) + COLOURED.tobytes() * 9, 0)[:-100] + bytes(100)
    size = -(-len(data) // pieces)
    header = struct.pack(">IIBBBBB", *samples.shape[1::-1], bits, colour, 0, 0, interlaced)
    return b"".join([
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", header),
        chunk(b"PLTE", bytes(range(256)) * 3) if colour == 3 else b"",
        *(chunk(b"IDAT", data[at : at + size]) for at in range(0, len(data), size)),
        chunk(b"tEXt", b"Comment\0behind the pixels"),
        chunk(b"IEND"),
    ])  # fmt: skip


KINDS = [
    (0, 1),
    (0, 2),
    (0, 4),
    (0, 8),
    (0, 16),
    (2, 8),
    (2, 16),
    (3, 1),
    (3, 8),
    (4, 8),
    (6, 8),
    (6, 16),
]


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize(("colour", "bits"), KINDS)
def test_data_that_end_early_are_refused_and_black_rows_are_not(
    colour: int, bits: int, interlaced: bool
) -> None:
    def file(without: int) -> bytes:
        return png(pixels, colour, bits, interlaced=interlaced, without=without)

    for pixels in (COLOURED, BLACK_BELOW, np.zeros_like(COLOURED), COLOURED[:1, :1]):
        assert np.asarray(load_picture(file(0))).shape == (*pixels.shape[:2], 3)
        if len(pixels) > 1:
            for without in (1, 4):
                with pytest.raises(PictureError, match=r"its data end after \d+ % of its pixels$"):
                    load_picture(file(without))


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("damaged_behind", [True, False])
def test_data_in_pieces_and_with_damage_behind_the_pixels_are_as_complete(
    pieces: int, damaged_behind: bool
) -> None:
    content = png(BLACK_BELOW, pieces=pieces, damaged_behind=damaged_behind)
    told = np.asarray(load_picture(content))
    assert (told == BLACK_BELOW[..., :3]).all()


def test_more_data_than_a_picture_has_are_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(complete, "_HELD_BYTES", 1000)
    compressed = iter([zlib.compress(bytes(10_000_000), 1), b"not read"])
    assert complete._count_inflated(compressed, 5000) == 5000
    assert next(compressed) == b"not read"


def test_a_picture_that_does_not_end_in_black_is_inflated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(complete, "_count_inflated", None)
    assert load_picture(png(COLOURED))
    with pytest.raises(PictureError, match="not callable"):
        load_picture(png(BLACK_BELOW))


PHOTO = np.random.default_rng(4).integers(40, 215, (150, 100, 3), np.uint8)
#: What libjpeg fills with, by the picture itself.
GREY_BELOW = PHOTO.copy()
GREY_BELOW[100:] = 128


def jpeg(pixels: Pixels, **options: object) -> bytes:
    return encode_picture(pixels, "JPEG", quality=80, **options)


def ending_early(content: bytes, share: float) -> bytes:
    """The JPEG with that share of its scan, and the marker of its end behind it."""
    scan = content.index(b"\xff\xda")
    return content[: scan + int(share * (len(content) - scan))] + b"\xff\xd9"


@pytest.mark.parametrize(
    "options",
    [{}, {"subsampling": 0}, {"optimize": True}, {"restart_marker_rows": 1}, {"quality": 10}],
)
@pytest.mark.parametrize("grey", [False, True])
def test_a_jpeg_that_ends_early_is_refused_and_grey_rows_are_not(
    options: dict[str, int], grey: bool
) -> None:
    for whole in (PHOTO, GREY_BELOW, np.full_like(PHOTO, 128)):
        content = encode_picture(
            whole[..., 0] if grey else whole, "JPEG", **({"quality": 80, **options})
        )
        # The marker of the end behind something else, as cameras write.
        for behind in (b"", b"more", content):
            for side in (0, 16):
                assert load_picture(content + behind, smallest_side=side)
                for share in (0.2, 0.6):
                    with pytest.raises(PictureError, match="its data end before its last rows"):
                        load_picture(ending_early(content, share) + behind, smallest_side=side)


def test_a_progressive_jpeg_with_a_grey_end_is_read() -> None:
    for whole in (PHOTO, GREY_BELOW, np.full_like(PHOTO, 128)):
        assert load_picture(jpeg(whole, progressive=True))


def test_a_jpeg_that_does_not_end_in_grey_is_decoded_once(
    monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    monkeypatch.setattr(complete, "_first_scan", None)
    assert load_picture(jpeg(PHOTO))
    if decoder == "simplejpeg":
        # It tells such an end from one of missing data.
        assert load_picture(jpeg(GREY_BELOW))
        return
    with pytest.raises(PictureError, match="not callable"):
        load_picture(jpeg(GREY_BELOW))


def test_an_animation_s_first_frame_and_other_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [Image.fromarray(BLACK_BELOW[..., :3]), Image.fromarray(COLOURED[..., :3])]
    animation = encode_picture(frames[0], "PNG", save_all=True, append_images=frames[1:])
    assert (np.asarray(load_picture(animation)) == BLACK_BELOW[..., :3]).all()
    monkeypatch.setattr(complete, "_last_row", None)
    for name in ("BMP", "GIF", "TIFF"):
        load_picture(encode_picture(frames[0], name))
