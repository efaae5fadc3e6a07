"""Teachers, devices of a plain formula, and their plans."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from mdp.formats.plan import Plan, PredictedAccuracy, SubModelSpec, TeacherSpec
from mdp.formats.profile import DeviceProfile, NetworkLink, read_profile
from partitioner.estimates.accuracy import Predictor, predictor_for, read_shipped_law
from partitioner.planner.problem import Problem, make_problem
from partitioner.planner.search import plan_within
from partitioner.run.plan_settings import PlanSettings
from tests.support.models.latencies import Formula


def teacher(
    image_size: int, patch_size: int, embed_dim: int, depth: int, num_heads: int
) -> TeacherSpec:
    shape = SubModelSpec(
        image_size=image_size,
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=num_heads,
        mlp_ratio=4.0,
    )
    return TeacherSpec(name="vision_transformer", shape=shape)


DIGITS = teacher(24, 4, 96, 6, 3)
TINY = teacher(64, 8, 192, 9, 3)
BASE = teacher(224, 16, 768, 12, 12)


def known_predictor(of: TeacherSpec, num_classes: int = 1000) -> Predictor:
    """The law of a converged training, taken to be supported by what is on file.

    Nothing is predicted without a teacher's accuracy and a training that is like recorded ones.
    """
    known = predictor_for(read_shipped_law(), of.shape, num_classes=num_classes)
    return replace(known, assumed=False, unknown="")


def known_problem(of: TeacherSpec, profiles: Sequence[DeviceProfile], **changes: Any) -> Problem:
    """A problem whose accuracies are predicted."""
    classes = changes.get("num_classes", 1000)
    return make_problem(of, profiles, **{"predictor": known_predictor(of, classes)} | changes)


def device(
    name: str,
    *,
    gmacs_per_s: float = 20.0,
    fixed_ms: float = 0.2,
    layer_ms: float = 0.05,
    round_trip_ms: float = 1.0,
    memory_bytes: int = 10**9,
    availability: float = 1.0,
    spin: bool = False,
) -> DeviceProfile:
    """A profile whose latency points follow a plain formula."""
    formula = Formula(fixed_ms=fixed_ms, layer_ms=layer_ms, mac_ms=1e-6 / gmacs_per_s)
    shapes = [teacher(16 * i, 8, 64 * i, d, i).shape for i in (1, 2, 4) for d in (2, 8)]
    latency = [formula.point(shape) for shape in shapes]
    link = NetworkLink(bandwidth_bps=1e9, round_trip_s=round_trip_ms / 1e3)
    return msgspec.structs.replace(
        read_profile("n100"),
        name=name,
        threads=1,
        latency=latency,
        link=link,
        memory_bytes=memory_bytes,
        availability=availability,
        spin=spin,
    )


def make_plan(
    teacher: TeacherSpec, profiles: Sequence[DeviceProfile], *, target_ms: float, **problem: Any
) -> Plan:
    """The plan of a problem for one target."""
    return plan_within(known_problem(teacher, profiles, **problem), target_ms).plan


def shares(accuracy: PredictedAccuracy | None) -> tuple[float, float]:
    """The predictions with every member in, and as devices come and go; fails without any."""
    assert accuracy is not None
    assert accuracy.all_in is not None, accuracy.unknown
    assert accuracy.expected is not None
    return accuracy.all_in, accuracy.expected


def settings(names: Sequence[str], **keys: Any) -> PlanSettings:
    """Settings of a plan for these profiles; the teacher's name does not matter."""
    return PlanSettings(teacher="vit_base_patch16_224", profiles=list(names), **keys)
