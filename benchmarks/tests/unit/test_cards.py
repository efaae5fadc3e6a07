"""The table with cards: new cards of the asked kind, seen by each camera in its own way."""

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.scenes.cards import CARD_PX, Table, card_of, play, word_in
from benchmarks.scenes.render import SIDE_PX
from mdp.testing.folder_cameras import FolderCameras

DEVICES = ("alpha", "beta")


def kinds() -> dict[str, list[Image.Image]]:
    """Bright and dark cards, two of each."""
    return {
        "bright": [card_of(np.full((8, 8), level)) for level in (0.0, 1.0)],
        "dark": [card_of(np.full((8, 8), level)) for level in (15.0, 16.0)],
    }


def brightness(content: bytes) -> float:
    return float(np.asarray(Image.open(io.BytesIO(content)).convert("L")).mean())


def test_a_card_has_ink_on_paper() -> None:
    pixels = np.zeros((8, 8))
    pixels[3:5, 3:5] = 16.0
    grey = np.asarray(card_of(pixels).convert("L"))
    assert grey.shape == (CARD_PX, CARD_PX)
    assert grey[CARD_PX // 2, CARD_PX // 2] < 60
    assert grey[2, 2] > 200


def test_each_camera_sees_the_asked_kind_in_its_own_way() -> None:
    table = Table(kinds(), DEVICES, seed=1)
    bright = [table.next_views("bright") for _ in range(8)]
    dark = [table.next_views("dark") for _ in range(8)]
    for device in DEVICES:
        assert np.mean([brightness(v[device]) for v in bright]) > 20 + np.mean(
            [brightness(v[device]) for v in dark]
        )
    assert Image.open(io.BytesIO(bright[0]["alpha"])).size == (SIDE_PX, SIDE_PX)
    assert bright[0]["alpha"] != bright[0]["beta"]
    assert len({views["alpha"] for views in bright}) == len(bright)


def test_cards_are_laid_until_told_to_end(tmp_path: Path) -> None:
    out = FolderCameras(tmp_path, DEVICES)
    seen = []

    def wait() -> None:
        seen.append((out.folders["alpha"] / "now").read_bytes())
        if len(seen) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play(Table(kinds(), DEVICES, seed=0), out, lambda: "dark", wait)
    assert len(set(seen)) == 3


def test_the_word_in_the_file_says_which_kind(tmp_path: Path) -> None:
    file = tmp_path / "item"
    assert word_in(file, ("zero", "one")) == "zero"
    file.write_text("one\n")
    assert word_in(file, ("zero", "one")) == "one"
    file.write_text("cup\n")
    with pytest.raises(SystemExit, match="item: expected one of zero, one, got 'cup'"):
        word_in(file, ("zero", "one"))
