"""Rows for the page of boards: comparable, and nothing of their owner's."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from devices.probe.share import GRAPHS, HEADING, rows_to_share
from mdp.errors import InputError
from mdp.formats.profile import (
    DeviceProfile,
    LatencyPoint,
    NetworkLink,
    NetworkPoint,
    Precision,
    ProbeRecord,
    Provenance,
    RuntimeName,
)

CPU = "CPUExecutionProvider"


def point(
    graph: tuple[object, ...],
    latency_ms: float,
    precision: Precision = "fp32",
    runtime: RuntimeName = "onnxruntime",
    threads: int = 1,
    batch: int = 1,
    others_cores: float = 0.0,
) -> LatencyPoint | NetworkPoint:
    """A measured point of one of the table's graphs."""
    how: dict[str, Any] = {
        "latency_ms": latency_ms, "precision": precision, "runtime": runtime, "threads": threads,
        "batch": batch, "others_cores": others_cores,
    }  # fmt: skip
    shape: Any = graph
    if len(graph) == 2:
        name, side = shape
        return NetworkPoint(name=name, image_size=side, **how)
    side, patch, width, depth = shape
    return LatencyPoint(
        image_size=side, patch_size=patch, embed_dim=width, depth=depth, num_heads=3,
        mlp_ratio=4.0, **how,
    )  # fmt: skip


def profile(points: Sequence[LatencyPoint | NetworkPoint]) -> DeviceProfile:
    estimated = Provenance(method="estimated", source="made for a test")
    return DeviceProfile(
        name="annas-board",
        kind="arm",
        provider=CPU,
        threads=4,
        memory_bytes=1_000_000,
        link=NetworkLink(bandwidth_bps=1e9, round_trip_s=0.001),
        latency=[one for one in points if isinstance(one, LatencyPoint)],
        networks=[one for one in points if isinstance(one, NetworkPoint)],
        provenance=dict.fromkeys(
            ("threads", "memory_bytes", "link", "latency", "networks", "availability"), estimated
        ),
        availability=0.98,
        probe=ProbeRecord(
            complete=True,
            date="2026-11-26",
            processor="Cortex-A76 | four",
            cores=4,
            system="Linux aarch64",
            versions={"mdp-edge": "0.1.0", "onnxruntime": "1.31.1", "openvino": "2026.4.1"},
            planned_points=9,
            busy_points=0,
            others_cores=0.0,
        ),
    )


POINTS = [point(graph, 10.0 + n) for n, (_, graph) in enumerate(GRAPHS)]


def test_a_row_has_a_column_for_each_of_the_heading() -> None:
    (row,) = rows_to_share(profile(POINTS), "Board 5\nModel B")
    assert row == (
        "| Board 5 Model B | Cortex-A76 / four | 4 | onnxruntime 1.31.1, CPU "
        "| 10 / - | 11 / - | 12 / - | 13 / - | 2026-11-26, mdp-edge 0.1.0 |"
    )
    assert row.count("|") == HEADING.count("|")
    assert "annas" not in row


def test_the_quickest_number_of_threads_counts_and_busy_points_are_marked() -> None:
    (_, graph), *_ = GRAPHS
    more = [
        point(graph, 4.0, threads=4, others_cores=0.9),
        point(graph, 1.0, batch=4),
        point(graph, 2.5, "int8-static"),
        point(graph, 0.1, "int8"),
    ]
    (row,) = rows_to_share(profile([*POINTS, *more]), "")
    assert row.startswith("| - | ")
    assert "| 4* / 2.5 |" in row


def test_each_runtime_has_a_row() -> None:
    second = point(GRAPHS[0][1], 3.0, runtime="openvino")
    one, two = rows_to_share(profile([*POINTS, second]), "Board")
    assert "onnxruntime 1.31.1, CPU | 10 / - |" in one
    assert "openvino 2026.4.1, CPU | 3 / - | - / - | - / - | - / - |" in two


def test_too_few_points_are_no_row() -> None:
    with pytest.raises(InputError, match=r"^--share: expected all points of --quick at least"):
        rows_to_share(profile(POINTS[:-1]), "Board")
    whole = profile(POINTS)
    with pytest.raises(InputError, match=r"^--share"):
        rows_to_share(replace(whole, probe=None), "Board")


def test_the_version_for_gpus_is_that_of_another_package() -> None:
    probed = profile(POINTS)
    assert probed.probe is not None
    gpu = replace(probed.probe, versions={"mdp-edge": "0.1.0", "onnxruntime-gpu": "1.31.1"})
    (row,) = rows_to_share(replace(probed, probe=gpu), "Board")
    assert "| onnxruntime 1.31.1, CPU |" in row
