"""Anomaly heads: a second output of an exported model, which says how far from good a picture is.

PaDiM (Defard, Setkov, Loesch and Audigier, ICPR 2020) with a diagonal covariance: every place of
some middle layers has the mean and the variance of each channel over good pictures. The distance of
a place is the root of the mean squared deviation in standard deviations, 1 for a typical one; the
score is the largest distance.

The head is written into the model's own ONNX graph: it reads tensors that are computed anyway, in
whatever precision they are, and itself computes in fp32.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mdp.errors import InputError
from mdp.fusion.anomaly_table import MAP_LIMIT, MAP_SIDE
from mdp.runtimes.base import ANOMALY, ANOMALY_MAP, HEADS

Floats = NDArray[np.float32]
#: Sides of grids that are worth a head: coarser ones see no place, finer ones are mostly edges.
_SIDES = range(4, 57)
#: Layers of a convolutional network, by how many pixels a place of theirs is apart.
STRIDES = (8, 16)
#: Of a transformer, how deep the layers lie, as shares of its blocks.
DEPTHS = (0.35, 0.65)
#: Tokens beside those of patches, at most: of a class, distillation and registers.
_MOST_PREFIX = 8
#: A channel varies at least this much of the median one: else noise of an int8 step is far away.
_LEAST_SHARE = 0.1
#: And this much of one of those that vary most: over a plain background most hardly vary at all.
_LEAST_OF_MOST, _MOST = 0.05, 0.9
_LEAST_SCALE = 1e-6
#: The opset from which on ReduceMax and ReduceL2 get their axes as an input.
_AXES_ARE_INPUTS = 18
#: Names of the head's nodes and tensors begin so.
PREFIX = "mdp/anomaly/"


@dataclass(frozen=True, slots=True)
class Layer:
    """A tensor of a graph with a feature vector for each place."""

    tensor: str
    side: int
    channels: int
    #: Of `[N, tokens, channels]`, the tokens before those of places; None of `[N, channels, H, W]`.
    prefix: int | None = None

    @property
    def words(self) -> str:
        """The layer's form: `14 x 14 x 192`."""
        return f"{self.side} x {self.side} x {self.channels}"

    def places(self, values: Floats) -> Floats:
        """Features `[N, side^2, channels]` of the tensor's values."""
        if self.prefix is None:
            flat = values.reshape(len(values), self.channels, -1)
            return np.ascontiguousarray(flat.transpose(0, 2, 1), dtype=np.float32)
        return np.asarray(values[:, self.prefix :], dtype=np.float32)


@dataclass(frozen=True, slots=True)
class LayerFit:
    """Mean and scale `[side^2, channels]` of one layer's features on good pictures."""

    mean: Floats
    scale: Floats

    def distances(self, features: Floats) -> Floats:
        """Distances `[N, side^2]` of features `[N, side^2, channels]`."""
        found: Floats = np.sqrt((((features - self.mean) / self.scale) ** 2).mean(axis=-1))
        return found


