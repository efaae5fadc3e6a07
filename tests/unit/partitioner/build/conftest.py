"""Isolation from weights that are installed beside the project, and exports that take no time."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.support.models import weights as stand_ins
from tests.support.models.traced_once import traced_once


@pytest.fixture(autouse=True)
def _only_weights_of_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.only_here(tmp_path, monkeypatch)


@pytest.fixture(scope="module", autouse=True)
def _networks_are_traced_once() -> Iterator[None]:
    with traced_once():
        yield
