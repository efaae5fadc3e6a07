"""A scene that moves, and one that rests, by small grey pictures."""

import numpy as np
import pytest
from PIL import Image

from devices.camera.rest import CELLS, SceneRest, difference, grey_of
from mdp.pictures.crop import Pixels

FRAME_S = 0.1
HEIGHT, WIDTH = 240, 320


def scene(at: float | None, *, noise: float = 0.0, seed: int = 0, light: float = 0.0) -> Pixels:
    """A grey belt with a dark item at the share `at` of its width, or without one."""
    rng = np.random.default_rng(seed)
    picture = np.full((HEIGHT, WIDTH, 3), 150.0 + light)
    if at is not None:
        left = int(at * WIDTH)
        picture[100:150, max(0, left) : max(0, left + 50)] = 60.0 + light
    picture += rng.normal(0, noise, picture.shape)
    return picture.clip(0, 255).astype(np.uint8)


class Belt:
    """Frames one after another, as one camera sees them."""

    def __init__(self, noise: float = 0.0) -> None:
        self.rest, self.noise, self.turn = SceneRest(), noise, 0

    def see(self, at: float | None, frames: int = 1, light: float = 0.0) -> None:
        for _ in range(frames):
            self.turn += 1
            picture = scene(at, noise=self.noise, seed=self.turn, light=light)
            self.rest.saw(grey_of(picture), self.turn * FRAME_S)


def test_a_grey_picture_has_the_means_of_its_cells() -> None:
    picture = np.zeros((64, 96, 3), dtype=np.uint8)
    picture[:, 48:] = 200
    for given in (picture, Image.fromarray(picture)):
        grey = grey_of(given)
        assert grey.shape == (CELLS, CELLS)
        assert {*grey[:, : CELLS // 2].flat} == {0.0}
        assert {*grey[:, CELLS // 2 :].flat} == {200.0}
    assert grey_of(np.full((3, 5, 3), 7, dtype=np.uint8)).shape == (CELLS, CELLS)


@pytest.mark.parametrize("noise", [0.0, 8.0])
def test_an_item_comes_rests_and_goes(noise: float) -> None:
    belt = Belt(noise)
    belt.see(None, 30)
    assert belt.rest.changes == 0
    assert belt.rest.still_s == pytest.approx(29 * FRAME_S)
    for number in range(8):
        belt.see(number / 16)
    arrived = belt.rest.changes
    assert arrived >= 6
    assert belt.rest.still_s <= FRAME_S
    belt.see(0.5, 20)
    # The step to where it rests is a change too.
    assert belt.rest.changes - arrived <= 1
    assert belt.rest.still_s >= 19 * FRAME_S - 1e-9
    belt.see(None)
    assert belt.rest.still_s == 0.0


def test_an_item_that_is_there_for_one_frame_is_counted() -> None:
    belt = Belt()
    belt.see(None, 10)
    belt.see(0.4)
    belt.see(None, 10)
    assert belt.rest.changes == 2


def test_daylight_and_exposure_are_no_change() -> None:
    belt = Belt(4.0)
    for number in range(300):
        belt.see(0.3, light=60 * number / 300)
    assert belt.rest.changes == 0
    belt.see(0.3, 5, light=50)
    assert belt.rest.changes == 0
    # A lamp that goes out is one.
    belt.see(0.3, 5, light=-50)
    assert belt.rest.changes == 1


def test_what_moves_slowly_is_seen() -> None:
    belt = Belt()
    for number in range(60):
        belt.see(number / 300)
    assert belt.rest.changes > 3


def test_a_difference_is_that_of_the_cells_that_differ_most() -> None:
    plain = np.full((CELLS, CELLS), 100.0, dtype=np.float32)
    item = plain.copy()
    item[:4, :4] += 80
    assert difference(plain, plain + 16) == 0.0
    assert difference(plain, plain + 50) == 34.0
    assert difference(plain, item) == 80.0


def test_a_frame_that_is_fetched_twice_has_rested_no_less_than_before() -> None:
    rest = SceneRest()
    for taken_s in (10.0, 9.96, 10.3, 10.28):
        rest.saw(grey_of(scene(0.4)), taken_s)
        assert rest.still_s >= 0.0
    assert rest.still_s == pytest.approx(0.3)
