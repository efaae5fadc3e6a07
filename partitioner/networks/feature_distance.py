"""Distance of a feature from those of the training pictures, told in the logits themselves.

Features of pictures that a network was taught vary in few directions. What a further feature has
outside of them grows with how little its picture resembles any of these (Wang, Li, Feng and Zhang,
ViM: Out-of-Distribution with Virtual-logit Matching, CVPR 2022). The mean of the logits over the
classes is this distance, negative, which changes no probability and no label: it reaches the client
without a byte more.

The feature is the mean of the last stage's output where a network has stages: training changes what
follows, and with it what resembles nothing (docs/lab-log.md). Of a plain ViT it is what the
classifier reads.
"""

import torch
from torch import Tensor, nn

from mdp.pictures.crop import Pixels
from partitioner.networks.families import NetworkStage

#: Directions that are kept, at most, and pictures for each of them, at least.
DIRECTIONS, PICTURES_EACH = 64, 4
#: Pictures that go through a network at a time.
_BATCH = 32
#: A feature that hardly varied in training has this scale at least, as a share of the median one:
#: else a small change of it would be a large distance.
_LEAST_SHARE = 0.1
_LEAST_SCALE = 1e-6
#: The largest distance: one member to which an item is very strange does not decide alone.
FARTHEST = 4.0


class StageOutput:
    """The output of a stage in the present forward pass."""

    def __init__(self) -> None:
        self.mean: Tensor | None = None


class WatchedStage(nn.Module):
    """A stage of a network that leaves the mean of its output for the classifier."""

    def __init__(self, module: nn.Module, stage: NetworkStage, output: StageOutput) -> None:
        super().__init__()
        self.module, self.stage, self.output = module, stage, output

    def forward(self, x: Tensor) -> Tensor:
        """Output of the stage."""
        found: Tensor = self.module(x)
        self.output.mean = self.stage.mean(found)
        return found


class DistanceClassifier(nn.Module):
    """A linear classifier whose logits have the negative distance of a feature as mean."""

    def __init__(
        self, classifier: nn.Linear, features: Tensor, output: StageOutput | None = None
    ) -> None:
        """`features` `[N, D]` are those of training pictures.

        They are means of `output` where it is given, else what the classifier reads.
        """
        super().__init__()
        self.classifier, self.output = classifier, output
        x = features.double()
        mean, scale = x.mean(dim=0), x.std(dim=0, correction=0)
        scale = scale.clamp(min=max(_LEAST_SHARE * float(scale.median()), _LEAST_SCALE))
        x = (x - mean) / scale
        kept = min(DIRECTIONS, len(x) // PICTURES_EACH, x.shape[1] // 2)
        _, vectors = torch.linalg.eigh(x.T @ x)
        self.mean: Tensor
        self.register_buffer("mean", mean.float())
        self.scale: Tensor
        self.register_buffer("scale", scale.float())
        self.directions: Tensor
        self.register_buffer("directions", vectors[:, vectors.shape[1] - kept :].float())
        self.typical: Tensor
        self.register_buffer("typical", torch.ones(()))
        with torch.no_grad():
            self.typical.copy_(self._length(features.float()).mean().clamp(min=_LEAST_SCALE))

    def distance(self, feature: Tensor) -> Tensor:
        """Lengths `[N, 1]` of features `[N, D]` outside of the directions, `FARTHEST` at most.

        Their unit is the mean of the training pictures.
        """
        return (self._length(feature) / self.typical).clamp(max=FARTHEST)

    def _length(self, feature: Tensor) -> Tensor:
        x = (feature - self.mean) / self.scale
        outside = x - (x @ self.directions) @ self.directions.T
        length: Tensor = outside.square().sum(dim=1, keepdim=True).sqrt()
        return length

    def forward(self, feature: Tensor) -> Tensor:
        """Logits `[N, C]` of features `[N, D]`."""
        logits: Tensor = self.classifier(feature)
        measured = feature if self.output is None else self.output.mean
        assert measured is not None
        return logits - logits.mean(dim=1, keepdim=True) - self.distance(measured)


def attach_distance(
    module: nn.Module, place: str, features: Tensor, stage: NetworkStage | None = None
) -> None:
    """Let the linear layer `place` of a served network carry the distance of a feature.

    `features` `[N, D]` are means of `stage` for training pictures, without one what the layer
    reads.
    """
    classifier = module.get_submodule(place)
    assert isinstance(classifier, nn.Linear)
    output = None
    if stage is not None:
        output = StageOutput()
        watched = WatchedStage(module.get_submodule(stage.place), stage, output)
        module.set_submodule(stage.place, watched)
    with torch.no_grad():
        module.set_submodule(place, DistanceClassifier(classifier, features, output))
    module.eval()


def features_at(
    module: nn.Module, place: str, pixels: Pixels, stage: NetworkStage | None = None
) -> Tensor:
    """Features `[N, D]`: means of `stage` of a served network, else what its layer `place` reads.

    `module` takes uint8 pictures; `pixels` `[N, S, S, 3]` are of that form.
    """
    seen: list[Tensor] = []
    if stage is None:
        hook = module.get_submodule(place).register_forward_pre_hook(
            lambda _, inputs: seen.append(inputs[0])
        )
    else:
        hook = module.get_submodule(stage.place).register_forward_hook(
            lambda _, inputs, output: seen.append(stage.mean(output))
        )
    with torch.inference_mode():
        for start in range(0, len(pixels), _BATCH):
            module.eval()(torch.from_numpy(pixels[start : start + _BATCH].copy()))
    hook.remove()
    return torch.cat(seen).clone()
