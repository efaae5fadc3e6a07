"""Counting by walking an ONNX graph with inferred shapes: a reference for
`partitioner.estimates.macs`.
"""

import math
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper

#: What only gives another name or shape to values that are there.
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Identity")


def infer_shapes(content: bytes, batch: int = 1) -> Any:
    """The model for `batch` pictures, with the shape of every value."""
    model = onnx.load_from_string(content)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].ClearField("dim_param")
        value.type.tensor_type.shape.dim[0].dim_value = batch
    # The quantiser turns the heads' weights and leaves their old shapes.
    del model.graph.value_info[:]
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


def matrix_macs(model: Any) -> int:
    """Multiply-accumulates of every matrix product and convolution."""
    shapes = {name: shape for name, (shape, _) in _values(model).items()}
    shapes |= {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    total = 0
    for node in model.graph.node:
        if node.op_type in ("MatMul", "MatMulInteger") or node.op_type == "Gemm":
            total += math.prod(shapes[node.output[0]]) * shapes[node.input[0]][-1]
        elif node.op_type == "Conv":
            total += math.prod(shapes[node.output[0]]) * math.prod(shapes[node.input[1]][1:])
    return total


def count_stored(model: Any) -> int:
    """Bytes of all initialisers that are learned: neither shape arithmetic nor plain constants."""
    return sum(
        numpy_helper.to_array(tensor).nbytes
        for tensor in model.graph.initializer
        if tensor.name.startswith("submodel.") or _is_weight(tensor)
    )


def _is_weight(tensor: Any) -> bool:
    # The exporter folds transposed weights into nameless matrices; the quantiser adds to the name.
    quantised = tensor.name.endswith(("_quantized", "_scale", "_zero_point"))
    return quantised or len(tensor.dims) == 2


def peak_bytes(model: Any) -> int:
    """Most bytes of values alive at once, nodes in their order, nothing in place.

    The pixels stay alive to the end; integers of shape arithmetic do not count.
    """
    sizes = {
        name: 0 if kind == TensorProto.INT64 else math.prod(shape) * _width(kind)
        for name, (shape, kind) in _values(model).items()
    }
    owner: dict[str, str] = {}
    for node in model.graph.node:
        for output in node.output:
            source = node.input[0] if node.op_type in _VIEWS else output
            owner[output] = owner.get(source, source)
    last: dict[str, float] = {
        owner.get(n, n): i for i, node in enumerate(model.graph.node) for n in node.input
    }
    last |= {owner.get(v.name, v.name): math.inf for v in model.graph.output}
    pixels = model.graph.input[0].name
    last[pixels] = math.inf
    alive, peak = {pixels}, 0
    for i, node in enumerate(model.graph.node):
        alive |= {owner[output] for output in node.output}
        peak = max(peak, sum(sizes[name] for name in alive))
        alive = {name for name in alive if last.get(name, -1) > i}
    return peak


def _values(model: Any) -> dict[str, tuple[tuple[int, ...], int]]:
    graph = model.graph
    return {
        value.name: (
            tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim),
            value.type.tensor_type.elem_type,
        )
        for value in (*graph.input, *graph.output, *graph.value_info)
    }


def _width(kind: int) -> int:
    return int(helper.tensor_dtype_to_np_dtype(kind).itemsize)
