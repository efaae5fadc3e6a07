"""What the client asks of everybody, and the view of a picture that rivals of MDP send."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mdp.formats.plan import Encoding, Region
from mdp.pictures.crop import Pixels, crop, encode_jpeg, load_picture

#: The longest that anything is waited for.
PATIENCE_MS = 120_000.0


class Rival(Protocol):
    """One way of getting pictures classified."""

    name: str

    def ask(self, picture: Path) -> None:
        """Classify one picture file and wait for the answer."""

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        """The moments, in seconds, at which answers came with so many under way."""


def view(picture: Path, image_size: int) -> Pixels:
    """The view that MDP's client would cut, by the same functions."""
    return crop(load_picture(picture, smallest_side=image_size), Region(), image_size)


def content(pixels: Pixels, encoding: Encoding) -> bytes:
    """A view as it is sent."""
    return encode_jpeg(pixels) if encoding == "jpeg" else pixels.tobytes()


def in_order(
    pictures: Sequence[Path],
    in_flight: int,
    send: Callable[[Path], object],
    receive: Callable[[], object],
) -> list[float]:
    """Moments of answers that come in the order of their pictures, sent by a thread of its own."""
    places = threading.Semaphore(in_flight)

    def send_all() -> None:
        for picture in pictures:
            places.acquire()
            send(picture)

    sender = threading.Thread(target=send_all, daemon=True)
    sender.start()
    moments = []
    for _ in pictures:
        receive()
        moments.append(time.perf_counter())
        places.release()
    sender.join()
    return moments
