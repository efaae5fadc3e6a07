"""An anomaly head in a model's own graph: what it reads, what it says, what it leaves alone."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("torch")

import onnx
import torch
from torch import Tensor, nn

from mdp.errors import AgentError, InputError
from mdp.formats.model_file import ModelFile
from mdp.fusion.anomaly_table import MAP_LIMIT
from mdp.runtimes.base import CPU, Execution
from mdp.runtimes.onnxruntime import import_onnxruntime
from mdp.runtimes.select import open_runtime
from partitioner.export.anomaly_head import (
    Layer,
    LayerFit,
    Moments,
    choose_layers,
    feature_names,
    fit_folds,
    has_head,
    map_of,
    maps_by_folds,
    plant_patch,
    scores_of,
    with_features,
    with_head,
    without_head,
)
from partitioner.export.quantize import quantize_model
from partitioner.export.write import to_onnx

pytestmark = pytest.mark.torch
SIDE, CLASSES = 64, 3


class Convolutions(nn.Module):
    """A trunk with sums of two branches, 8 and 16 pixels apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 8, 8)
        self.first = nn.Conv2d(8, 8, 3, 1, 1)
        self.down = nn.Conv2d(8, 16, 2, 2)
        self.second = nn.Conv2d(16, 16, 3, 1, 1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Logits of uint8 `[N, S, S, 3]`."""
        x = torch.relu(self.stem(images.permute(0, 3, 1, 2).float() / 128 - 1))
        x = x + torch.relu(self.first(x))
        x = torch.relu(self.down(x))
        x = x + torch.relu(self.second(x))
        return (self.head(x.mean(dim=(2, 3))),)


class Tokens(nn.Module):
    """Two blocks over 64 patches and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 8, 8)
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images: Tensor) -> tuple[Tensor]:
        """Logits of uint8 `[N, S, S, 3]`."""
        x = self.embed(images.permute(0, 3, 1, 2).float() / 128 - 1).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return (self.head(x[:, 0]),)


def model_of(kind: type[nn.Module]) -> bytes:
    torch.manual_seed(0)
    return to_onnx(kind(), SIDE, ["bag"], {"mdp_k": "0"})


@pytest.fixture(scope="module")
def pixels() -> NDArray[np.uint8]:
    random = np.random.default_rng(0)
    base = random.integers(60, 180, (1, SIDE, SIDE, 3))
    noise = random.normal(0, 6, (40, SIDE, SIDE, 3))
    return np.clip(base + noise, 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def models(pixels: NDArray[np.uint8]) -> dict[str, bytes]:
    convolutions = model_of(Convolutions)
    return {
        "convolutions": convolutions,
        "int8": quantize_model(convolutions, "int8-static", pixels, whole=True),
        "fp16": quantize_model(convolutions, "fp16"),
        "tokens": model_of(Tokens),
    }


def convolutions_by_hand(opset: int) -> bytes:
    """Five convolutions, each of half the side, without torch's exporter."""
    random, make = np.random.default_rng(0), onnx.helper.make_node
    nodes = [
        make("Cast", ["images"], ["f"], to=onnx.TensorProto.FLOAT),
        make("Transpose", ["f"], ["x0"], perm=[0, 3, 1, 2]),
    ]
    weights, before = [], 3
    for i in range(5):
        kernel = random.normal(size=(16, before, 3, 3)) / np.sqrt(9 * before)
        weights.append(onnx.numpy_helper.from_array(kernel.astype(np.float32), f"w{i}"))
        nodes += [
            make("Conv", [f"x{i}", f"w{i}"], [f"c{i}"], strides=[2, 2], pads=[1, 1, 1, 1]),
            make("Relu", [f"c{i}"], [f"x{i + 1}"]),
        ]
        before = 16
    last = random.normal(size=(16, CLASSES)).astype(np.float32)
    weights.append(onnx.numpy_helper.from_array(last, "last"))
    nodes += [
        make("GlobalAveragePool", ["x5"], ["pooled"]),
        make("Flatten", ["pooled"], ["flat"]),
        make("MatMul", ["flat", "last"], ["bag"]),
    ]
    info = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "g", [info("images", onnx.TensorProto.UINT8, ["N", SIDE, SIDE, 3])],
        [info("bag", onnx.TensorProto.FLOAT, ["N", CLASSES])], weights,
    )  # fmt: skip
    made = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8
    )
    content: bytes = made.SerializeToString()
    return content


