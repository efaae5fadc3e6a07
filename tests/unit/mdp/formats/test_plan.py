"""Contents that a plan may have, and those that it may not."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from mdp.errors import ConfigError
from mdp.files import write_toml
from mdp.formats.plan import (
    MAX_MEMBERS,
    Assignment,
    NetworkSpec,
    Plan,
    PredictedMs,
    SingleDevice,
    read_plan,
)
from mdp.testing.bundles import colour_plan, with_rungs


def without_none(value: Any) -> Any:
    """TOML has no null: keys without a value are left out."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list) else value


def change(plan: Plan, **changes: Any) -> dict[str, Any]:
    """The plan as builtins, with `a__b=value` put at a -> b; 0, 1, ... index lists."""
    content: dict[str, Any] = without_none(msgspec.to_builtins(plan))
    for key, value in changes.items():
        *way, last = key.split("__")
        place: Any = content
        for step in way:
            place = place[int(step)] if step.isdigit() else place[step]
        place[last] = value
    return content


def test_round_trip_keeps_everything(tmp_path: Path) -> None:
    path, plan = tmp_path / "plan.toml", colour_plan()
    write_toml(path, plan)
    assert read_plan(path) == plan


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"assignments__1__k": 0}, "listed by `k`, from 0 without gaps"),
        ({"assignments__2__k": 3}, "listed by `k`, from 0 without gaps"),
        ({"assignments__2__k": MAX_MEMBERS}, r"`int` <= 63 - at `\$\.assignments\[2\]\.k`"),
        ({"assignments__1__device": "alpha"}, "name a device twice: alpha, alpha, gamma"),
        (
            {"assignments__1__device": "No Name"},
            r"expected 1 to 64 of a-z.* `\$\.assignments\[1\]\.device`",
        ),
        ({"assignments": []}, r"`array` of length >= 1 - at `\$\.assignments`"),
        (
            {"assignments__0__submodel__image_size": 18},
            r"`image_size` 18 has to be a multiple of `patch_size` 4 - at `\$\.assignments\[0\]\.s",
        ),
        (
            {"assignments__0__submodel__num_heads": 3},
            "`embed_dim` 8 has to be a multiple of `num_heads` 3",
        ),
        ({"assignments__0__submodel__image_size": 2048}, r"`int` <= 1024"),
        ({"assignments__0__submodel__mlp_ratio": 0.0}, r"`float` > 0"),
        ({"assignments__0__submodel__mlp_ratio": float("nan")}, r"`float`"),
        ({"assignments__0__submodel__precision": "int4"}, "Invalid enum value 'int4'"),
        (
            {"assignments__0__region": {"left": 0.5, "right": 0.5}},
            "a region needs `left` < `right` and `top` < `bottom`",
        ),
        ({"assignments__0__region": {"top": 0.9, "bottom": 0.1}}, "a region needs"),
        ({"assignments__0__region": {"right": 1.5}}, r"`float` <= 1"),
        ({"assignments__0__region": {"right": 1e-300}}, "at least 0.01 of each side"),
        ({"assignments__0__encoding": "webp"}, "Invalid enum value 'webp'"),
        ({"assignments__0__threads": 0}, r"`int` >= 1 - at `\$\.assignments\[0\]\.threads`"),
        ({"assignments__0__predicted_ms__total": -1.0}, r"`float` >= 0"),
        ({"assignments__0__surprise": 1}, r"unknown field `surprise` - at `\$\.assignments\[0\]`"),
        ({"target_ms": 0.0}, r"`float` > 0.* at `\$\.target_ms`"),
        ({"target_ms": float("nan")}, r"at `\$\.target_ms`"),
        ({"teacher__name": ""}, r"length >= 1 - at `\$\.teacher\.name`"),
        ({"teacher__args": {"img_size": [1]}}, r"at `\$\.teacher\.args\[\.\.\.\]`"),
        ({"format_version": 2}, "Invalid enum value 2"),
        ({"surprise": 1}, "unknown field `surprise`"),
    ],
)
def test_what_a_plan_may_not_say(tmp_path: Path, changes: dict[str, Any], expected: str) -> None:
    import tomli_w

    content = change(colour_plan(), **changes)
    path = tmp_path / "plan.toml"
    path.write_text(tomli_w.dumps(content))
    with pytest.raises(ConfigError, match=rf"plan\.toml: .*{expected}"):
        read_plan(path)


def with_replica(**changes: Any) -> Plan:
    """A plan in which `delta` serves what `beta` is assigned."""
    plan = colour_plan()
    replica = {
        "k": 1,
        "device": "delta",
        "predicted_ms": {"compute": 1.0, "network": 0.5, "total": 1.5},
        "memory_bytes": 7,
        "provider": "CUDAExecutionProvider",
        "threads": 3,
        "why": "a second one",
        "runtime": "onnxruntime",
    }
    content = msgspec.to_builtins(plan) | {"replicas": [replica | changes]}
    return msgspec.convert(content, Plan)


