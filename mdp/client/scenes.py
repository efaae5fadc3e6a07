"""Pictures of one moment as files of data, and what is wrong with them. No sockets."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import combinations
from pathlib import Path

from mdp.errors import InputError
from mdp.files import replacing_folder

#: A scene with fewer pictures is not kept.
LEAST_CAMERAS = 2
#: A camera that gives the same bytes so many times in a row stands still.
FROZEN_AFTER = 3
_PNG = b"\x89PNG\r\n"
#: Names that data folders have for splits.
_SPLITS = ("train", "val", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Pictures of a fleet's cameras at one moment."""

    #: By device: a JPEG.
    pictures: Mapping[str, bytes]
    #: By device: why there is none.
    missing: Mapping[str, str]
    #: By device: when its picture was taken, on the client's clock, known to the time of one way.
    taken_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Suspicions:
    """Finds cameras that give the same bytes as another, or as before."""

    _last: dict[str, bytes] = field(default_factory=dict)
    _repeats: dict[str, int] = field(default_factory=dict)
    _said: set[tuple[str, ...]] = field(default_factory=set)

    def of(self, pictures: Mapping[str, bytes]) -> list[str]:
        """Faults of the pictures of one more moment; each is said once."""
        found: list[tuple[tuple[str, ...], str]] = []
        for device, content in pictures.items():
            same = self._last.get(device) == content
            self._repeats[device] = self._repeats[device] + 1 if same else 1
            self._last[device] = content
            if self._repeats[device] == FROZEN_AFTER:
                found.append(
                    ((device,), f"{device}: the same picture {FROZEN_AFTER} times in a row")
                )
        for one, other in combinations(sorted(pictures), 2):
            if pictures[one] == pictures[other]:
                text = f"{one} and {other}: the same picture: expected a camera for each"
                found.append(((one, other), text))
        new = [text for who, text in found if who not in self._said]
        self._said.update(who for who, _ in found)
        return new


@dataclass(slots=True)
class Tally:
    """Counts of what was recorded so far."""

    kept: int = 0
    #: Moments with fewer pictures than a scene needs.
    left_out: int = 0
    #: By device: moments without its picture.
    missing: Counter[str] = field(default_factory=Counter)

    @property
    def moments(self) -> int:
        """All moments."""
        return self.kept + self.left_out

    def add(self, scene: Scene) -> None:
        """Count one moment."""
        enough = len(scene.pictures) >= LEAST_CAMERAS
        self.kept, self.left_out = self.kept + enough, self.left_out + (not enough)
        self.missing.update(scene.missing.keys())

    def __str__(self) -> str:
        parts = ["1 scene" if self.kept == 1 else f"{self.kept} scenes"]
        if self.left_out:
            parts.append(f"{self.left_out} left out with fewer than {LEAST_CAMERAS} cameras")
        parts += [f"{n} without {device}" for device, n in sorted(self.missing.items())]
        return ", ".join(parts)


class SceneFolder:
    """Writes scenes of one class: OUT/LABEL/TIME/DEVICE.jpg, or .png."""

    def __init__(self, out: Path, label: str, name: str = "--label") -> None:
        """Writes nothing yet; `name` is that of the label in errors.

        Raises InputError unless `label` can be a class's folder.
        """
        if not label.isprintable() or "/" in label or label.startswith(".") or not label.strip():
            raise InputError(f"{name} {label!r}: expected the name of a folder")
        if label in _SPLITS:
            raise InputError(f"{name} {label}: expected a class, {label}/ would be a split")
        self.path = out / label

    def write(self, at: datetime, pictures: Mapping[str, bytes]) -> Path:
        """Write one scene, whole or not at all; raises InputError, also on a full disk."""
        while (scene := self.path / name_of(at)).exists():
            at += timedelta(milliseconds=1)
        made = [folder for folder in (self.path, self.path.parent) if not folder.exists()]
        try:
            with replacing_folder(scene) as folder:
                for device, content in pictures.items():
                    # A replica's name has a slash; no name has a plus.
                    suffix = ".png" if content.startswith(_PNG) else ".jpg"
                    (folder / f"{device.replace('/', '+')}{suffix}").write_bytes(content)
        except BaseException as error:
            # A class without a picture would be refused.
            with contextlib.suppress(OSError):
                for folder in made:
                    folder.rmdir()
            if isinstance(error, OSError):
                text = f"{scene}: cannot be written: {error.strerror or error}"
                raise InputError(text) from error
            raise
        return scene


def name_of(at: datetime) -> str:
    """A scene's name: the time in UTC to a millisecond, without characters that files lack."""
    text = at.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
    return text.replace(":", "-")