class Moments:
    """Mean and variance of features, taken in batch by batch.

    Sums of squared deviations are merged as by Chan, Golub and LeVeque (The American Statistician
    37, 1983), so that nothing but them is kept.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: NDArray[np.float64] | None = None
        self._squares: NDArray[np.float64] | None = None

    def add(self, features: Floats) -> None:
        """Take in features `[N, places, channels]`."""
        x = features.astype(np.float64)
        mean = x.mean(axis=0)
        self._merge(len(x), mean, ((x - mean) ** 2).sum(axis=0))

    def merge(self, other: "Moments") -> None:
        """Take in all that another one has."""
        if other._mean is not None and other._squares is not None:
            self._merge(other.count, other._mean, other._squares)

    def _merge(self, count: int, mean: NDArray[np.float64], squares: NDArray[np.float64]) -> None:
        if self._mean is None or self._squares is None:
            self.count, self._mean, self._squares = count, mean.copy(), squares.copy()
            return
        whole, apart = self.count + count, mean - self._mean
        self._squares += squares + apart**2 * (self.count * count / whole)
        self._mean += apart * (count / whole)
        self.count = whole

    def fit(self) -> LayerFit:
        """Mean and scale; of fewer than two pictures none can be told."""
        assert self._mean is not None
        assert self._squares is not None
        scale = np.sqrt(self._squares / max(1, self.count - 1))
        least = max(
            _LEAST_SHARE * float(np.median(scale)),
            _LEAST_OF_MOST * float(np.quantile(scale, _MOST)),
            _LEAST_SCALE,
        )
        return LayerFit(self._mean.astype(np.float32), np.maximum(scale, least).astype(np.float32))


def choose_layers(model: bytes, name: str) -> list[Layer]:
    """The layers of an exported model that its head reads; raises InputError where there are none.

    Of a convolutional network the last ones whose places are `STRIDES` pixels apart, of a
    transformer those after the blocks at `DEPTHS`.
    """
    import onnx

    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(model)).graph
    image_size = graph.input[0].type.tensor_type.shape.dim[1].dim_value
    found = list(_layers(graph))
    tokens = [layer for layer in found if layer.prefix is not None]
    grids = [layer for layer in found if layer.prefix is None]
    chosen: list[Layer] = []
    if tokens:
        last = len(tokens) - 1
        chosen = [tokens[round(depth * last)] for depth in DEPTHS]
    elif grids:
        # Those that are nearest, where the network has no such stride.
        sides = sorted({layer.side for layer in grids})
        wanted = {
            min(sides, key=lambda s: abs(math.log(s * each / image_size))) for each in STRIDES
        }
        chosen = [[one for one in grids if one.side == side][-1] for side in sorted(wanted)[::-1]]
    if not chosen:
        raise InputError(
            f"{name}: no middle layer has a feature for each place: expected a tensor "
            f"[N, C, side, side] or [N, tokens, C] with a side of {_SIDES[0]} to {_SIDES[-1]}"
        )
    return [_readable(graph, layer) for layer in dict.fromkeys(chosen)]


def _layers(graph: Any) -> Iterable[Layer]:
    """The sums of two branches, or of a network without any the outputs of activations."""
    shapes = {
        value.name: [d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in graph.value_info
    }
    constants = {tensor.name for tensor in graph.initializer}
    constants |= {node.output[0] for node in graph.node if node.op_type == "Constant"}
    added, others = [], []
    for node in graph.node:
        layer = _layer_of(node.output[0], shapes.get(node.output[0], []))
        if layer is None or node.name.startswith(PREFIX):
            continue
        if node.op_type == "Add" and not constants.intersection(_sources(graph, node)):
            added.append(layer)
        elif layer.prefix is None and node.op_type in ("Relu", "Clip", "Conv", "Mul"):
            others.append(layer)
    sides = {layer.side for layer in added}
    yield from added
    yield from (layer for layer in others if layer.side not in sides)


def _sources(graph: Any, node: Any) -> list[str]:
    """Inputs of a node; of one that is dequantized, what was quantized."""
    made = {output: each for each in graph.node for output in each.output}
    found = []
    for name in node.input:
        each = made.get(name)
        found.append(each.input[0] if each is not None and "Dequantize" in each.op_type else name)
    return found


def _layer_of(tensor: str, shape: Sequence[int]) -> Layer | None:
    """The layer that a tensor of this shape is; None where it has no places."""
    if len(shape) == 4 and shape[2] == shape[3] and shape[2] in _SIDES and shape[1] >= 8:
        return Layer(tensor, shape[2], shape[1])
    if len(shape) == 3 and shape[1] > 1 and shape[2] >= 8:
        side = math.isqrt(shape[1])
        if side in _SIDES and shape[1] - side**2 <= _MOST_PREFIX:
            return Layer(tensor, side, shape[2], shape[1] - side**2)
    return None


def _readable(graph: Any, layer: Layer) -> Layer:
    """The layer as it is dequantized: else the node before could not stay in 8 bits."""
    quantized = [
        node.output[0]
        for node in graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] == layer.tensor
    ]
    for node in graph.node:
        if node.op_type == "DequantizeLinear" and node.input[0] in quantized:
            return Layer(node.output[0], layer.side, layer.channels, layer.prefix)
    return layer


def with_features(model: bytes, layers: Sequence[Layer]) -> bytes:
    """`model` with the layers' tensors as further outputs, in fp32, named as `feature_names`."""
    import onnx

    loaded = onnx.load_from_string(model)
    for layer, name in zip(layers, feature_names(layers), strict=True):
        loaded.graph.node.append(
            onnx.helper.make_node(
                "Cast", [layer.tensor], [name], name=name, to=onnx.TensorProto.FLOAT
            )
        )
        loaded.graph.output.append(
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None)
        )
    content: bytes = loaded.SerializeToString()
    return content


