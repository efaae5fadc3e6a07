"""Exports of networks that differ in their weights alone, traced once for all of them.

torch's exporter takes two seconds for a network of two layers, the most of a test's build. What it
found for a network of the same structure is taken again with the weights of this one, where that
is the same model: every weight that differs has to be found in the first one's file, and what the
second computes has to be what the network computes. All else is exported by torch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import numpy_helper
from torch import Tensor, nn

from mdp.runtimes.onnxruntime import import_onnxruntime

#: Rounding, as a share of the largest logit and 1.
_MOST = 2e-5
_export = torch.onnx.export


@dataclass
class _Traced:
    """A model's file, and the weights that it was made of."""

    model: bytes
    weights: dict[str, NDArray[Any]]
    #: Of each tensor of the file that is a weight: which one, and whether it is transposed.
    sources: dict[str, tuple[str, bool]]

    def with_weights(self, weights: Mapping[str, NDArray[Any]]) -> onnx.ModelProto | None:
        """The same model of other weights; None where one that differs is not found in it."""
        differ = {name for name, old in self.weights.items() if (old != weights[name]).any()}
        if not differ <= {name for name, _ in self.sources.values()}:
            return None
        model = onnx.load_from_string(self.model)
        for tensor in model.graph.initializer:
            if tensor.name in self.sources:
                name, transposed = self.sources[tensor.name]
                new = weights[name].T if transposed else weights[name]
                shaped = np.ascontiguousarray(new).reshape(tensor.dims)
                tensor.CopyFrom(numpy_helper.from_array(shaped, tensor.name))
        return model


_known: dict[tuple[object, ...], _Traced] = {}


@contextmanager
def traced_once() -> Iterator[None]:
    """Let torch export one network of each structure, while this lasts."""
    with mock.patch.object(torch.onnx, "export", _export_once):
        yield


def _export_once(module: nn.Module, args: tuple[Tensor], **how: Any) -> Any:
    (example,) = args
    tensors = (*module.named_parameters(), *module.named_buffers())
    weights = {name: tensor.detach().numpy().copy() for name, tensor in tensors}
    shapes = tuple((name, weight.shape) for name, weight in weights.items())
    how_exported = tuple(how["output_names"]), how["opset_version"]
    key = (repr(module), shapes, tuple(example.shape), how_exported)
    known = _known.get(key)
    if known is not None:
        model = known.with_weights(weights)
        if model is not None and _computes(model, module, example):
            return SimpleNamespace(model_proto=model)
    program: Any = _export(module, args, **how)
    _known[key] = _traced(program.model_proto, weights)
    return program


def _traced(model: onnx.ModelProto, weights: dict[str, NDArray[Any]]) -> _Traced:
    by_content: dict[bytes, tuple[str, bool]] = {}
    for name, weight in weights.items():
        by_content.setdefault(weight.T.tobytes(), (name, True))
    for name, weight in weights.items():
        by_content[weight.tobytes()] = (name, False)
    sources = {}
    for tensor in model.graph.initializer:
        content = numpy_helper.to_array(tensor).tobytes()
        own = weights.get(tensor.name)
        if own is not None and own.tobytes() == content:
            sources[tensor.name] = (tensor.name, False)
        elif content in by_content:
            sources[tensor.name] = by_content[content]
    return _Traced(model.SerializeToString(), weights, sources)


def _computes(model: onnx.ModelProto, module: nn.Module, example: Tensor) -> bool:
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    with torch.inference_mode():
        expected = module(example)
    found = session.run(None, {"images": example.numpy()})
    return all(
        np.abs(ours - theirs.numpy()).max() <= _MOST * (1 + float(theirs.abs().max()))
        for ours, theirs in zip(found, expected, strict=True)
    )
