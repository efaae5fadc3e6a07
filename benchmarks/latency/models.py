"""Exports the benchmark's sub-models as they are served, in fp32 and in dynamic int8."""

from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.latency.shapes import Case, file_stem
from mdp.files import write_bytes
from mdp.formats.profile import Precision

PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")


def model_file(folder: Path, case: Case, precision: Precision) -> Path:
    return folder / f"{file_stem(case)}-{precision}.onnx"


def export_all(
    folder: Path,
    cases: Sequence[Case],
    note: Callable[[str], None],
    precisions: Sequence[Precision] = PRECISIONS,
) -> None:
    """Export every case in each precision into `folder`, leaving out what is there already."""
    from partitioner.export.quantize import quantised
    from partitioner.export.write import ServedMember, to_onnx
    from partitioner.networks.submodel import SubModel

    folder.mkdir(parents=True, exist_ok=True)
    for number, case in enumerate(cases, start=1):
        if all(model_file(folder, case, precision).is_file() for precision in precisions):
            continue
        note(f"exporting {number} of {len(cases)}: {file_stem(case)}")
        module = ServedMember(SubModel(case.spec, case.num_classes))
        content = to_onnx(module, case.spec.image_size, ["boost", "bag"], {})
        # The last one is what tells that a case is complete.
        for precision in precisions:
            write_bytes(model_file(folder, case, precision), quantised(content, precision))
