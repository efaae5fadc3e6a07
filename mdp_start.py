"""Entry points of the three commands: Ctrl-C ends them with exit code 130 during their imports too.

Importing them takes tenths of a second, seconds on a small device. This module lies outside the
packages, as any module inside `mdp` is imported after all of its client.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
_BAD_INPUT = 2


def mdp() -> NoReturn:
    """Run `mdp`."""
    _run("mdp", "mdp.cli.main")


def mdp_agent() -> NoReturn:
    """Run `mdp-agent`; its `health` at once, which managers run every few seconds."""
    if sys.argv[1:2] == ["health"]:
        _open_closed_streams()
        health = import_module("devices.health")
        if (asked := health.plain_words(sys.argv[2:])) is not None:
            sys.exit(health.report_health(asked[0], live=asked[1]))
    _run("mdp-agent", "devices.cli.main")


def mdp_partition() -> NoReturn:
    """Run `mdp-partition`."""
    _run("mdp-partition", "partitioner.cli.main")


def another_mdp() -> str | None:
    """A line about another project's files in the package `mdp`; None where there are none."""
    found = find_spec("mdp")
    folders = list(found.submodule_search_locations or ()) if found else []
    for folder in map(Path, folders):
        # The Modular toolkit for Data Processing, as the index has it and as Debian has it.
        if (folder / "hinet").is_dir() or not (folder / "cli").is_dir():
            return (
                f"{folder} has files of another project of this name (`pip uninstall mdp`, "
                "Debian's python3-mdp): install mdp-edge into an environment of its own"
            )
    return None


def _run(name: str, module: str) -> NoReturn:
    _open_closed_streams()
    if (told := another_mdp()) is not None:
        print(f"{name}: {told}", file=sys.stderr)
        sys.exit(_BAD_INPUT)
    try:
        with imports_interruptible(name):
            main = import_module(module).main
        main()
    except KeyboardInterrupt:
        _leave(name)
    sys.exit(0)


def _leave(name: str) -> NoReturn:
    # No exception: a module that is being imported may swallow it or turn it into another.
    os.write(sys.stderr.fileno(), f"{name}: interrupted\n".encode())
    os._exit(INTERRUPTED)


@contextmanager
def imports_interruptible(name: str) -> Iterator[None]:
    """Have Ctrl-C end the program `name` at once, in the main thread."""
    before = signal.getsignal(signal.SIGINT)
    # A process in the background ignores Ctrl-C.
    if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: _leave(name))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _open_closed_streams() -> None:
    """Have those that the caller has closed (`<&-`) be empty, or lead nowhere.

    Else they are None, and the next file or connection gets their number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
