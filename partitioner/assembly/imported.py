"""Trained models in the served form: uint8 `[N, S, S, 3]` in, logits `[N, C]` out."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from mdp.errors import InputError
from mdp.pictures.crop import Pixels
from partitioner.assembly.members import Model
from partitioner.export.write import ServedMember
from partitioner.networks.families import (
    Backbone,
    FamilyMember,
    NetworkStage,
    create,
    cut_classifier,
    last_stage,
    normalisation,
    read_state,
)
from partitioner.networks.submodel import Normalise

#: Without boosting members have one output.
HEADS = ["bag"]


class ServedClassifier(nn.Module):
    """The served form of a network with one classifier."""

    def __init__(self, normalise: Normalise, network: nn.Module, rows: list[int] | None) -> None:
        super().__init__()
        self.normalise, self.network, self.rows = normalise, network, rows

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Logits `[N, C]`, as a tuple of one."""
        logits: Tensor = self.network(self.normalise(images.permute(0, 3, 1, 2).float()))
        return (logits if self.rows is None else logits[:, self.rows],)


def timm_module(model: Model, weights: Path, names: int, rows: list[int]) -> nn.Module:
    """The served form of a timm network with `names` classes, cut to `rows`; raises InputError."""
    assert model.timm is not None
    assert model.image_size is not None
    backbone = Backbone(model.timm, model.image_size, model.depth, model.pooling)
    state = read_state(weights)
    if "bag.weight" in state:
        return _load_member(backbone, state, weights, names, rows)
    network = create(backbone, names, weights, own_classes=True)
    classifier = network.get_classifier()
    normalise = normalisation(network)
    if not isinstance(classifier, nn.Linear):
        return ServedClassifier(normalise, network, rows).eval()
    place = next(name for name, module in network.named_modules() if module is classifier)
    network.set_submodule(place, cut_classifier(classifier, rows))
    return ServedClassifier(normalise, network, None).eval()


def classifier_of(module: nn.Module) -> str | None:
    """Place of the linear layer that gives a served network's logits; None where none does."""
    if isinstance(module, ServedMember):
        return "submodel.bag"
    if not isinstance(module, ServedClassifier) or module.rows is not None:
        return None  # a classifier that is no linear layer
    network: Any = module.network
    classifier = network.get_classifier()
    named: dict[str, nn.Module] = dict(module.named_modules())
    return next(name for name, part in named.items() if part is classifier)


def stage_of(module: nn.Module) -> NetworkStage | None:
    """The last stage of a served network; None where it has none, as a plain ViT."""
    if isinstance(module, ServedMember):
        place, network = "submodel.trunk", module.submodel.trunk
    else:
        assert isinstance(module, ServedClassifier)
        place, network = "network", module.network
    stage = last_stage(network)
    return stage and NetworkStage(f"{place}.{stage.place}", stage.channels)


def _load_member(
    backbone: Backbone, state: dict[str, Tensor], weights: Path, names: int, rows: list[int]
) -> nn.Module:
    """A member trained by MDP, without its boost head; raises InputError for other weights."""
    found = len(state["bag.weight"])
    if found != names:
        raise InputError(f"{weights}: tells {found} classes apart, its labels name {names}")
    member = FamilyMember(backbone, names)
    try:
        member.load_state_dict({k: v for k, v in state.items() if not k.startswith("boost.")})
    except RuntimeError as error:
        text = " ".join(str(error).split())[:200]
        raise InputError(f"{weights}: expected the tensors of {backbone.name}: {text}") from error
    member.bag = cut_classifier(member.bag, rows)
    return ServedMember(member).eval()


def onnx_member(model: Model, path: Path, names: int, rows: list[int]) -> tuple[bytes, int]:
    """An ONNX file in the served form, cut to `rows`, and its image size; raises InputError."""
    import onnx
    from onnx import helper

    try:
        loaded = onnx.load(path)
        onnx.checker.check_model(loaded)
    except Exception as error:  # protobuf's, the system's and onnx's errors share no base
        text = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: expected an ONNX model: {text}") from error
    graph = loaded.graph
    given = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in given]
    if len(inputs) != 1:
        raise InputError(f"{path}: expected one input, found {len(inputs)}")
    size = _picture_input(inputs[0], path, model.image_size)
    outputs = [value.name for value in graph.output]
    head = outputs[0] if len(outputs) == 1 else HEADS[0]
    if head not in outputs:
        raise InputError(f"{path}: expected one output, or {head}, found {', '.join(outputs)}")
    for value in graph.output:
        _check_classes(value, path, names)
    own_input = inputs[0].name
    _rename(graph, {name: f"source/{name}" for name in {own_input, "images", *HEADS}})
    before, tensors = _normalise(inputs[0], f"source/{own_input}", model)
    tensors.append(_tensor("mdp/rows", np.array(rows, dtype=np.int64)))
    logits = f"source/{head}" if head in {own_input, "images", *HEADS} else head
    cut = helper.make_node("Gather", [logits, "mdp/rows"], HEADS, axis=1)
    nodes = [*before, *graph.node, cut]
    kept = [*graph.initializer, *tensors]
    del graph.node[:], graph.input[:], graph.output[:], graph.initializer[:], graph.value_info[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)
    graph.input.append(
        helper.make_tensor_value_info("images", onnx.TensorProto.UINT8, ["N", size, size, 3])
    )
    graph.output.append(
        helper.make_tensor_value_info(HEADS[0], onnx.TensorProto.FLOAT, ["N", len(rows)])
    )
    try:
        onnx.checker.check_model(loaded, full_check=True)
    except Exception as error:
        text = " ".join(str(error).split())[:200]
        raise InputError(f"{path}: cannot be served with any number of pictures: {text}") from error
    content: bytes = loaded.SerializeToString()
    return content, size


