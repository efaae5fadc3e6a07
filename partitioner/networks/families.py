"""Networks of any family that timm has, as ensemble members: a backbone and the same heads."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mdp.errors import InputError
from partitioner.networks.submodel import Member, MemberOutput, Normalise
from partitioner.torchvision_shim import import_timm

#: Prefixes of the names of a classifier's tensors in timm.
_HEADS = ("head.", "head_dist.", "classifier.", "fc.")


#: `own`: the pooling of the network's recipe; `tokens`: of a plain ViT the class token, the mean
#: and the standard deviation of the patch tokens, side by side; `stages`: of a network with stages
#: the pooling of its recipe beside the means of its later stages. These tell classes apart that its
#: own pooling does not, most where pictures differ from those that it was trained on
#: (docs/lab-log.md).
Pooling = Literal["own", "tokens", "stages"]
#: Least number of input pixels from one place of a stage's output to the next, for its mean to be a
#: part of the feature.
_LEAST_STRIDE = 8
#: Added to a variance before its root, whose slope has no bound at 0.
_LEAST_VARIANCE = 1e-6


class Backbone(NamedTuple):
    """A timm model name, the side of its square input in pixels, its depth and its pooling."""

    name: str
    image_size: int
    #: Transformer blocks kept, from the first on, of a plain ViT; 0: all.
    depth: int = 0
    pooling: Pooling = "own"


class TokenFeatures(nn.Module):
    """A plain ViT whose feature is its class token, if any, beside statistics of patch tokens."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Feature `[B, 3D]` of normalised pictures `[B, 3, S, S]`; without class token `[B, 2D]`.

        D is the width of the tokens.
        """
        return token_features(self.network, self.network.forward_features(x))


def token_features(network: Any, tokens: Tensor) -> Tensor:
    """The class token, if any, the mean and the standard deviation of patch tokens, joined.

    `tokens` are `[B, T, D]`. Pooling by mean and standard deviation is that of Snyder and others,
    X-vectors: robust DNN embeddings for speaker recognition, ICASSP 2018.
    """
    patches = tokens[:, network.num_prefix_tokens :]
    spread = (patches.float().var(dim=1, correction=0) + _LEAST_VARIANCE).sqrt()
    joined = [patches.mean(dim=1), spread.to(patches.dtype)]
    return torch.cat(joined if network.cls_token is None else [tokens[:, 0], *joined], dim=1)


class StageFeatures(nn.Module):
    """A network with stages whose feature is its own beside the means of its later stages."""

    def __init__(self, network: Any, stages: list[int]) -> None:
        """`stages` are places in the list of stages that timm knows of the network."""
        super().__init__()
        self.network, self.stages = network, stages

    def forward(self, x: Tensor) -> Tensor:
        """Feature `[B, D + sum of the stages' channels]` of normalised pictures `[B, 3, S, S]`."""
        last, outputs = self.network.forward_intermediates(x, indices=self.stages)
        own = self.network.forward_head(last)
        return torch.cat([own, *(output.mean(dim=(2, 3)) for output in outputs)], dim=1)


def later_stages(network: Any) -> list[int]:
    """Places of stages whose means tell more than a network's own feature; empty without any.

    Of stages of one size the last one counts, and none that the own feature is the mean of.
    """
    if last_stage(network) is None or not hasattr(network, "forward_intermediates"):
        return []
    listed = network.feature_info
    info = getattr(listed, "info", listed)
    places = {stage["reduction"]: place for place, stage in enumerate(info)}
    own = getattr(network, "head_hidden_size", network.num_features)
    return [
        place
        for stride, place in places.items()
        if stride >= _LEAST_STRIDE and info[place]["num_chs"] != own
    ]


def trunk_of(network: Any, pooling: Pooling) -> nn.Module:
    """The network whose output `[B, D]` is its feature by `pooling`."""
    if pooling == "tokens":
        return TokenFeatures(network)
    stages = later_stages(network) if pooling == "stages" else []
    trunk: nn.Module = StageFeatures(network, stages) if stages else network
    return trunk


class FamilyMember(Member):
    """A timm backbone without its classifier, and the heads that read its feature."""

    def __init__(
        self,
        backbone: Backbone,
        num_classes: int,
        weights: Path | None = None,
        *,
        boosting: bool = False,
    ) -> None:
        """Reads pretrained `weights` where given; raises InputError naming what does not fit."""
        network = create(backbone, 0, weights)
        trunk = trunk_of(network, backbone.pooling)
        width = _feature_width(trunk, backbone.image_size)
        super().__init__(trunk, normalisation(network), width, num_classes, boosting=boosting)
        self.backbone = backbone

    def forward(self, pixels: Tensor) -> MemberOutput:
        """The heads `[B, C]` and the feature `[B, D]` of pixels `[B, 3, S, S]` in 0..255."""
        return self.of_normalised(self.normalise(pixels))


class ServedFamily(nn.Module):
    """The network of timm's that a device runs: uint8 `[N, S, S, 3]` -> every head's logits."""

    def __init__(self, member: FamilyMember) -> None:
        super().__init__()
        self.member = member

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Logits `[N, C]` of the boost head, if there is one, and the bag head."""
        output: MemberOutput = self.member(images.permute(0, 3, 1, 2).float())
        return output.logits


