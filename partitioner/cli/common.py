"""Options and functions that several commands of `mdp-partition` use."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from mdp import console
from mdp.errors import InputError
from partitioner.training.compute import own_threads, use_threads

JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON on stdout, and nothing else there.")
]
RunOption = Annotated[Path, typer.Option(help="Folder that keeps what is done, to go on from.")]
OwnRunOption = Annotated[
    Path | None, typer.Option(help="Folder that keeps what is done; default: <bundle>.run.")
]
NameOption = Annotated[str | None, typer.Option(help="Name of the bundle; default: its folder's.")]
CrewFolderOption = Annotated[
    Path | None,
    typer.Option(help="Folder of a crew: train with others that join (mdp-partition crew)."),
]
OutOption = Annotated[Path, typer.Option(help="Bundle folder to write, or to replace.")]


@contextmanager
def interruptible(kept: str) -> Iterator[None]:
    """Turn Ctrl-C into an error that ends in `kept`, what remains of the work so far."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise console.Interrupted(f"interrupted; {kept}") from error


def prepare(threads: int) -> None:
    """Load torch, with as many threads as asked for, 0 meaning one per core."""
    use_threads(threads or own_threads())


def share_of(option: str, percent: float, most: float = 100.0) -> float:
    """The share that `percent` is; raises InputError unless it is above 0 and up to `most`."""
    if not 0 < percent <= most:
        raise InputError(f"{option}: expected a number above 0 and up to {most:g}, got {percent:g}")
    return percent / 100


def picture_kind(plot: Path | None) -> str:
    """`svg` or `png` by the file's ending; raises InputError for another."""
    kind = "svg" if plot is None else plot.suffix.lower().removeprefix(".")
    if kind not in ("svg", "png"):
        raise InputError(f"--plot: expected FILE.svg or FILE.png, got {str(plot)!r}")
    return kind


def say(json: bool, value: object, text: str) -> None:
    """JSON for machines or a line for people, on stdout."""
    if json:
        console.print_json(value)
    else:
        print(text)
