"""Plan of a probe: what is measured, in which order, and what is made of it. Pure."""

import itertools
from typing import Any

import pytest

from devices.probe.schedule import (
    BATCH,
    Backend,
    backends,
    best_provider,
    consistent,
    fitting,
    point_of,
    quieter,
    representative,
    tasks,
    thread_counts,
)
from tests.support.probes import CPU, CUDA, ENCODERS, a_run, encoder, make_point

ORT_FP32 = Backend("onnxruntime", CPU, "fp32")
ORT_INT8 = Backend("onnxruntime", CPU, "int8")
BF16 = Backend("openvino", CPU, "bf16")


def test_a_processor_is_measured_in_what_it_is_fast_in() -> None:
    found, skipped = backends([CPU], None)
    assert [way.precision for way in found] == ["fp32", "int8", "int8-static"]
    assert skipped == {}


def test_a_gpu_is_measured_in_half_precision_beside_the_processor() -> None:
    found, _ = backends(["TensorrtExecutionProvider", CUDA, CPU], None)
    assert Backend("onnxruntime", CUDA, "fp16") in found
    assert Backend("onnxruntime", CUDA, "int8") not in found
    assert Backend("onnxruntime", "TensorrtExecutionProvider", "int8-static") in found


def test_a_provider_nobody_knows_is_measured_in_fp32() -> None:
    assert backends(["NewExecutionProvider"], None)[0] == [
        Backend("onnxruntime", "NewExecutionProvider", "fp32")
    ]


def test_a_provider_that_computes_elsewhere_is_passed_over_and_said() -> None:
    found, skipped = backends(["AzureExecutionProvider", CPU], None)
    assert {way.provider for way in found} == {CPU}
    assert skipped == {"AzureExecutionProvider": "computes in a cloud"}


@pytest.mark.parametrize(
    ("able", "precisions"),
    [
        (["FP32", "BF16", "INT8"], ["fp32", "bf16", "int8-static"]),
        (["FP32"], ["fp32", "int8-static"]),
    ],
)
def test_openvino_uses_bf16_in_hardware_only(able: list[str], precisions: list[str]) -> None:
    found, _ = backends([], {"CPU": able})
    assert [way.precision for way in found if way.runtime == "openvino"] == precisions


def test_openvino_s_gpus_and_npus_are_measured_in_what_they_compute_in() -> None:
    able = {"GPU.0": ["FP32", "FP16"], "GPU.1": ["FP32"], "NPU": ["FP16", "INT8"], "GNA": ["FP16"]}
    found, _ = backends([], able)
    assert [(way.provider, way.precision) for way in found] == [
        ("GPU.0", "fp32"),
        ("GPU.0", "fp16"),
        ("GPU.0", "int8-static"),
        ("GPU.1", "fp32"),
        ("GPU.1", "int8-static"),
        ("NPU", "fp16"),
        ("NPU", "int8-static"),
    ]
    planned = tasks(ENCODERS, found, [1, 2, 4], 10)
    assert {(task.run.threads, task.run.batch) for task in planned} == {(1, 1)}


@pytest.mark.parametrize(
    ("cores", "counts"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (3, [1, 2, 3])]
)
def test_threads_are_doubled_up_to_all_cores(cores: int, counts: list[int]) -> None:
    assert thread_counts(cores) == counts


def test_models_that_do_not_fit_are_told_from_those_that_do() -> None:
    small, large = encoder(model_bytes=100), encoder(model_bytes=1000, image_size=64)
    assert fitting([small, large], 1600, 10**9) == ([small], [large])
    assert fitting([small, large], None, 1600) == ([small], [large])
    assert fitting([small, large], None, 10**9) == ([small, large], [])


def test_every_shape_is_measured_with_every_thread_count_and_backend() -> None:
    planned = tasks(ENCODERS, [ORT_FP32, ORT_INT8], [1, 2], 10)
    alone = {(t.run.spec, t.run.threads) for t in planned if t.run.batch == 1}
    assert len(alone) == len(ENCODERS) * 2
    assert len({t.run for t in planned}) == len(planned)


