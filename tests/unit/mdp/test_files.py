"""Strict reading; writing whole or not at all."""

import errno
import os
from pathlib import Path
from typing import Annotated

import pytest
from msgspec import Meta

from mdp import files
from mdp.errors import ConfigError, InputError
from mdp.files import (
    MAX_TOML_BYTES,
    Record,
    read_json,
    read_toml,
    replacing,
    replacing_folder,
    write_bytes,
    write_json,
    write_toml,
)


class Inner(Record, frozen=True):
    size: Annotated[int, Meta(gt=0)]


class Sample(Record, frozen=True):
    name: str
    inner: Inner
    note: str | None = None


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupt_writing(path: Path) -> None:
    path.write_text("half of the n")
    raise KeyboardInterrupt


class Outer(Record, frozen=True):
    samples: list[Sample] | None = None
    inners: dict[str, Inner] | None = None
    pairs: tuple[Inner, ...] = ()


SAMPLE = Sample(name="x", inner=Inner(size=3))
BAD_TOML = [
    (
        b'name = "x"\nsurprise = 1\n[inner]\nsize = 1',
        "`surprise`: expected some of name, inner, note$",
    ),
    (b'name = "x"\n[inner]\nsize = 1\nsize_mb = 2', r"unknown field `size_mb` - at `\$\.inner`"),
    (b"name = 3\n[inner]\nsize = 1", r"Expected `str`, got `int` - at `\$\.name`"),
    (b'name = "x"\n[inner]\nsize = "1"', r"Expected `int`, got `str` - at `\$\.inner\.size`"),
    (b'name = "x"\n[inner]\nsize = 0', r"Expected `int` >= 1 - at `\$\.inner\.size`"),
    (b'name = "x"', "missing required field `inner`"),
    (b'name = "x', "Illegal character|Unterminated|Expected"),
    (b'name = "\xff"', "can't decode byte 0xff"),
    (b"name = " + b"[" * 5000, "nested too deeply"),
    (b"name = " + b"9" * 5000, "Exceeds the limit"),
    (b"", "missing required field `name`"),
    # Python's parser would take 1.6 GB for these 40 kB.
    (b"a." * 20_000 + b"a = 1", "keys of at most 8 parts, found one of more"),
    (b"x = {" + b"'a' . " * 8 + b"a = 1}", "keys of at most 8 parts, found one of more"),
    (b"[[" + b'"]".' * 8 + b"a]]", "keys of at most 8 parts, found one of more"),
    (b"# " + b"x" * MAX_TOML_BYTES, "at most 1,048,576 bytes, found more"),
    (b'name = "\\u001b]0;owned"\ninner = {size = 1}', r"printable text, .* at `\$\.name`"),
]
BAD_OUTER = [
    (b'[[samples]]\nname = "x"\nnom = "y"\ninner = {size = 1}', "name, inner, note"),
    (b'[[samples]]\nname = "x"\ninner = {size = 1, sighs = 1}', "size"),
    (b"[inners.a]\nsize = 1\nsighs = 1", "size"),
    (b"pairs = [{size = 1}, {sighs = 1}]", "size"),
    (b"pears = []", "samples, inners, pairs"),
]
BAD_JSON = [
    (b'{"name": "x", "inner": {"size": 1}, "surprise": 1}', "unknown field `surprise`"),
    (b'{"name": "x", "inner": {"size": 1.5}}', r"Expected `int`, got `float` - at `\$\.inner\.s"),
    (b'{"name": "x", "inner": []}', r"Expected `object`, got `array` - at `\$\.inner`"),
    (b'{"name": "\xff", "inner": {"size": 1}}', "invalid|utf-8|UTF-8"),
    (b'{"name": "x"', "truncated"),
    (b"", "truncated"),
    (b"[" * 100_000, "Expected `object`, got `array`"),
]


