"""Convert an exported fp32 model to another precision, by onnxruntime's tools.

Whether that pays is decided in `partitioner.export.quantize_bundle`.
"""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mdp.errors import InputError, MDPError
from mdp.formats.profile import Precision, RuntimeName
from mdp.imports import silence_onnxruntime
from mdp.pictures.crop import Pixels
from mdp.runtimes.base import INPUT, PRECISION_KEY

#: Precisions with an unchanged file: bf16 is computed from fp32 numbers.
SAME_FILE: tuple[Precision, ...] = ("fp32", "bf16")
#: Pictures for the ranges of activations, at most and at least. On the bundle of examples/ 64, 256
#: and 1,024 pictures lose the same within 0.2 points.
RANGE_PICTURES, MIN_RANGE_PICTURES = 256, 32
#: Pictures at a time for the ranges; all their activations are in memory.
_BATCH = 16

Way = tuple[Precision, RuntimeName]
#: Precisions and runtimes that a sub-model may be served in; the first is as exported.
WAYS: tuple[Way, ...] = (
    ("fp32", "onnxruntime"),
    ("fp32", "openvino"),
    ("fp16", "onnxruntime"),
    ("bf16", "openvino"),
    ("int8", "onnxruntime"),
    ("int8-static", "onnxruntime"),
    ("int8-static", "openvino"),
)


class QuantizationError(MDPError):
    """A model cannot be converted to a precision."""


def quantize_model(
    model: bytes, precision: Precision, calibration: Pixels | None = None, *, whole: bool = False
) -> bytes:
    """An exported fp32 `model` in `precision`; `calibration` `[N, S, S, 3]` is for int8-static.

    With `whole` int8-static includes all convolutions and heads, else only those of a convolutional
    trunk: the embedding and the heads of a plain ViT stay fp32. Raises InputError for too few
    calibration pictures, and QuantizationError where onnxruntime's tools fail.
    """
    if precision == "int8-static":
        check_calibration(0 if calibration is None else len(calibration))
    import onnx

    loaded = onnx.load_from_string(model)
    properties = {entry.key: entry.value for entry in loaded.metadata_props}
    if precision not in SAME_FILE:
        # Shapes are inferred anew; the exporter's clash with the transposed weights of a Gemm.
        del loaded.graph.value_info[:]
        try:
            loaded = _convert(loaded, precision, calibration, whole)
        except Exception as error:  # the tools raise types of their own, without a common base
            text = " ".join(str(error).split())
            raise QuantizationError(f"cannot be converted to {precision}: {text}") from error
    written = "fp32" if precision in SAME_FILE else precision
    onnx.helper.set_model_props(loaded, {**properties, PRECISION_KEY: written})
    content: bytes = loaded.SerializeToString()
    return content


def check_calibration(found: int) -> None:
    """Raise InputError if so many calibration pictures are too few for int8-static."""
    if found < MIN_RANGE_PICTURES:
        raise InputError(
            f"int8-static: expected at least {MIN_RANGE_PICTURES} calibration pictures to see the "
            f"range of every activation, got {found}"
        )


def _convert(model: Any, precision: Precision, calibration: Pixels | None, whole: bool) -> Any:
    silence_onnxruntime()
    if precision == "fp16":
        from onnxruntime.transformers.float16 import convert_float_to_float16

        return convert_float_to_float16(model, keep_io_types=True)
    import onnx
    from onnxruntime.quantization.quant_utils import add_pre_process_metadata

    # Without it the tools log advice to optimise the graph first.
    add_pre_process_metadata(model)
    with TemporaryDirectory(prefix="mdp-quantize-") as folder:
        path = Path(folder) / "model.onnx"
        if precision == "int8":
            _quantize_dynamically(model, path)
        else:
            assert calibration is not None
            _quantize_statically(model, path, calibration, whole)
        written = onnx.load(path)
        return store_once(written) if whole else written


def store_once(model: Any) -> Any:
    """`model` with equal tensors stored once: the zero points, 1 to 5 bytes of every channel."""
    first: dict[tuple[int, tuple[int, ...], bytes], str] = {}
    instead: dict[str, str] = {}
    for tensor in list(model.graph.initializer):
        content = tensor.raw_data or bytes(str(list(tensor.int32_data)), "ascii")
        key = (tensor.data_type, tuple(tensor.dims), content)
        if "zero_point" in tensor.name and first.setdefault(key, tensor.name) != tensor.name:
            instead[tensor.name] = first[key]
            model.graph.initializer.remove(tensor)
    for node in model.graph.node:
        node.input[:] = [instead.get(name, name) for name in node.input]
    return model


#: Operators of a convolutional trunk whose outputs stay in 8 bits until the next convolution.
_TRUNK = ("Conv", "Clip", "Relu", "Add", "MaxPool")

# Scales per output channel cost no time. Weights use 7 of 8 bits: without VNNI two products
# overflow 16 bits.
_COMMON = {"per_channel": True, "reduce_range": True}


def _quantize_dynamically(model: Any, path: Path) -> None:
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(
        model, path, op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8, **_COMMON
    )


def _quantize_statically(model: Any, path: Path, calibration: Pixels, whole: bool) -> None:
    """QDQ before products with weights; their sums and products of two activations stay fp32.

    On three ViTs that is 10 to 20 % faster than quantizing those too, and as exact.
    """
    from onnxruntime.quantization import (
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._feeds = _feeds(calibration)

        def get_next(self) -> dict[str, Pixels] | None:
            return next(self._feeds, None)

    quantize_static(
        model,
        path,
        Reader(),
        quant_format=QuantFormat.QDQ,
        op_types_to_quantize=_types_to_quantize(model, whole),
        nodes_to_exclude=_without_weights(model),
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        # onnxruntime converts fp32 biases to 32 bit integers at load.
        extra_options={
            "OpTypesToExcludeOutputQuantization": ["MatMul", "Gemm"],
            "QuantizeBias": False,
        },
        **_COMMON,
    )


def _types_to_quantize(model: Any, whole: bool) -> list[str]:
    """Products with weights, and of a convolutional network the whole trunk."""
    if sum(node.op_type == "Conv" for node in model.graph.node) < 2:
        return ["MatMul", "Conv", "Gemm"] if whole else ["MatMul"]
    return ["MatMul", *_TRUNK, *(["Gemm"] if whole else [])]


def _without_weights(model: Any) -> list[str]:
    """Names of the products of two activations."""
    weights = {tensor.name for tensor in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    return [node.name for node in products if not weights.intersection(node.input)]


def _feeds(calibration: Pixels) -> Iterator[dict[str, Pixels]]:
    """RANGE_PICTURES of the pictures, evenly spaced, in batches."""
    count = min(len(calibration), RANGE_PICTURES)
    rows = np.linspace(0, len(calibration) - 1, count).astype(np.int64)
    for start in range(0, count, _BATCH):
        yield {INPUT: np.ascontiguousarray(calibration[rows[start : start + _BATCH]])}
