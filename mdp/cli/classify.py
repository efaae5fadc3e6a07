"""`mdp classify`: pictures from files, folders, patterns, standard input, videos and cameras."""

import glob
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from mdp import console
from mdp.arguments import seconds
from mdp.cameras import LiveReader, Source, parse_source, video_pictures
from mdp.cli import answers
from mdp.cli.answer_file import ANSWER_COLUMNS, answer_writer
from mdp.client.base import DEFAULT_DEADLINE_MS
from mdp.errors import InputError, MDPError, PictureError
from mdp.pictures.crop import Picture
from mdp.pictures.sources import MAX_PIPE_BYTES
from mdp.requests.deadline import check_deadline_ms

#: The picture that standard input has the bytes of.
STDIN = "-"
#: Files with these endings are videos; others are named video:FILE.
VIDEOS = frozenset(
    (".avi", ".m4v", ".mjpeg", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".ts", ".webm", ".wmv")
)
#: Of a video, `at_s` says where a picture was, and of a camera or stream `time` when.
COLUMNS = ("path", "at_s", "time", *ANSWER_COLUMNS)
_CAMERA = re.compile(r"(?:/dev/video|webcam:|camera:)(\d{1,9})")
_STREAM = re.compile(r"(?:video:|rtsps?://)")

#: A file, a path that is none and why, the bytes on standard input, or a video, camera or stream.
Given = Path | tuple[Path, InputError] | str | Source


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPicture:
    """One picture, or the error in its place, and how it is named to people and in JSON."""

    name: str
    keys: dict[str, object]
    picture: Picture | MDPError


def classify(
    pictures: Annotated[
        list[str],
        typer.Argument(
            help="Picture files, folders, patterns (quoted: '*.jpg'), - for the bytes of a picture "
            "on standard input, video files, camera:0 or /dev/video0, rtsp://HOST/PATH."
        ),
    ],
    fleet: answers.FleetFile,
    deadline_ms: answers.DeadlineMs = DEFAULT_DEADLINE_MS,
    every: Annotated[
        str, typer.Option(help="Of videos, cameras and streams: a picture so often, 0.5s or 200ms.")
    ] = "1s",
    out: Annotated[
        Path | None,
        typer.Option(help="Also append every answer, or error, to this .csv or .jsonl file."),
    ] = None,
    fusion: answers.FusionChoice = "stacked",
    cascade: answers.Cascade = False,
    key: answers.KeyFile = None,
    insecure: answers.Insecure = False,
    json: answers.Json = False,
) -> None:
    """Classify pictures; an unreadable one is an error, and the others follow.

    With --json and in --out a picture that failed has a line too, with `error` instead of `label`.

    Example: mdp classify --fleet fleet.toml cat.jpg --deadline-ms 80

    Exit codes: 0 fine, 2 bad input or a full disk, 3 the fleet could not answer, 130 interrupted, 1
    unforeseen.
    """
    check_deadline_ms(deadline_ms, "--deadline-ms")
    every_s = seconds("--every", every)
    exit_code = 0
    with (
        answers.open_client(fleet, key, insecure, fusion, cascade) as client,
        console.until_reader_leaves(),
    ):
        given = parse_pictures(pictures)
        with answer_writer(out, COLUMNS) as write, progress(given) as advance:
            for asked in pictures_of(given, every_s):
                try:
                    if isinstance(asked.picture, MDPError):
                        raise asked.picture
                    prediction = client.classify(asked.picture, deadline_ms=deadline_ms)
                except MDPError as error:
                    text = str(error)
                    text = text if text.startswith(asked.name) else f"{asked.name}: {text}"
                    print(f"mdp: {console.one_line(MDPError(text))}", file=sys.stderr)
                    told = {**asked.keys, **answers.failure(error)}
                    exit_code = exit_code or error.exit_code
                else:
                    told = {**asked.keys, **prediction.to_dict()}
                    if not json:
                        print(answers.describe(asked.name, prediction), flush=True)
                write(told)
                if json:
                    console.print_json(told)
                advance()
    raise typer.Exit(exit_code)


def parse_pictures(words: Sequence[str]) -> list[Given]:
    """Pictures that the words of a command line name; folders and patterns become their files.

    Raises InputError for a word that names nothing by its form, and for a source without an end
    beside anything else.
    """
    found: list[Given] = []
    for word in words:
        if not word:
            raise InputError("pictures: expected a file, folder, pattern, video or camera, got ''")
        if camera := _CAMERA.fullmatch(word):
            found.append(parse_source(f"camera:{camera[1]}", "pictures"))
        elif _STREAM.match(word):
            found.append(parse_source(word, "pictures"))
        elif word == STDIN:
            found.append(STDIN)
        else:
            for path, unusable in answers.picture_files(_matching(word)):
                if unusable is not None:
                    found.append((path, unusable))
                elif path.suffix.lower() in VIDEOS:
                    found.append(Source(kind="video", place=str(path)))
                else:
                    found.append(path)
    for source in found:
        if isinstance(source, Source) and source.is_live and len(found) > 1:
            raise InputError(f"{source} has no end: expected no other pictures beside it")
    if found.count(STDIN) > 1:
        raise InputError("-: expected once, as standard input has one picture")
    return found


