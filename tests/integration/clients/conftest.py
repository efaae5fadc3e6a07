"""Three healthy agents for the tests of each module."""

from collections.abc import Iterator

import pytest

from mdp.testing.bundles import write_bundle
from tests.support.fleet import Fleet


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    with Fleet(folder, write_bundle(folder / "bundle")) as fleet:
        yield fleet.start_all()
