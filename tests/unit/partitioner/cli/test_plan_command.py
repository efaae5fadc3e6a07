"""`mdp-partition plan`: what it is asked for, what it says, and what it draws."""

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mdp.errors import InputError, PlanRefused
from mdp.files import write_toml
from mdp.formats.plan import NetworkSpec, Region, SubModelSpec, TeacherSpec, read_plan
from mdp.formats.profile import DeviceProfile, Precision, ProbeRecord, Sustained, read_profile
from mdp.requests.deadline import reserve_s
from partitioner.cli.plan_plot import draw_plan
from partitioner.cli.plan_tables import print_planned
from partitioner.cli.tables import short
from partitioner.estimates.latency import Way, fit_latency
from partitioner.planner.deadline import CLIENT_MS_PER_MEMBER, DECODING_MS
from partitioner.planner.explain import cautions, explain
from partitioner.planner.make_plan import Planned, make_planned
from partitioner.planner.problem import Problem, make_problem
from partitioner.planner.search import plan_within
from partitioner.planner.single_device import single_device
from partitioner.planner.targets import ParetoPoint, pareto, plan_with_accuracy
from partitioner.regions import REGIONS, WHOLE, where
from tests.support.models.planning import BASE, known_problem, settings, shares
from tests.support.models.trees import write_scenes
from tests.unit.partitioner.cli.conftest import Run

NAMES = ("laptop-cpu", "n100", "raspberry-pi-5")
#: The manifest of a bundle that was evaluated.
PLAIN_VITS = Path(__file__).parents[3] / "support" / "plain_vits"


@pytest.fixture(scope="module")
def problem() -> Problem:
    # Without views of parts there is a sixth to search.
    return known_problem(BASE, [read_profile(name) for name in NAMES])


@pytest.fixture(scope="module")
def points(problem: Problem) -> list[ParetoPoint]:
    """The Pareto list up to 50 ms, which takes seconds to find."""
    return pareto(problem, 50.0)


def with_points(name: str, **changes: object) -> DeviceProfile:
    """A shipped profile with every point once more, run in another way, in half the time."""
    profile = read_profile(name)
    more = [
        msgspec.structs.replace(point, latency_ms=point.latency_ms / 2, **changes)
        for point in profile.latency
    ]
    return msgspec.structs.replace(profile, latency=[*profile.latency, *more])


def test_tables_show_a_network_by_a_short_name() -> None:
    lite = NetworkSpec(name="tf_efficientnet_lite0", image_size=160, parameters=1, macs=1)
    assert short(lite) == "effnet-lite0@160"


def test_the_pareto_list_ends_at_the_plan(problem: Problem, points: list[ParetoPoint]) -> None:
    assert len(points) >= 5
    latencies = [point.latency_ms for point in points]
    accuracies = [shares(point.accuracy)[1] for point in points]
    assert latencies == sorted(set(latencies))
    assert accuracies == sorted(set(accuracies))
    assert latencies[-1] <= 50.0
    plan = plan_within(problem, 50.0).plan
    assert accuracies[-1] == pytest.approx(shares(plan.accuracy)[1], abs=5e-4)


def test_a_floor_is_reached_and_not_much_sooner(problem: Problem) -> None:
    plan = plan_with_accuracy(problem, 0.75).plan
    assert shares(plan.accuracy)[1] >= 0.75
    assert max(a.predicted_ms.total for a in plan.assignments) <= plan.target_ms
    sooner = plan_within(problem, 0.97 * plan.target_ms).plan
    assert shares(sooner.accuracy)[1] < 0.75


def test_a_floor_that_nobody_reaches_names_what_can_be_reached(problem: Problem) -> None:
    with pytest.raises(
        PlanRefused,
        match=r"no plan reaches an expected accuracy of 85.00%; the most accurate one within 20 ms "
        r"is predicted to reach 7\d\.\d\d%",
    ):
        plan_with_accuracy(problem, 0.85, 20.0)


