"""Defects, draws and scores of the inspection benchmark, without a renderer."""

import json
import os
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.inspection.blind import by_kind, missed_without, over_draws, summarise_sides
from benchmarks.inspection.defects import KINDS, parts_of, pins_of, with_defect
from benchmarks.inspection.draws import CHANGES, draw_station
from benchmarks.inspection.inspected_line import (
    LineScene,
    is_visible,
    order_of,
    part_of,
    tally,
    without_novelty,
)
from benchmarks.inspection.measure import (
    areas_by_seen,
    by_count,
    limit_of,
    looks_to_moved,
    resampled,
    seen_by,
    served,
)
from benchmarks.inspection.on_board import has_module, installed_mb, run_within
from benchmarks.inspection.patchcore import Memory, patches
from benchmarks.inspection.render import PRODUCTS, options_of
from benchmarks.inspection.tails import compare
from benchmarks.line.played import PARTS
from benchmarks.scenes.solid_draws import PLACES
from benchmarks.scenes.solid_items import Floats, Item, Mesh
from mdp.fusion.anomaly_table import MAXIMUM
from mdp.testing.machine_faults import groups_work
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


def test_blind_sides_are_stated_the_better_the_more_defects_measure_them() -> None:
    random = np.random.default_rng(0)
    missed = [random.random(4000) < share for share in (0.1, 0.3)]
    few, many = (over_draws(missed, count, draws=200) for count in (15, 400))
    assert many["near"] > 0.9 > few["near"]
    assert many["width"] < 0.2 * few["width"] * np.sqrt(400 / 15)
    for found in (few, many):
        assert found["held"] == pytest.approx(0.95, abs=0.04)


def test_a_kind_that_was_not_measured_may_be_out_of_range() -> None:
    kinds = np.array(["stain"] * 200 + ["twin"] * 200)
    missed = [np.arange(400) < 150, np.arange(400) % 4 == 0]
    found = by_kind(missed, kinds)
    assert found["stain"]["held"] == 0.5
    assert (found["stain"]["defects"], found["stain"]["true"]) == (200, 0.5)
    every = summarise_sides(dict(enumerate(missed)), kinds)
    assert every["missed"] == {"0": 0.375, "1": 0.25}
    assert [*every["counts"]] == ["15", "30", "60", "120", "180"]


def test_the_others_miss_what_one_camera_alone_sees() -> None:
    random = np.random.default_rng(0)
    good = {k: random.exponential(1.0, 200) for k in range(3)}
    table = fit_anomaly(good, good, rate=0.01)
    strange = {k: np.where(np.arange(30) % 3 == k, 90.0, 0.5) for k in range(3)}
    missed = missed_without(table, strange)
    assert all(one.tolist() == [row % 3 == k for row in range(30)] for k, one in missed.items())


GOOD = LineScene("good", {}, {"all": True, "gone": True})
WORN = LineScene("defective", {}, {"all": False, "gone": True})


def record(item: int, *, normal: bool | None, used: int = 4, **more: object) -> dict[str, object]:
    answer: dict[str, object] = {
        "used": ["a"] * used,
        "suspects": {},
        "normal": normal,
        "blind_sides": [],
    }
    return {
        "item": str(item), "latency_ms": 20.0, "deadline_ms": 100.0, "passed": normal is True,
        "decision": "fused" if normal else "different", "answer": answer, **more,
    }  # fmt: skip


def test_records_of_a_line_are_compared_with_the_bundle() -> None:
    order = [GOOD, WORN, GOOD, WORN, WORN]
    assert [part_of(number, 5) for number in range(5)] == ["all"] * 4 + ["gone"]
    found = tally(
        [
            record(0, normal=True),
            record(1, normal=False),
            record(2, normal=True, used=3),
            # Passed without being normal, and late.
            record(3, normal=False, passed=True, latency_ms=300.0),
            record(3, normal=True),
        ],
        order,
    )
    assert (found["records"], found["lost"], found["twice"]) == (5, 1, 1)
    part = found["parts"]["all"]
    assert (part["whole"], part["as_bundle"], part["right"]) == (4, 3, 4)
    assert (part["in_time"], part["good"], part["defective"]) == (4, 2, 3)
    assert (part["defective_different"], part["defective_passed"]) == (2, 2)
    gone = tally([record(4, normal=True, used=3)], order)["parts"]["gone"]
    assert (gone["whole"], gone["as_bundle"], gone["defective_expected_different"]) == (1, 1, 0)


def test_no_scene_comes_twice_in_a_row() -> None:
    scenes = {
        "good": [LineScene("good", {}, {}) for _ in range(3)],
        "defective": [LineScene("defective", {}, {}) for _ in range(2)],
    }
    order = order_of(scenes, 500, seed=1)
    assert all(one is not other for one, other in pairwise(order))
    assert sum(one.kind == "defective" for one in order) == pytest.approx(100, abs=30)
    assert [one.kind for one in order_of(scenes, 500, seed=1)] == [one.kind for one in order]


def test_a_line_of_inspected_items_knows_of_no_unknown_ones(tmp_path: Path) -> None:
    made = without_novelty(PARTS, tmp_path / "plain")
    assert not made.fusion_weights().novelty
    assert made.manifest.labels
    (tmp_path / "visible.json").write_text(json.dumps({"top": 0.0, "left": 0.002}))
    assert is_visible(tmp_path)
    (tmp_path / "visible.json").write_text(json.dumps({"top": 0.0, "left": 0.0002}))
    assert not is_visible(tmp_path)


@pytest.mark.skipif(groups_work("memory") != "", reason=groups_work("memory"))
def test_a_command_that_takes_more_than_a_board_has_is_ended() -> None:
    core = min(os.sched_getaffinity(0))
    takes = [sys.executable, "-c", "print(len(bytearray(b'x') * (96 << 20)))"]
    assert run_within(takes, 512, core)["works"]
    assert run_within(takes, 512, core)["peak_mib"] > 96
    assert not run_within(takes, 48, core)["works"]
    wrong = [sys.executable, "-c", "raise SystemExit('no scenes')"]
    with pytest.raises(RuntimeError, match="ended with 1: no scenes"):
        run_within(wrong, 512, core)


def test_an_environment_is_told_by_its_program(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/program").write_bytes(bytes(3_000_000))
    assert installed_mb(tmp_path / "bin/program") == 3
    (tmp_path / "bin/python").symlink_to(sys.executable)
    assert has_module(tmp_path / "bin/program", "json")
    assert not has_module(tmp_path / "bin/program", "no_module_of_this_name")


def test_areas_by_how_many_cameras_see_a_defect() -> None:
    good = {k: np.arange(100) / 100 for k in range(2)}
    # The first defect is before one camera, the second before both; nobody sees the third.
    strange = {0: np.array([2.0, 2.0, -1.0]), 1: np.array([-1.0, 2.0, -1.0])}
    found = areas_by_seen(good, strange, np.array([1, 2, 0]), MAXIMUM)
    assert found == {"1": {"alone": 0.5, "all": 1.0}, "2": {"alone": 1.0, "all": 1.0}}
