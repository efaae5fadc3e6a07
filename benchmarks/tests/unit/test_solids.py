"""Scenes of solid items: their draws, the folders of their pictures, and shapes that are read."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.scenes.solid_draws import (
    OBSTRUCTED,
    PLACES,
    TEXTURE_PX,
    Belt,
    Obstacle,
    develop,
    draw_scene,
    resting,
    scene_folder,
    splits,
    texture,
)
from benchmarks.scenes.solid_items import (
    OTHERS,
    PAIRS,
    Item,
    Mesh,
    kicad_files,
    kicad_items,
    radii,
    vrml_meshes,
)
from benchmarks.scenes.solids import folders, options_of
from partitioner.data.datasets import open_dataset

NUT, WASHER = (15.0, 13.0, 6.8), (16.0, 16.0, 1.8)
VRML = """#VRML V2.0 utf8
Shape { appearance Appearance {material DEF PIN Material {
diffuseColor 0.8 0.7 0.1
shininess 0.5
transparency 0.25
}}}
Shape { geometry IndexedFaceSet { coordIndex [0,1,2,-1,0,2,3,-1]
coord Coordinate { point [0 0 0,1 0 0,1 1.5e0 0,0 -1 .5] }}
appearance Appearance{material USE PIN }}
Shape { geometry IndexedFaceSet { coordIndex [0,1,2,-1]
coord Coordinate { point [0 0 2,1 0 2,1 1 2] }}
appearance Appearance{material USE PIN }}
Shape { geometry IndexedFaceSet { coordIndex [0,1,2,-1]
coord Coordinate { point [0 0 0,1 0 0,1 1 0] }}
appearance Appearance{material USE BODY }}
"""


def box(size: tuple[float, float, float]) -> Mesh:
    return Mesh(np.array([(0, 0, 0), size], dtype=np.float32), np.array([[0, 1, 0]]))


def test_a_scene_is_drawn_by_seed_label_and_number_alone() -> None:
    scene = draw_scene(1, "hex_nut", 5, NUT, PLACES)
    assert scene == draw_scene(1, "hex_nut", 5, NUT, PLACES)
    others = [draw_scene(2, "hex_nut", 5, NUT, PLACES), draw_scene(1, "hex_nut", 6, NUT, PLACES)]
    others.append(draw_scene(1, "square_nut", 5, NUT, PLACES))
    assert all(one.pose.turn != scene.pose.turn and one.belt != scene.belt for one in others)
    few = draw_scene(1, "hex_nut", 5, NUT, PLACES[:2])
    assert (few.pose, few.belt, few.lights) == (scene.pose, scene.belt, scene.lights)
    # A camera sees the same, however many others there are.
    assert few.shots == scene.shots[:2]


def test_one_view_in_four_has_something_in_the_way_of_one_camera() -> None:
    scenes = [draw_scene(3, "cap_nut", number, NUT, PLACES) for number in range(300)]
    found = np.array([[shot.obstacle is not None for shot in one.shots] for one in scenes])
    assert found.mean() == pytest.approx(OBSTRUCTED, abs=0.03)
    # Cameras are obstructed one by one: two of them at once by chance alone.
    assert (found[:, 0] & found[:, 1]).mean() == pytest.approx(OBSTRUCTED**2, abs=0.04)
    kinds = {shot.obstacle.kind for one in scenes for shot in one.shots if shot.obstacle}
    assert kinds == {"bar", "disc", "edge"}
    assert {one.belt.pattern for one in scenes} == {"plain", "ribbed", "woven", "speckled", "worn"}


def test_what_is_flat_lies_flat() -> None:
    assert sum(resting(WASHER)) == pytest.approx(1)
    assert sum(resting(WASHER)[:2]) > 0.95
    assert resting((1, 1, 1)) == pytest.approx([1 / 6] * 6)
    assert sum(resting((10, 10, 22))[:2]) < 0.2
    faces = [draw_scene(0, "washer", number, WASHER, ()).pose.face for number in range(100)]
    assert sum(face < 2 for face in faces) > 85


@pytest.mark.parametrize("pattern", ["plain", "ribbed", "woven", "speckled", "worn"])
def test_a_belt_has_its_colour_and_its_pattern(pattern: str) -> None:
    belt = Belt((0.5, 0.4, 0.3), pattern, depth=0.4, period=12, turn=0.3, seed=1)  # type: ignore[arg-type]
    pixels = texture(belt)
    assert pixels.shape == (TEXTURE_PX, TEXTURE_PX, 3)
    assert (pixels == texture(belt)).all()
    plain = float(texture(Belt(belt.colour, "plain", 0.4, 12, 0.3, 1)).std(axis=(0, 1)).mean())
    spread = float(pixels.std(axis=(0, 1)).mean())
    assert spread == plain if pattern == "plain" else spread > 1.5 * plain
    if pattern in ("plain", "ribbed", "woven"):
        assert pixels.mean(axis=(0, 1)) == pytest.approx([127, 102, 76], abs=3)


@pytest.mark.parametrize("kind", ["bar", "disc", "edge"])
def test_an_obstacle_hides_a_part_of_one_picture(kind: str) -> None:
    (shot,) = draw_scene(0, "hex_nut", 0, NUT, PLACES[:1]).shots
    white = np.full((64, 64, 3), 255, np.uint8)
    obstacle = Obstacle(kind, 0.5, 0.5, 0.3, 0.7, (0.0, 0.0, 0.0), 0.01)  # type: ignore[arg-type]
    clear, hidden = (
        np.asarray(develop(white, replace(shot, obstacle=one)), dtype=float)
        for one in (None, obstacle)
    )
    share = (hidden.mean(axis=2) < clear.mean(axis=2) / 2).mean()
    assert 0.1 < share < 0.6
    assert (hidden == np.asarray(develop(white, replace(shot, obstacle=obstacle)))).all()


def test_twins_are_pairs_of_one_scale_and_no_item_has_two_names() -> None:
    labels = [label for label, _ in (*PAIRS, *OTHERS)]
    assert len(set(labels)) == len(labels)
    assert len(PAIRS) % 2 == 0
    # A half of the other kinds is for the test.
    assert len(OTHERS) % 2 == 0
    small, large = Item("a", "twins", (box((1, 1, 1)),)), Item("b", "twins", (box((3, 4, 0)),))
    assert radii([small, large, Item("c", "c", (box((0, 0, 2)),))]) == {"twins": 2.5, "c": 1}


def test_pictures_go_where_a_build_reads_them(tmp_path: Path) -> None:
    out = tmp_path / "solids"
    options = options_of(
        ["--out", str(out), "--classes", "2", "--scenes", "4", "--test", "2", "--unknown", "8"]
    )
    items = [Item("hex_nut", "hex_nut", ()), Item("square_nut", "hex_nut", ())]
    others = [Item(label, label, ()) for label in ("key", "rack", "wheel", "block")]
    found = list(folders(options, items, others))
    for _, folder, _ in found:
        folder.mkdir(parents=True)
        for place in PLACES[:4]:
            Image.new("RGB", (8, 8)).save(folder / f"{place.name}.jpg")
    data = open_dataset(str(out), cameras=[place.name for place in PLACES[:4]])
    assert data.labels == ("hex_nut", "square_nut")
    assert len(data.train) + len(data.calibration) == 8
    assert len(data.test) == 4
    assert data.unknown is not None
    assert data.unknown_test is not None
    assert (len(data.unknown), len(data.unknown_test)) == (4, 4)
    # No scene is drawn twice, and kinds of no class that measure were never seen.
    assert len({(item.label, number) for item, _, number in found}) == len(found)
    kinds = {item.label: folder.parent.parent.name for item, folder, _ in found[12:]}
    assert kinds == {"key": "train", "rack": "test", "wheel": "train", "block": "test"}


def test_without_a_test_split_classes_are_at_the_top(tmp_path: Path) -> None:
    assert splits(3, 0) == [("", range(3))]
    assert splits(3, 2) == [("train", range(3)), ("test", range(3, 5))]
    assert scene_folder(tmp_path, "", "hex_nut", 7) == tmp_path / "hex_nut/s007"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--cameras", "7"], "--cameras: expected 1 to 6, got 7"),
        (["--classes", "1"], "--classes: expected 2 to 20, got 1"),
        (["--scenes", "0"], "--scenes: expected at least 1, got 0"),
        (["--out", "."], "--out: .: expected a new or empty folder"),
    ],
)
def test_options_out_of_bounds(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options_of(["--out", "nowhere", *words])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_vrml_file_is_read_by_material() -> None:
    pin, body = vrml_meshes(VRML, "x.wrl")
    assert (pin.colour, pin.shine, pin.transparency) == ((0.8, 0.7, 0.1), 31, 0.25)
    assert pin.points.tolist()[2:5] == [[1, 1.5, 0], [0, -1, 0.5], [0, 0, 2]]
    assert pin.triangles.tolist() == [[0, 1, 2], [0, 2, 3], [4, 5, 6]]
    assert (body.colour, len(body.triangles)) == ((0.7, 0.7, 0.7), 1)
    with pytest.raises(ValueError, match=r"x\.wrl: expected shapes of triangles, found none"):
        vrml_meshes("#VRML V2.0 utf8\n", "x.wrl")


def test_kicads_models_are_taken_in_pairs_of_look_alikes(tmp_path: Path) -> None:
    padded = VRML + "#" * 8_000
    for family in ("Relay_SMD.3dshapes", "Diode_SMD.3dshapes"):
        (tmp_path / family).mkdir()
        # Long names differ in their ends alone.
        for name in ("A" * 90 + "_1", "A" * 90 + "_2", "B" * 90 + "_1", "B" * 90 + "_2"):
            (tmp_path / family / f"{name}.wrl").write_text(padded)
    (tmp_path / "Few.3dshapes").mkdir()
    (tmp_path / "Few.3dshapes/one.wrl").write_text(padded)
    files = kicad_files(tmp_path, 4, 0)
    assert files == kicad_files(tmp_path, 4, 0)
    assert all(a.parent == b.parent and a.name[:2] == b.name[:2] for a, b in (files[:2], files[2:]))
    items = list(kicad_items(files))
    assert {item.group for item in items} == {"Relay_SMD", "Diode_SMD"}
    assert len({item.label for item in items}) == 4
    with pytest.raises(ValueError, match="expected 3 folders with 4 or more models, found 2"):
        kicad_files(tmp_path, 5, 0)