def test_an_energy_limit_holds_for_all_members_together() -> None:
    profiles = [read_profile(name) for name in ("n100", "raspberry-pi-5")]
    free = plan_within(make_problem(BASE, profiles), 40.0).plan
    spent_j = sum(a.energy_j or 0.0 for a in free.assignments)
    half_j = make_problem(BASE, profiles, max_energy_j=spent_j / 2)
    limited = plan_within(half_j, 40.0).plan
    assert 0 < sum(a.energy_j or 0.0 for a in limited.assignments) <= spent_j / 2
    for assignment in free.assignments:
        watts = read_profile(assignment.device).power_w
        assert watts is not None
        assert assignment.energy_j == pytest.approx(watts * assignment.predicted_ms.compute / 1e3)


def test_a_device_without_known_power_has_no_part_under_an_energy_limit() -> None:
    profiles = [read_profile(name) for name in NAMES]
    plan = plan_within(make_problem(BASE, profiles, max_energy_j=1.0), 40.0).plan
    assert "the profile has no `power_w`" in plan.left_out["laptop-cpu"]
    # Nor is the plan refused for that device alone.
    problem = make_problem(BASE, profiles, max_energy_j=1.0)
    alone = single_device(problem, problem.limits(40.0, 1))
    assert alone is None or alone.device != "laptop-cpu"


@pytest.mark.parametrize(
    ("changes", "asked", "found"),
    [
        ({"runtime": "openvino"}, ("fp32",), ("fp32", "openvino")),
        ({"precision": "int8"}, ("fp32",), ("fp32", "onnxruntime")),
        ({"precision": "int8"}, ("fp32", "int8"), ("int8", "onnxruntime")),
        ({"precision": "int8"}, ("int8",), ("int8", "onnxruntime")),
    ],
)
def test_only_measured_and_allowed_ways_are_planned(
    changes: dict[str, object], asked: tuple[Precision, ...], found: tuple[str, str]
) -> None:
    profiles = [with_points(name, **changes) for name in ("n100", "raspberry-pi-5")]
    plan = plan_within(make_problem(BASE, profiles, precisions=asked), 20.0).plan
    named = {(a.vit.precision, a.runtime) for a in plan.assignments}
    assert named == {found}


def test_a_precision_that_was_not_measured_cannot_be_planned() -> None:
    with pytest.raises(InputError, match=r"expected `latency` points of int8, found fp32"):
        make_problem(BASE, [read_profile("n100")], precisions=("int8",))


def test_the_explanation_names_limit_gain_and_sureness(problem: Problem) -> None:
    solution = plan_within(problem, 50.0)
    plan = solution.plan
    told = explain(problem, solution)
    assert [t.device for t in told] == [a.device for a in plan.assignments]
    for one in told:
        text = " ".join(one.sentences)
        assert "Runs " in text
        assert "points of the expected accuracy." in text
        assert "ms too late" in text
        assert "Compute is expected between " in text
    assert any("by estimated latencies" in " ".join(one.sentences) for one in told)


@pytest.mark.parametrize(
    ("region", "words"),
    [
        (WHOLE, "the whole square"),
        (REGIONS[2], "75% x 75% at the middle"),
        (REGIONS[3], "75% x 75% at the top left"),
        (REGIONS[4], "75% x 75% at the bottom right"),
        (REGIONS[5], "75% x 75% at the top right"),
        (REGIONS[6], "75% x 75% at the bottom left"),
        (Region(bottom=0.5), "100% x 50% at the top"),
        (Region(left=0.1, right=0.6), "50% x 100% at the middle"),
    ],
)
def test_a_region_in_words(region: Region, words: str) -> None:
    assert where(region) == words


def probe_record(last_minute_ms: float, complete: bool = True, busy_points: int = 0) -> ProbeRecord:
    load = Sustained(shape="one", minutes=10, first_minute_ms=10.0, last_minute_ms=last_minute_ms)
    return ProbeRecord(
        complete=complete, date="2026-11-20", processor="Test", cores=4, system="Linux",
        versions={}, planned_points=90, busy_points=busy_points, sustained=load,
    )  # fmt: skip


