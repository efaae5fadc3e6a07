"""A table with a card on it, before folders that play cameras round it: handwritten digits.

    python -m benchmarks.scenes.cards cameras/ --devices raspberry-pi-5-1 raspberry-pi-5-2

Every card is one of scikit-learn's digits (E. Alpaydin and C. Kaynak, Optical recognition of
handwritten digits, UCI, 1998), seen by each camera with perspective, light, focus and things in the
way (benchmarks/scenes/render.py). The word in the file `item` beside the folder, as `seven`, says
which kind lies there; a new card of it every `--every` seconds, until SIGTERM or Ctrl-C.
Needs the extra `partition`.
"""

import argparse
import io
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.scenes.render import cameras, view
from mdp.testing.folder_cameras import FolderCameras

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
DEVICES = tuple(f"raspberry-pi-5-{number}" for number in range(1, 5))
ITEM = "item"
#: Seconds that a card lies there: less than between two recorded scenes.
EVERY_S = 0.3
#: Pixels of a card, the grey of its paper and of its ink.
CARD_PX, _PAPER, _INK = 224, 235, 25
#: The darkest value of scikit-learn's digits, in whose files ink is bright.
_FULL = 16.0


def card_of(pixels: np.ndarray) -> Image.Image:
    """A card with a digit of shape (8, 8) in ink: values 0 to 16."""
    levels = _PAPER - (_PAPER - _INK) * pixels / _FULL
    digit = Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    card = Image.new("RGB", (CARD_PX, CARD_PX), (_PAPER,) * 3)
    side = round(CARD_PX * 0.8)
    edge = (CARD_PX - side) // 2
    card.paste(digit.resize((side, side), Image.Resampling.BICUBIC), (edge, edge))
    return card


def cards() -> dict[str, list[Image.Image]]:
    """Some 180 cards of each word."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return {
        word: [card_of(pixels) for pixels in found.images[found.target == number]]
        for number, word in enumerate(WORDS)
    }


class Table:
    """Views of the cameras round a table; cards of a kind come in a drawn order, none twice."""

    def __init__(
        self, kinds: Mapping[str, Sequence[Image.Image]], devices: Sequence[str], seed: int
    ) -> None:
        """`seed` places the cameras and shuffles the cards."""
        self._random = np.random.default_rng(seed)
        self._cameras = dict(zip(devices, cameras(seed, len(devices)), strict=True))
        self._others = [card for some in kinds.values() for card in some[:1]]
        self._kinds = kinds
        self._waiting = {word: self._shuffled(word) for word in kinds}

    def next_views(self, word: str) -> dict[str, bytes]:
        """A JPEG for each device, of the next card of this kind."""
        card = next(self._waiting[word])
        return {device: self._view(card, device) for device in self._cameras}

    def _shuffled(self, word: str) -> Iterator[Image.Image]:
        while True:
            for place in self._random.permutation(len(self._kinds[word])):
                yield self._kinds[word][place]

    def _view(self, card: Image.Image, device: str) -> bytes:
        seen, content = view(card, self._cameras[device], self._others, self._random), io.BytesIO()
        seen.save(content, "JPEG", quality=90)
        return content.getvalue()


def word_in(file: Path, known: Sequence[str]) -> str:
    """The word in a file, or the first one where there is none yet; ends the program for others."""
    word = file.read_text().strip() if file.exists() else ""
    if word and word not in known:
        sys.exit(f"{file}: expected one of {', '.join(known)}, got {word!r}")
    return word or known[0]


def play(
    table: Table, out: FolderCameras, item: Callable[[], str], wait: Callable[[], None]
) -> None:
    """Lay card after card, until `wait` raises."""
    while True:
        out.put(table.next_views(item()))
        wait()


def main(words: Sequence[str]) -> None:
    """Play until told to end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scenes.cards")
    parser.add_argument("cameras", type=Path, help="folder in which each camera gets one")
    parser.add_argument("--devices", nargs="+", default=DEVICES)
    parser.add_argument("--every", type=float, default=EVERY_S, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    options.cameras.mkdir(parents=True, exist_ok=True)
    kinds, item = cards(), options.cameras.parent / ITEM
    play(
        Table(kinds, options.devices, options.seed),
        FolderCameras(options.cameras, options.devices),
        lambda: word_in(item, tuple(kinds)),
        lambda: time.sleep(options.every),
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(130)
