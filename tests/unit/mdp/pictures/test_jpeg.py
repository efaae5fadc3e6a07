"""JPEGs decoded by simplejpeg: the pixels, messages and bounds are those of Pillow alone."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image

from mdp.errors import PictureError
from mdp.pictures import jpeg
from mdp.pictures.crop import load_picture
from tests.support.pictures import encode_picture, with_more_scans

PHOTO = Image.fromarray(np.random.default_rng(5).integers(0, 255, (9, 13, 3), np.uint8)).resize(
    (333, 241), Image.Resampling.BICUBIC
)
FULL_SCALE = 0

simplejpeg = pytest.importorskip("simplejpeg")


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The pictures that simplejpeg has decoded or refused."""
    made: list[Any] = []

    class Recording:
        @staticmethod
        def decode_jpeg(content: bytes, *how: str, **size: int) -> Any:
            made.append(None)
            made[-1] = simplejpeg.decode_jpeg(content, *how, **size)
            return made[-1]

    monkeypatch.setattr(jpeg, "simplejpeg", Recording)
    return made


def by_pillow(content: bytes, side: int, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    with monkeypatch.context() as context:
        context.setattr(jpeg, "simplejpeg", None)
        return np.asarray(load_picture(content, smallest_side=side))


def load_or_message(content: bytes, pillow: pytest.MonkeyPatch | None = None) -> bytes | str:
    """Pixels, or what is said of the file; with `pillow`, by Pillow alone."""
    try:
        if pillow is not None:
            return by_pillow(content, FULL_SCALE, pillow).tobytes()
        return np.asarray(load_picture(content)).tobytes()
    except PictureError as error:
        return str(error)


@pytest.mark.parametrize("side", [FULL_SCALE, 8, 30, 60, 120, 240])
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_pixels_are_pillow_s(
    mode: str,
    subsampling: str,
    progressive: bool,
    side: int,
    decoded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = encode_picture(
        PHOTO.convert(mode), "JPEG", quality=85, progressive=progressive, subsampling=subsampling
    )
    found = np.asarray(load_picture(content, smallest_side=side))
    assert len(decoded) == 1
    assert decoded[0] is not None
    expected = by_pillow(content, side, monkeypatch)
    assert found.shape == expected.shape
    assert (found == expected).all()


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (40, 1), (7, 8), (16, 17)])
def test_small_and_narrow_ones(
    size: tuple[int, int], decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encode_picture(PHOTO.resize(size), "JPEG")
    for side in (FULL_SCALE, 1, 4):
        expected = by_pillow(content, side, monkeypatch)
        assert (np.asarray(load_picture(content, smallest_side=side)) == expected).all()
    assert len(decoded) == 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_they_are_turned_upright(
    orientation: int, tmp_path: Path, decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    content = encode_picture(PHOTO, "JPEG", exif=exif)
    expected = by_pillow(content, FULL_SCALE, monkeypatch)
    assert expected.shape == ((333, 241, 3) if orientation > 4 else (241, 333, 3))
    assert (np.asarray(load_picture(content)) == expected).all()
    file = tmp_path / "turned.jpg"
    file.write_bytes(content)
    assert (np.asarray(load_picture(file)) == expected).all()
    assert len(decoded) == 2


def test_other_colours_formats_and_large_ones_are_pillow_s(
    decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_picture(encode_picture(PHOTO.convert("CMYK"), "JPEG"))
    load_picture(encode_picture(PHOTO, "PNG"))
    content = encode_picture(PHOTO, "JPEG")
    monkeypatch.setattr(jpeg, "_MOST_PIXELS", 333 * 241 - 1)
    load_picture(content)
    monkeypatch.setattr(jpeg, "_MOST_PIXELS", 333 * 241)
    monkeypatch.setattr(jpeg, "_MOST_BYTES", len(content) - 1)
    load_picture(content)
    assert decoded == []
    monkeypatch.setattr(jpeg, "_MOST_BYTES", len(content))
    load_picture(content)
    assert len(decoded) == 1


@pytest.mark.parametrize("share", [0.3, 0.6, 0.95])
def test_what_is_cut_off_is_refused_in_pillow_s_words(share: float, decoded: list[Any]) -> None:
    content = encode_picture(PHOTO, "JPEG")
    with pytest.raises(PictureError, match="truncated"):
        load_picture(content[: int(share * len(content))])
    assert decoded == [None]


def test_a_header_that_lies_is_refused() -> None:
    content = bytearray(encode_picture(PHOTO, "JPEG"))
    place = content.index(b"\xff\xc0") + 5
    # Twice as many rows as there are.
    content[place : place + 2] = (2 * PHOTO.height).to_bytes(2, "big")
    with pytest.raises(PictureError):
        load_picture(bytes(content))


def test_damaged_data_are_what_pillow_makes_of_them(
    decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    content = encode_picture(PHOTO, "JPEG")
    damaged = 0
    for place in range(len(content) // 2, len(content) - 2, 97):
        broken = content[:place] + bytes((content[place] ^ 0x55,)) + content[place + 1 :]
        found = [load_or_message(broken, monkeypatch), load_or_message(broken)]
        assert found[0] == found[1]
        damaged += decoded[-1] is None and isinstance(found[0], bytes)
    assert damaged, "none has anything to warn of, and is read"


def test_bounds_of_scans_hold_before_it(decoded: list[Any]) -> None:
    with pytest.raises(PictureError, match="scans"):
        load_picture(with_more_scans(encode_picture(PHOTO, "JPEG"), 200))
    assert decoded == []


def test_it_stays_where_the_file_object_began() -> None:
    stream = io.BytesIO(b"before" + encode_picture(PHOTO, "JPEG"))
    stream.seek(6)
    assert load_picture(stream).size == PHOTO.size
