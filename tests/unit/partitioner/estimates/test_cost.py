"""Cost of a ViT, counted against the exported graph."""

import functools
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from mdp.formats.plan import NetworkSpec, SubModelSpec
from mdp.formats.profile import Precision
from partitioner.estimates import macs as cost
from tests.support.models.latencies import spec_from


def test_vit_base_costs_what_is_published() -> None:
    # 86.6 M parameters and 17.58 G MACs with one head of 1,000 classes (torchvision, vit_b_16).
    base = spec_from(image_size=224, patch_size=16, embed_dim=768, depth=12, num_heads=12)
    one_head = 769 * 1000
    assert cost.parameters(base, 1000) - one_head == 86_567_656
    assert cost.macs(base, 1000) / 1e9 == pytest.approx(17.58, abs=0.02)


def test_memory_covers_weights_activations_and_the_session() -> None:
    small, large = spec_from(depth=2), spec_from(depth=8)
    assert cost.memory_bytes(small, 10) > cost.SESSION_BYTES + cost.weight_bytes(small, 10)
    grown = cost.memory_bytes(large, 10) - cost.memory_bytes(small, 10)
    assert grown == pytest.approx(2 * 4 * 6 * (12 * 64 * 64 + 13 * 64), rel=1e-6)


def test_activations_of_a_long_sequence_are_its_attention_maps() -> None:
    spec = spec_from(image_size=224, patch_size=4, embed_dim=32, num_heads=2)
    maps = 2 * spec.num_heads * cost.tokens(spec) ** 2 * 4
    assert maps < cost.activation_bytes(spec) < 1.1 * maps


def with_precision(spec: SubModelSpec, precision: Precision) -> SubModelSpec:
    return msgspec.structs.replace(spec, precision=precision)


def test_fp16_halves_what_is_stored_and_what_is_alive_and_bf16_is_stored_as_fp32() -> None:
    spec = spec_from()
    half = with_precision(spec, "fp16")
    pixels = 3 * 32 * 32
    assert 2 * cost.weight_bytes(half, 10) == cost.weight_bytes(spec, 10)
    assert 2 * (cost.activation_bytes(half) - pixels) == cost.activation_bytes(spec) - pixels
    assert cost.weight_bytes(with_precision(spec, "bf16"), 10) == cost.weight_bytes(spec, 10)


def test_activations_of_a_network_grow_with_its_pictures_and_shrink_with_their_precision() -> None:
    network = NetworkSpec(name="any", image_size=100, parameters=10**6, macs=10**8)
    large = msgspec.structs.replace(network, image_size=200)
    half = msgspec.structs.replace(network, precision="fp16")
    assert cost.activation_bytes(large) == 4 * cost.activation_bytes(network)
    pixels = 3 * 100 * 100
    assert 2 * (cost.activation_bytes(half) - pixels) == cost.activation_bytes(network) - pixels


@pytest.fixture(scope="module")
def exported() -> Callable[[tuple[Any, ...]], bytes]:
    """fp32 ONNX of a shape with seven classes, as it is served, every weight different."""
    import torch

    from partitioner.export.write import ServedMember, to_onnx
    from partitioner.networks.submodel import SubModel

    @functools.cache
    def export(shape: tuple[Any, ...]) -> bytes:
        module = ServedMember(SubModel(spec_from(*shape), 7, boosting=True))
        with torch.no_grad():
            for parameter in module.parameters():  # equal ones would be stored once
                torch.nn.init.normal_(parameter)
        return to_onnx(module, shape[0], ["boost", "bag"], {})

    return export


#: The GELU, the dealing of queries, keys and values, the maps, and the pixels are widest in turn.
WIDEST = [
    (24, 4, 96, 2, 3, 4.0),
    (16, 4, 48, 1, 2, 1.5),
    (48, 4, 16, 1, 4, 2.0),
    (48, 24, 16, 2, 2, 2.0),
]


@pytest.mark.torch
@pytest.mark.parametrize("shape", WIDEST)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_exported_graph_is_counted_exactly(
    exported: Callable[[tuple[Any, ...]], bytes], shape: tuple[Any, ...], batch: int
) -> None:
    from tests.support.models import graphs

    spec, model = spec_from(*shape), graphs.infer_shapes(exported(shape), batch)
    assert graphs.matrix_macs(model) == batch * cost.macs(spec, 7)
    assert graphs.count_stored(model) == cost.weight_bytes(spec, 7) == 4 * cost.parameters(spec, 7)
    assert graphs.peak_bytes(model) == cost.activation_bytes(spec, batch)


@pytest.mark.torch
@pytest.mark.parametrize("shape", WIDEST)
@pytest.mark.parametrize("precision", ["int8", "int8-static"])
def test_the_quantized_graph_is_counted_exactly(
    exported: Callable[[tuple[Any, ...]], bytes], shape: tuple[Any, ...], precision: Precision
) -> None:
    from partitioner.export.quantize import quantize_model
    from tests.support.models import graphs

    pixels = np.random.default_rng(0).integers(0, 256, (32, shape[0], shape[0], 3), dtype=np.uint8)
    spec = msgspec.structs.replace(spec_from(*shape), precision=precision)
    model = graphs.infer_shapes(quantize_model(exported(shape), precision, pixels))
    assert graphs.matrix_macs(model) == cost.macs(spec, 7)
    assert graphs.count_stored(model) == cost.weight_bytes(spec, 7)
    if precision == "int8":
        # Nodes are ordered anew: a product's scales, or the class token, may be alive besides.
        besides = graphs.peak_bytes(model) - cost.activation_bytes(spec)
        assert 0 <= besides <= 4 * 3 * spec.embed_dim
