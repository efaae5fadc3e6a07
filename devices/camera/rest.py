"""Tells whether a camera's scene moves or rests, by small grey pictures of its frames. Pure."""

import math
from collections import deque

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdp.pictures.crop import Pixels

Grey = NDArray[np.float32]
#: Cells a side of a small grey picture, and pixels a side that they are made of, about.
CELLS, SAMPLED = 16, 64
#: A difference is the mean over this many cells, those that differ most: an item is a small part of
#: the picture.
MOST_CELLS = 16
#: Grey levels (0 to 255) that all cells may have in common: exposure, and lamps that flicker.
MOST_LIGHT = 16.0
#: Grey levels of a difference that is never noise.
LEAST_CHANGE = 4.0
#: What moves differs from one frame to the next by so many times what noise does: the tenth
#: part of the latest frames that differ least have noise alone, as nothing moves all the time.
ABOVE_NOISE, NOISE_FRAMES, QUIET_SHARE = 4.0, 256, 0.1
#: How soon the resting picture follows daylight.
FOLLOW_S = 5.0


def grey_of(picture: Image.Image | Pixels) -> Grey:
    """The picture `[H, W, 3]` as grey levels `[CELLS, CELLS]`."""
    pixels = np.asarray(picture)
    height, width = pixels.shape[:2]
    step = max(1, min(height, width) // SAMPLED)
    sampled = np.ascontiguousarray(pixels[::step, ::step])
    small = Image.fromarray(sampled).convert("L").resize((CELLS, CELLS), Image.Resampling.BOX)
    return np.asarray(small, dtype=np.float32)


def difference(one: Grey, other: Grey) -> float:
    """Mean difference of two grey pictures in the cells that differ most, beyond light."""
    apart = one - other
    apart = np.abs(apart - np.clip(np.median(apart), -MOST_LIGHT, MOST_LIGHT))
    return float(np.sort(apart, axis=None)[-MOST_CELLS:].mean())


class SceneRest:
    """Rest of the scene before one camera: its length, and the changes before it.

    Each frame is compared with the picture of the present rest, so that also what moves slowly is
    seen; one that differs is a change, and begins a rest of its own.
    """

    def __init__(self) -> None:
        #: Frames that were unlike those before.
        self.changes = 0
        self._since_s = self._seen_s = 0.0
        self._resting: Grey | None = None
        self._last: Grey | None = None
        #: Of the latest frames: how much each differed from the one before.
        self._noise: deque[float] = deque(maxlen=NOISE_FRAMES)

    @property
    def still_s(self) -> float:
        """From the first frame of the present rest to the newest one."""
        return self._seen_s - self._since_s

    def saw(self, grey: Grey, taken_s: float) -> None:
        """Take in the newest frame, of which `taken_s` may be a little earlier than the last one's.

        A frame that is fetched twice over a network has two times.
        """
        taken_s = max(taken_s, self._seen_s)
        if self._resting is None or self._last is None:
            self._since_s, self._resting = taken_s, grey.copy()
        else:
            self._noise.append(difference(grey, self._last))
            if difference(grey, self._resting) > self._threshold():
                self.changes += 1
                self._since_s, self._resting = taken_s, grey.copy()
            else:
                share = -math.expm1(-(taken_s - self._seen_s) / FOLLOW_S)
                self._resting += np.float32(share) * (grey - self._resting)
        self._last, self._seen_s = grey, taken_s

    def _threshold(self) -> float:
        quiet = sorted(self._noise)[int(QUIET_SHARE * len(self._noise))]
        return max(LEAST_CHANGE, ABOVE_NOISE * quiet)