def test_a_doubtful_probe_is_reported(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = read_profile("n100")
    record = probe_record(13.0, complete=False, busy_points=2)
    path = tmp_path / "n100.toml"
    write_toml(path, msgspec.structs.replace(plain, probe=record))
    asked = settings([str(path), "raspberry-pi-5"], latency_ms=20.0)
    planned = make_planned(BASE, asked, 10, explained=True)
    points = len(plain.latency)
    expected = [
        f"Its probe was interrupted: {points} of 90 points",
        f"During 2 of {points} points others kept it busy, so it may be faster",
        "After 10 minutes of load it takes 30% longer, which is planned with",
    ]
    assert cautions(profile_of(planned, "n100")) == expected
    assert cautions(profile_of(planned, "raspberry-pi-5")) == []
    told = {one.device: " ".join(one.sentences) for one in planned.explanations}
    assert told["n100"].endswith(". ".join(expected) + ".")
    print_planned(planned)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("n100: ")] == [
        f"n100: {sentence}" for sentence in expected
    ]


def test_a_device_that_slows_down_under_load_is_planned_as_slow_as_it_gets() -> None:
    plain = read_profile("n100")

    def under_load(last_minute_ms: float) -> DeviceProfile:
        return msgspec.structs.replace(plain, probe=probe_record(last_minute_ms))

    shape = BASE.shape
    cold = fit_latency(plain)
    hot, noisy = fit_latency(under_load(13.0)), fit_latency(under_load(10.1))
    assert hot.predict_ms(shape, 10) == pytest.approx(1.3 * cold.predict_ms(shape, 10))
    assert hot.estimate(shape, 10).high_ms == pytest.approx(1.3 * cold.estimate(shape, 10).high_ms)
    assert noisy.predict_ms(shape, 10) == cold.predict_ms(shape, 10)
    others = [read_profile(name) for name in ("raspberry-pi-5", "laptop-cpu")]
    plan = plan_within(make_problem(BASE, [under_load(13.0), *others]), 40.0).plan
    part = plan.assignment_of("n100")
    assert part is not None
    assert part.predicted_ms.compute == pytest.approx(
        1.3 * cold.predict_ms(part.vit, 1000), abs=1e-3
    )
    assert part.predicted_ms.total <= 40.0


def profile_of(planned: Planned, name: str) -> DeviceProfile:
    return next(d.profile for d in planned.problem.devices if d.name == name)


def test_the_deadline_leaves_room_for_slow_answers_the_client_and_its_reserve() -> None:
    planned = make_planned(BASE, settings(["n100", "raspberry-pi-5"], latency_ms=20.0), 10)
    plan = planned.plan
    needed = []
    for assignment in plan.assignments:
        model = fit_latency(read_profile(assignment.device), Way(threads=assignment.threads))
        slow_ms = model.estimate(assignment.vit, 10).high_ms
        own_ms = 2 * CLIENT_MS_PER_MEMBER + DECODING_MS
        needed.append(slow_ms + assignment.predicted_ms.network + own_ms)
    assert plan.deadline_ms is not None
    kept_ms = 1e3 * reserve_s(plan.deadline_ms)
    assert plan.deadline_ms - kept_ms == pytest.approx(max(needed), abs=0.1)
    assert plan.deadline_ms > max(a.predicted_ms.total for a in plan.assignments) + 2