def test_a_replica_runs_what_another_device_is_assigned(tmp_path: Path) -> None:
    plan = with_replica()
    write_toml(tmp_path / "plan.toml", plan)
    assert read_plan(tmp_path / "plan.toml") == plan
    own, replica = plan.assignment_of("beta"), plan.assignment_of("delta")
    assert own is not None
    assert replica is not None
    assert replica.submodel == own.submodel
    assert replica.region == own.region
    assert (replica.k, replica.device, replica.threads) == (1, "delta", 3)
    assert replica.provider == "CUDAExecutionProvider"
    assert own.k == 1
    assert plan.assignment_of("nobody") is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"k": 7}, "`replicas` name sub-model 7, which no device is assigned"),
        ({"device": "beta"}, "`replicas` name a device twice, or one that has an assignment"),
    ],
)
def test_what_a_replica_may_not_be(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=expected):
        with_replica(**changes)


def test_too_many_members() -> None:
    devices = tuple(f"d{k}" for k in range(MAX_MEMBERS))
    assert len(colour_plan(devices, (8,) * MAX_MEMBERS).assignments) == MAX_MEMBERS
    content = change(colour_plan(devices, (8,) * MAX_MEMBERS))
    content["assignments"].append({**content["assignments"][0], "k": MAX_MEMBERS, "device": "one"})
    with pytest.raises(msgspec.ValidationError, match=f"length <= {MAX_MEMBERS}"):
        msgspec.convert(content, Plan)


NETWORK = NetworkSpec(name="tf_efficientnet_lite0", image_size=152, parameters=3, macs=4)


def test_an_assignment_holds_a_network_instead_of_a_vit(tmp_path: Path) -> None:
    plan = colour_plan()
    other = replace(plan.assignments[0], submodel=None, network=NETWORK)
    changed_plan = replace(plan, teacher=None, assignments=[other, *plan.assignments[1:]])
    write_toml(tmp_path / "plan.toml", changed_plan)
    assert read_plan(tmp_path / "plan.toml") == changed_plan
    assert other.spec == NETWORK
    assert other.in_precision("int8-static").spec.precision == "int8-static"
    assert changed_plan.finest_px == 152
    with pytest.raises(ConfigError, match="sub-model 0 is 152 px, tf_efficientnet_lite0: expected"):
        _ = other.vit
    with pytest.raises(ConfigError, match="the plan has no teacher"):
        changed_plan.require_teacher()


@pytest.mark.parametrize("network", [None, NETWORK])
def test_an_assignment_holds_exactly_one_of_the_two(network: NetworkSpec | None) -> None:
    one = colour_plan().assignments[0]
    with pytest.raises(ValueError, match="either `submodel` or `network`"):
        Assignment(
            k=0,
            device="a",
            predicted_ms=one.predicted_ms,
            memory_bytes=1,
            provider="CPUExecutionProvider",
            threads=1,
            why="",
            submodel=one.submodel if network else None,
            network=network,
        )


def test_the_best_single_device_runs_a_vit_or_a_network(tmp_path: Path) -> None:
    known = PredictedMs(compute=1, network=1, total=2)
    vit = colour_plan().assignments[0].submodel
    one = SingleDevice(device="alpha", predicted_ms=known, is_teacher=False, submodel=vit)
    other = SingleDevice(device="alpha", predicted_ms=known, is_teacher=False, network=NETWORK)
    assert (one.spec, other.spec) == (vit, NETWORK)
    # As older versions wrote it.
    write_toml(tmp_path / "plan.toml", replace(colour_plan(), single_device=one))
    assert "[single_device.network]" not in (tmp_path / "plan.toml").read_text()
    assert read_plan(tmp_path / "plan.toml").single_device == one
    with pytest.raises(ValueError, match="either `submodel` or `network`"):
        SingleDevice(device="alpha", predicted_ms=known, is_teacher=False)


def test_rungs_are_kept_and_one_takes_the_place_of_all(tmp_path: Path) -> None:
    own = with_rungs(colour_plan().assignments[0], 3)
    plan = replace(colour_plan(), assignments=[own, *colour_plan().assignments[1:]])
    write_toml(tmp_path / "plan.toml", plan)
    assert "[[assignments.rungs]]" in (tmp_path / "plan.toml").read_text()
    assert read_plan(tmp_path / "plan.toml") == plan
    assert own.at(0) == colour_plan().assignments[0]
    lower = own.at(2)
    assert lower.lower == ()
    assert (lower.spec, lower.memory_bytes) == (own.lower[1].spec, own.lower[1].memory_bytes)
