"""Several equal students in one ONNX file, whose answer is their fused one."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mdp.errors import InputError
from mdp.runtimes.base import HEADS, INPUT


def join_models(models: Sequence[bytes], weights: Sequence[tuple[float, ...]]) -> bytes:
    """One model with the output `bag`: the students' logits, each head's times its weight, summed.

    `weights` has a number for each head of each student, boost before bag. Raises InputError for
    files that do not fit together.
    """
    import onnx
    from onnx import compose, helper, numpy_helper

    loaded = [onnx.load_from_string(content) for content in models]
    opsets = [{entry.domain: entry.version for entry in one.opset_import} for one in loaded]
    if any(opset != opsets[0] for opset in opsets):
        raise InputError("students: expected models of one set of operators, found several")
    whole, terms = onnx.ModelProto(), list[str]()
    whole.CopyFrom(loaded[0])
    for part in ("node", "initializer", "output", "value_info", "sparse_initializer"):
        del getattr(whole.graph, part)[:]
    del whole.functions[:]
    for number, (one, own) in enumerate(zip(loaded, weights, strict=True)):
        prefix = f"student/{number}/"
        del one.graph.value_info[:]
        renamed = compose.add_prefix(one, prefix, rename_inputs=False)
        outputs = [prefix + head for head in HEADS[-len(own) :]]
        if [value.name for value in renamed.graph.output] != outputs:
            raise InputError(f"students: expected the outputs {', '.join(HEADS[-len(own) :])}")
        for part in ("node", "initializer", "sparse_initializer"):
            getattr(whole.graph, part).extend(getattr(renamed.graph, part))
        whole.functions.extend(renamed.functions)
        for output, weight in zip(outputs, own, strict=True):
            factor = numpy_helper.from_array(np.array(weight, np.float32), f"{output}/weight")
            whole.graph.initializer.append(factor)
            terms.append(f"{output}/weighted")
            whole.graph.node.append(
                helper.make_node("Mul", [output, factor.name], [terms[-1]], name=terms[-1])
            )
    whole.graph.node.append(helper.make_node("Sum", terms, [HEADS[-1]], name="students"))
    given: Any = loaded[0].graph.output[-1].type.tensor_type
    shape = [dim.dim_param or dim.dim_value for dim in given.shape.dim]
    whole.graph.output.append(
        helper.make_tensor_value_info(HEADS[-1], onnx.TensorProto.FLOAT, shape)
    )
    assert [value.name for value in whole.graph.input] == [INPUT]
    onnx.checker.check_model(whole, full_check=True)
    content: bytes = whole.SerializeToString()
    return content
