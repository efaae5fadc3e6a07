"""Images that the tests of this folder share, built once."""

import pytest

from tools.containers import BuiltImages, prepare
from tools.prepare import MissingError


@pytest.fixture(scope="session")
def built() -> BuiltImages:
    """Those of this checkout; skipped where no container can be run."""
    try:
        return prepare()
    except MissingError as error:
        pytest.skip(str(error))
