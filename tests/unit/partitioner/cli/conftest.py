"""Command lines of `mdp-partition` in the test's own process and folder."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from partitioner.cli import main as cli
from partitioner.run import progress
from tests.support.command_lines import run_here

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command line; returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    # A line that a slow machine brings would be one more beside a refusal's.
    monkeypatch.setattr(progress, "LINE_EVERY_S", math.inf)

    def call(*words: object) -> tuple[int, str, str]:
        done = run_here(cli.main, "mdp-partition", *words)
        return done.returncode, done.stdout, done.stderr

    return call
