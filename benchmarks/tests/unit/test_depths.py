"""Cuts against milliseconds: what is compared, timed, chosen by and counted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.harness.results import read_result
from benchmarks.pilot.depths import (
    CLASSES,
    PARTS_DRAWS,
    SPEEDS,
    AnsweredPictures,
    Contest,
    FittedPool,
    compared_rows,
    interpolate,
    ratios_to,
    score,
    score_devices,
    share,
    teacher_of,
    within,
)
from benchmarks.pilot.depths_page import (
    accuracies,
    behind,
    by_data,
    contests,
    depths,
    draw,
    promises,
)
from benchmarks.pilot.pools import CAMERAS, PicturePool, PoolPictures
from benchmarks.pilot.speeds import speed_profiles, teacher_ms
from mdp.errors import InputError
from mdp.files import write_toml
from mdp.formats.plan import SubModelSpec
from mdp.formats.profile import read_profiles
from partitioner.estimates.catalogue import catalogue
from partitioner.estimates.latency import fit_latency
from partitioner.pilot.candidates import FrozenNetwork
from partitioner.pilot.choice import ChosenNetworks

pytestmark = pytest.mark.torch

VIT, LITE = "vit_tiny_patch16_224", "tf_efficientnet_lite0"


def encoder(depth: int, side: int = 64) -> SubModelSpec:
    return SubModelSpec(
        image_size=side, patch_size=16, embed_dim=192, depth=depth, num_heads=3, mlp_ratio=4.0
    )


def cut(depth: int, side: int = 64) -> FrozenNetwork:
    return FrozenNetwork(VIT, encoder(depth, side))


def lite(side: int = 64) -> FrozenNetwork:
    return FrozenNetwork(LITE, catalogue()[LITE].spec(side, 0))


def answers(right: str, targets: np.ndarray[tuple[int], np.dtype[np.int64]]) -> np.ndarray:
    """Log-probabilities of two classes: `+` where the answer is right, `-` where it is wrong."""
    sure = np.array([0.8 if one == "+" else 0.2 for one in right])
    chances = np.where(targets[:, None] == np.arange(2), sure[:, None], 1 - sure[:, None])
    return np.log(chances)


def of(*rights: str) -> AnsweredPictures:
    targets = np.arange(len(rights[0])) // 2 % 2
    return AnsweredPictures([answers(right, targets) for right in rights], targets)


def test_as_many_scenes_of_each_class_are_compared_as_a_build_compares() -> None:
    targets = np.repeat(np.repeat([0, 1], (3, 5)), len(CAMERAS))
    groups = np.arange(len(targets)) // len(CAMERAS)
    pool = PoolPictures(("a", "b"), tuple(Path(str(row)) for row in groups), targets, groups)
    found = compared_rows(pool, 2 * 2 * len(CAMERAS) + 3)
    assert np.unique(groups[found]).tolist() == [0, 1, 3, 4]
    assert len(found) == 4 * len(CAMERAS)
    assert np.unique(groups[compared_rows(pool, 1)]).tolist() == [0, 3]
    assert len(compared_rows(pool, 1000)) == len(targets)


def test_a_pool_holds_the_named_scenes_of_the_first_classes(tmp_path: Path) -> None:
    for label in ("a", "b", "c"):
        for scene in ("s0", "s1", "s2", "s3"):
            folder = tmp_path / "parts" / label / scene
            folder.mkdir(parents=True)
            for camera in CAMERAS:
                (folder / f"{camera}.jpg").touch()
    pool = PicturePool("parts", 9, {}, names=("s1", "s2"), classes=2)
    found = pool.read(tmp_path)
    assert found.labels == ("a", "b")
    assert {path.parent.name for path in found.sources} == {"s1", "s2"}
    assert len(found.sources) == 2 * 2 * len(CAMERAS)
    around = replace(pool, names=("s3", "s0"))
    assert {path.parent.name for path in around.read(tmp_path).sources} == {"s3", "s0"}
    different = (pool, around, replace(pool, names=()), replace(pool, classes=0))
    assert len({one.name for one in different}) == len(different)


def test_no_draw_of_parts_learns_from_scenes_of_its_test(tmp_path: Path) -> None:
    for number in range(75):
        (tmp_path / "parts" / "a" / f"s{number:03}").mkdir(parents=True)
    tests = list[str]()
    for names in PARTS_DRAWS:
        learnt, tested = (
            {
                path.parent.name
                for path in PicturePool("parts", 99, {}, names=one).read(tmp_path).sources
            }
            for one in names
        )
        assert (len(learnt), len(tested)) == (40, 25)
        assert not learnt & tested
        tests += tested
    assert len(set(tests)) == len(tests)


def test_a_budget_keeps_what_takes_no_more_and_says_where_nothing_does() -> None:
    assert within([0.5, 0.1, 0.25], 0.25) == [1, 2]
    with pytest.raises(InputError, match=r"budget of 0\.05 .* quickest takes 0\.100"):
        within([0.5, 0.1], 0.05)


def test_a_ratio_is_the_median_of_its_rounds_so_that_a_slow_one_counts_for_both() -> None:
    found = ratios_to(1, {0: [[1, 1, 9], [4, 4, 4]], 1: [[2, 2, 2], [8, 8, 8]]})
    assert found == {0: (2.5, 0.5), 1: (5.0, 1.0)}


def test_depths_that_were_not_timed_lie_on_a_line_between_those_of_their_size() -> None:
    some = [cut(1), cut(2), cut(3), cut(4), lite(), cut(1, 96), cut(2, 96)]
    known = {0: 1.0, 2: 3.0, 3: 10.0, 4: 7.0, 5: 20.0, 6: 30.0}
    assert interpolate(some, known) == [1.0, 2.0, 3.0, 10.0, 7.0, 20.0, 30.0]


def test_the_teacher_is_the_whole_transformer_at_its_own_size() -> None:
    assert teacher_of([cut(12, 224), cut(12), cut(3, 224), lite(256)]) == 0
    with pytest.raises(InputError, match="plain vision transformer"):
        teacher_of([lite()])


def test_points_behind_are_of_the_same_pictures() -> None:
    found, targets = of("++++", "+-+-", "-+++"), np.array([0, 0, 1, 1])
    one = score(found.answers[1], found.answers[0], targets)
    assert one == {"accuracy": 0.5, "behind": 0.5, "error": 0.25}
    same = score(found.answers[1], found.answers[1], targets)
    assert (same["behind"], same["error"]) == (0.0, 0.0)


def test_scenes_are_fused_and_cameras_keep_their_order() -> None:
    targets = np.repeat([0, 1], len(CAMERAS))
    found = AnsweredPictures([answers("+++-+---", targets)], targets)
    assert found.of_camera(CAMERAS[0]).accuracies() == [1.0]
    assert found.of_camera(CAMERAS[3]).accuracies() == [0.0]
    assert found.fused().targets.tolist() == [0, 1]
    assert found.fused().accuracies() == [0.5]


#: The teacher, a cut and a network by half of its time, and a quick cut.
SOME, RATIOS = [cut(12, 224), cut(6), lite(), cut(1)], [1.0, 0.5, 0.5, 0.1]
LEARNT = of("+" * 20, "+++-" * 5, "++++" * 4 + "+++-", "+-+-" * 5)


def test_networks_are_chosen_by_the_training_pictures_and_measured_on_the_test() -> None:
    # On the test the cut would be better than the network that was chosen.
    tested = of("+" * 20, "+" * 20, "++++---+++" * 2, "-" * 20)
    found = Contest(SOME, RATIOS, LEARNT, tested).measure_pictures(0.5)
    assert found["single"]["rows"] == {"": 2}
    assert found["single"]["together"]["accuracy"] == pytest.approx(0.7)
    assert found["single"]["together"]["behind"] == pytest.approx(0.3)
    assert found["cut"]["rows"] == {"": 1}
    assert found["cut"]["together"]["behind"] == 0.0
    # The time of all three devices together is less than the teacher's.
    assert found["single_of_all_time"]["rows"] == {"": 2}


def test_each_device_serves_what_its_part_of_the_time_is_enough_for() -> None:
    tested = of("+" * 20, "+" * 20, "+" * 20, "+-" * 10)
    found = Contest(SOME, RATIOS, LEARNT, tested).measure_pictures(1.0)
    assert list(found["fleet"]["rows"]) == list(SPEEDS)
    for device, row in found["fleet"]["rows"].items():
        assert RATIOS[row] <= SPEEDS[device]
        assert SOME[found["cuts"]["rows"][device]].depth
    assert found["fleet"]["rows"]["a quarter"] == 3
    fleet = found["fleet"]
    assert fleet["one_missing"]["accuracy"] == min(fleet["without"].values())
    assert set(fleet["without"]) == set(SPEEDS)


def test_devices_count_as_much_as_the_training_pictures_say() -> None:
    """A device that is sure and right as often as wrong would outvote the other in a sum."""
    choice = ChosenNetworks(rows={"good": 0, "bad": 1}, alone={}, together=1.0, without={})
    targets = np.arange(60) % 2
    told = {"good": answers("+" * 60, targets), "bad": 4 * answers("++--" * 15, targets)}
    found = score_devices(choice, (told, targets), (told, targets), told["good"])
    assert share(told["good"] + told["bad"], targets) == 0.5
    assert found["together"]["accuracy"] == 1.0
    assert found["one_missing"]["accuracy"] == found["without"]["good"] == 0.5


def test_each_camera_has_a_network_and_a_single_one_the_best_camera() -> None:
    scenes = np.arange(20) // 10
    targets = np.repeat(scenes, len(CAMERAS))

    def views(good: str) -> np.ndarray:
        """Right by the camera `good`, wrong by the others every second time."""
        marks = ["+" if camera == good or scene % 2 else "-"
                 for scene in range(20) for camera in CAMERAS]  # fmt: skip
        return answers("".join(marks), targets)

    pictures = AnsweredPictures([views("left")] * 2 + [views("top")] * 2, targets)
    found = Contest(SOME, RATIOS, pictures, pictures).measure_cameras(0.5)
    assert set(found["fleet"]["rows"]) == set(CAMERAS)
    assert 0 not in found["fleet"]["rows"].values()
    assert len(found["single"]["rows"]) == 1
    assert found["single"]["together"]["accuracy"] == 1.0
    assert found["cut"]["rows"] in ({"left": 1}, {"top": 3})
    assert "single_of_all_time" not in found
    assert len(found["fleet"]["without"]) == len(CAMERAS)


def scored(accuracy: float, points_behind: float) -> dict[str, float]:
    return {"accuracy": accuracy, "behind": points_behind, "error": 0.003}


def row(
    name: str, number: int, shares: list[float], points_behind: float, *, cameras: bool = False
) -> dict[str, object]:
    """A draw whose ways are all the same, at a quarter and half of the time."""
    one = {"rows": {"": 1}, "together": scored(0.9, points_behind),
           "one_missing": scored(0.8, 2 * points_behind)}  # fmt: skip
    ways = ["cut", "single", "cuts", "fleet"] + ([] if cameras else ["single_of_all_time"])
    return {
        "data": name, "draw": number, "learnt": 600, "tested": 500, "accuracy": shares,
        "budgets": [{"budget": budget} | dict.fromkeys(ways, one) for budget in (0.25, 0.5)],
    }  # fmt: skip


LISTED = [
    {"network": one.name, "image_size": one.spec.image_size, "depth": one.depth,
     "ms": 20 * ratio, "ratio": ratio}
    for one, ratio in zip(SOME, RATIOS, strict=True)
]  # fmt: skip
DATA = by_data([row("x", 0, [1, 0.5, 0.6, 0.4], 0.01), row("x", 1, [0.9, 0.7, 0.6, 0.4], 0.03)])


def test_draws_are_averaged_and_their_errors_shrink() -> None:
    assert accuracies(DATA["x"]) == pytest.approx([95, 60, 60, 40])
    found = behind([scored(0.9, 0.01), scored(0.9, 0.03)])
    assert found.points == pytest.approx(2.0)
    assert found.error == pytest.approx(0.3 / 2**0.5)
    assert found.words(3) == "+2.0 ± 0.2, kept"
    assert found.words(1) == "+2.0 ± 0.2, not kept"


def test_a_promise_is_kept_or_not_and_one_camera_is_no_rival_of_four() -> None:
    lines = promises(DATA).splitlines()
    assert lines[2].endswith("| +2.0 ± 0.2, kept |")
    assert any("at most 1" in line and "+2.0 ± 0.2, not kept" in line for line in lines)
    assert any(
        "one missing: at most 2" in line and "+4.0 ± 0.2, not kept" in line for line in lines
    )
    fused = by_data([row("four", 0, [1, 0.5, 0.6, 0.4], 0.01, cameras=True)])
    assert promises(fused).splitlines()[2].endswith("at most 3 |  |")
    assert "| 90.0 | 90.0 |  | 90.0 | 80.0 |" in contests(LISTED, fused)


def test_the_best_depth_of_each_size_is_bold() -> None:
    some = [LISTED[0] | {"depth": depth, "image_size": 64} for depth in (2, 1)]
    data = by_data([row("x", 0, [0.7, 0.5], 0.0)])
    assert depths(some, data).splitlines()[2] == "| x | 64 | 50.0 | **70.0** |"


def test_the_picture_has_a_panel_for_each_data_set_and_one_legend() -> None:
    drawn = draw(LISTED, DATA | by_data([row("y", 0, [1, 0.5, 0.6, 0.4], 0.0)])).decode()
    assert drawn.count(">x<") == 1
    assert drawn.count(">y<") == 1
    for words in ("layers at 64 px", "layers at 224 px", "EfficientNet", "one missing", "teacher"):
        assert drawn.count(words) == 1


def test_classifiers_answer_pictures_left_out_of_their_fit_and_those_of_a_test() -> None:
    targets = np.repeat([0, 1], 20)
    paths = tuple(Path(str(row)) for row in range(40))
    pool = PoolPictures(("here", "there"), paths, targets, np.arange(40))
    random = np.random.default_rng(0)
    learnt, tested = ({0: targets[:, None] + random.normal(0, 0.3, (40, 3))} for _ in range(2))
    found = FittedPool([lite()], {}, pool, learnt).answer(pool, tested)  # type: ignore[arg-type]
    for one in found:
        assert one.answers[0].shape == (40, 2)
        assert one.accuracies()[0] > 0.9


def test_devices_as_slow_as_named_are_predicted_to_take_what_was_timed(tmp_path: Path) -> None:
    times = read_result("depth-cuts")
    for profile in speed_profiles(times):
        write_toml(tmp_path / f"{profile.name}.toml", profile)
    profiles = read_profiles([str(tmp_path / f"{name.replace(' ', '-')}.toml") for name in SPEEDS])
    timed = [one for one in times["candidates"] if one["timed"] and one["depth"]]
    for profile, speed in zip(profiles, SPEEDS.values(), strict=True):
        latency = fit_latency(profile)
        for one in timed:
            predicted = latency.predict_ms(encoder(one["depth"], one["image_size"]), CLASSES)
            assert predicted * speed == pytest.approx(one["ms"], rel=0.1)
    assert teacher_ms(times) == max(one["ms"] for one in timed)
