"""The teacher's part of a run: get it, train it if asked, and keep its answers."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from mdp.files import Record, read_json, write_bytes, write_json
from mdp.formats.plan import TeacherSpec
from partitioner.data.crops import View, load_views
from partitioner.data.datasets import Dataset, SplitName
from partitioner.data.memmaps import Array, Index, Views, load, load_weights
from partitioner.networks.linear_probe import fit_classifier
from partitioner.networks.submodel import init_weights
from partitioner.networks.teacher import Teacher, build_teacher
from partitioner.networks.teacher_weights import given_teacher, start_classifier
from partitioner.run.folder import RunFolder
from partitioner.run.progress import Progress
from partitioner.run.settings import TeacherFacts
from partitioner.training.cached_outputs import BATCH, batch, device_of, keep_outputs
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


class Right(Record, frozen=True):
    """How many of how many pictures a network is right on."""

    right: int
    of: int

    @property
    def share(self) -> float:
        """Above 0 and below 1: half a picture right and half a picture wrong are added."""
        return (self.right + 0.5) / (self.of + 1)


@dataclass(frozen=True, slots=True)
class GivenTeacher:
    """A teacher whose weights are the user's file or timm's, and the pictures of a run."""

    run: RunFolder
    spec: TeacherSpec
    facts: TeacherFacts
    data: Dataset
    checkpoint: Path | None
    progress: Progress

    def pixels(self, split: SplitName) -> Views:
        """A split `[N, S, S, 3]` as the teacher sees it, unchanged."""
        view = View(self.spec.shape.image_size)
        what = f"{split} split, {view.image_size} px for the teacher"
        return load_views(self.data.split(split), [view], self.run.cache, self.progress, what)[0]

    def build(self) -> Teacher:
        """The teacher with a classifier for the data's classes; raises InputError.

        What a linear probe has learned is kept in the run's cache.
        """
        if self.facts.pretrained:
            self.progress.note(f"getting timm's weights of {self.spec.name}")
        count = len(self.data.labels)
        teacher = given_teacher(self.spec, count, self.checkpoint, self.facts.rows)
        if self.facts.classes == "probe":
            path = self.run.cache / f"classifier-{self._digest}.safetensors"
            if not path.exists():
                self._fit(teacher, path)
            start_classifier(teacher, **load_weights(path))
        return teacher

    def accuracy(self) -> float:
        """Share of the calibration pictures that it is right on, above 0 and below 1."""
        path = self.run.cache / f"accuracy-{self._digest}.json"
        if not path.exists():
            teacher = self.build()
            logits = self.outputs(teacher, "calibration", pre_logits=False)
            targets = torch.from_numpy(self.data.calibration.targets)
            right = int((logits.cpu().argmax(dim=1) == targets).sum())
            write_json(path, Right(right, len(targets)))
        return read_json(path, Right).share

    def _fit(self, teacher: Teacher, path: Path) -> None:
        count = len(self.data.train)
        features = self.outputs(teacher, "train", pre_logits=True)
        targets = torch.from_numpy(self.data.train.targets).to(features.device)
        weight, bias = fit_classifier(features, targets, len(self.data.labels))
        write_bytes(path, save({"weight": weight.cpu().contiguous(), "bias": bias.cpu()}))
        self.progress.note(f"teacher: a linear probe fitted on {count:,} training pictures")

    def outputs(self, teacher: Teacher, split: SplitName, *, pre_logits: bool) -> Tensor:
        """Logits `[N, C]`, or what the classifier reads `[N, D]`; float32."""
        pixels, network = self.pixels(split), teacher.eval().to(training_device()).network
        found: list[Tensor] = []
        head: Any = network
        what = f"teacher's {'features' if pre_logits else 'answers'}, {split} split"
        with self.progress.task(what, len(pixels)) as advance, torch.inference_mode():
            for start in range(0, len(pixels), BATCH):
                index = np.arange(start, min(start + BATCH, len(pixels)))
                seen = teacher.normalise(batch(pixels, index, device_of(teacher)))
                found.append(head.forward_head(head.forward_features(seen), pre_logits=pre_logits))
                advance(len(index), "")
        return torch.cat(found)

    @property
    def _digest(self) -> str:
        """Names the weights, the way to the data's classes and the pictures."""
        facts = msgspec.structs.replace(self.facts, file=None)
        made_of = [facts, self.data.train.digest, self.data.calibration.digest]
        return hashlib.sha256(msgspec.json.encode(made_of, order="sorted")).hexdigest()[:16]


def ensure_teacher(work: Work, checkpoint: Path | None) -> Teacher:
    """The trained teacher: from the run folder if it is there, else made as the settings say.

    `checkpoint` is the user's file to start from. Raises InputError where it does not fit.
    """
    if finished(work.run.teacher):
        return _kept(work)
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


def _kept(work: Work) -> Teacher:
    teacher = build_teacher(work.plan.require_teacher(), len(work.data.labels), pretrained=False)
    teacher.load_state_dict(load_weights(work.run.teacher))
    return teacher.eval()


def _untrained(work: Work, checkpoint: Path | None) -> Teacher:
    facts, spec = work.settings.teacher, work.plan.require_teacher()
    torch.manual_seed(derived_seed(work.settings.seed, "teacher", "init"))
    if facts.pretrained or checkpoint is not None:
        return GivenTeacher(work.run, spec, facts, work.data, checkpoint, work.progress).build()
    teacher = build_teacher(spec, len(work.data.labels), pretrained=False)
    init_weights(teacher.network)
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
    """The teacher's answers to every variant of the train split, and to calibration and test.

    To the train split none where teaching is live.
    """
    run, variants = work.run, work.variants
    teacher.to(training_device())
    with_features = work.settings.schedule.imitate == "teacher"
    names = ["logits", "feature"] if with_features else ["logits"]
    kept = [
        [run.answers(f"{variants.digest}-{v}-{name}") for name in names]
        for v in range(variants.count if work.settings.teaching == "kept" else 0)
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
    right = accuracy(load(path), work.data.split(split).targets)
    work.progress.note(f"teacher: {right:.1%} on {len(pixels):,} {split} pictures")


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
