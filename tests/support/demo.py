"""Bundles and scenes for `mdp demo`, and what is left of its processes."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psutil
from PIL import Image

from mdp.testing.bundles import DEVICES, LABELS, colour_picture
from mdp.testing.processes import PATIENCE_S


def write_scenes(folder: Path) -> Path:
    """Every camera sees another colour than the scene's in one of six, each in other ones."""
    for place, label in enumerate(LABELS):
        for number in range(12):
            scene = folder / label / f"s{number:02d}"
            scene.mkdir(parents=True)
            for turn, device in enumerate(DEVICES):
                other = LABELS[(place + 1) % len(LABELS)]
                seen = other if number % 6 == turn else label
                Image.fromarray(colour_picture(seen)).save(scene / f"{device}.png")
    (folder / "README.md").write_text("What these are.")
    return folder


def agents_of(bundle: Path) -> list[list[str]]:
    """Command lines of the agents that still serve `bundle`."""
    running = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [line for line in running if str(bundle) in line and "run" in line]


def asked(
    url: str, data: bytes | None = None, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, bytes]:
    """Status and body of a request."""
    try:
        with urlopen(Request(url, data, dict(headers)), timeout=PATIENCE_S) as answer:
            return answer.status, answer.read()
    except HTTPError as error:
        with error:
            return error.code, error.read()
