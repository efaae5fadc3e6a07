"""What the client asks of everybody, MDP itself, and the view of a picture that its rivals send."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from mdp import Client
from mdp.errors import MDPError
from mdp.formats.plan import Encoding, Region
from mdp.pictures.crop import crop, encode_jpeg, load_picture
from mdp.requests.prediction import Prediction

#: The longest that anything is waited for.
PATIENCE_MS = 120_000.0


class Rival(Protocol):
    """One way of getting pictures classified."""

    name: str

    def ask(self, picture: Path) -> object:
        """Classify one picture file and wait for the answer."""

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        """The moments, in seconds, at which answers came with so many under way."""


class MdpRival:
    """A fleet that answers with all its members, as its users have it: the client, keys, agents."""

    def __init__(self, name: str, fleet: Path) -> None:
        self.name = name
        self._client = Client.connect(fleet, timeout_s=30.0)

    def ask(self, picture: Path) -> None:
        whole(self._client.classify(picture, deadline_ms=PATIENCE_MS))

    def stream(self, pictures: Sequence[Path], in_flight: int) -> list[float]:
        moments = []
        for answer in self._client.stream(pictures, deadline_ms=PATIENCE_MS, in_flight=in_flight):
            moments.append(time.perf_counter())
            assert isinstance(answer, Prediction)  # errors are raised
            whole(answer)
        return moments

    def close(self) -> None:
        self._client.close()


def whole(answer: Prediction) -> None:
    """Raise MDPError unless every member was heard: a part of an answer would be no comparison."""
    if answer.partial:
        raise MDPError(f"expected all members' answers, missing: {answer.missing}")


def content(picture: Path, image_size: int, encoding: Encoding) -> bytes:
    """The view that MDP's client would cut, by the same functions, as it is sent."""
    pixels = crop(load_picture(picture, smallest_side=image_size), Region(), image_size)
    return encode_jpeg(pixels) if encoding == "jpeg" else pixels.tobytes()
