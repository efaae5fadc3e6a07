"""The shipped graphs are what the maker makes, and run as a directly exported model does."""

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest

from devices.probe.encoders import complete, extract, read_index
from mdp.formats.plan import SubModelSpec
from partitioner.export.quantize import quantize_model
from tools.probe_encoders import (
    DESIGN,
    NETWORK_PRECISIONS,
    TIERS_OF,
    archive,
    calibration,
    design_specs,
    make_one,
    make_random_model,
    name_of,
    network_specs,
    without_tensors,
)

pytestmark = pytest.mark.torch

#: Small, but deep enough that layers are told apart.
SPEC = design_specs("quick")[1]
PRECISIONS = ["fp32", "int8", "int8-static", "fp16"]


@pytest.fixture(scope="module")
def model() -> bytes:
    return make_random_model(SPEC, seed=5)


def count_optimised(path: Path, out: Path) -> Counter[str]:
    """The operators that onnxruntime runs after it has optimised the model."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(out)
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(out).graph.node)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_shipped_graph_runs_as_exported(model: bytes, tmp_path: Path, precision: str) -> None:
    spec = msgspec.structs.replace(SPEC, precision=precision)
    exported = tmp_path / "exported.onnx"
    pictures = calibration(spec.image_size) if precision == "int8-static" else None
    exported.write_bytes(quantize_model(model, spec.precision, pictures))
    extract(tmp_path)
    completed = tmp_path / "completed.onnx"
    complete(tmp_path / f"{name_of(spec)}.onnx", completed)
    ours, theirs = (
        count_optimised(p, tmp_path / f"{p.stem}-opt.onnx") for p in (completed, exported)
    )
    assert ours == theirs
    assert ours["MatMul"] + ours["FusedMatMul"] + ours["MatMulIntegerToFloat"] > 0


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_shipped_graphs_are_what_the_maker_makes(model: bytes, precision: str) -> None:
    spec = msgspec.structs.replace(SPEC, precision=precision)
    entry, _, tensors = make_one(model, spec)
    shipped = {encoder.file: encoder for encoder in read_index().encoders}[entry["file"]]
    assert msgspec.to_builtins(shipped.spec) == entry["submodel"]
    assert shipped.operators == entry["operators"]
    assert shipped.model_bytes == pytest.approx(entry["model_bytes"], rel=0.01)
    assert len(msgspec.msgpack.decode(tensors)) > 10


def test_what_is_shipped_is_the_design() -> None:
    shipped = [(encoder.tier, encoder.name) for encoder in read_index().encoders]
    designed = []
    for tier in DESIGN:
        of_vits = [precision for precision, tiers in TIERS_OF.items() if tier in tiers]
        designed += [
            (tier, name_of(msgspec.structs.replace(spec, precision=precision)))
            for spec in design_specs(tier)
            for precision in of_vits
        ]
        designed += [
            (tier, name_of(msgspec.structs.replace(spec, precision=precision)))
            for spec in network_specs(tier)
            for precision in NETWORK_PRECISIONS
        ]
    assert shipped == designed


def test_large_tensors_leave_only_their_range(model: bytes) -> None:
    loaded = onnx.load_from_string(model)
    graph, tensors = without_tensors(loaded)
    kept = {t.name for t in onnx.load_from_string(graph).graph.initializer}
    taken = {name: (low, high) for name, _, _, low, high in tensors}
    assert kept | taken.keys() == {t.name for t in loaded.graph.initializer}
    assert not kept & taken.keys()
    assert len(graph) < len(model) / 10
    norm = "submodel.trunk.blocks.0.norm1.weight"
    assert 0.8 < taken[norm][0] < 1 < taken[norm][1] < 1.2


def test_no_two_tensors_of_an_untrained_model_are_merged(model: bytes) -> None:
    layers = SPEC.depth
    biases = [
        t.name for t in onnx.load_from_string(model).graph.initializer if t.name.endswith(".bias")
    ]
    # Two norms, two products of attention and two of the MLP; patches, last norm, two heads.
    assert len(biases) == 6 * layers + 4


def test_a_name_says_shape_and_precision() -> None:
    spec = SubModelSpec(
        image_size=224,
        patch_size=16,
        embed_dim=192,
        depth=12,
        num_heads=3,
        mlp_ratio=4.0,
        precision="int8-static",
    )
    assert name_of(spec) == "vit-224-16-192x12-h3-m4-int8-static"


def test_an_archive_of_the_same_files_is_the_same() -> None:
    files = {"a.onnx": bytes(1000), "b.tensors": b"b"}
    assert archive(files) == archive(dict(files))
    assert np.frombuffer(archive(files), dtype=np.uint8)[:6].tobytes() == b"\xfd7zXZ\x00"
