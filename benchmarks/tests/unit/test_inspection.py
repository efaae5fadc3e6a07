"""Defects, draws and scores of the inspection benchmark, without a renderer."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.inspection.defects import KINDS, parts_of, pins_of, with_defect
from benchmarks.inspection.draws import CHANGES, draw_station
from benchmarks.inspection.measure import (
    by_count,
    limit_of,
    looks_to_moved,
    resampled,
    seen_by,
    served,
)
from benchmarks.inspection.patchcore import Memory, patches
from benchmarks.inspection.render import PRODUCTS, options_of
from benchmarks.inspection.tails import compare
from benchmarks.scenes.solid_draws import PLACES
from benchmarks.scenes.solid_items import Floats, Item, Mesh
from partitioner.fusion.anomaly_fit import fit_anomaly


def box(low: tuple[float, float, float], high: tuple[float, float, float]) -> tuple[Floats, Floats]:
    """Corners and triangles of a box, its sides outwards."""
    x, y, z = zip(low, high, strict=True)
    corners = [(a, b, c) for a in x for b in y for c in z]
    faces = [(0, 1, 3, 2), (4, 6, 7, 5), (0, 4, 5, 1), (2, 3, 7, 6), (0, 2, 6, 4), (1, 5, 7, 3)]
    triangles = [face[:3] for face in faces] + [(f[0], f[2], f[3]) for f in faces]
    return np.array(corners, dtype=np.float32), np.array(triangles)


def item(label: str = "part") -> Item:
    """A body on four pins."""
    body = box((-4, -2, 1), (4, 2, 4))
    legs = [
        box((x - 0.2, y - 0.2, -2), (x + 0.2, y + 0.2, 1)) for x in (-3, 3) for y in (-1.5, 1.5)
    ]
    points = np.concatenate([leg[0] for leg in legs])
    triangles = np.concatenate([leg[1] + 8 * n for n, leg in enumerate(legs)])
    return Item(
        label,
        "group",
        (
            Mesh(body[0], body[1].astype(np.int64), (0.1, 0.1, 0.1)),
            Mesh(points, triangles.astype(np.int64), (0.8, 0.8, 0.8)),
        ),
    )


def test_pins_are_found_apart() -> None:
    part = item()
    assert [len(rows) for rows in parts_of(part.meshes[1])] == [12] * 4
    assert [number for number, _ in pins_of(part)] == [1] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_defect_changes_the_item_and_is_drawn_again_alike(kind: str) -> None:
    good, twin = item(), item("twin")
    made = with_defect(good, kind, np.random.default_rng(3), twin)
    again = with_defect(good, kind, np.random.default_rng(3), twin)
    assert made is not good
    if kind == "twin":
        assert made is twin
        return
    assert len(made.meshes) == len(again.meshes)
    for one, other in zip(made.meshes, again.meshes, strict=True):
        assert (one.points == other.points).all()
        assert (one.triangles == other.triangles).all()
        assert one.colour == other.colour
    # Nothing lies below the pins that carry it.
    used = [mesh.points[mesh.triangles].reshape(-1, 3) for mesh in made.meshes]
    assert min(points[:, 2].min() for points in used) >= good.bounds[0][2] - 1e-4
    if kind == "pin missing":
        assert len(made.meshes[1].triangles) == 3 * 12
    if kind in ("scratch", "stain"):
        assert len(made.meshes) == 3
    if kind == "wrong colour":
        assert made.meshes[0].colour != good.meshes[0].colour


def test_a_station_changes_one_thing_at_a_time() -> None:
    places = PLACES[:4]
    plain = draw_station(0, "part", "good", 1, places)
    assert draw_station(0, "part", "good", 1, places) == plain
    other = draw_station(0, "part", "good", 2, places)
    assert [shot.place for shot in other.shots] == [*places]
    assert abs(other.pose.turn - plain.pose.turn) <= 5
    moved = draw_station(0, "part", "moved", 1, places, "moved")
    assert moved.shots[0].azimuth == places[0].azimuth + 8
    assert [shot.azimuth for shot in moved.shots[1:]] == [place.azimuth for place in places[1:]]
    assert {*CHANGES} == {"light", "background", "pose", "moved"}


def test_options_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--kicad", str(tmp_path), "--out", str(tmp_path / "new")]
    assert options_of(words).products == len(PRODUCTS)
    (tmp_path / "file").touch()
    for wrong in (["--products", "0"], ["--out", str(tmp_path)]):
        with pytest.raises(SystemExit):
            options_of([*words, *wrong])
    assert "expected a new or empty folder" in capsys.readouterr().err


def test_a_memory_is_near_to_good_patches_and_far_from_others() -> None:
    random = np.random.default_rng(0)
    fine, coarse = random.normal(size=(30, 6, 6, 4)), random.normal(size=(30, 3, 3, 5))
    features = patches([fine.astype(np.float32), coarse.astype(np.float32)])
    assert features.shape == (30, 36, 9)
    memory = Memory(features)
    assert memory.kept.shape == (11, 9)
    strange = features.copy()
    strange[:, 7] += 12
    assert memory.scores(strange).min() > memory.scores(features).max()


def test_sets_of_cameras_and_limits() -> None:
    assert [(size, len(sets)) for size, sets in by_count(range(4))] == [
        (1, 4),
        (2, 6),
        (3, 4),
        (4, 1),
    ]
    known = np.arange(200.0)
    assert (known > limit_of(known)).sum() == 2


def test_draws_of_good_items_keep_the_stated_rate() -> None:
    random = np.random.default_rng(0)
    good = {k: 1 + random.exponential(0.3, 200) for k in range(2)}
    strange = {k: one[:50] + (3 if k else 0) for k, one in good.items()}
    found = resampled(good, strange, draws=20)
    assert found["stated"] == pytest.approx(1 / 101, abs=1e-6)
    for way in ("fitted", "plain"):
        assert found["2"][way]["rejected"] == pytest.approx(0.01, abs=0.01)
        assert found["2"][way]["found"] > 0.9
        assert found["1"][way]["found"] == pytest.approx(0.5, abs=0.1)
    assert json.loads(json.dumps(found)) == found


def test_tails_are_compared_over_draws() -> None:
    random = np.random.default_rng(0)
    good = {k: unit * (1 + random.exponential(0.3, 200)) for k, unit in ((0, 1.0), (1, 5.0))}
    strange = {k: one[:60] + (3 if k == 0 else 0) for k, one in good.items()}
    found = compare(good, strange, 100, draws=10)
    assert found["stated"] == pytest.approx(1 / 101, abs=1e-6)
    # What the first camera sees is hidden where the second's scores are larger.
    assert found["shared"]["auc"] > 0.98
    assert found["none"]["auc"] < 0.7
    for tail in ("own", "shared", "none"):
        assert found[tail]["tail_rejected"] == pytest.approx(0.01, abs=0.015)
    assert found["shared"]["tail_found"] > 0.95


def test_a_moved_camera_is_named_after_some_looks() -> None:
    random = np.random.default_rng(0)
    good = {k: random.exponential(1.0, 300) for k in range(4)}
    table = fit_anomaly(good, good, rate=0.01)
    more = {k: random.exponential(1.0, 200) for k in range(4)}
    moved = {k: random.exponential(1.0, 30) + (40 if k == 0 else 0) for k in range(4)}
    found = looks_to_moved(table, more, moved)
    assert (found["before"], found["named"]) == ([], ["0"])
    assert 8 <= found["looks"] <= 20
    assert served(table, more)["0+1+2+3"] < 0.05


def test_visible_sides_are_counted(tmp_path: Path) -> None:
    for name, shares in (("b", (0.0, 0.01, 0.0005)), ("a", (0.0, 0.0, 0.0))):
        (tmp_path / name).mkdir()
        (tmp_path / name / "visible.json").write_text(json.dumps(dict(enumerate(shares))))
    assert seen_by(tmp_path) == [0, 1]
