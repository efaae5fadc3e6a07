"""Puts kept items right: an item's pictures become a scene of the class that somebody names."""

import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from mdp.client.scenes import SceneFolder
from mdp.errors import ConfigError, InputError
from mdp.files import read_regular, write_bytes
from mdp.line.kept import MAX_RECORD_BYTES, RECORD, KeptItem, list_kept, read_kept
from mdp.protocol.messages import MAX_BUFFER_BYTES
from mdp.teach.taught import class_folder, remove_scenes

#: The name of a folder while its item is being moved.
_CLAIMED = ".teaching."
#: Moves that can be undone.
MOST_UNDONE = 50


class GoneError(InputError):
    """A kept item that is not there any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A kept item that became a scene."""

    item: str
    name: str
    label: str
    scene: Path
    record: bytes
    #: Whether it is a good scene that anomaly heads learn from, and none of a class.
    good: bool
    #: A picture's name in the scene -> the one that it had; by file, pictures that are not there.
    names: Mapping[str, str]
    left_out: Mapping[str, bytes]

    def copy_back(self, source: str, target: str) -> None:
        """Copy a picture of the scene, called as it was."""
        path = Path(target)
        shutil.copyfile(source, path.with_stem(self.names.get(path.stem, path.stem)))


class Review:
    """The kept items of one folder, and the moves of this process."""

    def __init__(self, kept: Path, scenes: Path) -> None:
        """Items in `kept` that a former process was moving are there again."""
        self._kept, self._scenes = kept, scenes
        self._moves: list[Move] = []
        #: One at a time: two would take back the same move.
        self._undoing = threading.Lock()
        for claimed in kept.glob(f"{_CLAIMED}*"):
            place = kept / claimed.name.removeprefix(_CLAIMED)
            if not place.exists():
                claimed.rename(place)

    def items(self) -> list[KeptItem]:
        """Items to look through, unsure first; raises ConfigError."""
        return list_kept(self._kept)

    def picture(self, name: str, device: str) -> tuple[bytes, str]:
        """The picture of a device, and its suffix; raises GoneError or ConfigError."""
        found = self._item(name).pictures.get(device)
        if found is None:
            raise GoneError(f"{name}: has no picture of {device[:80]!r}")
        return read_regular(found, MAX_BUFFER_BYTES)[0], found.suffix

    @property
    def last(self) -> Move | None:
        """The move that `undo` would take back."""
        return self._moves[-1] if self._moves else None

    def put_right(self, name: str, label: str) -> Move:
        """Make an item a scene of the class `label`, and remove it here.

        All at once for whoever reads either folder: an item that cannot be written stays. Raises
        GoneError where it is not there any more, and InputError.
        """
        target = class_folder(self._scenes, label)
        return self._move(name, label, target, lambda item: item.pictures, good=False)

    def make_good(
        self, name: str, folder: SceneFolder, choose: Callable[[KeptItem], Mapping[str, Path]]
    ) -> Move:
        """Make an item a good scene in `folder`, of the pictures that `choose` names by camera.

        As `put_right` does; raises InputError where `choose` does, too.
        """
        return self._move(name, folder.path.name, folder, choose, good=True)

    def _move(
        self,
        name: str,
        label: str,
        target: SceneFolder,
        choose: Callable[[KeptItem], Mapping[str, Path]],
        *,
        good: bool,
    ) -> Move:
        claimed = self._claim(name)
        try:
            item = read_kept(claimed)
            if not item.pictures:
                raise InputError(f"{name}: expected pictures, found none")
            record, _ = read_regular(claimed / RECORD, MAX_RECORD_BYTES)
            chosen = choose(item)
            found = {
                file: read_regular(file, MAX_BUFFER_BYTES)[0] for file in item.pictures.values()
            }
            pictures = {called: found[file] for called, file in chosen.items()}
            scene = target.write(_moment(item.record.time), pictures)
        except BaseException:
            claimed.rename(self._kept / name)
            raise
        shutil.rmtree(claimed, ignore_errors=True)
        move = Move(
            item=item.record.item,
            name=name,
            label=label,
            scene=scene,
            record=record,
            good=good,
            names={called.replace("/", "+"): file.stem for called, file in chosen.items()},
            left_out={
                file.name: content for file, content in found.items() if file not in chosen.values()
            },
        )
        with self._undoing:
            self._moves = [*self._moves, move][-MOST_UNDONE:]
        return move

    def undo(self) -> Move:
        """Take the last move back.

        Raises GoneError where there is none or it cannot be any more, and is then forgotten;
        InputError where the disk is full or the like: it can be undone later.
        """
        with self._undoing:
            return self._undo()

    def _undo(self) -> Move:
        if not self._moves:
            raise GoneError("nothing was put right since the gateway's start that can be undone")
        move = self._moves[-1]
        place = self._kept / move.name
        if place.exists() or not move.scene.is_dir():
            self._moves.pop()
            raise GoneError(f"{move.item}: cannot be undone: its scene was changed meanwhile")
        # Complete under a hidden name before anybody sees it.
        hidden = self._kept / f".undone.{move.name}"
        try:
            shutil.rmtree(hidden, ignore_errors=True)
            shutil.copytree(move.scene, hidden, copy_function=move.copy_back)
            for file, content in {**move.left_out, RECORD: move.record}.items():
                write_bytes(hidden / file, content)
            hidden.rename(place)
        except OSError as error:
            shutil.rmtree(hidden, ignore_errors=True)
            raise InputError(f"{place}: cannot be written: {error.strerror or error}") from error
        self._moves.pop()
        remove_scenes([move.scene])
        return move

    def discard(self, name: str) -> None:
        """Remove an item for good; raises GoneError."""
        shutil.rmtree(self._claim(name), ignore_errors=True)

    def _item(self, name: str) -> KeptItem:
        _check_name(name)
        try:
            return read_kept(self._kept / name)
        except ConfigError as error:
            raise GoneError(f"{name}: is not there any more") from error

    def _claim(self, name: str) -> Path:
        """Rename an item's folder, so that nobody else moves or reads it.

        Raises GoneError, and InputError where the folder may not be written.
        """
        _check_name(name)
        claimed = self._kept / f"{_CLAIMED}{name}"
        try:
            (self._kept / name).rename(claimed)
        except FileNotFoundError as error:
            raise GoneError(f"{name}: was put right already, or is not there any more") from error
        except OSError as error:
            raise InputError(f"{name}: cannot be moved: {error.strerror}") from error
        return claimed


def _check_name(name: str) -> None:
    if not name or name.startswith(".") or "/" in name or not name.isprintable():
        raise GoneError(f"{name[:80]!r}: expected the name of a kept item")


def _moment(time: str) -> datetime:
    """An item's time; now where its record has none that can be read."""
    try:
        found = datetime.fromisoformat(time)
    except ValueError:
        return datetime.now(UTC)
    return found if found.tzinfo else found.replace(tzinfo=UTC)
