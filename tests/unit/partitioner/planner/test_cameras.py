"""Devices with cameras of their own: what they see, what that adds, and who computes it."""

import io
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from mdp.errors import InputError
from mdp.files import write_toml
from mdp.formats.plan import Plan
from mdp.formats.profile import DeviceProfile, NetworkLink
from partitioner.cli.plan_tables import print_planned
from partitioner.estimates.accuracy import NO_SCENES, Views, seeing
from partitioner.estimates.network import fetch_ms, look_ms
from partitioner.planner.explain import explain
from partitioner.planner.make_plan import make_planned
from partitioner.planner.problem import make_problem
from partitioner.planner.search import plan_within
from tests.support.models.planning import TINY, device, known_predictor, make_plan, settings, shares

MEASURED = Views(sharpness=4.9, error=0.006, subsets=11)
PREDICTOR = known_predictor(TINY, 10)


def weak(name: str) -> DeviceProfile:
    """A device without the memory for any sub-model."""
    return device(name, memory_bytes=1000)


def cameras_of(plan: Plan) -> dict[str, str | None]:
    return {a.device: a.camera for a in plan.assignments}


def test_equal_devices_run_one_sub_model_each_on_its_own_camera() -> None:
    profiles = [device(name) for name in ("a", "b", "c", "d")]
    own = {"a": "front", "b": "side", "c": "top"}
    plan = make_plan(
        TINY, profiles, target_ms=5.0, num_classes=10, cameras=own,
        predictor=seeing(PREDICTOR, MEASURED),
    )  # fmt: skip
    assert cameras_of(plan) == own
    assert plan.cameras == ["front", "side", "top"]
    # On one picture no two members have the same shape.
    assert len({a.spec for a in plan.assignments}) == 1
    assert plan.left_out == {"d": "it has no camera (--camera)"}
    assert plan.replicas == []
    for assignment in plan.assignments:
        asked_ms = look_ms(profiles[0].link, 10)
        assert assignment.predicted_ms.network == pytest.approx(asked_ms, abs=0.01)


def test_views_add_what_was_measured_and_that_is_unknown_without_scenes() -> None:
    profiles = [device(name) for name in ("a", "b", "c")]
    own = {"a": "front", "b": "side", "c": "top"}
    for views in (None, MEASURED):
        predictor = seeing(PREDICTOR, views)
        plan = make_plan(
            TINY, profiles, target_ms=5.0, num_classes=10, cameras=own, predictor=predictor
        )
        assert plan.accuracy is not None
        assert (NO_SCENES in plan.accuracy.unknown) == (views is None)
        assert bool(predictor.views) == (views is not None)
        if views is None:
            assert plan.accuracy.all_in is None
            assert [a.accuracy for a in plan.assignments] == [None, None, None]
        else:
            assert shares(plan.accuracy)[0] > max(a.accuracy or 0 for a in plan.assignments) > 0


@pytest.mark.parametrize("order", [("bell", "n100"), ("n100", "bell")])
def test_a_neighbour_computes_for_a_device_that_is_too_weak(order: tuple[str, str]) -> None:
    """In whichever order they are named, the one that can computes; only the first has a camera."""
    profiles = [weak("bell"), device("n100"), device("pi")]
    shared = {**dict.fromkeys(order, "door"), "pi": "yard"}
    problem = make_problem(TINY, profiles, num_classes=10, cameras=shared)
    solution = plan_within(problem, 8.0)
    plan = solution.plan
    assert cameras_of(plan) == {"n100": "door", "pi": "yard"}
    network_ms = {a.device: a.predicted_ms.network for a in plan.assignments}
    (part,) = (a for a in plan.assignments if a.device == "n100")
    fetched = order[0] == "bell"
    assert ("fetches the pictures of bell" in part.why) == fetched
    assert ("n100 computes its camera door" in plan.left_out["bell"]) == fetched
    link = profiles[0].link
    more_ms = fetch_ms(link, link, part.spec.image_size) if fetched else 0.0
    assert network_ms["n100"] == pytest.approx(network_ms["pi"] + more_ms, abs=2e-3)
    assert all(a.predicted_ms.total <= 8.0 for a in plan.assignments)
    said = [sentence for each in explain(problem, solution) for sentence in each.sentences]
    assert any("on the pictures of camera door" in sentence for sentence in said)


def test_a_device_that_can_computes_its_camera_itself() -> None:
    shared = {"n100": "door", "fast": "door", "pi": "yard"}
    profiles = [device("n100"), device("fast", gmacs_per_s=500.0), device("pi")]
    plan = make_plan(TINY, profiles, target_ms=8.0, num_classes=10, cameras=shared)
    assert cameras_of(plan) == {"n100": "door", "pi": "yard"}
    assert plan.left_out == {"fast": "n100 computes the camera door itself"}
    assert plan.single_device is not None
    assert plan.single_device.device != "fast"


def test_a_picture_that_takes_too_long_to_fetch_leaves_its_camera_out() -> None:
    slow = msgspec.structs.replace(
        weak("bell"), link=NetworkLink(bandwidth_bps=1e5, round_trip_s=0.001)
    )
    shared = {"bell": "door", "n100": "door", "pi": "yard"}
    plan = make_plan(
        TINY, [slow, device("n100"), device("pi")], target_ms=8.0, num_classes=10, cameras=shared
    )
    assert cameras_of(plan) == {"pi": "yard"}
    assert "too late" in plan.left_out["n100"]


@pytest.mark.parametrize(
    ("target_ms", "said"),
    [
        (2.0, "a alone, with 56 px, patch 8, 64 x 4 on the pictures of front alone, is predicted"),
        (20.0, "a runs the teacher itself on the pictures of front alone in "),
    ],
)
def test_a_refusal_says_what_the_one_device_sees(target_ms: float, said: str) -> None:
    profiles = [device("a"), device("b", gmacs_per_s=1.0, availability=0.5)]
    plan = make_plan(
        TINY, profiles, target_ms=target_ms, num_classes=10, cameras={"a": "front", "b": "side"}
    )
    assert plan.refused
    assert plan.reason.startswith(said)


def test_the_plan_says_who_computes_and_what_is_not_known(tmp_path: Path) -> None:
    profiles = [weak("bell"), device("n100"), device("pi")]
    for profile in profiles:
        write_toml(tmp_path / f"{profile.name}.toml", profile)
    names = [str(tmp_path / f"{profile.name}.toml") for profile in profiles]
    shared = {"bell": "door", "n100": "door", "pi": "yard"}
    planned = make_planned(TINY, settings(names, latency_ms=8.0, cameras=shared), 10)
    said = io.StringIO()
    print_planned(planned, Console(file=said, width=200))
    assert "camera door: n100 computes it for bell, whose pictures it fetches" in said.getvalue()
    assert "camera yard: pi computes it\n" in said.getvalue()
    assert NO_SCENES in said.getvalue()
    assert planned.as_json()["predictor"]["views"] == ""


def test_a_camera_of_no_device() -> None:
    with pytest.raises(InputError, match=r"^plan\.cameras: expected cameras of a; camera 'top' is"):
        make_problem(TINY, [device("a")], cameras={"b": "top"})
