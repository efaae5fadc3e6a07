"""Distances between the surfaces of near twins."""

from pathlib import Path

import pytest

from benchmarks.scenes import twins
from benchmarks.scenes.solid_items import Item
from benchmarks.scenes.twins import LABEL, compare, model_of

SHAPE = """
Shape {{ appearance Appearance {{ material DEF PIN Material {{ diffuseColor {colour} }} }}
geometry IndexedFaceSet {{ coordIndex [ 0,1,2,-1, 0,1,3,-1, 0,2,3,-1, 1,2,3,-1 ]
coord Coordinate {{ point [ 0 0 0, 1 0 0, 0 1 0, 0 0 {height} ] }} }} }}
Shape {{ geometry IndexedFaceSet {{ coordIndex [ 0,1,2,-1 ]
coord Coordinate {{ point [ 0 0 0, 1 0 0, 0 1 0 ] }} }}
appearance Appearance {{ material USE PIN }} }}
"""


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Models of which one's name begins as another's, in the folder of a family."""
    folder = tmp_path / "Relay_SMD.3dshapes"
    folder.mkdir()
    longest = "G" * LABEL
    for name, height, colour in (
        ("G6K-2F", 1.0, "0.7 0.7 0.7"),
        ("G6K-2F-Y", 1.5, "0.7 0.7 0.7"),
        ("red", 1.0, "0.7 0.1 0.1"),
        (longest, 1.0, "0.7 0.7 0.7"),
    ):
        (folder / f"{name}.wrl").write_text(SHAPE.format(height=height, colour=colour))
    return tmp_path


def height(item: Item) -> float:
    low, high = item.bounds
    return float(high[2] - low[2])


def test_the_model_of_a_class_has_its_whole_name(models: Path) -> None:
    assert height(model_of(models, "Relay_SMD-G6K-2F")) == 1.0
    assert height(model_of(models, "Relay_SMD-G6K-2F-Y")) == 1.5
    # Names of classes are cut.
    assert model_of(models, f"Relay_SMD-{'G' * LABEL}"[:LABEL]).group == "Relay_SMD"
    with pytest.raises(FileNotFoundError, match="expected a model of Relay_SMD-G6K-2"):
        model_of(models, "Relay_SMD-G6K-2")


def test_surfaces_are_as_far_apart_as_shapes_and_colours_differ(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Fewer points lie further apart, in fewer pixels.
    monkeypatch.setattr(twins, "POINTS", 4_000)
    monkeypatch.setattr(twins, "PIXELS", 10.0)
    plain, high, red = (
        model_of(models, f"Relay_SMD-{one}") for one in ("G6K-2F", "G6K-2F-Y", "red")
    )
    same = compare(plain, plain)
    assert same["mean_px"] == pytest.approx(same["of_itself_px"], rel=0.1)
    assert (same["over_a_pixel"], same["other_colour"]) == (0.0, 0.0)
    apart = compare(plain, high)
    assert apart["mean_px"] > 3 * apart["of_itself_px"]
    assert apart["over_a_pixel"] > 0.2
    painted = compare(plain, red)
    assert painted["mean_px"] == pytest.approx(same["mean_px"], rel=0.1)
    assert painted["other_colour"] == 1.0
