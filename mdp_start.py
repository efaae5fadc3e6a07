"""Entry points of the three commands: Ctrl-C ends them with exit code 130 during their imports too.

Importing them takes tenths of a second, seconds on a small device. This module lies outside the
packages, as any module inside `mdp` is imported after all of its client.
"""

import os
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


def mdp() -> NoReturn:
    """Run `mdp`."""
    _run("mdp", "mdp.cli.main")


def mdp_agent() -> NoReturn:
    """Run `mdp-agent`."""
    _run("mdp-agent", "devices.cli.main")


def mdp_partition() -> NoReturn:
    """Run `mdp-partition`."""
    _run("mdp-partition", "partitioner.cli.main")


def _run(name: str, module: str) -> NoReturn:
    _open_closed_streams()

    def leave(*_: object) -> NoReturn:
        # No exception: a module that is being imported may swallow it or turn it into another.
        os.write(sys.stderr.fileno(), f"{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    try:
        before = signal.getsignal(signal.SIGINT)
        # A process in the background ignores Ctrl-C.
        if before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, leave)
        main = import_module(module).main
        signal.signal(signal.SIGINT, before)
        main()
    except KeyboardInterrupt:
        leave()
    sys.exit(0)


def _open_closed_streams() -> None:
    """Have those that the caller has closed (`<&-`) be empty, or lead nowhere.

    Else they are None, and the next file or connection gets their number.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
