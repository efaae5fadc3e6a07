"""Ensemble members: a trunk and the heads that read its feature; of a plain ViT, SubModel."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mdp.formats.plan import SubModelSpec
from partitioner.torchvision_shim import import_timm

#: Pixels 0..255 become -1..1, independent of the teacher's normalisation.
MEAN = STD = (0.5, 0.5, 0.5)


class MemberOutput(NamedTuple):
    """Boost head f_k `[B, C]`, or None; bag head c_k `[B, C]`; last feature h_k `[B, D]`."""

    boost: Tensor | None
    bag: Tensor
    feature: Tensor

    @property
    def logits(self) -> tuple[Tensor, ...]:
        """Outputs that are served: the logits of every head that there is, boost first."""
        return (self.bag,) if self.boost is None else (self.boost, self.bag)


class Member(nn.Module):
    """A trunk and its linear heads: the bag head, and with boosting the boost head."""

    def __init__(
        self,
        trunk: nn.Module,
        normalise: "Normalise",
        width: int,
        num_classes: int,
        *,
        boosting: bool,
    ) -> None:
        """`width` is the number D of the feature's values."""
        super().__init__()
        self.trunk, self.normalise, self.width = trunk, normalise, width
        self.boost = nn.Linear(width, num_classes) if boosting else None
        self.bag = nn.Linear(width, num_classes)

    @property
    def heads(self) -> list[str]:
        """Names of the served outputs."""
        return ["bag"] if self.boost is None else ["boost", "bag"]

    def of_normalised(self, x: Tensor) -> MemberOutput:
        """The heads and the feature of normalised pictures `[B, 3, S, S]`."""
        feature: Tensor = self.trunk(x)
        boost = None if self.boost is None else self.boost(feature)
        return MemberOutput(boost, self.bag(feature), feature)

    def start_heads(self, classifier: nn.Linear) -> None:
        """Copy a classifier of the data's classes into every head."""
        for head in (self.boost, self.bag):
            if head is not None:
                head.load_state_dict(classifier.state_dict())


class SubModel(Member):
    """timm's VisionTransformer without its classifier; the heads read its class token."""

    def __init__(self, spec: SubModelSpec, num_classes: int, *, boosting: bool = False) -> None:
        normalise = Normalise(MEAN, STD)
        super().__init__(_trunk(spec), normalise, spec.embed_dim, num_classes, boosting=boosting)
        self.spec = spec

    def forward(self, x: Tensor) -> MemberOutput:
        """The heads and the feature of normalised pictures `[B, 3, S, S]`."""
        return self.of_normalised(x)


def _trunk(spec: SubModelSpec) -> nn.Module:
    import_timm()
    from timm.models.vision_transformer import VisionTransformer

    trunk: nn.Module = VisionTransformer(
        img_size=spec.image_size,
        patch_size=spec.patch_size,
        embed_dim=spec.embed_dim,
        depth=spec.depth,
        num_heads=spec.num_heads,
        mlp_ratio=spec.mlp_ratio,
        num_classes=0,
    )
    init_weights(trunk)
    return trunk


def init_weights(vit: Any) -> None:
    """Initialise a timm ViT for trainings of hundreds of steps.

    timm's standard deviation of 0.02 is too small for narrow networks: on the digits a 96 x 6 ViT
    reaches 74 % in 240 steps with it, and 98 % with this one.
    """
    for module in vit.blocks.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
    if vit.pos_embed is not None:
        nn.init.trunc_normal_(vit.pos_embed, std=0.2)


class Normalise(nn.Module):
    """From pixels `[B, 3, S, S]` in 0..255 to a network's normalised input."""

    def __init__(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        super().__init__()
        scale = 1 / (255 * np.asarray(std, dtype=np.float64))
        offset = -np.asarray(mean, dtype=np.float64) / np.asarray(std, dtype=np.float64)
        self.scale: Tensor
        self.offset: Tensor
        self.register_buffer("scale", _column(scale), persistent=False)
        self.register_buffer("offset", _column(offset), persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised pictures `[B, 3, S, S]`."""
        return pixels * self.scale + self.offset


def _column(values: NDArray[np.float64]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)
