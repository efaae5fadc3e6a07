"""The folder of kept items: a folder each, with its record and a picture of each camera.

    DIR/<item>/record.json       the record as published, with `why_kept`
    DIR/<item>/<device>.jpg      what the device's camera gave, or .png

`<item>` is the item's id made safe for file names; `record.json` has it as it is. A replica's name
has a slash, which is a plus in the file's name.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import msgspec
from msgspec import Struct

from mdp.errors import ConfigError
from mdp.files import read_regular
from mdp.requests.reason import Suspicion

#: Reasons to keep an item, the most telling one first.
WhyKept = Literal["unknown", "different", "unsure", "disagreement"]
Order = Literal["unsure", "oldest"]
RECORD = "record.json"
PICTURE_SUFFIXES = (".jpg", ".png")
#: Of a record; those of sixteen devices have some 4 kB.
MAX_RECORD_BYTES = 2**18
#: Characters of an id in a folder's name.
_NAME_CHARACTERS = 80


class KeptDevice(Struct, frozen=True, kw_only=True):
    """One device's own answer to a kept item."""

    label: str | None = msgspec.field(default=None, name="class")
    probability: float | None = None
    #: Decades above its own threshold.
    anomaly: float | None = None


class KeptAnswer(Struct, frozen=True, kw_only=True):
    """The fused answer of a kept item."""

    #: The likeliest class; of an unknown item the nearest one. None where nobody answered.
    label: str | None = msgspec.field(default=None, name="class")
    probability: float | None = None
    known: bool | None = None
    novelty: float | None = None
    anomaly: float | None = None
    suspects: dict[str, Suspicion] = {}
    devices: dict[str, KeptDevice] = {}


class KeptRecord(Struct, frozen=True, kw_only=True):
    """The part of an item's record that choosing and teaching need; others are left out."""

    item: str
    #: Of the trigger, in UTC (ISO 8601).
    time: str
    why_kept: WhyKept
    answer: KeptAnswer


class KeptItem(Struct, frozen=True, kw_only=True):
    """One kept item."""

    folder: Path
    record: KeptRecord
    #: Device -> its picture's file.
    pictures: Mapping[str, Path]


def folder_name(item: str) -> str:
    """The name of an item's folder: no other id has the same, whatever characters are in it."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", item)[:_NAME_CHARACTERS]
    if safe.startswith("."):
        safe = f"_{safe[1:]}"
    return safe if safe and safe == item else f"{safe}_{crc32(item.encode()):08x}"


def picture_name(device: str, suffix: str = ".jpg") -> str:
    """The name of a device's picture."""
    return f"{device.replace('/', '+')}{suffix}"


def read_kept(folder: Path) -> KeptItem:
    """The item in `folder`; raises ConfigError where its record is none."""
    path = folder / RECORD
    content, _ = read_regular(path, MAX_RECORD_BYTES)
    try:
        record = msgspec.json.decode(content, type=KeptRecord)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: expected the record of a kept item: {error}") from error
    pictures = {}
    try:
        for file in sorted(folder.iterdir()):
            if file.suffix in PICTURE_SUFFIXES and not file.name.startswith("."):
                pictures[file.stem.replace("+", "/")] = file
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror or error}") from error
    return KeptItem(folder=folder, record=record, pictures=pictures)


def list_kept(folder: Path, *, order: Order = "unsure") -> list[KeptItem]:
    """The items kept in `folder`, none where it does not exist; what is no item is left out.

    `oldest` is by time. `unsure` is the order in which people look through them: unknown items,
    the strangest first; then those that differ from the good ones, the most different first; then
    the least probable answers; the older one first where they are alike.
    An item that is removed meanwhile, as the watcher makes room, is left out too. Raises
    ConfigError for a folder that cannot be read.
    """
    found = []
    try:
        folders = [one for one in folder.iterdir() if not one.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read: {error.strerror or error}") from error
    for one in folders:
        try:
            found.append(read_kept(one))
        except ConfigError:
            continue
    return sorted(found, key=_age if order == "oldest" else _certainty)


def _age(kept: KeptItem) -> tuple[Any, ...]:
    return kept.record.time, kept.folder.name


def _certainty(kept: KeptItem) -> tuple[Any, ...]:
    answer, why = kept.record.answer, kept.record.why_kept
    score = {"unknown": answer.novelty, "different": answer.anomaly}.get(why)
    rank = ("unknown", "different").index(why) if why in ("unknown", "different") else 2
    return rank, -(score or 0.0), answer.probability or 0.0, *_age(kept)