def create(
    backbone: Backbone, num_classes: int, weights: Path | None = None, *, own_classes: bool = False
) -> Any:
    """The timm model with `num_classes` outputs (0: its pooled feature `[B, D]`).

    Positional embeddings are resampled to the image size. With `own_classes` the classifier of
    `weights` is loaded too. Raises InputError for a name unknown to timm, and for weights of
    another architecture.
    """
    timm = check_known(backbone.name)
    try:
        try:
            size = backbone.image_size
            model = timm.create_model(backbone.name, num_classes=num_classes, img_size=size)
        except TypeError:  # a network without positions takes pictures of any size
            model = timm.create_model(backbone.name, num_classes=num_classes)
        if weights is not None:
            read_weights(model, weights, own_classes=own_classes)
    except (RuntimeError, TypeError, AssertionError, ValueError) as error:
        raise InputError(f"{backbone.name} at {backbone.image_size} px: {error}") from error
    if backbone.depth:
        blocks = getattr(model, "blocks", None)
        if not hasattr(model, "pos_embed") or len(blocks or ()) < backbone.depth:
            raise InputError(f"{backbone.name}: cannot be cut to {backbone.depth} blocks")
        model.blocks = model.blocks[: backbone.depth]
    return model


def is_known(name: str) -> bool:
    """Tell whether timm has a model of this name."""
    known: bool = import_timm().is_model(name)
    return known


def check_known(name: str) -> Any:
    """The timm package; raises InputError for a model name unknown to it."""
    timm = import_timm()
    if not is_known(name):
        near = ", ".join(timm.list_models(f"*{name.split('_')[0]}*")[:5])
        hint = f" (there are: {near}, ...)" if near else ""
        raise InputError(f"{name}: timm {timm.__version__} has no such model{hint}")
    return timm


