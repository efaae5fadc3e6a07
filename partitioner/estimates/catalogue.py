"""Public networks that a member may be: published accuracy and counted cost.

`catalogue.json` is written by `python -m tools.catalogue`. Accuracies are top-1 on
ImageNet-1k as published with timm (huggingface/pytorch-image-models, results-imagenet.csv); what a
network costs is counted with the timm version that the file names.
"""

from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Annotated

from msgspec import Meta, json

from mdp.errors import InputError
from mdp.files import Record
from mdp.formats.plan import NetworkSpec
from mdp.formats.profile import PositiveFloat, PositiveInt, Precision

_SHIPPED = "catalogue.json"
#: A member has two heads: the boost head and the bag head.
_HEADS = 2
#: Families with parameters for each pair of places of a picture, so that weights fit pictures of
#: the size alone that they were trained on.
_OF_ONE_SIZE = ("LeViT",)


class Cost(Record, frozen=True):
    """Counts of one picture in a network without its classifier."""

    #: Multiply-accumulates of pointwise convolutions and linear layers, of other dense
    #: convolutions, of depthwise convolutions, and of everything else (attention).
    pointwise: Annotated[int, Meta(ge=0)]
    spatial: Annotated[int, Meta(ge=0)]
    depthwise: Annotated[int, Meta(ge=0)]
    other: Annotated[int, Meta(ge=0)]
    #: Values written by layers.
    values: PositiveInt
    #: Convolutions and linear layers.
    layers: PositiveInt

    @property
    def macs(self) -> int:
        """All multiply-accumulates."""
        return self.pointwise + self.spatial + self.depthwise + self.other


class Network(Record, frozen=True):
    """One public network, at the recipe that its published accuracy belongs to."""

    #: timm's architecture, and the tag of its weights.
    name: Annotated[str, Meta(min_length=1)]
    recipe: str
    family: str
    #: Percent of ImageNet-1k's validation pictures that it is right on, at that picture size.
    top1: Annotated[float, Meta(gt=0, lt=100)]
    image_size: PositiveInt
    #: Whether the recipe used pictures beyond ImageNet-1k.
    extra_pictures: bool
    #: Parameters without the classifier, and the width of the feature.
    parameters: PositiveInt
    width: PositiveInt
    #: By side of the square picture in pixels: the sizes that a plan may use.
    costs: dict[int, Cost]
    #: Latency at `image_size` over that of ViT-S/16 at 224 px, one onnxruntime thread, fp32 and
    #: static int8, measured on one Zen 4 core; None where not measured.
    vit_s_ratio: PositiveFloat | None = None
    vit_s_ratio_int8: PositiveFloat | None = None

    @property
    def sizes_of_weights(self) -> list[int]:
        """Sides of the pictures, of those in `costs`, that its pretrained weights can be read for.

        They are ascending.
        """
        return [
            side
            for side in sorted(self.costs)
            if self.family not in _OF_ONE_SIZE or side == self.image_size
        ]

    def spec(self, image_size: int, num_classes: int, precision: Precision = "fp32") -> NetworkSpec:
        """The network as a member with both heads; raises InputError for another picture size."""
        if image_size not in self.costs:
            known = ", ".join(map(str, self.costs))
            raise InputError(
                f"{self.name}: expected a picture size of {known} px, got {image_size}"
            )
        heads = _HEADS * num_classes
        return NetworkSpec(
            name=self.name,
            image_size=image_size,
            parameters=self.parameters + heads * (self.width + 1),
            macs=self.costs[image_size].macs + heads * self.width,
            precision=precision,
        )


class Catalogue(Record, frozen=True):
    """The shipped file."""

    timm: str
    networks: list[Network]


@cache
def catalogue() -> Mapping[str, Network]:
    """Every network by its name."""
    content = (resources.files("partitioner.estimates") / _SHIPPED).read_bytes()
    shipped = json.decode(content, type=Catalogue)
    return {network.name: network for network in shipped.networks}


def network_of(spec: NetworkSpec) -> Network | None:
    """The catalogue's entry of a member, or None where it has none."""
    return catalogue().get(spec.name)
