"""Test code that asks a fleet: no agents, no model, no bundle of your own.

pytest examples/test_sorting.py
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import mdp
from mdp.testing import FakeFleet, fake_fleet

CERTAIN = 0.9


def sort_picture(client: mdp.Client, picture: Path, into: Path) -> Path:
    """The code under test: moves a picture to a folder of its label, or to `unsure`."""
    try:
        answer = client.classify(picture, deadline_ms=5000)
        folder = into / (answer.label if answer.probability > CERTAIN else "unsure")
    except mdp.InferenceError:
        folder = into / "unsure"
    folder.mkdir(parents=True, exist_ok=True)
    return picture.rename(folder / picture.name)


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet(labels=["cat", "dog"], members=2) as fleet:
        yield fleet


@pytest.fixture
def client(fleet: FakeFleet) -> Iterator[mdp.Client]:
    with mdp.Client.connect(fleet.path) as client:
        yield client


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "new.png"
    Image.fromarray(np.full((40, 60, 3), 90, dtype=np.uint8)).save(path)
    return path


def test_a_picture_is_put_to_its_kind(
    fleet: FakeFleet, client: mdp.Client, picture: Path, tmp_path: Path
) -> None:
    fleet.answer("dog")
    assert sort_picture(client, picture, tmp_path) == tmp_path / "dog" / "new.png"


def test_one_device_less_changes_nothing(
    fleet: FakeFleet, client: mdp.Client, picture: Path, tmp_path: Path
) -> None:
    fleet.members[0].fail("overloaded")
    assert sort_picture(client, picture, tmp_path) == tmp_path / "cat" / "new.png"


def test_a_doubtful_picture_is_kept_apart(
    fleet: FakeFleet, client: mdp.Client, picture: Path, tmp_path: Path
) -> None:
    fleet.answer([0.1, 0.0])
    assert sort_picture(client, picture, tmp_path) == tmp_path / "unsure" / "new.png"


def test_a_fleet_without_an_answer_loses_no_picture(
    fleet: FakeFleet, client: mdp.Client, picture: Path, tmp_path: Path
) -> None:
    for k in range(2):
        fleet.members[k].stop()
    assert sort_picture(client, picture, tmp_path) == tmp_path / "unsure" / "new.png"