def test_what_is_left_out_and_what_replicates_is_explained_too() -> None:
    away = [
        msgspec.structs.replace(read_profile("n100"), name=f"n{i}", availability=0.3)
        for i in range(20)
    ]
    slow = msgspec.structs.replace(
        read_profile("n100"),
        name="slow",
        latency=[
            msgspec.structs.replace(point, latency_ms=1000 * point.latency_ms)
            for point in read_profile("n100").latency
        ],
    )
    problem = make_problem(BASE, [*away, slow])
    solution = plan_within(problem, 20.0)
    plan = solution.plan
    assert plan.replicas
    assert [p.candidate.spec for p in solution.placements] == [a.spec for a in plan.assignments]
    told = {one.device: one for one in explain(problem, solution)}
    replica = told[plan.replicas[0].device]
    assert replica.sentences[0].startswith(f"Serves member {plan.replicas[0].k} too: ")
    assert told["slow"].k is None
    assert "ms too late" in told["slow"].sentences[0]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_picture_repeats(problem: Problem, points: list[ParetoPoint], kind: str) -> None:
    plan = plan_within(problem, 50.0).plan
    drawn = draw_plan(plan, points, kind)
    assert drawn == draw_plan(plan, points, kind)
    assert drawn.startswith(b"\x89PNG" if kind == "png" else b"<?xml")
    if kind == "svg":
        for word in (*NAMES, "compute", "network", "slack", "predicted accuracy, %"):
            assert word in drawn.decode()


def test_own_runs_change_the_prediction() -> None:
    shape = SubModelSpec(
        image_size=32, patch_size=8, embed_dim=192, depth=6, num_heads=3, mlp_ratio=4.0
    )
    teacher = TeacherSpec(name="vit_tiny_patch16_224", shape=shape)
    without = make_planned(teacher, settings(NAMES, latency_ms=1.0), 10)
    known = make_planned(teacher, settings(NAMES, latency_ms=1.0, runs=[str(PLAIN_VITS)]), 10)
    assert (without.problem.predictor.assumed, known.problem.predictor.assumed) == (True, False)
    assert known.problem.predictor.teacher_accuracy == pytest.approx(0.5928)
    assert without.plan.accuracy is not None
    assert without.plan.accuracy.all_in is None
    assert 0.55 < shares(known.plan.accuracy)[0] < 0.68


PERCENTILE = "plan.percentile: expected a number from 50 to 99.9, got {}"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected --latency-ms, --min-accuracy or both, got neither"),
        ({"min_accuracy": 1.0}, "plan.min_accuracy: expected a share above 0 and below 1, got 1"),
        *(
            ({"latency_ms": 5, key: value}, f"plan.{key}: expected a number above 0, got {value:g}")
            for key, values in (
                ("latency_ms", (0.0, -1.0, math.nan, math.inf)),
                ("client_mbit", (0.0, -5.0, math.nan)),
                ("max_energy_j", (0.0,)),
            )
            for value in values
        ),
        (
            {"latency_ms": 5, "precision": ["int4"]},
            "plan.precision: expected some of fp32, fp16, bf16, int8, int8-static, got 'int4'",
        ),
        ({"latency_ms": 5, "percentile": 40}, PERCENTILE.format("40")),
        ({"latency_ms": 5, "percentile": 100}, PERCENTILE.format("100")),
        ({"latency_ms": 5, "percentile": math.nan}, PERCENTILE.format("nan")),
        (
            {"latency_ms": 5, "teacher_accuracy": 80},
            "plan.teacher_accuracy: expected a share above 0 and below 1, got 80",
        ),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        settings(NAMES, **options)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("named", "every", "found"),
    [
        ([], False, ("fp32",)),
        (["int8", "fp32"], False, ("fp32", "int8")),
        ([], True, ("fp32", "fp16", "bf16", "int8", "int8-static")),
    ],
)
def test_precisions_by_option(named: list[str], every: bool, found: tuple[str, ...]) -> None:
    asked = settings(NAMES, latency_ms=5, precision=named, any_precision=every)
    assert asked.precisions() == found


PLAN = ["plan", "--teacher", "vit_base_patch16_224", "--profiles", *NAMES]


