"""Properties that the three installed commands share, each in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mdp

BIN = Path(sys.executable).parent
COMMANDS = ("mdp", "mdp-agent", "mdp-partition")

pytestmark = pytest.mark.parametrize("command", COMMANDS)


def run(command: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / command), *args],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version(command: str) -> None:
    done = run(command, "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{command} {mdp.__version__}\n", "")


def test_help_cuts_no_summary(command: str) -> None:
    done = run(command, "-h", COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    _, _, commands = done.stdout.partition("\nCommands:\n")
    assert commands.count("\n") > 5
    assert "..." not in commands
    assert commands.splitlines()[-1].endswith(".")
    assert max(map(len, commands.splitlines())) <= 80


def test_shells_complete(command: str) -> None:
    variable = f"_{command.replace('-', '_').upper()}_COMPLETE"
    told = {variable: "complete_bash", "COMP_WORDS": f"{command} --vers", "COMP_CWORD": "1"}
    assert run(command, **told).stdout.split() == ["--version"]
    # The shell is told here, as no shell has started this process.
    done = run(
        command, "--show-completion", "bash", _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{variable}=complete_bash" in done.stdout


def test_ctrl_c_while_modules_are_imported(command: str, tmp_path: Path) -> None:
    stub = "import signal\nsignal.raise_signal(signal.SIGINT)\nraise AssertionError('went on')\n"
    (tmp_path / "msgspec.py").write_text(stub)
    done = run(command, "--help", PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == f"{command}: interrupted\n"
