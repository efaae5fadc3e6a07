"""Features of frozen networks with given weights: of a plain ViT after each of its layers."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from partitioner.data.memmaps import Views
from partitioner.estimates.catalogue import catalogue
from partitioner.networks.families import (
    Backbone,
    create,
    cut_classifier,
    last_stage,
    normalisation,
    own_classifier,
    token_features,
    trunk_of,
)
from partitioner.networks.inference_form import to_inference_form
from partitioner.pilot.linear import Classifier
from partitioner.run.progress import Advance
from partitioner.training.cached_outputs import batch
from partitioner.training.compute import quicker_autocast

Features = NDArray[np.float32]


class NetworkFeatures(NamedTuple):
    """Features of one pass over pictures."""

    #: `[N, D]`, what a classifier reads.
    read: Features
    #: `[N, E]`, of which the distance to the training pictures is measured.
    distance: Features


#: Pictures in one forward pass, at most, and their pixels: of more it takes more memory, not less
#: time.
_BATCH, _PIXELS = 64, 16 * 224**2


def layers_of(name: str) -> int:
    """The number of layers of a plain ViT that can be cut after each of them; 0 for others.

    Raises InputError for a name unknown to timm.
    """
    with torch.device("meta"):
        network = create(Backbone(name, 224), 0)
    blocks = getattr(network, "blocks", None)
    plain = hasattr(network, "pos_embed") and hasattr(network, "forward_intermediates")
    return len(blocks) if plain and blocks is not None else 0


def cut_features(
    name: str,
    image_size: int,
    weights: Path,
    depths: Sequence[int],
    pixels: Views,
    advance: Advance,
) -> dict[int, Features]:
    """Features `[N, 3D]` after each of `depths` layers, from views `[N, S, S, 3]`, in one pass.

    They are those of `TokenFeatures` of the network cut to that depth. Raises InputError.
    """
    network = create(Backbone(name, image_size, max(depths)), 0, weights).eval()

    def features(x: Tensor) -> list[Tensor]:
        found = network.forward_intermediates(
            x,
            indices=[depth - 1 for depth in depths],
            norm=True,
            output_fmt="NLC",
            return_prefix_tokens=True,
            intermediates_only=True,
        )
        return [token_features(network, torch.cat([rest[1], rest[0]], dim=1)) for rest in found]

    return dict(
        zip(depths, _run(network, normalisation(network), features, pixels, advance), strict=True)
    )


def network_features(
    name: str, image_size: int, weights: Path, pixels: Views, advance: Advance
) -> NetworkFeatures:
    """The features of a whole network, from views `[N, S, S, 3]`; raises InputError.

    They are its own beside the means of its stages, if it has any.
    """
    noise = torch.randn(1, 3, image_size, image_size, generator=torch.Generator().manual_seed(0))
    plain = create(Backbone(name, image_size), 0, weights)
    network: Any = to_inference_form(trunk_of(plain, "stages"), noise)
    # A third less time in convolutions, measured with EfficientNet-Lite at 128 px.
    layout = torch.channels_last
    network = network.to(memory_format=layout)
    stage, means = last_stage(network), list[Tensor]()
    if stage is not None:
        network.get_submodule(stage.place).register_forward_hook(
            lambda _, inputs, output: means.append(stage.mean(output))
        )

    def features(x: Tensor) -> list[Tensor]:
        found = network(x.to(memory_format=layout))
        return [found, means.pop() if means else found]

    return NetworkFeatures(*_run(network, normalisation(plain), features, pixels, advance))


def own_rows(name: str, depth: int, weights: Path, rows: Sequence[int]) -> Classifier | None:
    """The rows `rows` of a network's own classifier, for the first part of the pilot's feature.

    None unless it reads that part: of a plain ViT, the class token after all of its layers.
    """
    if depth and depth != _depth_of_token(name):
        return None
    classifier = own_classifier(name, weights)
    if classifier is None:
        return None
    network = None if depth else catalogue().get(name)
    # CAFormer has a layer of its own before its classifier.
    if network is not None and classifier.in_features != network.width:
        return None
    part = cut_classifier(classifier, list(rows))
    weight, bias = (value.detach().double().numpy() for value in (part.weight, part.bias))
    return Classifier(weight=weight, bias=bias)


@cache
def _depth_of_token(name: str) -> int:
    """Layers of a plain ViT whose classifier reads its class token; 0 where it reads another."""
    with torch.device("meta"):
        network = create(Backbone(name, 224), 0)
    reads_token = network.global_pool == "token" and isinstance(network.fc_norm, nn.Identity)
    return len(network.blocks) if reads_token else 0


def _run(
    network: Any, normalise: Any, features: Any, pixels: Views, advance: Advance
) -> list[Features]:
    """Every output of `features` for all pictures."""
    parts = list[list[Features]]()
    size = max(1, min(_BATCH, _PIXELS // pixels.shape[1] ** 2))
    with (
        torch.inference_mode(),
        torch.autocast(
            "cpu", torch.bfloat16, enabled=quicker_autocast(on_processor=True) == "bf16"
        ),
    ):
        for start in range(0, len(pixels), size):
            index = np.arange(start, min(start + size, len(pixels)))
            x = normalise(batch(pixels, index, torch.device("cpu")).contiguous())
            parts.append([output.float().numpy() for output in features(x)])
            advance(len(index), "")
    return [np.concatenate(column) for column in zip(*parts, strict=True)]