@pytest.mark.torch
def test_everything_at_once_on_the_command_line(run: Run, tmp_path: Path) -> None:
    more = ["--latency-ms", 40, "--explain", "--pareto", "--plot", "p.svg", "--out", "p.toml"]
    code, out, err = run(*PLAN, *more, "--anyway")
    assert (code, err) == (0, "")
    unknown = "the teacher's accuracy on such pictures is not known; how long members will be "
    said = f"accuracy: not predicted: no training like this is on record ({unknown}trained was not "
    assert said in out
    assert "by the law's order no plan is as accurate in less time" in out
    assert re.findall(r"right on|nine of ten|expected accuracy|points higher", out) == []
    assert "ms too late" in " ".join(out.split())
    rows = [line for line in out.splitlines() if "n100" in line and "~" in line]
    assert rows[0].startswith("│")
    said = " ".join(out.split())
    assert "~ estimated, not measured on laptop-cpu, n100, raspberry-pi-5" in said
    assert re.search(r"deadline of [\d.]+ ms or more, 8 of them for decoding a picture of", said)
    assert (tmp_path / "p.svg").read_bytes().startswith(b"<?xml")
    plan = read_plan(tmp_path / "p.toml")
    assert plan.accuracy is not None
    assert plan.accuracy.unknown.startswith(unknown)
    assert plan.accuracy.all_in is plan.accuracy.expected is plan.accuracy.low is None
    assert plan.single_device is not None
    assert plan.single_device.accuracy is None
    assert [a.accuracy for a in plan.assignments] == [None] * len(plan.assignments)


@pytest.mark.torch
def test_a_refusal_names_a_target_and_anyway_plans(run: Run, tmp_path: Path) -> None:
    # No public network is known for pictures of 80 px, which would be the better choice anyway.
    refused = ["plan", "--teacher", "vit_base_patch16_224", "--latency-ms", 60, "--out", "p.toml",
               "--teacher-arg", "img_size=80",
               "--profiles", "jetson-orin-nano", "n100"]  # fmt: skip
    code, out, err = run(*refused)
    assert code == 4
    assert not (tmp_path / "p.toml").exists()
    works = re.search(r"the nearest target with a plan is ([\d.]+) ms", err)
    assert works is not None
    code, out, err = run(*refused[:4], works[1], *refused[5:])
    assert (code, err) == (0, "")

    code, out, err = run(*refused, "--anyway")
    assert (code, err) == (0, "p.toml: replaced\n")
    plan = read_plan(tmp_path / "p.toml")
    assert (plan.refused, len(plan.assignments)) == (False, 2)
    assert plan.reason.startswith("made against advice: jetson-orin-nano runs the teacher itself")
    assert plan.reason in " ".join(out.split())


@pytest.mark.torch
def test_one_device_and_several_boards_of_a_kind_can_be_planned(run: Run, tmp_path: Path) -> None:
    teacher = ["plan", "--teacher", "vit_base_patch16_224", "--out", "p.toml",
               "--latency-ms"]  # fmt: skip
    code, _, err = run(*teacher, 100, "--profiles", "n100")
    assert (code, err) == (0, "")
    assert [a.device for a in read_plan(tmp_path / "p.toml").assignments] == ["n100"]

    code, _, err = run(*teacher, 60, "--profiles", "n100*2", "laptop-cpu", "--anyway")
    assert (code, err) == (0, "p.toml: replaced\n")
    plan = read_plan(tmp_path / "p.toml")
    served = {a.device for a in plan.assignments} | {r.device for r in plan.replicas}
    served |= set(plan.left_out)
    assert served == {"n100-1", "n100-2", "laptop-cpu"}

    code, _, err = run(*teacher, 60, "--profiles", "n100", "n100")
    assert code == 2
    assert "n100*2 for several boards of a kind" in err
    code, _, err = run(*teacher, 60, "--profiles", "n100*0")
    assert code == 2
    assert "n100*0: expected a number of boards from 1 to 64" in err