def _rename(graph: Any, names: dict[str, str]) -> None:
    """Rename tensors of the graph that have names of the served form."""
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for tensor in graph.initializer:
        tensor.name = names.get(tensor.name, tensor.name)


def _shape(value: Any) -> list[int]:
    """Sizes of a tensor, 0 for open dimensions."""
    return [dim.dim_value for dim in value.type.tensor_type.shape.dim]


def _picture_input(value: Any, path: Path, image_size: int | None) -> int:
    """Side in pixels of the model's square input; raises InputError for any other input."""
    import onnx

    kind, shape = value.type.tensor_type.elem_type, _shape(value)
    channels = {onnx.TensorProto.FLOAT: 1, onnx.TensorProto.UINT8: 3}.get(kind)
    sides = [n for axis, n in enumerate(shape) if axis not in (0, channels)]
    if channels is None or len(shape) != 4 or shape[channels] != 3 or len(set(sides)) != 1:
        name = onnx.TensorProto.DataType.Name(kind).lower()
        raise InputError(
            f"{path}: expected square pictures as float [N, 3, S, S] or uint8 [N, S, S, 3], "
            f"found {name} {shape}"
        )
    size = sides[0] or image_size
    if not size:
        raise InputError(f"{path}: takes pictures of any size: expected the key `image_size`")
    if image_size not in (None, size):
        raise InputError(f"{path}: takes pictures of {size} px, not `image_size` {image_size}")
    return int(size)


def _check_classes(value: Any, path: Path, names: int) -> None:
    shape = _shape(value)
    if len(shape) != 2 or shape[1] not in (0, names):
        raise InputError(
            f"{path}: output {value.name} is {shape}, expected [N, {names}]: one logit for each of "
            f"the {names} names of its labels file"
        )


def _tensor(name: str, value: Any) -> Any:
    from onnx import numpy_helper

    return numpy_helper.from_array(value, name)


def _normalise(value: Any, target: str, model: Model) -> tuple[list[Any], list[Any]]:
    """Nodes from `images` to the model's own input, and their constants."""
    import onnx
    from onnx import helper

    if value.type.tensor_type.elem_type == onnx.TensorProto.UINT8:
        if model.mean or model.std:
            raise InputError(f"{model.onnx}: takes uint8 pixels: expected no `mean` and no `std`")
        return [helper.make_node("Identity", ["images"], [target])], []
    if model.mean is None or model.std is None:
        raise InputError(f"{model.onnx}: takes floats: expected the keys `mean` and `std`")
    mean = np.array(model.mean, dtype=np.float32).reshape(1, 3, 1, 1) * 255
    scale = 1 / (np.array(model.std, dtype=np.float32).reshape(1, 3, 1, 1) * 255)
    return [
        helper.make_node("Transpose", ["images"], ["mdp/turned"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["mdp/turned"], ["mdp/float"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Sub", ["mdp/float", "mdp/mean"], ["mdp/centred"]),
        helper.make_node("Mul", ["mdp/centred", "mdp/scale"], [target]),
    ], [_tensor("mdp/mean", mean), _tensor("mdp/scale", scale.astype(np.float32))]


def own_logits(path: Path, model: Model, pixels: Pixels, rows: list[int]) -> Any:
    """Logits `[N, C]` of the ONNX file itself, one picture at a time."""
    from mdp.runtimes.onnxruntime import open_session

    session = open_session(path)
    source = session.get_inputs()[0]
    found = []
    for one in pixels:
        feed: Any = one[np.newaxis]
        if source.type != "tensor(uint8)":
            scaled = (one / 255 - np.array(model.mean)) / np.array(model.std)
            feed = scaled.astype(np.float32).transpose(2, 0, 1)[np.newaxis]
        names = [output.name for output in session.get_outputs()]
        (logits,) = session.run(names if len(names) == 1 else HEADS, {source.name: feed})
        found.append(logits[:, rows])
    return np.concatenate(found)


def count_costs(content: bytes) -> tuple[int, int]:
    """Parameters of a served model, and its multiply-accumulates for one picture."""
    import onnx
    from onnx import shape_inference

    loaded = onnx.load_from_string(content)
    graph = loaded.graph
    for value in (*graph.input, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    del graph.value_info[:]
    graph = shape_inference.infer_shapes(loaded, data_prop=True).graph
    shapes = {v.name: _shape(v) for v in (*graph.value_info, *graph.output, *graph.input)}
    weights = {t.name: list(t.dims) for t in graph.initializer}
    shapes |= weights
    total = 0
    for node in graph.node:
        if node.op_type in ("MatMul", "Gemm", "Conv") and node.output[0] in shapes:
            made = math.prod(max(1, n) for n in shapes[node.output[0]])
            inner = shapes.get(node.input[1] if node.op_type != "MatMul" else node.input[0], [1])
            summed = math.prod(inner[1:]) if node.op_type == "Conv" else inner[-1]
            if node.op_type == "Gemm":
                summed = math.prod(inner) // max(1, shapes[node.output[0]][-1])
            total += made * max(1, summed)
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    learned = sum(math.prod(t.dims) for t in graph.initializer if t.data_type in floats)
    return max(1, learned), max(1, total)
