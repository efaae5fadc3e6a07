"""OpenVINO on a machine with a GPU and an NPU, as far as one without shows it: its own graphs and
sessions on the processor, but for a core that says it has such devices."""

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from mdp.formats.bundle import Bundle
from mdp.formats.model_file import ModelFile
from mdp.runtimes import openvino as openvino_runtime
from mdp.runtimes.base import CPU, Execution, NotHereError
from mdp.runtimes.openvino import OpenVinoRuntime
from mdp.runtimes.select import open_runtime
from mdp.testing.bundles import DEVICES, SIZES, write_bundle

ARC = {"CPU": ["FP32"], "GPU.0": ["FP32", "FP16"], "GPU.1": ["FP32"], "NPU": ["FP16", "INT8"]}


class Core:
    """As OpenVINO's, on the devices that it is told."""

    def __init__(self, able: Mapping[str, list[str]], *, broken: str = "") -> None:
        self.able, self.broken = able, broken
        self.real = openvino_runtime.core_of(openvino_runtime.import_openvino())
        self.compiled: list[tuple[str, dict[str, object]]] = []
        self.shapes: list[list[int]] = []

    @property
    def available_devices(self) -> list[str]:
        return list(self.able)

    def get_property(self, device: str, key: str) -> list[str]:
        assert key == "OPTIMIZATION_CAPABILITIES"
        if self.broken == key:
            raise RuntimeError("Exception from core.cpp:268:\nno\n driver\n\n")
        return self.able["GPU.0" if device == "GPU" else device]

    def compile_model(self, graph: Any, device: str, wishes: dict[str, object]) -> Any:
        self.compiled.append((device, wishes))
        # Raises for a shape that is not static.
        self.shapes.append([dimension.get_length() for dimension in graph.input().partial_shape])
        if self.broken == "compile":
            raise RuntimeError("Exception from plugin.cpp:112:\nno\n kernel\n\n")
        return self.real.compile_model(graph, "CPU", {})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return Bundle.open(write_bundle(tmp_path_factory.mktemp("openvino") / "bundle"))


@pytest.fixture
def model(bundle: Bundle) -> ModelFile:
    return bundle.model(0)


def plan_execution(bundle: Bundle, provider: str, precision: str) -> Execution:
    return msgspec.structs.replace(
        Execution.of(bundle.assignment(DEVICES[0])),
        runtime="openvino",
        provider=provider,
        precision=precision,
        threads=3,
    )


def with_core(monkeypatch: pytest.MonkeyPatch, core: Core) -> Core:
    monkeypatch.setattr(openvino_runtime, "core_of", lambda openvino: core)
    return core


@pytest.mark.parametrize(
    ("provider", "precision", "hint"),
    [
        ("GPU", "fp32", "f32"),
        ("GPU.0", "fp16", "f16"),
        ("openvino:GPU.1", "fp32", "f32"),
        ("GPU.0", "int8-static", "f16"),
        ("NPU", "fp16", None),
        ("NPU", "int8-static", None),
    ],
)
def test_a_device_gets_one_picture_at_a_time_its_precision_and_no_threads(
    monkeypatch: pytest.MonkeyPatch,
    bundle: Bundle,
    model: ModelFile,
    provider: str,
    precision: str,
    hint: str | None,
) -> None:
    core = with_core(monkeypatch, Core(ARC))
    runtime = OpenVinoRuntime(model, plan_execution(bundle, provider, precision), num_classes=3)
    device = provider.removeprefix("openvino:")
    wishes = {"PERFORMANCE_HINT": "LATENCY"} | ({"INFERENCE_PRECISION_HINT": hint} if hint else {})
    assert core.compiled == [(device, wishes)]
    assert core.shapes == [[1, SIZES[0], SIZES[0], 3]]
    assert (runtime.provider, runtime.fallback) == (f"openvino:{device}", False)
    pixels = np.zeros((3, SIZES[0], SIZES[0], 3), dtype=np.uint8)
    assert runtime.run(pixels).bag.shape == (3, 3)


@pytest.mark.parametrize(
    ("core", "provider", "precision", "said"),
    [
        (Core({"CPU": []}), "GPU", "fp32", "on GPU, openvino finds CPU here"),
        (Core(ARC), "GPU.2", "fp32", "on GPU.2, openvino finds CPU, GPU.0, GPU.1, NPU here"),
        # It would choose by itself, the processor among others.
        (Core(ARC), "AUTO", "fp32", "on AUTO, openvino finds CPU, GPU.0, GPU.1, NPU here"),
        (Core({}), "NPU", "fp16", "on NPU, openvino finds no device here"),
        (Core(ARC), "NPU", "fp32", "in fp32 on NPU, openvino has fp16, int8-static on NPU"),
        (Core(ARC), "GPU", "bf16", "in bf16 on GPU, openvino has fp32, fp16, int8-static on GPU"),
        (Core(ARC), "GPU.1", "fp16", "in fp16 on GPU.1, this device computes FP32 only"),
        (
            Core(ARC, broken="OPTIMIZATION_CAPABILITIES"),
            "GPU",
            "fp32",
            "in fp32 on GPU, which cannot be started: Exception from core.cpp:268: no driver",
        ),
        (
            Core(ARC, broken="compile"),
            "NPU",
            "fp16",
            "on NPU, which cannot be started: Exception from plugin.cpp:112: no kernel",
        ),
    ],
)
def test_a_device_refuses_what_it_cannot_do_unless_a_fallback_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    bundle: Bundle,
    model: ModelFile,
    core: Core,
    provider: str,
    precision: str,
    said: str,
) -> None:
    with_core(monkeypatch, core)
    asked = plan_execution(bundle, provider, precision)
    with pytest.raises(NotHereError) as caught:
        open_runtime(model, asked, num_classes=3)
    assert str(caught.value) == f"the plan asks for openvino {said}"
    if precision != "bf16":
        runtime = open_runtime(model, asked, num_classes=3, allow_fallback=True)
        assert (runtime.provider, runtime.fallback) == (CPU, True)
    assert capfd.readouterr().out == ""


def test_openvino_s_own_core_names_the_devices_found(bundle: Bundle, model: ModelFile) -> None:
    asked = plan_execution(bundle, "GPU.99", "fp32")
    with pytest.raises(NotHereError, match=r"on GPU\.99, openvino finds .*CPU.* here$"):
        open_runtime(model, asked, num_classes=3)
