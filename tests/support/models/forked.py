"""Processes forked from one that has torch and the partitioner already: 0.1 s each, not 3 s."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from mdp.errors import MDPError

_SERVER = multiprocessing.get_context("forkserver")
# The first optimiser would import torch._dynamo.
_SERVER.set_forkserver_preload(["partitioner.cli.main", "partitioner.crew.run", "torch._dynamo"])


class Forked:
    """A process that calls `main(*args)` in `folder` and writes stdout and stderr to files.

    An MDPError of `main` is its message and exit code. `variables` are of its environment.
    """

    def __init__(
        self,
        main: Callable[..., object],
        *args: object,
        stderr: Path,
        stdout: Path = Path(os.devnull),
        folder: Path = Path(),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        told = (folder, stdout.resolve(), stderr.resolve(), dict(variables or {}))
        self._process = _SERVER.Process(target=_run, args=(*told, main, args))
        self._process.start()

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Its exit code, minus the signal that ended it; None while it goes on."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def interrupt(self) -> None:
        """Do to it what Ctrl-C does."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGINT)

    def kill(self) -> None:
        """End it by SIGKILL."""
        self._process.kill()


def _run(
    folder: Path,
    stdout: Path,
    stderr: Path,
    variables: Mapping[str, str],
    main: Callable[..., object],
    args: tuple[object, ...],
) -> None:
    for path, descriptor in ((stdout, 1), (stderr, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.chdir(folder)
    os.environ.update(variables)
    try:
        main(*args)
    except MDPError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def command(main: Callable[[], object], *words: str) -> None:
    """The entry point `main` with a program's name and its words."""
    sys.argv = [*words]
    main()
