"""Tiny plans and runs, trained in seconds."""

import io
from pathlib import Path
from typing import Any

import msgspec

from mdp.files import write_toml
from mdp.formats.plan import Assignment, Plan, PredictedMs, Region, SubModelSpec, TeacherSpec
from mdp.formats.profile import NetworkLink, read_profile
from partitioner.run.progress import Progress
from partitioner.run.settings import (
    Augmentation,
    MemberSchedule,
    RunOptions,
    TeacherSchedule,
    TrainingConfig,
)
from tests.support.models.latencies import Formula

QUIET = Progress(io.StringIO())
#: A teacher that two devices of `write_profiles` have to share, and their target.
SHARED_ARGS = ["img_size=12", "patch_size=4", "embed_dim=48", "depth=2", "num_heads=3"]
SHARED_MS = 50.0
TEACHER_ARGS = {"img_size": 12, "patch_size": 4, "embed_dim": 24, "depth": 1, "num_heads": 2}


def spec(image_size: int, embed_dim: int, patch_size: int = 4, depth: int = 1) -> SubModelSpec:
    """A tiny shape with two heads."""
    return SubModelSpec(
        image_size=image_size,
        patch_size=patch_size,
        embed_dim=embed_dim,
        depth=depth,
        num_heads=2,
        mlp_ratio=4.0,
    )


def tiny_plan() -> Plan:
    """Two members that differ in picture, width, view and encoding."""
    ms = PredictedMs(compute=1, network=1, total=2)
    common: dict[str, Any] = {
        "predicted_ms": ms,
        "memory_bytes": 1,
        "provider": "CPUExecutionProvider",
    }
    return Plan(
        teacher=TeacherSpec(
            name="vit_tiny_patch16_224", args=dict(TEACHER_ARGS), shape=spec(12, 24)
        ),
        target_ms=5,
        refused=False,
        reason="",
        assignments=[
            Assignment(k=0, device="alpha", submodel=spec(8, 16), threads=1, why="", **common),
            Assignment(
                k=1,
                device="beta",
                submodel=spec(12, 8),
                threads=1,
                why="",
                region=Region(left=0.1, right=0.9, top=0.1, bottom=0.9),
                encoding="jpeg",
                **common,
            ),
        ],
    )


#: Boosting and stacking distillation, which are off by default.
CHAINED = {"boost_weight": 1.0, "stack_weight": 0.5}


def config_of(
    data: str | Path,
    *,
    seed: int = 0,
    epochs: int = 3,
    schedule: dict[str, Any] | None = None,
    **options: Any,
) -> TrainingConfig:
    """A training of a few epochs; `schedule` changes how the sub-models are trained."""
    return TrainingConfig(
        options=RunOptions(data=str(data), seed=seed, autocast="fp32", **options),
        teacher_schedule=TeacherSchedule(epochs=epochs, batch_size=16),
        schedule=MemberSchedule(epochs=epochs, batch_size=16, **(schedule or {})),
        augmentation=Augmentation(variants=2),
    )


def write_profiles(folder: Path) -> list[str]:
    """Profiles of two very slow devices: one MMAC takes about 100 ms, the network nothing."""
    model = Formula(fixed_ms=1.0, layer_ms=1.0, mac_ms=1e-4)
    shapes = ((8, 16, 1), (8, 64, 4), (16, 32, 2), (16, 64, 1), (24, 48, 4))
    latency = [model.point(spec(size, dim, depth=depth)) for size, dim, depth in shapes]
    paths = []
    for name in ("alpha", "beta"):
        profile = msgspec.structs.replace(
            read_profile("n100"),
            name=name,
            threads=1,
            latency=latency,
            link=NetworkLink(bandwidth_bps=1e9, round_trip_s=0.0),
        )
        paths.append(str(folder / f"{name}.toml"))
        write_toml(paths[-1], profile)
    return paths
