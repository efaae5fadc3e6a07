"""Isolation of these tests from weights that are installed beside the project."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.models import weights as stand_ins


@pytest.fixture(autouse=True)
def _only_weights_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.only_here(tmp_path, monkeypatch)
