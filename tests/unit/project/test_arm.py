"""Needs of the emulated agents, and the one line in which one is said to be missing."""

import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tools import arm as preparing
from tools.arm import main, prepare
from tools.prepare import MissingError


@pytest.fixture(autouse=True)
def x86(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


def test_what_is_missing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    monkeypatch.setattr(preparing, "prepare", lambda: prepare(tmp_path / "arm"))
    said = ["apt-get is not here: this needs Debian 12 or a system derived of it"]
    for _ in range(2):
        assert main() == 2
        assert capsys.readouterr() == ("", f"make test-arm: {said[-1]}\n")
        monkeypatch.setattr(platform, "machine", lambda: "riscv64")
        said.append("an x86-64 machine is needed to emulate on, this is riscv64")
    assert not (tmp_path / "arm").exists()


def test_a_release_without_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        # Its lists and its status are its own, so that the system's stay as they are.
        assert options["env"]["APT_CONFIG"] == str(tmp_path / "arm/apt/apt.conf")
        code = 100 if command[1] == "download" else 0
        return subprocess.CompletedProcess(command, code, "", "E: Unable to locate python3.11")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
    with pytest.raises(MissingError, match=r"^apt-get download: E: Unable to locate python3\.11$"):
        prepare(tmp_path / "arm")
    assert [command[1] for command in ran] == ["update", "download"]
    assert "python3.11-minimal:arm64" in ran[1]
    settings = (tmp_path / "arm/apt/apt.conf").read_text()
    for key in ("Dir::State", "Dir::State::status", "Dir::Cache"):
        assert f'{key} "{tmp_path}/arm/apt' in settings