def session_of(model: bytes) -> Any:
    return import_onnxruntime().InferenceSession(model, providers=[CPU])


def fitted(
    model: bytes, pixels: NDArray[np.uint8]
) -> tuple[list[Layer], list[LayerFit], NDArray[np.float32]]:
    layers = choose_layers(model, "m")
    session = session_of(with_features(model, layers))

    def features() -> Iterator[list[NDArray[np.float32]]]:
        for start in range(0, len(pixels), 7):
            values = session.run(feature_names(layers), {"images": pixels[start : start + 7]})
            yield [one.places(value) for one, value in zip(layers, values, strict=True)]

    fits = fit_folds(features(), layers, 4)
    return layers, fits.whole, maps_by_folds(features(), layers, fits)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("convolutions", ["8 x 8 x 8", "4 x 4 x 16"]),
        ("int8", ["8 x 8 x 8", "4 x 4 x 16"]),
        ("tokens", ["8 x 8 x 16", "8 x 8 x 16"]),
    ],
)
def test_middle_layers_are_read(models: dict[str, bytes], kind: str, words: list[str]) -> None:
    layers = choose_layers(models[kind], "m")
    assert [layer.words for layer in layers] == words
    assert {layer.prefix for layer in layers} == ({1} if kind == "tokens" else {None})
    if kind == "int8":
        assert all("Dequantize" in layer.tensor for layer in layers)


def test_a_network_without_places_has_no_head() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(SIDE * SIDE * 3, CLASSES)

        def forward(self, images: Tensor) -> tuple[Tensor]:
            return (self.head(images.float().flatten(1)),)

    with pytest.raises(InputError, match=r"m\.onnx: no middle layer has a feature for each place"):
        choose_layers(model_of(Flat), "m.onnx")


@pytest.mark.parametrize("kind", ["convolutions", "int8", "fp16", "tokens"])
def test_a_head_says_what_its_fit_says_and_leaves_the_logits(
    models: dict[str, bytes], kind: str, pixels: NDArray[np.uint8]
) -> None:
    model = models[kind]
    layers, fits, maps = fitted(model, pixels)
    made = with_head(model, layers, fits, limit=2.0)
    scores, cells, bag = session_of(made).run(["anomaly", "anomaly_map", "bag"], {"images": pixels})
    values = session_of(with_features(model, layers)).run(feature_names(layers), {"images": pixels})
    distances = [
        fit.distances(layer.places(value))
        for layer, fit, value in zip(layers, fits, values, strict=True)
    ]
    expected = map_of(layers, distances)
    assert scores[:, 0] == pytest.approx(scores_of(expected), rel=1e-3)
    assert (cells.shape, cells.dtype) == ((len(pixels), 16, 16), np.uint8)
    assert cells.max() <= np.ceil(scores.max() * MAP_LIMIT / 2.0)
    assert (bag == session_of(model).run(["bag"], {"images": pixels})[0]).all()
    # Left out of the fit, a good picture is a little farther away than in it.
    assert scores_of(maps).mean() > scores.mean()
    assert scores_of(maps).mean() == pytest.approx(scores.mean(), rel=0.3)


@pytest.mark.parametrize("kind", ["convolutions", "int8", "tokens"])
def test_a_head_can_be_taken_off_again(
    models: dict[str, bytes], kind: str, pixels: NDArray[np.uint8]
) -> None:
    model = models[kind]
    layers, fits, _ = fitted(model, pixels)
    made = with_head(model, layers, fits, limit=2.0)
    assert (has_head(made), has_head(model)) == (True, False)
    assert without_head(made) == onnx.load_from_string(model).SerializeToString()


@pytest.mark.parametrize("kind", ["convolutions", "int8", "tokens"])
def test_a_patch_is_found_where_it_is(
    models: dict[str, bytes], kind: str, pixels: NDArray[np.uint8]
) -> None:
    layers, fits, maps = fitted(models[kind], pixels)
    made = session_of(with_head(models[kind], layers, fits, float(scores_of(maps).max())))
    strange = pixels.copy()
    strange[:, 8:24, 40:56] = 250
    scores, cells = made.run(["anomaly", "anomaly_map"], {"images": strange})
    assert scores.min() > scores_of(maps).max()
    row, column = np.unravel_index(cells.astype(int).sum(axis=0).argmax(), (16, 16))
    assert 1 <= row <= 7
    assert 9 <= column <= 15


