"""Pictures behind a mask: nothing of the hidden boxes, and nothing outside the region."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mdp.formats.mask import CameraMask, PictureBox
from mdp.pictures.masking import MaskError, mask_picture, side_before

SIDES = st.integers(1, 60)
SHARES = st.floats(0, 1)


@st.composite
def boxes(draw: st.DrawFn, least: float = 0.001) -> PictureBox:
    left, top = draw(st.floats(0, 1 - least)), draw(st.floats(0, 1 - least))
    return PictureBox(
        left=left,
        top=top,
        right=draw(st.floats(min(1.0, left + least * 1.001), 1)),
        bottom=draw(st.floats(min(1.0, top + least * 1.001), 1)),
    )


@st.composite
def masks_and_sides(draw: st.DrawFn) -> tuple[CameraMask, int, int]:
    width, height = draw(SIDES), draw(SIDES)
    region, hidden = draw(boxes(0.06)), draw(st.lists(boxes(), max_size=4))
    return CameraMask(width=width, height=height, region=region, hidden=hidden), width, height


@given(masks_and_sides(), st.booleans())
def test_pixels_that_a_hidden_box_touches_decide_nothing(
    drawn: tuple[CameraMask, int, int], as_image: bool
) -> None:
    mask, width, height = drawn
    one = np.full((height, width, 3), 200, np.uint8)
    other = one.copy()
    xs, ys = np.arange(width), np.arange(height)
    seen = (xs + 1 > mask.region.left * width) & (xs < mask.region.right * width)
    seen_y = (ys + 1 > mask.region.top * height) & (ys < mask.region.bottom * height)
    secret = ~(seen_y[:, None] & seen[None, :])
    for box in mask.hidden:
        across = (xs + 1 > box.left * width) & (xs < box.right * width)
        down = (ys + 1 > box.top * height) & (ys < box.bottom * height)
        secret |= down[:, None] & across[None, :]
    other[secret] = 17
    results = []
    for pixels in (one, other):
        before = pixels.copy()
        given_picture = Image.fromarray(pixels) if as_image else pixels
        results.append(np.asarray(mask_picture(given_picture, mask)))
        # A copy: the camera's own picture is as it was.
        assert np.array_equal(pixels, before)
    assert np.array_equal(results[0], results[1])
    assert set(np.unique(results[0])) <= {0, 200}


def test_an_array_and_an_image_are_masked_alike() -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (72, 96, 3), np.uint8)
    mask = CameraMask(
        width=1280,
        height=960,
        region=PictureBox(left=0.25, right=0.75),
        hidden=[PictureBox(left=0.5, top=0.5), PictureBox(right=0.1)],
    )
    cut = np.asarray(mask_picture(Image.fromarray(pixels), mask))
    assert np.array_equal(cut, np.asarray(mask_picture(pixels, mask)))
    assert cut.shape == (72, 48, 3)
    assert not cut[36:, 24:].any()
    assert np.array_equal(cut[:36], pixels[:36, 24:72])
    assert side_before(100, mask) == 200


@pytest.mark.parametrize(("width", "height"), [(640, 480), (480, 640), (16, 12), (9, 16)])
def test_a_picture_of_another_shape_is_refused(width: int, height: int) -> None:
    mask = CameraMask(width=1280, height=720)
    with pytest.raises(MaskError, match=rf"^a picture of {width}x{height}: expected the shape of"):
        mask_picture(np.zeros((height, width, 3), np.uint8), mask)


@given(st.integers(1, 4000), st.integers(1, 4000), st.sampled_from((1, 2, 4, 8)))
def test_a_picture_that_was_decoded_smaller_has_the_shape(
    width: int, height: int, scale: int
) -> None:
    assert CameraMask(width=width, height=height).fits(-(-width // scale), -(-height // scale))


def test_boxes_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="a box needs `left` < `right`"):
        PictureBox(left=0.5, right=0.5)
    with pytest.raises(ValueError, match=r"`region`: expected at least 0\.05 of each side"):
        CameraMask(width=9, height=9, region=PictureBox(right=0.01))
