"""docs/reference/training.md names every key of a training, with the default that it has."""

import re
from pathlib import Path

import msgspec
import pytest

from mdp.files import Record
from partitioner.config import read_config
from partitioner.run.settings import (
    Augmentation,
    MemberSchedule,
    RunOptions,
    TeacherSchedule,
)

DOC = (Path(__file__).parents[4] / "docs/reference/training.md").read_text()
#: Schedules have a table of the keys that all have, with one column for each kind of network.
COLUMNS: list[tuple[type[Record], int]] = [
    (MemberSchedule, 2),
    (TeacherSchedule, 3),
]


def rows() -> dict[str, list[str]]:
    """Cells of every row that begins with a key, by each key it names."""
    found = {}
    for line in DOC.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        for name in re.findall(r"`([a-z][a-z_.]+)`", cells[0]) if len(cells) > 2 else []:
            found[name] = cells
    return found


def told(cell: str) -> object:
    """A default as the table tells it."""
    text = cell.strip("`").partition(",")[0]
    if text in ("off", "none"):
        return text
    return float(text) if re.fullmatch(r"[0-9.]+", text) else text


def said(value: object) -> object:
    """A default as the table would tell it."""
    if value is None:
        return "none"
    if value is False or value == "":
        return "off"
    return float(value) if isinstance(value, (int, float)) else value


@pytest.mark.parametrize(
    ("kind", "section"),
    [
        (MemberSchedule, "schedule"),
        (RunOptions, "run"),
        (Augmentation, "augmentation"),
    ],
)
def test_every_key_stands_there_with_its_default(kind: type[Record], section: str) -> None:
    table = rows()
    shared = {field.name for field in msgspec.structs.fields(TeacherSchedule)}
    compared = 0
    for field in msgspec.structs.fields(kind):
        name = f"{section}.{field.name}"
        # Schedules have a table of their own; mirroring depends on the data.
        if field.name in shared or name in ("schedule.patience", "augmentation.flip"):
            continue
        assert name in table, f"docs/reference/training.md does not name {name}"
        if not field.required:
            assert told(table[name][2]) == said(field.default), name
            compared += 1
    assert compared > 1


@pytest.mark.parametrize(("kind", "column"), COLUMNS)
def test_every_schedule_stands_there_with_its_defaults(kind: type[Record], column: int) -> None:
    table = rows()
    for field in msgspec.structs.fields(TeacherSchedule):
        default = next(f.default for f in msgspec.structs.fields(kind) if f.name == field.name)
        if default is None:  # depends on where the weights come from
            continue
        assert told(table[field.name][column]) == said(default), field.name


def test_the_settings_file_that_is_shown_is_read(tmp_path: Path) -> None:
    shown = re.search(r"```toml\n(.*?)```", DOC, re.DOTALL)
    assert shown is not None
    (tmp_path / "run.toml").write_text(shown[1])
    config = read_config(tmp_path / "run.toml")
    assert (config.schedule.epochs, config.augmentation.variants) == (10, 12)
