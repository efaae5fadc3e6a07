"""Command lines run in the test's own process, which has loaded their modules already."""

import io
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from unittest import mock

import pytest


def run_here(main: Callable[[], object], *words: object) -> CompletedProcess[str]:
    """Result of the entry point `main` with a program's name and its words."""
    args = [str(word) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", args),
        redirect_stdout(out),
        redirect_stderr(err),
        pytest.raises(SystemExit) as stopped,
    ):
        main()
    return CompletedProcess(args, int(stopped.value.code or 0), out.getvalue(), err.getvalue())