def test_moments_are_those_of_all_pictures() -> None:
    random = np.random.default_rng(0)
    features = random.normal(3, 2, (50, 4, 5)).astype(np.float32)
    whole, other = Moments(), Moments()
    whole.add(features[:7])
    other.add(features[7:30])
    other.add(features[30:])
    whole.merge(Moments())
    whole.merge(other)
    fit = whole.fit()
    assert fit.mean == pytest.approx(features.mean(axis=0), abs=1e-5)
    expected = features.std(axis=0, ddof=1)
    assert fit.scale == pytest.approx(np.maximum(expected, 0.1 * np.median(expected)), rel=1e-4)


def test_a_plain_background_does_not_make_its_own_noise_count() -> None:
    """Most places see a mask, whose features differ by steps of int8 alone."""
    random = np.random.default_rng(0)
    features = random.normal(0, 1, (50, 20, 5)).astype(np.float32)
    features[:, 4:] = random.choice([0.0, 0.01], (50, 16, 5), p=[0.99, 0.01])
    moments = Moments()
    moments.add(features)
    scale = moments.fit().scale
    assert scale[:4].min() > 0.5
    assert scale[4:].min() > 0.04


@pytest.mark.parametrize("opset", [13, 17, 18])
def test_a_head_fits_models_of_older_opsets(opset: int, pixels: NDArray[np.uint8]) -> None:
    model = convolutions_by_hand(opset)
    layers, fits, _ = fitted(model, pixels)
    made = with_head(model, layers, fits, limit=2.0)
    (scores,) = session_of(made).run(["anomaly"], {"images": pixels})
    values = session_of(with_features(model, layers)).run(feature_names(layers), {"images": pixels})
    distances = [
        fit.distances(layer.places(value))
        for layer, fit, value in zip(layers, fits, values, strict=True)
    ]
    assert scores[:, 0] == pytest.approx(scores_of(map_of(layers, distances)), rel=1e-3)


def test_planted_patches_change_a_part_of_each_picture(pixels: NDArray[np.uint8]) -> None:
    made = plant_patch(pixels)
    changed = (made != pixels).any(axis=3).mean(axis=(1, 2))
    assert (changed > 0).all()
    assert (changed < 0.1).all()
    assert (plant_patch(pixels) == made).all()


def opened(model: bytes) -> Any:
    execution = Execution(runtime="onnxruntime", provider=CPU, precision="fp32", image_size=SIDE)
    return open_runtime(ModelFile(Path("m.onnx"), model), execution, num_classes=CLASSES)


def test_a_runtime_gives_scores_and_maps(
    models: dict[str, bytes], pixels: NDArray[np.uint8]
) -> None:
    layers, fits, _ = fitted(models["convolutions"], pixels)
    runtime = opened(with_head(models["convolutions"], layers, fits, limit=2.0))
    runtime.warm_up()
    found = runtime.run(pixels[:5])
    assert (found.anomaly.shape, found.anomaly_map.shape) == ((5,), (5, 16, 16))
    plain = opened(models["convolutions"]).run(pixels[:5])
    assert (plain.anomaly, plain.anomaly_map) == (None, None)
    assert (plain.bag == found.bag).all()


def test_openvino_gives_them_too(models: dict[str, bytes], pixels: NDArray[np.uint8]) -> None:
    pytest.importorskip("openvino")
    layers, fits, _ = fitted(models["convolutions"], pixels)
    made = ModelFile(Path("m.onnx"), with_head(models["convolutions"], layers, fits, limit=2.0))
    execution = Execution(runtime="openvino", provider=CPU, precision="fp32", image_size=SIDE)
    found = open_runtime(made, execution, num_classes=CLASSES).run(pixels[:3])
    expected = opened(made.content).run(pixels[:3])
    assert found.anomaly == pytest.approx(expected.anomaly, rel=1e-3)
    assert found.anomaly_map is not None
    apart = found.anomaly_map.astype(int) - expected.anomaly_map.astype(int)
    assert np.abs(apart).max() <= 1


def test_half_a_head_is_no_model_of_ours(
    models: dict[str, bytes], pixels: NDArray[np.uint8]
) -> None:
    layers, fits, _ = fitted(models["convolutions"], pixels)
    loaded = onnx.load_from_string(with_head(models["convolutions"], layers, fits, limit=2.0))
    del loaded.graph.output[-1]
    with pytest.raises(AgentError, match="expected an anomaly head of"):
        opened(loaded.SerializeToString())