def test_tiers_come_one_after_another_so_that_each_prefix_spans_everything() -> None:
    planned = tasks(ENCODERS, [ORT_FP32, ORT_INT8], [1, 2], 10)
    tiers = [task.encoder.tier for task in planned]
    assert tiers == sorted(tiers, key=["quick", "core", "full"].index)
    first = planned[: tiers.index("core")]
    assert {task.backend for task in first} == {ORT_FP32, ORT_INT8}


def test_points_of_one_file_stand_together() -> None:
    files = [task.encoder.file for task in tasks(ENCODERS, [ORT_FP32, ORT_INT8, BF16], [1, 2], 10)]
    changes = sum(one != other for one, other in itertools.pairwise(files))
    assert changes == len(set(files)) - 1


def test_bf16_runs_the_fp32_file_and_says_that_it_is_bf16() -> None:
    planned = tasks(ENCODERS, [BF16], [1], 10)
    assert {task.encoder.spec.precision for task in planned} == {"fp32"}
    assert {task.run.spec.precision for task in planned} == {"bf16"}


def test_other_backends_than_the_processor_s_onnxruntime_leave_out_the_last_tier() -> None:
    planned = tasks(ENCODERS, [ORT_FP32, BF16, Backend("onnxruntime", CUDA, "fp32")], [1, 2, 4], 10)
    last = [task for task in planned if task.encoder.tier == "full"]
    assert {task.backend for task in last} == {ORT_FP32}
    assert {task.run.threads for task in last} == {1, 4}


def test_some_encoders_are_measured_in_batches_too_but_not_in_openvino() -> None:
    planned = tasks(ENCODERS, [ORT_FP32, BF16], [1, 2], 10)
    batched = [task for task in planned if task.run.batch > 1]
    assert {task.run.batch for task in batched} == {BATCH}
    assert {task.backend for task in batched} == {ORT_FP32}
    assert {task.run.threads for task in batched} == {2}


def test_of_two_measurements_the_quieter_is_kept() -> None:
    loud, quiet = make_point(8.0, others_cores=1.0), make_point(9.0, others_cores=0.0)
    assert quieter(loud, quiet) is quiet
    assert quieter(quiet, loud) is quiet


def test_of_several_looks_the_middle_one_counts_and_disturbed_ones_do_not() -> None:
    looks = [make_point(ms, others_cores=0.0) for ms in (9.0, 12.0, 8.0, 10.0)]
    assert representative(looks[:1]) is looks[0]
    assert representative(looks[:2]) is looks[0]
    assert representative(looks[:3]) is looks[0]
    assert representative(looks) is looks[0]
    loud = [make_point(ms, others_cores=1.0) for ms in (5.0, 6.0, 7.0)]
    assert representative([*loud, *looks]) is looks[0]
    assert representative(loud) is loud[1]


def test_of_points_that_exclude_each_other_the_disturbed_one_goes() -> None:
    points = [
        point_of(a_run(depth=2), make_point(10.0, others_cores=0.0)),
        point_of(a_run(depth=4), make_point(20.0, others_cores=0.0)),
        point_of(a_run(depth=1), make_point(90.0, others_cores=1.9)),
    ]
    kept, said = consistent(points)
    assert kept == points[:2]
    assert said == [
        "contradicts itself: `latency[2]` and `latency[0]` are 1 and 2 deep and say 90 and 10 ms"
    ]


def test_the_best_provider_is_the_fastest_on_what_all_of_them_ran() -> None:
    small: dict[str, Any] = {"image_size": 8}
    large: dict[str, Any] = {"image_size": 64}
    points = [
        point_of(a_run(**small), make_point(1.0)),
        point_of(a_run(**large), make_point(100.0)),
        # The GPU is slower on the small one, and did not run a third.
        point_of(a_run(**small, provider=CUDA), make_point(2.0)),
        point_of(a_run(**large, provider=CUDA), make_point(3.0)),
        point_of(a_run(image_size=12), make_point(0.001)),
    ]
    assert best_provider(points) == CUDA
    assert best_provider(points[:2]) == CPU