@pytest.mark.parametrize(("content", "keys"), BAD_OUTER)
def test_an_unknown_key_is_answered_by_those_of_its_place(
    tmp_path: Path, content: bytes, keys: str
) -> None:
    (tmp_path / "outer.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=rf": expected some of {keys}$"):
        read_toml(tmp_path / "outer.toml", Outer)


@pytest.mark.parametrize(("content", "expected"), BAD_TOML)
def test_bad_toml_names_file_and_key(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"bad.toml: .*({expected})"):
        read_toml(path, Sample)


@pytest.mark.parametrize(("content", "expected"), BAD_JSON)
def test_bad_json_names_file_and_key(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"bad.json: .*({expected})"):
        read_json(path, Sample)


@pytest.mark.parametrize("read", [read_toml, read_json])
def test_what_cannot_be_read_is_named(tmp_path: Path, read: object) -> None:
    assert callable(read)
    with pytest.raises(ConfigError, match="nowhere: cannot be read: No such file or directory"):
        read(tmp_path / "nowhere", Sample)
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read(tmp_path, Sample)


def test_dots_of_texts_and_comments_are_no_keys(tmp_path: Path) -> None:
    path = tmp_path / "sample.toml"
    dots = "a.b.c.d.e.f.g.h.i.j"
    path.write_text(
        f"# {dots}\nname = \"{dots} \\\" {dots}\"\nnote = '''{dots}'''  # '{dots}\n"
        f'inner.size = 1 # """\n'
    )
    assert read_toml(path, Sample).note == dots


def test_toml_round_trip_leaves_out_what_has_no_value(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "sample.toml"
    write_toml(path, SAMPLE)
    assert "note" not in path.read_text()
    assert read_toml(path, Sample) == SAMPLE


def test_json_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "sample.json"
    write_json(path, SAMPLE)
    assert path.read_text().endswith("}\n")
    assert read_json(path, Sample) == SAMPLE


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as temporary:
        interrupt_writing(temporary)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert names(tmp_path) == ["file"]


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A folder that holds a file `old`, alone in another one."""
    path = tmp_path / "in" / "folder"
    path.mkdir(parents=True)
    (path / "old").write_text("old")
    return path


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(InputError, match="file: cannot be written: No space left on device"):
        write_bytes(path, b"new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (OSError(errno.ENOSPC, "No space"), InputError("folder: cannot be written: No space")),
        (KeyboardInterrupt("Ctrl-C"), KeyboardInterrupt("Ctrl-C")),
    ],
)
def test_failure_keeps_the_folder(old: Path, error: BaseException, raised: BaseException) -> None:
    def fail(temporary: Path) -> None:
        (temporary / "new").write_text("half of the n")
        raise error

    with pytest.raises(type(raised), match=str(raised)), replacing_folder(old) as temporary:
        fail(temporary)
    assert names(old) == ["old"]
    assert names(old.parent) == ["folder"]


def test_places_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    below = r"below: cannot be written: (Not a directory|File exists)"
    with pytest.raises(InputError, match=below):
        write_bytes(tmp_path / "file" / "below", b"")
    with pytest.raises(InputError, match="folder: cannot be written: Is a directory"):
        write_bytes(tmp_path / "folder", b"")
    for path, expected in (
        (tmp_path / "file" / "below", below),
        (tmp_path / "file", "file: expected a folder or nothing, found a file"),
    ):
        with pytest.raises(InputError, match=expected), replacing_folder(path):
            pass
    assert (tmp_path / "file").read_text() == "mine"
    assert names(tmp_path) == ["file", "folder"]


def test_a_new_folder_takes_the_place_of_the_old_one(old: Path) -> None:
    with replacing_folder(old) as temporary:
        (temporary / "deep").mkdir()
        (temporary / "deep" / "new").write_text("new")
        assert names(old) == ["old"]
    assert (old / "deep" / "new").read_text() == "new"
    assert names(old) == ["deep"]
    assert names(old.parent) == ["folder"]


def test_a_failed_exchange_is_undone(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = Path.replace

    def refusing(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", refusing)
    with pytest.raises(OSError, match="Input/output error"), replacing_folder(old) as temporary:
        (temporary / "new").write_text("new")
    assert names(old) == ["old"]
    assert names(old.parent) == ["folder"]


def test_a_link_to_a_folder_stays_a_link(old: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(old)
    with replacing_folder(link) as temporary:
        (temporary / "new").write_text("new")
    assert link.is_symlink()
    assert names(old) == ["new"]
    assert names(tmp_path) == ["in", "link"]