def _matching(word: str) -> list[Path]:
    """The files that a pattern matches; any other word is the path itself."""
    if not glob.has_magic(word) or os.path.lexists(word):
        return [Path(word)]
    if "**" in Path(word).parts:
        return sorted(_everywhere(Path(word))) or [Path(word)]
    # Path.glob does not leave out hidden files.
    return [Path(name) for name in sorted(glob.glob(word))] or [Path(word)]  # noqa: PTH207


def _everywhere(pattern: Path) -> Iterator[Path]:
    """The files that a pattern with `**` matches, hidden ones only where it names them.

    Links to folders are not followed, as two that lead up would have no end.
    """
    # Path.glob takes no pattern that begins at the root, and `**` as a whole part only.
    top = Path(pattern.anchor)
    parts = [part if part == "**" else re.sub(r"\*+", "*", part) for part in pattern.parts]
    # At the end it means folders alone.
    parts += ["*"] if parts[-1] == "**" else []
    for path in top.glob("/".join(parts[len(top.parts) :])):
        hidden = any(part[0] == "." and part not in parts for part in path.parts)
        if (not hidden or parts[-1][0] == ".") and not path.is_dir():
            yield path


def pictures_of(given: Sequence[Given], every_s: float) -> Iterator[NamedPicture]:
    """Each picture, as it is read; of videos and cameras, one every `every_s` seconds."""
    for each in given:
        if isinstance(each, Source):
            yield from _camera(each, every_s) if each.is_live else _video(each, every_s)
        elif isinstance(each, str):
            yield NamedPicture(name=each, keys={"path": each}, picture=_stdin())
        else:
            path, picture = each if isinstance(each, tuple) else (each, each)
            yield NamedPicture(name=str(path), keys=answers.path_keys(path), picture=picture)


def _stdin() -> bytes | InputError:
    if sys.stdin.isatty():
        return InputError("-: expected the bytes of a picture on standard input, got a terminal")
    content = sys.stdin.buffer.read(MAX_PIPE_BYTES + 1)
    if not content:
        return InputError("-: expected the bytes of a picture on standard input, got none")
    if len(content) > MAX_PIPE_BYTES:
        return PictureError(f"-: expected at most {MAX_PIPE_BYTES:,} bytes on standard input")
    return content


def _video(source: Source, every_s: float) -> Iterator[NamedPicture]:
    keys = answers.path_keys(Path(source.place))
    try:
        for at_s, picture in video_pictures(source, every_s):
            name = f"{answers.printable_path(Path(source.place))} at {at_s:.2f} s"
            yield NamedPicture(name=name, keys={**keys, "at_s": at_s}, picture=picture)
    except MDPError as error:
        yield NamedPicture(name=str(source), keys=keys, picture=error)


def _camera(source: Source, every_s: float) -> Iterator[NamedPicture]:
    keys: dict[str, object] = {"path": str(source)}
    reader = LiveReader(source)
    due_s = time.monotonic()
    try:
        while True:
            time.sleep(max(0.0, due_s - time.monotonic()))
            # Those that were missed are not caught up.
            due_s = max(due_s + every_s, time.monotonic())
            picture: Picture | MDPError
            try:
                picture = reader.next()
            except PictureError as error:
                picture = error
            yield NamedPicture(
                name=str(source), keys={**keys, "time": answers.utc_now()}, picture=picture
            )
    except MDPError as error:
        yield NamedPicture(name=str(source), keys=keys, picture=error)
    finally:
        reader.close()


@contextmanager
def progress(given: Sequence[Given]) -> Iterator[Callable[[], Any]]:
    """Show on a terminal how many pictures are done; yields what is called after each."""
    endless = any(isinstance(each, Source) for each in given)
    if not sys.stderr.isatty() or (len(given) < 2 and not endless):
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Lines that go elsewhere than to the terminal go there as they are.
    to_terminal = sys.stdout.isatty()
    with Progress(
        *columns, console=Console(stderr=True), transient=True, redirect_stdout=to_terminal
    ) as bar:
        task = bar.add_task("", total=None if endless else len(given))
        yield lambda: bar.advance(task)
