"""A plain ViT with one head: how it is built, taught, kept, and asked."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save
from torch import Tensor, nn

from benchmarks.rivals.ground import Ground
from mdp.files import write_bytes
from mdp.formats.plan import SubModelSpec
from mdp.fusion.fuse import Logits
from partitioner.data.memmaps import Array, Index, Views, rows
from partitioner.networks.submodel import MEAN, STD, Normalise, SubModel
from partitioner.run.settings import MemberSchedule
from partitioner.training.cached_outputs import BATCH, batch, device_of
from partitioner.training.loop import BatchLoss, derived_seed, fit
from partitioner.training.losses import taught_loss


class ClassifierOutput(NamedTuple):
    """Logits `[B, C]` and last feature `[B, D]`, float32."""

    logits: Tensor
    feature: Tensor


class Classifier(nn.Module):
    """Our own trunk, drawn as ours are, and one linear head on its class token."""

    def __init__(self, spec: SubModelSpec, outputs: int) -> None:
        super().__init__()
        whole = SubModel(spec, outputs)
        self.normalise = Normalise(MEAN, STD)
        self.trunk, self.head = whole.trunk, whole.bag

    def forward(self, pixels: Tensor) -> ClassifierOutput:
        """Logits and feature of pixels `[B, 3, S, S]` in 0..255."""
        feature = self.trunk(self.normalise(pixels))
        return ClassifierOutput(self.head(feature).float(), feature.float())


def new_classifier(ground: Ground, name: str, spec: SubModelSpec, outputs: int) -> Classifier:
    """A classifier with weights of its own, the same for the same seed and name."""
    torch.manual_seed(derived_seed(ground.work.settings.seed, name, "init"))
    return Classifier(spec, outputs)


class TaughtLoss:
    """Labels and the teacher, mixed as in our bag heads; epoch e sees variant e plus `first`."""

    def __init__(self, ground: Ground, pixels: Sequence[Views], first: int = 0) -> None:
        self.ground, self.pixels, self.first = ground, pixels, first
        self.labels = [ground.work.variants.labels(v) for v in range(ground.variants)]

    def __call__(self, network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        variant, device = (self.first + epoch) % len(self.pixels), device_of(network)
        logits = network(batch(self.pixels[variant], index, device)).logits
        return {"loss": self.of(logits, index, variant)}

    def of(self, logits: Tensor, index: Index, variant: int) -> Tensor:
        """Loss of logits `[B, C]` of the pictures `index` of one variant."""
        labels = self.labels[variant][index].to(logits.device)
        teacher = rows(self.ground.targets.train[variant], index).to(logits.device)
        return taught(logits, labels, teacher, self.ground.work.settings.schedule)


def taught(logits: Tensor, labels: Tensor, teacher: Tensor, schedule: MemberSchedule) -> Tensor:
    return taught_loss(
        logits,
        labels,
        teacher,
        distillation=schedule.distillation,
        temperature=schedule.temperature,
        label_smoothing=schedule.label_smoothing,
    )


def train(
    ground: Ground, name: str, module: nn.Module, loss_of: Callable[[], BatchLoss], epochs: int
) -> None:
    """Train `module` in place, or load it where it is finished; `loss_of` makes the loss."""
    work = ground.work
    kept = work.run.path / f"{name}.safetensors"
    if kept.is_file():
        module.load_state_dict(load_file(kept))
        module.eval()
        return
    schedule = msgspec.structs.replace(work.settings.schedule, epochs=epochs)
    stage = work.stage(name, f"training {name}", schedule)
    curve = fit(module, stage, loss_of(), work.progress)
    work.run.keep_curve(name, curve)
    write_bytes(kept, save(module.state_dict()))
    stage.checkpoint.unlink(missing_ok=True)


def asked(network: nn.Module, pixels: Views) -> tuple[Logits, Array]:
    """Logits `[N, C]` and features `[N, D]` in fp32."""
    device, parts = device_of(network), []
    for start in range(0, len(pixels), BATCH):
        index = np.arange(start, min(start + BATCH, len(pixels)))
        with torch.inference_mode():
            output = network.eval()(batch(pixels, index, device))
        parts.append((output.logits.cpu().numpy(), output.feature.cpu().numpy()))
    logits, features = (np.concatenate(column) for column in zip(*parts, strict=True))
    return logits, features


def as_tensor(values: NDArray[np.floating]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float32))