def read_state(weights: Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors or torch file; raises InputError."""
    import_timm()
    from timm.models import load_state_dict

    if not weights.is_file():
        raise InputError(f"{weights}: expected a file of weights, found none")
    try:
        state: dict[str, Tensor] = load_state_dict(str(weights), use_ema=False)
    except Exception as error:  # pickle's and safetensors' errors share no base
        text = " ".join(str(error).split())[:200]
        raise InputError(f"{weights}: expected a file of weights: {text}") from error
    return state


def read_weights(model: Any, weights: Path, *, own_classes: bool = False) -> None:
    """Load pretrained `weights` into `model`, the classifier only where its shape fits.

    With `own_classes` it has to fit. Raises InputError where any other tensor is missing or has
    another shape.
    """
    state = dict(adapt_positions(model, read_state(weights)))
    own = model.state_dict()
    heads = {k for k in state if k.startswith(_HEADS)}
    drop = {k for k in heads if k not in own or own[k].shape != state[k].shape}
    kept = {k: v for k, v in state.items() if k not in drop}
    wrong = [k for k, v in kept.items() if k not in own or own[k].shape != v.shape]
    missing = [k for k in own if k not in kept and not k.startswith(_HEADS)]
    if wrong or missing:
        raise InputError(
            f"{weights}: expected the tensors of {type(model).__name__}, "
            f"but {', '.join((wrong + missing)[:3])} differ"
        )
    if own_classes and drop:
        name = min(drop)
        wanted = tuple(own[name].shape) if name in own else "none"
        raise InputError(
            f"{weights}: its classifier {name} is {tuple(state[name].shape)}, expected {wanted}: "
            "as many rows as its labels file has names"
        )
    model.load_state_dict(kept, strict=False)


def adapt_positions(model: Any, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """`state` with positional embeddings resampled to the image size of `model`."""
    if not hasattr(model, "pos_embed") or "pos_embed" not in state:
        return state
    from timm.models.vision_transformer import checkpoint_filter_fn

    found: Mapping[str, Tensor] = checkpoint_filter_fn(dict(state), model)
    return found


def normalisation(model: Any) -> Normalise:
    """From pixels 0..255 to the input of the recipe of the timm model `model`."""
    config = model.pretrained_cfg
    return Normalise(tuple(config["mean"]), tuple(config["std"]))


class NetworkStage(NamedTuple):
    """A part of a network, by its place, whose output has so many channels."""

    place: str
    channels: int

    def mean(self, output: Tensor) -> Tensor:
        """Mean `[B, C]` over the places of an output `[B, C, H, W]`, `[B, H, W, C]` or `[B, T, C]`.

        Raises ValueError for another shape.
        """
        if output.ndim == 4 and output.shape[1] == self.channels:
            return output.mean(dim=(2, 3))
        if output.ndim in {3, 4} and output.shape[-1] == self.channels:
            return output.flatten(1, -2).mean(dim=1)
        raise ValueError(
            f"{self.place}: expected {self.channels} channels, got {tuple(output.shape)}"
        )


def last_stage(trunk: Any) -> NetworkStage | None:
    """The last stage of a network, before what its classifier needs; None of a plain ViT.

    Of `StageFeatures` it is that of the network within.
    """
    inside = isinstance(trunk, StageFeatures)
    network = trunk.network if inside else trunk
    listed = getattr(network, "feature_info", None)
    # A list while a network is whole; an object of timm's where it was made for its features.
    info = getattr(listed, "info", listed)
    if not info or hasattr(network, "pos_embed"):
        return None
    place = info[-1]["module"]
    return NetworkStage(f"network.{place}" if inside else place, info[-1]["num_chs"])


def own_classifier(name: str, weights: Path) -> nn.Linear | None:
    """The classifier of a network's pretrained weights; None unless it is one linear map.

    Raises InputError for an unreadable file.
    """
    config, state = check_known(name).get_pretrained_cfg(name), read_state(weights)
    place = config.classifier if config else None
    weight, bias = (state.get(f"{place}.{part}") for part in ("weight", "bias"))
    if weight is None or bias is None or weight.ndim != 2:
        return None
    classifier = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        classifier.weight.copy_(weight)
        classifier.bias.copy_(bias)
    return classifier


def cut_classifier(classifier: nn.Linear, rows: list[int]) -> nn.Linear:
    """A classifier of the rows `rows` of a pretrained one, in that order."""
    part = nn.Linear(classifier.in_features, len(rows))
    with torch.no_grad():
        part.weight.copy_(classifier.weight[rows])
        part.bias.copy_(classifier.bias[rows])
    return part


def _feature_width(trunk: nn.Module, image_size: int) -> int:
    """D of the feature `[B, D]`, found in eval mode, which keeps running statistics."""
    with torch.no_grad():
        feature: Tensor = trunk.eval()(torch.zeros(1, 3, image_size, image_size))
    trunk.train()
    return feature.shape[1]
