"""Members that a plan may have, and plans whose members are networks."""

import math
from pathlib import Path

import numpy as np
import pytest

from mdp.errors import InputError
from mdp.files import write_toml
from mdp.formats.plan import NetworkSpec, SubModelSpec, read_plan
from mdp.formats.profile import DeviceProfile, read_profile
from partitioner.estimates.accuracy import predictor_for, read_shipped_law
from partitioner.estimates.catalogue import catalogue
from partitioner.planner.candidates import evaluate_device, fit_ways
from partitioner.planner.design_space import make_design_space
from partitioner.planner.explain import explain
from partitioner.planner.families import Families, families_of
from partitioner.planner.problem import make_problem
from partitioner.planner.search import plan_within
from partitioner.run.weights import weights_in
from tests.support.models.planning import BASE

NAMES = ("n100", "laptop-cpu")
LITE0, CONV = "tf_efficientnet_lite0", "mobilenetv4_conv_small"


@pytest.fixture(scope="module")
def profiles() -> list[DeviceProfile]:
    return [read_profile(name) for name in NAMES]


def names(families: Families) -> set[str]:
    return {spec.name for spec in families.networks}


def test_networks_are_planned_where_their_weights_are_at_hand_or_where_they_are_named() -> None:
    shape = BASE.shape
    assert families_of(None, None, shape, 10) == Families()
    found = families_of(None, {LITE0, "resnet50"}, shape, 10)
    assert found.vits
    assert names(found) == {LITE0}
    assert {s.image_size for s in found.networks} <= set(catalogue()[LITE0].costs)
    assert min(s.image_size for s in found.networks) >= shape.image_size / 2
    named = families_of(["mobilenetv4", LITE0], None, shape, 10)
    assert not named.vits
    assert {LITE0, CONV} < names(named)
    assert families_of(["vit"], {LITE0}, shape, 10) == Families()
    assert names(families_of(["all"], {LITE0}, shape, 10)) == {LITE0}
    assert len(names(families_of(["all"], None, shape, 10))) == len(catalogue())


@pytest.mark.parametrize(
    ("named", "weights", "said"),
    [
        (["resnet"], None, "--families: expected ViT, MobileNetV4, .*, got 'resnet'"),
        (None, {"resnet50"}, "--weights: expected a file named after .*, found resnet50"),
        (["LCNet"], {LITE0}, "--families LCNet: expected weights of one of lcnet_050 in --weights"),
    ],
)
def test_an_absent_family(named: list[str] | None, weights: set[str] | None, said: str) -> None:
    with pytest.raises(InputError, match=said):
        families_of(named, weights, BASE.shape, 10)


def test_a_teacher_of_too_small_pictures_is_refused() -> None:
    tiny = SubModelSpec(
        image_size=8, patch_size=4, embed_dim=8, depth=1, num_heads=1, mlp_ratio=2.0
    )
    with pytest.raises(InputError, match="for pictures of 4 to 24 px"):
        families_of([LITE0], None, tiny, 10)


def test_weights_are_files_named_after_networks(tmp_path: Path) -> None:
    (tmp_path / f"{LITE0}.in1k.safetensors").touch()
    (tmp_path / "README.md").touch()
    # As another system writes beside each file.
    (tmp_path / f"._{LITE0}.in1k.safetensors").touch()
    assert set(weights_in(tmp_path)) == {LITE0}
    (tmp_path / f"{LITE0}.pth").touch()
    with pytest.raises(InputError, match="expected one file of weights of"):
        weights_in(tmp_path)


def test_a_plan_of_networks_is_explained(profiles: list[DeviceProfile], tmp_path: Path) -> None:
    networks = tuple(catalogue()[name].spec(160, 1000) for name in (LITE0, CONV, "hgnetv2_b0"))
    families = Families(vits=False, networks=networks)
    problem = make_problem(BASE, profiles, families=families)
    solution = plan_within(problem, 40.0)
    plan = solution.plan
    assert plan.assignments
    for assignment in plan.assignments:
        assert assignment.submodel is None
        assert assignment.predicted_ms.total <= 40.0
        assert assignment.spec.outline in assignment.why
    write_toml(tmp_path / "plan.toml", plan)
    assert read_plan(tmp_path / "plan.toml") == plan
    told = explain(problem, solution)
    assert {one.device for one in told} == set(NAMES)
    assert plan.deadline_ms is not None
    assert plan.deadline_ms > max(a.predicted_ms.total for a in plan.assignments)


def test_vits_and_networks_compete_with_their_own_kind_alone(profiles: list[DeviceProfile]) -> None:
    predictor = predictor_for(read_shipped_law(), BASE.shape, num_classes=10)
    networks = [catalogue()[name].spec(160, 10) for name in (CONV, "hgnetv2_b0", "hgnetv2_b1")]
    choices = make_design_space(BASE.shape, predictor, networks=networks)
    device = evaluate_device(profiles[0], fit_ways(profiles[0], ["fp32"], networks=True), choices)
    kept = [choices.specs[row] for row in device.rows]
    assert {s.name for s in kept if isinstance(s, NetworkSpec)} >= {CONV}
    assert any(isinstance(spec, SubModelSpec) and spec.image_size == 160 for spec in kept)
    # Without latencies of networks none of them can be run.
    blind = evaluate_device(profiles[0], fit_ways(profiles[0], ["fp32"]), choices)
    assert not [row for row in blind.rows if isinstance(choices.specs[row], NetworkSpec)]
    network = int(np.flatnonzero(choices.embed_dims == 0)[0])
    assert blind.running(network) is None
    run = device.running(network)
    assert run is not None
    assert math.isfinite(run.predicted_ms.total)
