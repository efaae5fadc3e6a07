"""Words after `mdp classify`, and how the time between pictures is written."""

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mdp.arguments import seconds
from mdp.cameras import Source
from mdp.cli import classify
from mdp.cli.classify import Given, parse_pictures, pictures_of, progress
from mdp.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.png", "a.png", "door.MP4", "sub/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def test_files_folders_patterns_and_videos(folder: Path) -> None:
    film = Source(kind="video", place=str(folder / "door.MP4"))
    a, b, c = folder / "a.png", folder / "b.png", folder / "sub" / "c.png"
    assert parse_pictures([str(folder)]) == [a, b, film, c]
    assert parse_pictures([f"{folder}/*.png", f"{folder}/**/c.png"]) == [a, b, c]
    # Links that lead up are not followed, or there would be no end.
    for name in ("up", "higher"):
        (folder / "sub" / name).symlink_to(folder)
    (folder / "sub" / ".c.png").touch()
    assert parse_pictures([f"{folder}/**/*.png"]) == [a, b, c]
    assert parse_pictures([f"{folder}/**"]) == [a, b, film, c]
    assert parse_pictures([f"{folder}/**/.c**"]) == [folder / "sub" / ".c.png"]
    # A file whose name is that of a pattern is that file.
    (folder / "[ab].png").touch()
    assert parse_pictures([f"{folder}/[ab].png"]) == [folder / "[ab].png"]
    ((path, error),) = [each for each in parse_pictures([f"{folder}/*.gif"]) if type(each) is tuple]
    assert (path, str(error)) == (folder / "*.gif", f"{folder}/*.gif: no such file")
    assert parse_pictures([f"video:{folder}/a.png"]) == [Source(kind="video", place=str(a))]


@pytest.mark.parametrize("word", ["/dev/video1", "camera:1", "webcam:01"])
def test_cameras(word: str) -> None:
    assert parse_pictures([word]) == [Source(kind="camera", place="1")]


def test_streams() -> None:
    (stream,) = parse_pictures(["rtsp://me:s3cret@door/live"])
    assert str(stream) == "rtsp://door/live"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["camera:64"], "pictures: expected .*camera:NUMBER"),
        (["rtsp://:0/x"], "^pictures: expected rtsp://HOST/PATH or "),
        (["video:nowhere.mp4"], "^pictures video:nowhere.mp4: expected a file$"),
        (["camera:0", "."], "^camera:0 has no end: expected no other pictures beside it$"),
        ([""], "^pictures: expected a file, .*, got ''$"),
        (["-", "-"], "^-: expected once, as standard input has one picture$"),
    ],
)
def test_words_that_name_nothing(words: list[str], expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        parse_pictures(words)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_standard_input_without_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", _Terminal())
    (asked,) = pictures_of(["-"], 1.0)
    assert str(asked.picture).endswith("on standard input, got a terminal")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    (asked,) = pictures_of(["-"], 1.0)
    assert str(asked.picture).endswith("on standard input, got none")
    monkeypatch.setattr(classify, "MAX_PIPE_BYTES", 3)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1234")))
    (asked,) = pictures_of(["-"], 1.0)
    assert str(asked.picture) == "-: expected at most 3 bytes on standard input"


@pytest.mark.parametrize(
    ("text", "value_s"), [("0.5s", 0.5), ("200ms", 0.2), ("2", 2.0), (".5", 0.5), ("0s", 0.0)]
)
def test_times(text: str, value_s: float) -> None:
    assert seconds("every", text) == value_s


@pytest.mark.parametrize("text", ["", "soon", "-1s", "1m", "1 s", "nan", "inf", "1e3s", "9999999s"])
def test_times_that_are_none(text: str) -> None:
    with pytest.raises(InputError, match=r"^every: expected a time such as 0\.5s or 200ms, got "):
        seconds("every", text)


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    many: list[Given] = [Path("a.png"), Path("b.png")]
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    with progress(many) as advance:
        advance()
    assert quiet.getvalue() == ""
    shown = _Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    terminal = Console(file=shown, force_terminal=True, width=60)
    monkeypatch.setattr("rich.console.Console", lambda **_: terminal)
    with progress(many[:1]) as advance:
        advance()
    assert shown.getvalue() == "", "a single picture needs no bar"
    with progress(many) as advance:
        advance()
        advance()
    assert "2/2" in shown.getvalue()
