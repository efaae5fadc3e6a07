"""Fixtures of integration tests: a fleet of the test's own, a gate for odd agents, and exports."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from mdp.testing.bundles import write_bundle
from tests.support.fleet import Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A bundle and no agents yet."""
    with Fleet(tmp_path, write_bundle(tmp_path / "bundle")) as fleet:
        yield fleet


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """An empty folder, in which files let odd agents go on."""
    (tmp_path / "gate").mkdir()
    return tmp_path / "gate"


@pytest.fixture(scope="module")
def quick_exports() -> Iterator[None]:
    """Networks that this process exports are traced once for their structure."""
    # torch is for tests that ask for this alone.
    from tests.support.models.traced_once import traced_once

    with traced_once():
        yield
