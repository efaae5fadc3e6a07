"""A whole bundle quantized: what is kept, what is refused and why, what is written."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("torch")

from mdp.errors import InputError
from mdp.files import write_json
from mdp.formats.bundle import MANIFEST, Bundle, Quantization, TriedPrecision
from mdp.formats.model_file import ModelFile
from mdp.formats.plan import PredictedMs, Replica
from mdp.runtimes.base import Execution, Runtime
from mdp.runtimes.select import open_runtime
from mdp.testing.bundles import DEVICES, SIZES, write_bundle
from partitioner.data.datasets import Dataset, open_dataset
from partitioner.export import try_precision
from partitioner.export.evaluate import Report
from partitioner.export.quantize import QuantizationError, Way, quantize_model
from partitioner.export.quantize_bundle import quantize_bundle
from partitioner.export.try_precision import QuantizeRequest
from tests.support.models.quantized import (
    fragile_model,
    profile_of,
    put_models,
    with_numbers,
    write_colours,
)
from tests.support.models.runs import QUIET

pytestmark = pytest.mark.torch
INT8: Way = ("int8", "onnxruntime")
FP16: Way = ("fp16", "onnxruntime")
STATIC: Way = ("int8-static", "openvino")
OPENVINO: Way = ("fp32", "openvino")
Quantize = Callable[..., Report | None]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    made = open_dataset(str(write_colours(tmp_path_factory.mktemp("colours") / "tree")))
    assert (len(made.calibration), len(made.test)) == (36, 90)
    return made


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return Bundle.open(write_bundle(tmp_path / "bundle"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("views")


@pytest.fixture
def run(data: Dataset, cache: Path, tmp_path: Path) -> Quantize:
    """Quantize into `out`."""

    def call(bundle: Bundle, *profiles: object, out: str = "out", **changes: Any) -> Report | None:
        request = QuantizeRequest(**{"max_loss": 0.05, "profiles": profiles, **changes})
        return quantize_bundle(bundle, data, None, request, tmp_path / out, cache, QUIET)

    return call


def record_of(path: Path) -> Quantization:
    record = Bundle.open(path).manifest.quantisation
    assert record is not None
    return record


def trial_of(path: Path, k: int, way: tuple[str, str]) -> TriedPrecision:
    member = record_of(path).members[k]
    return next(one for one in member.tried if (one.precision, one.runtime) == way)


def test_members_get_what_is_fast_there(bundle: Bundle, run: Quantize, tmp_path: Path) -> None:
    before = {name: (bundle.path / name).read_bytes() for name in bundle.manifest.files}
    report = run(
        bundle,
        profile_of("alpha", {INT8: 0.5, STATIC: 0.6, FP16: 1.2}),
        profile_of("beta", {STATIC: 0.4, OPENVINO: 0.99}),
        profile_of("gamma", {INT8: 0.1}, measured=False),
    )
    made = Bundle.open(tmp_path / "out")
    first, second, third = made.manifest.plan.assignments
    assert (first.vit.precision, first.runtime) == INT8
    assert (second.vit.precision, second.runtime) == STATIC
    assert third == bundle.manifest.plan.assignments[2]
    assert first.predicted_ms == PredictedMs(compute=0.5, network=1.0, total=1.5)
    assert second.predicted_ms == PredictedMs(compute=0.4, network=1.0, total=1.4)
    assert first.why.startswith("for tests; int8 in onnxruntime: 50% of fp32's time")
    for name in made.manifest.files:
        same = made.verified(name).read_bytes() == before[name]
        assert same == (name == "submodels/2/model.onnx")
        assert (bundle.path / name).read_bytes() == before[name]
    assert made.digest != bundle.digest
    assert report is not None
    assert made.manifest.evaluation == report.evaluation
    assert report.evaluation.pictures == 90
    assert Bundle.open(bundle.path).manifest == bundle.manifest


def test_the_record_says_what_was_tried(bundle: Bundle, run: Quantize, tmp_path: Path) -> None:
    run(
        bundle,
        profile_of("alpha", {INT8: 0.5, STATIC: 0.6, FP16: 1.2}),
        profile_of("beta", {OPENVINO: 0.99}, measured=False),
    )
    out, record = tmp_path / "out", record_of(tmp_path / "out")
    assert [m.device for m in record.members] == list(DEVICES)
    assert record.members[0].measured == "profile alpha: by a test, on no alpha"
    assert [len(m.tried) for m in record.members] == [6, 6, 6]
    int8 = trial_of(out, 0, INT8)
    assert (int8.kept, int8.compute_ms, int8.fp32_ms) == (True, 0.5, 1.0)
    assert int8.loss is not None
    assert abs(int8.loss) <= 0.05
    assert trial_of(out, 0, STATIC).reason == "slower than int8 in onnxruntime"
    assert trial_of(out, 0, FP16).reason == "slower: takes 1.2 ms on alpha and fp32 1 ms"
    assert trial_of(out, 0, ("bf16", "openvino")).reason == (
        "profile alpha has no bf16 in openvino beside fp32 of the same shapes with 1 threads"
    )
    estimated = "the latencies of profile beta are estimated, not measured"
    assert {one.reason for one in record.members[1].tried} == {estimated}
    unknown = "nothing was measured on gamma: give its profile, or --here"
    assert {one.reason for one in record.members[2].tried} == {unknown}
    evaluation = Bundle.open(out).manifest.evaluation
    assert evaluation is not None
    whole = next(s for s in evaluation.subsets if s.members == (0, 1, 2))
    assert record.test.now == whole.stacked
    assert (record.calibration_pictures, record.test_pictures) == (36, 90)
    losses = [record.worst.fp32 - record.worst.now, record.test.fp32 - record.test.now]
    assert losses[0] >= losses[1]
    assert record.calibration.fp32 - record.calibration.now <= record.max_loss


def test_nothing_is_lost_by_all_together(bundle: Bundle, run: Quantize, tmp_path: Path) -> None:
    """Each fragile member alone is made up for by the others, and all of them are not."""
    fragile = put_models(bundle.path, {k: fragile_model(s, 4.0) for k, s in enumerate(SIZES)})
    run(fragile, *(profile_of(device, {INT8: 0.5}) for device in DEVICES))
    out = tmp_path / "out"
    ways = [a.vit.precision for a in Bundle.open(out).manifest.plan.assignments]
    assert 0 < ways.count("int8") < 3
    rejected = trial_of(out, ways.index("fp32"), INT8)
    assert rejected.reason.startswith("loses ")
    assert rejected.reason.endswith(" together with sub-models 0, 1, more than 5.00 points")
    record = record_of(out)
    assert record.calibration.fp32 - record.calibration.now <= 0.05


@pytest.mark.parametrize("value", [float("nan"), 3e38])
def test_an_int8_model_that_overflows_or_gives_nan_is_refused(
    bundle: Bundle, run: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    monkeypatch.setattr(
        try_precision, "quantize_model", lambda *args: with_numbers(quantize_model(*args), value)
    )
    assert run(bundle, profile_of("alpha", {INT8: 0.5}), ways=[INT8]) is None
    found = trial_of(tmp_path / "out", 0, INT8)
    assert found.reason == "logits are not finite on 36 of 36 calibration pictures"
    assert not found.kept
    assert found.loss is None


def test_a_model_that_the_tools_cannot_quantize_is_left_as_it_is(
    bundle: Bundle, run: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*args: object) -> bytes:
        raise QuantizationError("cannot be converted: no kernel for Wavelet")

    monkeypatch.setattr(try_precision, "quantize_model", failing)
    assert run(bundle, profile_of("alpha", {INT8: 0.5}), ways=[INT8]) is None
    assert (
        trial_of(tmp_path / "out", 0, INT8).reason == "cannot be converted: no kernel for Wavelet"
    )


def with_first(bundle: Bundle, **changes: object) -> Bundle:
    """The bundle whose first device is planned otherwise."""
    plan = bundle.manifest.plan
    first = msgspec.structs.replace(plan.assignments[0], **changes)
    plan = msgspec.structs.replace(plan, assignments=[first, *plan.assignments[1:]])
    return Bundle(bundle.path, msgspec.structs.replace(bundle.manifest, plan=plan))


def test_an_absent_provider_is_not_judged(bundle: Bundle, run: Quantize, tmp_path: Path) -> None:
    """In fp16 a GPU overflows where this processor, computing in fp32, does not."""
    cuda = "CUDAExecutionProvider"
    gpu = msgspec.structs.replace(profile_of("alpha", {FP16: 0.5}), provider=cuda)
    for asked in ({"profiles": [gpu]}, {"profiles": [], "here": ["alpha"]}):
        assert run(with_first(bundle, provider=cuda), ways=[FP16], **asked) is None
        reason = trial_of(tmp_path / "out", 0, FP16).reason
        assert reason.startswith(f"the plan asks for {cuda}, this device has ")


def test_a_runtime_that_is_not_here_is_a_reason(
    bundle: Bundle, run: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert run(bundle, profile_of("alpha", {OPENVINO: 0.5}), ways=[OPENVINO]) is None
    assert trial_of(tmp_path / "out", 0, OPENVINO).reason == (
        "the plan asks for openvino in fp32, which is not installed "
        "(pip install '.[openvino]' in a checkout of MDP)"
    )


def test_nothing_kept_changes_the_record(bundle: Bundle, run: Quantize, tmp_path: Path) -> None:
    assert run(bundle, ways=[INT8]) is None
    made = Bundle.open(tmp_path / "out")
    assert made.digest == bundle.digest
    manifest = msgspec.structs.replace(made.manifest, quantisation=None)
    assert manifest == bundle.manifest


def test_here_is_measured_with_the_planned_threads(
    bundle: Bundle, run: Quantize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[object, ...]] = []

    def opening(model: ModelFile, execution: Execution, *, num_classes: int) -> Runtime:
        opened.append((execution.precision, execution.runtime, execution.threads,
                       execution.provider, execution.spin))  # fmt: skip
        return open_runtime(model, execution, num_classes=num_classes)

    def best_ms(runs: Sequence[object], pixels: object) -> list[float]:
        assert len(runs) == 2
        return [0.5, 0.25]

    monkeypatch.setattr(try_precision, "open_runtime", opening)
    monkeypatch.setattr(try_precision, "best_ms", best_ms)
    run(with_first(bundle, threads=3, spin=True), here=["alpha"], ways=[INT8])
    cpu = "CPUExecutionProvider"
    assert (*INT8, 3, cpu, True) in opened
    assert ("fp32", "onnxruntime", 3, cpu, True) in opened
    found = trial_of(tmp_path / "out", 0, INT8)
    assert (found.kept, found.compute_ms, found.fp32_ms) == (True, 0.25, 0.5)
    assert record_of(tmp_path / "out").members[0].measured == "here, on the machine that quantized"


def test_a_replica_has_to_be_faster_too(bundle: Bundle, run: Quantize, tmp_path: Path) -> None:
    replica = Replica(
        k=0, device="delta", predicted_ms=PredictedMs(compute=1, network=1, total=2),
        memory_bytes=1, provider="CPUExecutionProvider", threads=1, why="",
    )  # fmt: skip
    plan = msgspec.structs.replace(bundle.manifest.plan, replicas=[replica])
    doubled = Bundle(bundle.path, msgspec.structs.replace(bundle.manifest, plan=plan))
    alpha = profile_of("alpha", {INT8: 0.5})
    assert run(doubled, alpha, profile_of("delta", {INT8: 1.5}), ways=[INT8]) is None
    assert trial_of(tmp_path / "out", 0, INT8).reason == (
        "slower: takes 1.5 ms on delta and fp32 1 ms"
    )
    assert run(doubled, alpha, profile_of("delta", {INT8: 0.7}), ways=[INT8]) is not None
    serving, alpha_s = map(
        Bundle.open(tmp_path / "out").manifest.plan.assignment_of, ("delta", "alpha")
    )
    assert serving is not None
    assert alpha_s is not None
    assert serving.vit.precision == "int8"
    assert serving.memory_bytes == alpha_s.memory_bytes


def test_a_bundle_may_be_replaced_by_itself(bundle: Bundle, run: Quantize) -> None:
    run(bundle, profile_of("alpha", {INT8: 0.5}), out="bundle", ways=[INT8])
    assert Bundle.open(bundle.path).assignment("alpha").vit.precision == "int8"
    again = Bundle.open(bundle.path)
    expected = "sub-model 0 is in int8 already: expected fp32$"
    with pytest.raises(InputError, match=expected):
        run(again, out="bundle")
    assert Bundle.open(bundle.path).manifest == again.manifest


def rewritten(bundle: Bundle, **changes: object) -> Bundle:
    write_json(bundle.path / MANIFEST, msgspec.structs.replace(bundle.manifest, **changes))
    return Bundle.open(bundle.path)


def test_the_planned_runtime_is_compared(bundle: Bundle, run: Quantize, tmp_path: Path) -> None:
    plan = with_first(bundle, runtime="openvino").manifest.plan
    # Half of the time of fp32 in onnxruntime, but no gain on what is planned.
    profile = profile_of("alpha", {OPENVINO: 0.5, INT8: 0.5, STATIC: 0.3})
    run(rewritten(bundle, plan=plan), profile)
    made = Bundle.open(tmp_path / "out").assignment("alpha")
    assert (made.vit.precision, made.runtime) == STATIC
    reason = trial_of(tmp_path / "out", 0, INT8).reason
    assert reason == "slower: takes 0.5 ms on alpha and fp32 0.5 ms"
    assert OPENVINO not in {
        (one.precision, one.runtime) for one in record_of(tmp_path / "out").members[0].tried
    }


@pytest.mark.parametrize(
    ("manifest", "asked", "expected"),
    [
        (
            {"provenance": {"untrained": "random weights"}}, {},
            r"bundle: is untrained, so it has no accuracy to lose; plan the precision instead$",
        ),
        ({"evaluation": None}, {}, r"bundle: was never evaluated: run mdp-partition evaluate"),
        (
            {}, {"profiles": [profile_of("omega", {})]},
            r"^--profiles: .*bundle has no device 'omega'",
        ),
        (
            {"provenance": {"calibration_digest": "0" * 64}}, {},
            r"the calibration split is not that of .*bundle, whose sub-models may have been "
            r"trained on its pictures \(give the --limit-train of the training\)$",
        ),
        ({"labels": ["blue", "green", "rot"]}, {}, r"expected the 3 classes of .*bundle"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantized_is_refused_before_anything(
    bundle: Bundle, run: Quantize, tmp_path: Path, manifest: dict[str, Any],
    asked: dict[str, Any], expected: str,
) -> None:  # fmt: skip
    with pytest.raises(InputError, match=expected):
        run(rewritten(bundle, **manifest), **asked)
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