@pytest.mark.torch
def test_cameras_that_are_called_as_the_devices_are_their_own(run: Run, tmp_path: Path) -> None:
    scenes = write_scenes(tmp_path / "scenes", each=8)
    for camera, device in (("left", "n100-1"), ("right", "n100-2")):
        for picture in scenes.rglob(f"{camera}.png"):
            picture.rename(picture.with_stem(device))
    code, _, err = run(
        "plan", "--teacher", "vit_tiny_patch16_224", "--profiles", "n100*2", "--latency-ms", 60,
        "--data", scenes, "--out", "p.toml", "--anyway",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert read_plan(tmp_path / "p.toml").cameras == ["n100-1", "n100-2"]


#: A plan for a teacher of which a bundle is on file.
KNOWN = [
    "plan", "--teacher", "vit_tiny_patch16_224", "--teacher-arg", "img_size=32", "patch_size=8",
    "depth=6", "--profiles", *NAMES, "--runs", PLAIN_VITS,
]  # fmt: skip


@pytest.mark.torch
def test_json_has_what_was_asked_for(run: Run) -> None:
    more = ["--pareto", "--explain", "--json", "--anyway"]
    code, out, err = run(*KNOWN, "--min-accuracy", 0.5, *more)
    assert (code, err) == (0, "")
    value = json.loads(out)
    assert {"target_ms", "refused", "assignments", "single_device", "accuracy"} <= value.keys()
    assert value["accuracy"]["expected"] >= 0.5
    assert {"latency_ms", "accuracy", "members", "replicas", "energy_j"} == set(value["pareto"][0])
    assert next(told["device"] for told in value["explanations"]) in NAMES
    assert value["predictor"]["teacher_accuracy"] == pytest.approx(0.5928)

    code, out, err = run(*PLAN, "--latency-ms", 40, *more)
    assert (code, err) == (0, "plan.toml: replaced\n")
    value = json.loads(out)
    assert value["accuracy"].pop("unknown").startswith("the teacher's accuracy")
    assert set(value["accuracy"].values()) == {None}
    assert {a["accuracy"] for a in value["assignments"]} == {None}
    assert {point["accuracy"]["expected"] for point in value["pareto"]} == {None}
    assert value["predictor"]["teacher_accuracy"] is None


@pytest.mark.torch
def test_tables_have_accuracies_that_are_on_record(run: Run) -> None:
    code, out, err = run(*KNOWN, "--latency-ms", 1, "--anyway", "--explain")
    assert (code, err) == (0, "")
    assert re.search(r"predicted to be right on \d\d\.\d% with all in", out)
    assert "(teacher: 59.3%)" in out
    assert "nine of ten such trainings end between " in out
    assert "points of the expected accuracy." in out


def test_a_floor_needs_a_prediction(run: Run, tmp_path: Path) -> None:
    code, out, err = run(*PLAN, "--min-accuracy", 0.7)
    assert (code, out) == (2, "")
    expected = "mdp-partition: --min-accuracy: expected a prediction to hold it against, got none: "
    assert err.startswith(expected)
    assert err.endswith("give a latency target alone\n")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--latency-ms", 5, "--plot", "p.pdf"], "--plot: expected FILE.svg or FILE.png, got 'p."),
        (["--latency-ms", 5, "--precision", "int4"], "--precision: expected some of fp32"),
        (["--latency-ms", 5, "--runs", "none.json"], "none.json: cannot be read"),
    ],
)
def test_bad_input_is_one_line(run: Run, tmp_path: Path, args: list[object], message: str) -> None:
    code, out, err = run(*PLAN, *args)
    assert (code, out) == (2, "")
    assert err.startswith(f"mdp-partition: {message}")
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", [["--explain"], ["--pareto"], ["--plot", "plan.svg"]])
def test_a_plan_by_measurement_has_no_explanations(
    run: Run, tmp_path: Path, option: list[str]
) -> None:
    code, out, err = run(
        "plan", "--profiles", "n100", "--latency-ms", 5, "--data", tmp_path, *option
    )
    assert (code, out) == (2, "")
    assert err == f"mdp-partition: {option[0]}: expected --teacher beside it\n"
    assert not list(tmp_path.iterdir())
