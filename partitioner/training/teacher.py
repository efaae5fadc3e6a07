"""The teacher's part of a run: get it, train it if asked, and keep its answers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from mdp.files import write_bytes
from partitioner.data.datasets import SplitName
from partitioner.data.memmaps import Array, Index, Views, load, load_weights
from partitioner.networks.submodel import draw_weights
from partitioner.networks.teacher import Teacher, build_teacher, load_checkpoint
from partitioner.training.cached_outputs import batch, device_of, keep_outputs
from partitioner.training.compute import training_device
from partitioner.training.context import Work
from partitioner.training.distributed import finished, first_then_others, is_first, together
from partitioner.training.loop import derived_seed, fit
from partitioner.training.losses import centred


@dataclass(frozen=True, slots=True)
class Targets:
    """What the teacher says to the train split, per variant: mean-centred logits `[N, C]`, and its
    last feature `[N, D]` where sub-models imitate it."""

    train: list[Array]
    features: list[Array]


def ensure_teacher(work: Work, checkpoint: Path | None) -> Teacher:
    """The trained teacher: from the run folder if it is there, else made as the settings say.

    `checkpoint` is the user's file to start from. Raises InputError where it does not fit.
    """
    if finished(work.run.teacher):
        teacher = build_teacher(
            work.plan.require_teacher(), len(work.data.labels), pretrained=False
        )
        teacher.load_state_dict(load_weights(work.run.teacher))
        return teacher.eval()
    # The first process downloads or complains, the others find the files.
    with first_then_others():
        teacher = _untrained(work, checkpoint)
    if work.settings.teacher_schedule.epochs:
        _train(work, teacher)
    with together():
        if is_first():
            write_bytes(work.run.teacher, save(teacher.state_dict()))
            work.run.checkpoint("teacher").unlink(missing_ok=True)
    return teacher.eval()


def _untrained(work: Work, checkpoint: Path | None) -> Teacher:
    settings, spec = work.settings, work.plan.require_teacher()
    pretrained = settings.teacher.pretrained
    torch.manual_seed(derived_seed(settings.seed, "teacher", "init"))
    if pretrained:
        work.progress.note(f"getting timm's weights of {spec.name}")
    teacher = build_teacher(spec, len(work.data.labels), pretrained=pretrained)
    if checkpoint is not None:
        load_checkpoint(teacher, checkpoint)
    elif not pretrained:
        draw_weights(teacher.network)
    return teacher


def _train(work: Work, teacher: Teacher) -> None:
    """Plain supervised training on the variants, in turn."""
    variants, smoothing = work.variants, work.settings.teacher_schedule.label_smoothing
    with first_then_others():
        pixels = [variants.view(work.teacher_view, v) for v in range(variants.count)]
        labels = [variants.labels(v) for v in range(variants.count)]

    def loss_of(network: nn.Module, index: Index, epoch: int) -> dict[str, Tensor]:
        variant, device = epoch % variants.count, device_of(network)
        logits = network(batch(pixels[variant], index, device)).float()
        wanted = labels[variant][index].to(device)
        return {"loss": F.cross_entropy(logits, wanted, label_smoothing=smoothing)}

    stage = work.stage("teacher", "training the teacher", work.settings.teacher_schedule)
    curve = fit(teacher, stage, loss_of, work.progress)
    with together():
        if is_first():
            work.run.keep_curve("teacher", curve)


def ensure_targets(work: Work, teacher: Teacher) -> Targets:
    """The teacher's answers to every variant of the train split, and to calibration and test."""
    run, variants = work.run, work.variants
    teacher.to(training_device())
    with_features = work.settings.schedule.imitate == "teacher"
    names = ["logits", "feature"] if with_features else ["logits"]
    kept = [
        [run.answers(f"{variants.digest}-{v}-{name}") for name in names]
        for v in range(variants.count)
    ]
    missing = [v for v, paths in enumerate(kept) if not all(path.exists() for path in paths)]
    if missing:
        count = len(work.data.train)
        what, done = f"teacher's answers, {len(kept)} variants", (len(kept) - len(missing)) * count
        with work.progress.task(what, len(kept) * count, done=done) as advance:
            for variant in missing:
                keep_outputs(
                    kept[variant],
                    _Answers(teacher, variants.view(work.teacher_view, variant), with_features),
                    count,
                    arithmetic=work.settings.autocast,
                    dtype=np.float16,
                    advance=advance,
                )
    for split in ("calibration", "test"):
        _ensure_plain(work, teacher, split)
    return Targets(
        train=[load(paths[0]) for paths in kept],
        features=[load(paths[1]) for paths in kept] if with_features else [],
    )


def _ensure_plain(work: Work, teacher: Teacher, split: SplitName) -> None:
    """The teacher's fp32 answers to an unchanged split."""
    path = work.run.answers(work.data.split(split).digest[:16])
    if path.exists():
        return
    pixels = work.teacher_pixels(split)
    with work.progress.task(f"teacher's answers, {split} split", len(pixels)) as advance:
        keep_outputs(
            [path],
            _Answers(teacher, pixels, with_features=False),
            len(pixels),
            arithmetic="fp32",
            dtype=np.float32,
            advance=advance,
        )


@dataclass(frozen=True, slots=True)
class _Answers:
    """Centred logits of the pictures `index`, and the last feature where it is wanted."""

    teacher: Teacher
    pixels: Views
    with_features: bool

    def __call__(self, index: Index) -> list[Tensor]:
        # Centred in float32: in bf16 the difference of two large logits is hardly a number.
        pixels = batch(self.pixels, index, device_of(self.teacher))
        if not self.with_features:
            return [centred(self.teacher(pixels).float())]
        network: Any = self.teacher.network
        tokens = network.forward_features(self.teacher.normalise(pixels))
        feature: Tensor = network.forward_head(tokens, pre_logits=True)
        return [centred(network.forward_head(tokens).float()), feature]


def accuracy(logits: Array, targets: Index) -> float:
    """Share of the rows of `logits[N, C]` whose largest entry is the target's."""
    return float((logits.argmax(axis=1) == targets).mean())
