"""Pictures such as a camera hands over: JPEG files of 640 by 480 pixels."""

from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT, QUALITY = 640, 480, 90
#: Amplitudes of natural pictures fall as one over the frequency (Field, JOSA A 4 (1987)).
_FALL = 1.0


def camera_pixels(seed: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """A random picture `[H, W, 3]` with the spectrum of natural ones, its colours much alike."""
    rng = np.random.default_rng(seed)
    down, right = np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None, :]
    frequency = np.hypot(down * HEIGHT, right * WIDTH)
    frequency[0, 0] = 1.0
    light = _field(rng, frequency)
    colours = [light + 0.3 * _field(rng, frequency) for _ in range(3)]
    pixels = np.stack(colours, axis=-1)
    pixels = 128 + 50 * (pixels - pixels.mean()) / pixels.std()
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _field(
    rng: np.random.Generator, frequency: np.ndarray[tuple[int, ...], np.dtype[np.float64]]
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    phases = np.exp(2j * np.pi * rng.random(frequency.shape))
    return np.fft.irfft2(phases / frequency**_FALL, s=(HEIGHT, WIDTH))


def write_pictures(folder: Path, count: int) -> list[Path]:
    """`count` files in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:03}.jpg" for number in range(count)]
    for seed, path in enumerate(paths):
        Image.fromarray(camera_pixels(seed)).save(path, "JPEG", quality=QUALITY)
    return paths