def feature_names(layers: Sequence[Layer]) -> list[str]:
    """Names of the outputs of `with_features`."""
    return [f"{PREFIX}features_{place}" for place in range(len(layers))]


def has_head(model: bytes) -> bool:
    """Tell whether a model has an anomaly head."""
    import onnx

    return ANOMALY in [output.name for output in onnx.load_from_string(model).graph.output]


def without_head(model: bytes) -> bytes:
    """`model` as it was before `with_head`."""
    import onnx

    loaded = onnx.load_from_string(model)
    graph = loaded.graph
    kept = {
        "node": [node for node in graph.node if not node.name.startswith(PREFIX)],
        "initializer": [one for one in graph.initializer if not one.name.startswith(PREFIX)],
        "output": [one for one in graph.output if one.name in HEADS],
    }
    for field, values in kept.items():
        del getattr(graph, field)[:]
        getattr(graph, field).extend(values)
    content: bytes = loaded.SerializeToString()
    return content


def map_of(layers: Sequence[Layer], distances: Sequence[Floats]) -> Floats:
    """Distances `[N, side, side]` of the finest grid, the mean of the layers' `[N, side^2]`."""
    side = max(layer.side for layer in layers)
    grids = [
        _resize(one.reshape(-1, layer.side, layer.side), side)
        for layer, one in zip(layers, distances, strict=True)
    ]
    found: Floats = np.mean(grids, axis=0, dtype=np.float32)
    return found


def scores_of(maps: Floats) -> Floats:
    """Scores `[N]` of maps `[N, side, side]`."""
    found: Floats = maps.max(axis=(1, 2))
    return found


def _resize(grids: Floats, side: int) -> Floats:
    """Grids `[N, S, S]` at another side, bilinearly between the middles of places."""
    weights = _between(grids.shape[1], side)
    found: Floats = np.einsum("ai,nij,bj->nab", weights, grids, weights).astype(np.float32)
    return found


def _between(before: int, after: int) -> Floats:
    """Weights `[after, before]` of bilinear resizing, as ONNX's `half_pixel` has them."""
    at = (np.arange(after) + 0.5) * before / after - 0.5
    at = np.clip(at, 0, before - 1)
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, before - 1)
    weights = np.zeros((after, before), dtype=np.float32)
    rows = np.arange(after)
    np.add.at(weights, (rows, low), (1 - (at - low)).astype(np.float32))
    np.add.at(weights, (rows, high), (at - low).astype(np.float32))
    return weights


