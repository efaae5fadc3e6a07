"""A bundle that was quantised, served by real agents: as accurate as its manifest says."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import pytest
from msgspec.structs import replace as changed

from mdp.files import write_toml
from mdp.formats.bundle import Bundle, model_path
from mdp.testing.bundles import DEVICES, LABELS, colour_picture, colour_plan, write_bundle
from mdp.testing.processes import PATIENCE_S
from partitioner.cli.main import main
from partitioner.export.quantize import Way
from tests.support.command_lines import run_here
from tests.support.fleet import PLENTY_MS, Fleet

pytest.importorskip("torch")

from partitioner.data.crops import picture_of
from partitioner.data.datasets import open_dataset
from tests.support.models.quantized import profile_of, write_colours

pytestmark = pytest.mark.torch
WAYS: tuple[Way, ...] = (("int8", "onnxruntime"), ("int8-static", "openvino"), ("fp32", "openvino"))


def partition(*args: object) -> Any:
    """JSON that `mdp-partition` prints."""
    done = run_here(main, "mdp-partition", *args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class Untrained(NamedTuple):
    """A bundle without training, and what its export printed."""

    out: Path
    printed: Any


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Untrained:
    """Made before a test counts threads: torch's exporter leaves one."""
    folder = tmp_path_factory.mktemp("untrained")
    plan, out = colour_plan(), folder / "out"
    assignments = [
        changed(a, runtime=runtime, submodel=changed(a.vit, precision=precision))
        for a, (precision, runtime) in zip(plan.assignments[:2], WAYS, strict=False)
    ]
    # Only shapes count, so the teacher may be anybody.
    teacher = changed(plan.require_teacher(), name="nobody_s_teacher")
    write_toml(folder / "plan.toml", changed(plan, assignments=assignments, teacher=teacher))
    how = ["--untrained", "--plan", folder / "plan.toml", "--data", write_colours(folder / "tree")]
    return Untrained(out, partition("export", *how, "--out", out))


@pytest.mark.usefixtures("no_leaks")
def test_untrained_sub_models_are_served(untrained: Untrained, tmp_path: Path) -> None:
    out, printed = untrained
    assert printed["trained"] is False
    assert max(entry["error"] for entry in printed["max_abs_error"]) < 1e-3
    bundle = Bundle.open(out)
    assert printed["digest"] == bundle.digest
    assert bundle.manifest.provenance["untrained"] == (
        "random weights, for latency: its answers mean nothing"
    )
    assert bundle.manifest.labels == sorted(LABELS)
    fitted = bundle.fusion_weights().weights_of((0, 1))
    assert fitted is not None
    assert fitted.b == (0.5, 0.5)
    for k, (precision, _) in enumerate(WAYS[:2]):
        model = onnx.load(bundle.verified(model_path(k)))
        properties = {entry.key: entry.value for entry in model.metadata_props}
        assert properties["mdp_precision"] == precision
        assert properties["mdp_untrained"] == "true"
    with Fleet(tmp_path, out) as fleet:
        fleet.start_all("alpha", "beta")
        with fleet.client() as client:
            answer = client.classify(colour_picture("red"), deadline_ms=PLENTY_MS)
            providers = [s.provider for s in client.status(timeout_s=PATIENCE_S)]
    assert providers == ["CPUExecutionProvider", "openvino:CPU"]
    assert answer.used == ("alpha", "beta")
    assert answer.label in LABELS
    assert answer.expected_accuracy is None


@pytest.mark.usefixtures("no_leaks")
def test_agents_serve_a_quantized_bundle_as_accurately_as_stated(tmp_path: Path) -> None:
    tree, out = write_colours(tmp_path / "tree"), tmp_path / "out"
    profiles = []
    for device, way in zip(DEVICES, WAYS, strict=True):
        profiles.append(str(tmp_path / f"{device}.toml"))
        write_toml(profiles[-1], profile_of(device, {way: 0.5}))
    bundle = write_bundle(tmp_path / "bundle")
    printed = partition(
        "quantize", "--bundle", bundle, "--data", tree, "--profiles", *profiles,
        "--max-loss", 5, "--out", out,
    )  # fmt: skip
    assert [(a["precision"], a["runtime"]) for a in printed["assignments"]] == list(WAYS)
    made = Bundle.open(out)
    assert printed["digest"] == made.digest
    expected = made.expected_accuracy((0, 1, 2), "stacked")
    assert expected == printed["quantisation"]["test"]["now"]
    test = open_dataset(str(tree)).test
    with Fleet(tmp_path, out) as fleet:
        fleet.start_all()
        with fleet.client() as client:
            status = {s.device: s for s in client.status(timeout_s=PATIENCE_S)}
            answers = [
                client.classify(picture_of(source, None), deadline_ms=PLENTY_MS)
                for source in test.sources
            ]
    assert [status[device].provider for device in DEVICES] == [
        "CPUExecutionProvider", "openvino:CPU", "openvino:CPU",
    ]  # fmt: skip
    assert {answer.mode for answer in answers} == {"stacked"}
    # A picture that is taken for one of no class has none.
    assert {answer.expected_accuracy for answer in answers if answer.known} == {expected}
    labels = [made.manifest.labels[target] for target in test.targets]
    right = sum(a.label == label for a, label in zip(answers, labels, strict=True))
    assert right / len(labels) == pytest.approx(expected)
