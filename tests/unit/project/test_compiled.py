"""The optional compiled build: what it needs, and what it leaves."""

import fnmatch
import re
import sysconfig
from pathlib import Path

import pytest

from tests.support.fleet import ROOT
from tools import compiled


def test_every_module_is_there_and_is_removed_by_make_interpreted() -> None:
    makefile = (ROOT / "Makefile").read_text()
    removed = re.search(r"^interpreted:\n\trm -f (.*)$", makefile, re.MULTILINE)
    assert removed is not None
    # fnmatch's * would cross folders, a shell's does not.
    folders = {Path(pattern).parent for pattern in removed[1].split()}
    for module in compiled.MODULES:
        assert (ROOT / module).is_file()
        assert Path(module).parent in folders
    # And the one that they share.
    assert any(fnmatch.fnmatch("mdp_simulator__mypyc.so", p) for p in removed[1].split())


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "not-there -O1")
    assert compiled.missing() == "no C compiler: 'not-there' is not on the PATH (Debian: gcc)"


def test_missing_headers_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "sh")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert compiled.missing() == (
        f"no {tmp_path}/Python.h: expected this Python's headers (Debian: python3-dev)"
    )
    (tmp_path / "Python.h").touch()
    assert compiled.missing() == ""