def with_head(
    model: bytes, layers: Sequence[Layer], fits: Sequence[LayerFit], limit: float
) -> bytes:
    """`model` with a head of the fitted layers: outputs `anomaly` and `anomaly_map`.

    A place at the distance `limit` has `MAP_LIMIT` in the map.
    """
    import onnx

    loaded = onnx.load_from_string(model)
    opset = next(one.version for one in loaded.opset_import if one.domain in ("", "ai.onnx"))
    writer = _Writer(loaded.graph, opset)
    side = max(layer.side for layer in layers)
    grids = [
        writer.resize(writer.distances(layer, fit), layer.side, side)
        for layer, fit in zip(layers, fits, strict=True)
    ]
    whole = grids[0]
    for grid in grids[1:]:
        whole = writer.node("Add", [whole, grid])
    if len(grids) > 1:
        whole = writer.node("Mul", [whole, writer.constant(np.float32(1 / len(grids)))])
    flat = writer.node("Reshape", [whole, writer.constant(np.array([-1, side**2]))])
    writer.reduce("ReduceMax", flat, 1, keepdims=1, output=ANOMALY)
    cells = writer.resize(whole, side, MAP_SIDE)
    cells = writer.node("Mul", [cells, writer.constant(np.float32(MAP_LIMIT / limit))])
    bounds = [writer.constant(np.float32(0)), writer.constant(np.float32(255))]
    cells = writer.node("Clip", [cells, *bounds])
    writer.node("Cast", [cells], to=onnx.TensorProto.UINT8, output=ANOMALY_MAP)
    for name, kind, shape in (
        (ANOMALY, onnx.TensorProto.FLOAT, ["N", 1]),
        (ANOMALY_MAP, onnx.TensorProto.UINT8, ["N", MAP_SIDE, MAP_SIDE]),
    ):
        loaded.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, shape))
    onnx.checker.check_model(loaded)
    content: bytes = loaded.SerializeToString()
    return content


class _Writer:
    """Appends a head's nodes to a graph."""

    def __init__(self, graph: Any, opset: int) -> None:
        self._graph, self._opset = graph, opset
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"{PREFIX}{self._count}"

    def constant(self, value: NDArray[Any] | np.float32) -> str:
        """Name of a stored tensor."""
        from onnx import numpy_helper

        name = self._name()
        self._graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(
        self, kind: str, inputs: Sequence[str], output: str | None = None, **attributes: Any
    ) -> str:
        """Name of the output of a new node."""
        import onnx

        name = self._name()
        made = output or name
        self._graph.node.append(
            onnx.helper.make_node(kind, list(inputs), [made], name=name, **attributes)
        )
        return made

    def reduce(
        self, kind: str, x: str, axis: int, *, keepdims: int, output: str | None = None
    ) -> str:
        """Name of the output of a new node that reduces `axis`."""
        if self._opset < _AXES_ARE_INPUTS:
            return self.node(kind, [x], output, axes=[axis], keepdims=keepdims)
        return self.node(kind, [x, self.constant(np.array([axis]))], output, keepdims=keepdims)

    def distances(self, layer: Layer, fit: LayerFit) -> str:
        """Distances `[N, side, side]` of a layer's places."""
        import onnx

        x = self.node("Cast", [layer.tensor], to=onnx.TensorProto.FLOAT)
        mean, inverse = fit.mean, (1 / fit.scale) / math.sqrt(layer.channels)
        axis = 2
        if layer.prefix is None:
            axis, shape = 1, (layer.channels, layer.side, layer.side)
            mean = np.ascontiguousarray(mean.T).reshape(shape)
            inverse = np.ascontiguousarray(inverse.T).reshape(shape)
        elif layer.prefix:
            starts, ends = np.array([layer.prefix]), np.array([layer.prefix + layer.side**2])
            bounds = [self.constant(one) for one in (starts, ends, np.array([1]))]
            x = self.node("Slice", [x, *bounds])
        x = self.node("Sub", [x, self.constant(mean.astype(np.float32))])
        x = self.node("Mul", [x, self.constant(inverse.astype(np.float32))])
        # Root of the sum of squares in one node.
        x = self.reduce("ReduceL2", x, axis, keepdims=0)
        if layer.prefix is None:
            return x
        grid = np.array([-1, layer.side, layer.side])
        return self.node("Reshape", [x, self.constant(grid)])

    def resize(self, grid: str, before: int, after: int) -> str:
        """A grid `[N, before, before]` at another side, as `_resize`: two small products."""
        if before == after:
            return grid
        weights = _between(before, after)
        rows = self.node("MatMul", [self.constant(weights), grid])
        return self.node("MatMul", [rows, self.constant(np.ascontiguousarray(weights.T))])


