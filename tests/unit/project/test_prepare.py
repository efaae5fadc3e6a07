"""Reasons to skip: a lack of the machine is one, a build of this checkout that fails is none."""

from pathlib import Path

import pytest

from tools import engine, systemd
from tools.engine import Podman, download
from tools.prepare import CheckoutError, MissingError


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("ERROR: ResolutionImpossible: for help visit some page", CheckoutError),
        ("ERROR: Could not install packages due to an OSError: no network", MissingError),
    ],
)
def test_requirements_that_exclude_each_other_are_the_checkout_s(
    said: str, expected: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(command: object) -> str:
        raise MissingError(f"pip download: {said}")

    monkeypatch.setattr(engine, "run", fail)
    with pytest.raises(expected, match=said):
        download(tmp_path, ["agent"])
    assert not (tmp_path / "wheels.json").exists()


class FailingPodman(Podman):
    """An engine in which the wheel cannot be installed."""

    def run(self, *words: str) -> str:
        return {"wait": "1", "logs": "ERROR: No matching distribution found"}.get(words[0], "made")


def test_a_wheel_that_cannot_be_installed_is_the_checkout_s(tmp_path: Path) -> None:
    podman = FailingPodman(folder=tmp_path, settings=None)
    with pytest.raises(CheckoutError, match="the wheel cannot be installed: ERROR: No matching"):
        systemd._install(podman, tmp_path, tmp_path / "mdp.whl", "image")
