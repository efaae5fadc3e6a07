"""The folder of scenes that a fleet is taught by, CLASS/SCENE/DEVICE.jpg as of `mdp record`."""

import os
import shutil
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mdp.client.scenes import SceneFolder
from mdp.errors import InputError

#: Characters of a class's name that is given in the page.
MAX_LABEL = 80
PICTURES = (".jpg", ".jpeg", ".png")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaughtClass:
    """One class, and the scenes of it that are there."""

    label: str
    scenes: int
    #: Device -> pictures of its camera.
    cameras: dict[str, int] = field(default_factory=dict)


def class_folder(scenes: Path, label: str) -> SceneFolder:
    """Folder for the scenes of a class; raises InputError for what is no class's name."""
    if len(label) > MAX_LABEL:
        raise InputError(f"label: expected at most {MAX_LABEL} characters, got {len(label)}")
    return SceneFolder(scenes, label, "label")


def count_classes(scenes: Path) -> list[TaughtClass]:
    """The classes in a folder of scenes by name; none where it does not exist.

    Hidden folders, as of a scene that is being written, are left out, and those whose name is no
    text that a page can show.
    """
    found = []
    for label in _folders(scenes):
        cameras: Counter[str] = Counter()
        numbers = 0
        for scene in _folders(scenes / label):
            numbers += 1
            with suppress(OSError):
                cameras.update(
                    Path(name).stem.replace("+", "/")
                    for name in os.listdir(scenes / label / scene)  # noqa: PTH208
                    if name.endswith(PICTURES) and not name.startswith(".") and name.isprintable()
                )
        found.append(
            TaughtClass(label=label, scenes=numbers, cameras=dict(sorted(cameras.items())))
        )
    return found


def remove_scenes(paths: list[Path]) -> int:
    """Remove scenes, each at once, and classes that have none left; returns how many there were."""
    removed = 0
    for path in paths:
        aside = path.with_name(f".{path.name}.removed")
        try:
            path.rename(aside)
        except FileNotFoundError:
            continue
        shutil.rmtree(aside, ignore_errors=True)
        removed += 1
        # A class without a scene would be refused.
        with suppress(OSError):
            path.parent.rmdir()
    return removed


def _folders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and entry.name.isprintable() and entry.is_dir()
            )
    except OSError:
        return []