@dataclass(frozen=True, slots=True)
class FoldFits:
    """Fits of a head's layers to good pictures: to `whole`, and to all but those of each fold.

    Picture n is of fold n modulo their number.
    """

    whole: list[LayerFit]
    left_out: list[list[LayerFit]]


def fit_folds(batches: Iterable[Sequence[Floats]], layers: Sequence[Layer], folds: int) -> FoldFits:
    """Fit layers to batches of their features `[N, side^2, channels]`, in one pass."""
    moments = [[Moments() for _ in layers] for _ in range(folds)]
    start = 0
    for batch in batches:
        rows = (start + np.arange(len(batch[0]))) % folds
        for fold in range(folds):
            for of_layer, values in zip(moments[fold], batch, strict=True):
                if (rows == fold).any():
                    of_layer.add(values[rows == fold])
        start += len(batch[0])

    def fit_layers(left_out: int | None) -> list[LayerFit]:
        found = []
        for place in range(len(layers)):
            whole = Moments()
            for fold in range(folds):
                if fold != left_out:
                    whole.merge(moments[fold][place])
            found.append(whole.fit())
        return found

    return FoldFits(whole=fit_layers(None), left_out=[fit_layers(fold) for fold in range(folds)])


def maps_by_folds(
    batches: Iterable[Sequence[Floats]], layers: Sequence[Layer], fits: FoldFits
) -> Floats:
    """Maps `[N, side, side]` of the pictures that were fitted to, each by fits without its fold.

    They are as of pictures that were never seen: also those of the same pictures with a patch.
    """
    maps, start, folds = [], 0, len(fits.left_out)
    for batch in batches:
        rows = (start + np.arange(len(batch[0]))) % folds
        side = max(layer.side for layer in layers)
        found = np.empty((len(rows), side, side), dtype=np.float32)
        for fold in set(rows.tolist()):
            mine = rows == fold
            distances = [
                fit.distances(values[mine])
                for fit, values in zip(fits.left_out[fold], batch, strict=True)
            ]
            found[mine] = map_of(layers, distances)
        maps.append(found)
        start += len(rows)
    return np.concatenate(maps)


def plant_patch(pixels: NDArray[np.uint8], seed: int = 0) -> NDArray[np.uint8]:
    """Pictures `[N, S, S, 3]` with a patch of another place of theirs, with other brightness.

    CutPaste (Li, Sohn, Yoon and Pfister, CVPR 2021): stands for defects where there are none.
    """
    random = np.random.default_rng(seed)
    made, side = np.array(pixels), pixels.shape[1]
    for row in made:
        area, stretch = random.uniform(0.005, 0.03), np.exp(random.uniform(-1.2, 1.2))
        height = int(np.clip(side * math.sqrt(area * stretch), 2, side // 2))
        width = int(np.clip(side * math.sqrt(area / stretch), 2, side // 2))
        low, high = side // 6, side - side // 6
        y, x = (
            random.integers(low, max(low + 1, high - height)),
            random.integers(low, max(low + 1, high - width)),
        )
        from_y, from_x = random.integers(0, side - height), random.integers(0, side - width)
        patch = row[from_y : from_y + height, from_x : from_x + width].astype(np.float32)
        patch = patch * random.uniform(0.6, 1.5) + random.uniform(-25, 25, 3)
        row[y : y + height, x : x + width] = np.clip(patch, 0, 255).astype(np.uint8)
    return made


def words_of(layers: Sequence[Layer]) -> str:
    """The layers' forms in one text."""
    return ", ".join(layer.words for layer in layers)
