"""Images that the tests of this folder share, built once."""

from collections.abc import Iterator

import pytest

from tests.support.figures import Figures
from tools.containers import BuiltImages, prepare
from tools.prepare import MissingError


@pytest.fixture(scope="session")
def built() -> BuiltImages:
    """Those of this checkout; skipped where no container can be run."""
    try:
        return prepare()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def figures(request: pytest.FixtureRequest, built: BuiltImages) -> Iterator[Figures]:
    """Figures of a module, kept under its name."""
    version = built.podman.run("version", "--format={{.Client.Version}}")
    with Figures(request.module.PART, {"podman": version}) as made:
        yield made
