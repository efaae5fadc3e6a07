"""Exports the benchmark's sub-models as they are served, in fp32 and in dynamic int8."""

import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from onnxruntime.quantization import QuantType, quantize_dynamic

from benchmarks.latency_shapes import Case, file_stem
from mdp.files import write_bytes
from mdp.profile import Precision

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")


def model_file(folder: Path, case: Case, precision: Precision) -> Path:
    """Where `case` lies in this precision."""
    return folder / f"{file_stem(case)}-{precision}.onnx"


def export_all(folder: Path, cases: Sequence[Case], note: Callable[[str], None]) -> None:
    """Export every case in every precision into `folder`, leaving out what is there already."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases, start=1):
        if all(model_file(folder, case, precision).is_file() for precision in PRECISIONS):
            continue
        note(f"exporting {number} of {len(cases)}: {file_stem(case)}")
        _export(folder, case)


def _export(folder: Path, case: Case) -> None:
    from partitioner.export import ServedMember, to_onnx
    from partitioner.submodel import SubModel

    module = ServedMember(SubModel(case.spec, case.num_classes))
    content = to_onnx(module, case.spec.image_size, ["boost", "bag"], {})
    write_bytes(model_file(folder, case, "fp32"), content)
    write_bytes(model_file(folder, case, "int8"), quantised(content))


def quantised(content: bytes) -> bytes:
    """The model with the weights of its matrix products in int8, activations quantised as run."""
    model = onnx.load_from_string(content)
    # The exporter notes a head's weights in torch's order, and the quantiser turns them.
    del model.graph.value_info[:]
    logging.getLogger().setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as name:
        source, target = Path(name) / "fp32.onnx", Path(name) / "int8.onnx"
        onnx.save(model, source)
        quantize_dynamic(
            source, target, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul"]
        )
        return target.read_bytes()
