"""Pictures such as a camera hands over: JPEG files of 640 by 480 pixels."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mdp.pictures.crop import Pixels

WIDTH, HEIGHT, QUALITY = 640, 480, 90
#: Amplitudes fall with this power of the frequency. Those of photographs fall with about 1 (Field,
#: JOSA A 4 (1987)), but theirs also have smooth places; with 1.5 a view of 224 pixels takes as many
#: bytes as photographs did: 0.35 a pixel (`partitioner.estimates.network`).
_FALL = 1.5


def camera_pixels(seed: int) -> Pixels:
    """A random picture `[H, W, 3]` with the spectrum of natural ones, its colours much alike."""
    rng = np.random.default_rng(seed)
    down, right = np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None, :]
    frequency = np.hypot(down * HEIGHT, right * WIDTH)
    frequency[0, 0] = 1.0
    light = _field(rng, frequency)
    colours = [light + 0.3 * _field(rng, frequency) for _ in range(3)]
    pixels = np.stack(colours, axis=-1)
    pixels = 128 + 50 * (pixels - pixels.mean()) / pixels.std()
    return np.asarray(np.clip(pixels, 0, 255), dtype=np.uint8)


def _field(rng: np.random.Generator, frequency: NDArray[np.float64]) -> NDArray[np.float64]:
    phases = np.exp(2j * np.pi * rng.random(frequency.shape))
    return np.fft.irfft2(phases / frequency**_FALL, s=(HEIGHT, WIDTH))


def write_pictures(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03}.jpg" for number in range(count)]
    for seed, path in enumerate(paths):
        Image.fromarray(camera_pixels(seed)).save(path, "JPEG", quality=QUALITY)
    return paths
